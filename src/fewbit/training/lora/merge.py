"""Merges adapters into their weights."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jaxtyping import PyTree

from ...array.qarray import QArray
from ...array.scheme import Scheme
from ...errors import QuantError
from ...kernels.quantize.dispatch import quantize
from ...ops.interpret.rules.control_flow import stacked
from .adapter import Adapter, Weight, with_adapters
from .factors import updated


def merge(
    params: PyTree, adapters: Mapping[str, Adapter], *, scheme: str | Scheme | Mapping[str, Any] | None = None
) -> PyTree:
    """Adds every adapter to its weight: `w + (alpha / r) a b`, computed in float32.

    Quantizing the sum again moves weights by up to half a step, which can exceed the update, so the merged model can differ
    from the one that `apply` trained. Results are float without a scheme; measure the quality of quantized ones.

    Args:
        params: the tree that the adapters were trained with.
        adapters: by path, like those of `init`.
        scheme: of the adapted weights: None, float arrays; "base", each as before: quantized in its own scheme with new
            scales, or float; or anything that `fb.scheme` takes, with tiles along the contracted axes.

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

    def merged(path: str, w: Weight, adapter: Adapter) -> jax.Array | QArray:
        total = updated(w, *adapter.aligned(), adapter.scale)
        try:
            if scheme == "base" and isinstance(w, QArray):
                return _as_base(total, w, adapter)
            if scheme is None or scheme == "base":
                return total
            return _for_each(functools.partial(quantize, scheme=scheme, axis=adapter.inputs), adapter)(total)
        except QuantError as error:
            raise QuantError(f"{path}: {error}") from error

    return with_adapters(params, adapters, merged)


def _as_base(x: jax.Array, base: QArray, adapter: Adapter) -> QArray:
    """The weight quantized like the base, with its tiles, pack axis and policy."""

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
        if axis + adapter.ndim == place:
            one = jax.vmap(one)
    return one
