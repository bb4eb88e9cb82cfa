"""Products with an adapted weight: `x w + scale (x a) b`.

A convolution with `a b` is one with `a`, which has the weight's window and `r` output channels, and then a 1x1 convolution
with `b`. A ragged product is one with each group's `a`, and then one with its `b`.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.extend import core as jex_core
from jaxtyping import Array

from ..._explicit_mesh import explicit_sharding
from ...ops.interpret.evaluator import Evaluator, NoRuleError, Rule
from ...ops.interpret.proxy import ArrayProxy, is_proxy
from ...ops.ragged import PLAIN
from .factors import accumulator, factored_product

if TYPE_CHECKING:
    from .adapted import Adapted

LowRank: TypeAlias = Callable[[Array, "Adapted", list[Any], Mapping[str, Any], bool], Array]
"""Computes the second term without its scale, in float32 or wider, from the other operand, the weight, all operands, the
equation's parameters, and whether the weight is the right operand."""


def _product(low_rank: LowRank) -> Rule:
    """The rule of a product with an adapter. It is the base product as without an adapter, plus the low-rank term."""

    def rule(evaluator: Evaluator, eqn: jex_core.JaxprEqn, values: list[Any]) -> list[Any]:
        is_right = isinstance(values[1], ArrayProxy)
        w, x = values[is_right], values[not is_right]
        if any(is_proxy(value) for value in values if value is not w):
            raise NoRuleError("another operand is no plain array, and one has an adapter")
        (product,) = evaluator.equation(eqn, [w.base if value is w else value for value in values])
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            x = x.astype(w.dtype)
        x = _dropped(x, w)
        update = low_rank(x, w, values, eqn.params, is_right)
        return [(product.astype(update.dtype) + w.scale * update).astype(product.dtype)]

    return rule


def _dropped(x: Array, w: "Adapted") -> Array:
    """The operand with random elements dropped, and the others scaled to keep the mean."""
    if w.keys is None:
        return x
    is_kept = jax.random.bernoulli(w.keys.reshape(-1)[0], 1 - w.dropout, x.shape)
    if sharding := explicit_sharding(x):
        is_kept = jax.reshard(is_kept, sharding)
    scaled = x / (1 - w.dropout)
    return jnp.where(is_kept, scaled, jnp.zeros_like(scaled))


def _dot(x: Array, w: "Adapted", values: list[Any], params: Mapping[str, Any], is_right: bool) -> Array:
    """The product of the other operand with the factors, over axes numbered by the weight's."""
    (contracting, batches), order = params["dimension_numbers"], (1, -1)[is_right]
    (w_axes, x_axes), (w_batch, x_batch) = contracting[::order], batches[::order]
    names = dict(zip((*x_axes, *x_batch), (*w_axes, *w_batch), strict=True))
    of_x = [names.get(i, len(w.shape) + i) for i in range(x.ndim)]
    x_free = [n for i, n in enumerate(of_x) if i not in names]
    w_free = [i for i in range(len(w.shape)) if i not in (*w_axes, *w_batch)]
    free = w_free + x_free
    if is_right:
        free = x_free + w_free
    return factored_product(x, (w.a, w.b), of_x, range(len(w.shape)), [*w_batch, *free], params["precision"])


def _conv(x: Array, w: "Adapted", values: list[Any], params: Mapping[str, Any], is_right: bool) -> Array:
    """Two convolutions; channel groups share `a`, and each has its own part of `b`."""
    numbers, groups = params["dimension_numbers"], params["feature_group_count"]
    out, *window = numbers.rhs_spec  # the input channels first
    b_shape = [1] * w.b.ndim
    b_shape[out], b_shape[-1] = w.shape[out], w.b.shape[-1]
    if not is_right or params["batch_group_count"] != 1 or w.a.shape[out] != 1 or w.b.shape != tuple(b_shape):
        raise NoRuleError("the a of its adapter must have the kernel's window and input channels, and b its output channels")
    a = jnp.moveaxis(jnp.tile(w.a.squeeze(out), groups), -1, out)
    b = jnp.moveaxis(w.b.squeeze(window[0]), -1, window[0])
    settings = {name: params[name] for name in ("window_strides", "padding", "lhs_dilation", "rhs_dilation", "precision")}
    middle = jax.lax.conv_general_dilated(
        x, a.astype(x.dtype), **settings, dimension_numbers=numbers, feature_group_count=groups
    )
    wide, second = accumulator(x.dtype), numbers._replace(lhs_spec=numbers.out_spec)
    return jax.lax.conv_general_dilated(
        middle.astype(wide),
        b.astype(x.dtype).astype(wide),
        (1,) * len(window[1:]),
        "VALID",
        dimension_numbers=second,
        feature_group_count=groups,
        precision=params["precision"],
    )


def _ragged(x: Array, w: "Adapted", values: list[Any], params: Mapping[str, Any], is_right: bool) -> Array:
    """Two ragged products, of rows `[M, K]` and the matrices of groups `[G, K, N]`."""
    numbers = params["ragged_dot_dimension_numbers"]
    if not is_right or not _is_plain(numbers) or w.a.shape[2] != 1 or w.b.shape[1] != 1:
        raise NoRuleError("its adapter must have a matrix for each group")
    a, b = w.a.squeeze(2), w.b.squeeze(1).mT
    wide, sizes = accumulator(x.dtype), values[2]

    def product(x: Array, factor: Array) -> Array:
        factor = jnp.broadcast_to(factor.astype(x.dtype), (w.shape[0], *factor.shape[1:]))
        return jax.lax.ragged_dot_general(
            x, factor, sizes, numbers, params["precision"], group_offset=params["group_offset"]
        )

    return product(product(x, a).astype(wide), b.astype(x.dtype))


def _is_plain(numbers: jax.lax.RaggedDotDimensionNumbers) -> bool:
    """Whether the dimension numbers are those of `jax.lax.ragged_dot`."""
    fields = ("dot_dimension_numbers", "lhs_ragged_dimensions", "rhs_group_dimensions")
    return all(_tuples(getattr(numbers, name)) == _tuples(getattr(PLAIN, name)) for name in fields)


def _tuples(axes: object) -> object:
    if isinstance(axes, list | tuple):
        return tuple(map(_tuples, axes))
    return axes


PRODUCTS: dict[str, Rule] = {
    "dot_general": _product(_dot),
    "conv_general_dilated": _product(_conv),
    "ragged_dot": _product(_ragged),
    "ragged_dot_general": _product(_ragged),
}
"""The rules of the products, by the primitive's name."""
