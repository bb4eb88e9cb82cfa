"""Runs unchanged code with adapted weights."""

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Key, PyTree

from ..._wrapping import copy_signature, refuse_shared_keywords, signature_of
from ...array.qarray import QArray
from ...errors import QuantError
from ...ops.interpret.evaluator import Decoded
from ...ops.interpret.transparent import transparent
from .adapted import Adapted
from .adapter import Adapter, Weight, path_key, with_adapters


def apply(
    fn: Callable[..., Any],
    *,
    dropout: float = 0.0,
    fallback: Literal["error", "dequantize"] = "error",
    report: Callable[[Decoded], None] | None = None,
) -> Callable[..., Any]:
    """Makes a function take adapters after its parameters, without changing its code.

    The product of an operand `x` with an adapted weight becomes `x w + (alpha / r) (x a) b`, where `x w` is computed as
    without an adapter, quantized or not. The other weights may be QArrays too, as for `fb.transparent`. Transposes,
    reshapes, casts, slices and scans over stacked layers act on weight and factors alike, and embedding look-ups add the
    update to their rows. The factors are cast to the dtype of `x`, products accumulate in float32, and the sum is rounded
    once. While `b` is zero the result is that of the base.

    `jax.grad(loss, argnums=1)` gives the gradient of the adapters only; the frozen weights can be shared by several
    adapters.

    Args:
        fn: any function `fn(params, *args, **kwargs)` that JAX can trace.
        dropout: the fraction of the elements of `x` that are dropped for the second term, from 0 to below 1; the others are
            scaled by `1 / (1 - dropout)`. A weight that is used several times drops the same elements of operands of one
            shape each time; each of stacked layers drops its own.
        fallback: for a weight, quantized or adapted, that an operation needs as an array: "error" raises; "dequantize"
            decodes it and adds the update, which gives the same numbers and takes more memory.
        report: called while tracing for each place where "dequantize" does so.

    Returns:
        A function `(params, adapters, *args, dropout_key=None, **kwargs)`, where `adapters` is a dictionary by path like
        that of `init`. With dropout it requires the key. A function with an argument `dropout_key` gets its own by position.

    Raises:
        QuantError: for a dropout outside [0, 1); when called, for adapters that do not fit the parameters, for a key
            without dropout or dropout without a key, and for a key by keyword if the function takes it too.
        UnsupportedError: under "error", when called, for the first operation that needs an array.

    >>> from fewbit.training.lora import init
    >>> def fn(params, x):
    ...     return x @ params["w"].T
    >>> params, x = {"w": fb.quantize(jnp.ones((8, 4)), "nf4")}, jnp.ones((2, 4))
    >>> adapters = init(jax.random.key(0), fn, params, x, match="w", rank=2)
    >>> jax.grad(lambda params, adapters: apply(fn)(params, adapters, x).sum(), argnums=1)(params, adapters)
    {'w': Adapter(a=[4, 2], b=[2, 8], alpha=2)}
    """
    if not 0 <= dropout < 1:
        raise QuantError(f"dropout is {dropout}, must be at least 0 and below 1")
    inner, signature = transparent(fn, fallback=fallback, report=report), signature_of(fn)

    def adapted(
        params: PyTree,
        adapters: Mapping[str, Adapter],
        *args: PyTree,
        dropout_key: Key[Array, ""] | None = None,
        **kwargs: object,
    ) -> PyTree:
        refuse_shared_keywords(signature, (params, *args), {"dropout_key": dropout_key}, "fb.lora.apply")
        if dropout and dropout_key is None:
            raise QuantError(f"a function adapted with dropout={dropout} needs a dropout_key")
        if not dropout and dropout_key is not None:
            raise QuantError(f"a function adapted with dropout={dropout} takes no dropout_key")

        def with_adapter(path: str, w: Weight, adapter: Adapter) -> Adapted:
            keys = None if dropout_key is None else _keys(path_key(dropout_key, path), w.shape, adapter.stacked)
            base = w if isinstance(w, QArray) else jnp.asarray(w)
            return Adapted(base, *adapter.aligned(), keys, adapter.scale, dropout)

        return inner(with_adapters(params, adapters, with_adapter), *args, **kwargs)

    copy_signature(fn, adapted, second="adapters", keywords=("dropout_key",))
    return adapted


def _keys(key: Array, shape: tuple[int, ...], stacked: tuple[int, ...]) -> Array:
    """A random key for each element of the stacked axes. The keys have the weight's axes and one more."""
    if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):  # of jax.random.PRNGKey: its words would be an axis of the keys
        key = jax.random.wrap_key_data(key)
    lengths = [n if axis - len(shape) in stacked else 1 for axis, n in enumerate(shape)]
    return jax.random.split(key, math.prod(lengths)).reshape(*lengths, 1)
