"""Adding adapters to their weights for good."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ...array import QArray, Scheme, is_qarray
from ...errors import QuantError
from ...kernels.quantize import dequantize, quantize
from ...ops.rules.control import stacked
from .adapter import Adapter
from .apply import with_adapters
from .factors import updated


def merge(params: Any, adapters: Mapping[str, Adapter], *, scheme: str | Scheme | Mapping[str, Any] | None = None) -> Any:
    """The parameters with the update of every adapter added: `w + (alpha / r) a b`, computed in float32.

    Quantizing the sum anew moves weights by up to half a step, which can be more than the update: the merged model is
    then another one than `apply` trained. So it is float unless a scheme is asked for; measure before you serve the other.

    Args:
        params: the tree that the adapters were trained with.
        adapters: by path, like those of `init`.
        scheme: how adapted weights are held: None, as float arrays; "base", each as it was: quantized in its own scheme
            with scales chosen anew, or float; or anything that `fb.scheme` takes, its tiles along the contracted axes.

    Returns:
        A tree of the same structure; weights without an adapter are the same objects.

    Raises:
        QuantError: for adapters that do not fit the parameters, or a scheme that does not fit a weight.

    >>> adapter = Adapter(jnp.ones((4, 1)), jnp.ones((1, 8)), alpha=0.5, inputs=(-2,))
    >>> merge({"w": jnp.zeros((4, 8))}, {"w": adapter})["w"][0, 0].item()
    0.5
    >>> merge({"w": fb.quantize(jnp.zeros((4, 8)), "int8")}, {"w": adapter}, scheme="base")["w"]
    QArray(int8, float32[4, 8], 48 bytes, 12.000 bits/weight)
    """

    def merged(path: str, w: Any, adapter: Adapter) -> Any:
        total = updated(dequantize(w) if is_qarray(w) else jnp.asarray(w), *adapter.aligned(), adapter.scale)
        if scheme is None or (scheme == "base" and not is_qarray(w)):
            return total
        try:
            return _as_base(total, w, adapter) if scheme == "base" else _quantized(total, scheme, adapter)
        except QuantError as error:
            raise QuantError(f"{path}: {error}") from error

    return with_adapters(params, adapters, merged)


def _quantized(x: jax.Array, scheme: Any, adapter: Adapter) -> QArray:
    """The weight quantized, each element of its leading stacked axes on its own."""

    def one(x: jax.Array) -> QArray:
        return quantize(x, scheme, axis=adapter.inputs)

    return _for_each(one, adapter)(x)


def _as_base(x: jax.Array, base: QArray, adapter: Adapter) -> QArray:
    """The weight quantized as the base is: with its tiles, packed along its axis, under its policy."""

    def one(x: jax.Array, base: QArray) -> QArray:
        packed = base.scheme.pack_axis + base.ndim
        order = [*(i for i in range(base.ndim) if i != packed), packed]
        q = quantize(x.transpose(order), base.transpose(*order).scheme)
        back = sorted(range(base.ndim), key=lambda i: order[i])
        return dataclasses.replace(q.transpose(*back), policy=base.policy)

    return _for_each(one, adapter)(x, stacked(base) if adapter.stacked else base)


def _for_each(one: Callable[..., QArray], adapter: Adapter) -> Callable[..., QArray]:
    """The function mapped over the stacked axes that come first."""
    for place, axis in enumerate(adapter.stacked):
        one = jax.vmap(one) if axis + adapter.ndim == place else one
    return one
