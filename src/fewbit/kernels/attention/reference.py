"""Attention over keys and values that are floating or quantized; quantized ones are never multiplied out.

A scale belongs to a token (and a head), so it leaves the sum over the head dimension, and enters the one over tokens with
the weights:

    q . (k_codes * k_scale)     = (q . k_codes) * k_scale            [B, K, G T, S]
    weights . (v_codes * v_scale) = (weights * v_scale) . v_codes    [B, K, G T, h]

So a scale is multiplied once for each query and token, where the product is or where the weights are, instead of once for
each coordinate of the cache. The codes are cast to the compute dtype, which holds integers and minifloats exactly.

Dimension letters: B batch, H heads, K key heads, G = H / K, T new tokens, S positions of the cache, h head width.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from ..._registry import Registry
from ...array import QArray, unpack
from ...array.quantize import scale_values
from ...formats.format import exponent_of, power_of_two
from ..select import AbstractBackend
from .problem import AttentionProblem, Block, Held

BACKENDS: Registry[AbstractBackend[AttentionProblem]] = Registry("attention")
"""The backends of attention; the last that can is taken, the reference when no other can."""


class Reference(AbstractBackend[AttentionProblem]):
    """Plain JAX, on any device, over any blocks."""

    name: ClassVar[str] = "reference"

    def unsupported(self, problem: AttentionProblem) -> str | None:
        return None

    def run(self, problem: AttentionProblem, *operands: Any) -> jax.Array:
        return attended(*operands)


def attended(q: Float[Array, "B H T h"], blocks: Sequence[Block]) -> Float[Array, "B H T h"]:
    """`attention` by plain JAX, which takes a layer's keys and values out of a cache first."""
    blocks = [block.of_layer() for block in blocks]
    B, H, T, h = q.shape
    K = blocks[0].keys.shape[1]
    grouped = q.reshape(B, K, H // K * T, h)
    scores = [_scores(grouped, block, T) for block in blocks]
    weights = jax.nn.softmax(scores[0] if len(scores) == 1 else jnp.concatenate(scores, axis=-1), axis=-1)
    ends = [block.keys.shape[2] for block in blocks]
    starts = [sum(ends[:i]) for i in range(len(ends))]
    mixed = [
        _mixed(lax.slice_in_dim(weights, start, start + S, axis=-1), block, q.dtype)
        for start, S, block in zip(starts, ends, blocks, strict=True)
    ]
    return sum(mixed[1:], mixed[0]).astype(q.dtype).reshape(B, H, T, h)


def _scores(grouped: Array, block: Block, T: int) -> Float[Array, "B K G T S"]:
    """The scaled products of queries and keys, -inf where a position is not seen."""
    B, K, rows, h = grouped.shape
    product = _product(grouped, _numbers(block.keys, grouped.dtype), 3).reshape(B, K, rows // T, T, -1)
    factor = h**-0.5 if not isinstance(block.keys, QArray) else _beside(block.keys) * h**-0.5
    is_seen = jnp.arange(product.shape[-1])[None, :] < block.seen[:, None]  # [T, S]
    return jnp.where(jnp.broadcast_to(is_seen, product.shape), product * factor, -jnp.inf)


def _mixed(weights: Float[Array, "B K G T S"], block: Block, dtype: DTypeLike) -> Float[Array, "B K R h"]:
    """The values in the mixture that the weights give, float32. What a token does not see adds nothing, be it NaN or infinite."""
    B, K, G, T, S = weights.shape
    values, unit, may_be_odd = _numbers(block.values, dtype), None, True
    odd: list[Array] = []
    if isinstance(block.values, QArray):
        scale = _beside(block.values)
        may_be_odd = not np.isfinite(block.values.scheme.format.values()).all()
        is_nan = ~jnp.isfinite(scale[:, :, 0, 0, :, None])  # [B, J, S, 1]
        odd.append(jnp.where(is_nan, jnp.nan, 0.0))
        scale = jnp.where(_counts(scale, block), scale, 0.0)
        # A power of two, so that it changes no rounding, and what is written later changes no bit of what is read now.
        unit = power_of_two(jnp.clip(exponent_of(jnp.max(scale, axis=-1, keepdims=True)), -126, 126))
        weights = weights * (scale / unit)
    if may_be_odd:
        odd.insert(0, values.astype(jnp.float32))  # a scale that is NaN comes last, for it makes NaN of infinities too
        counts = _counts(values.swapaxes(-1, -2), block).swapaxes(-1, -2)
        values = jnp.where(counts, values, jnp.zeros_like(values))
    mixed = _product(weights.astype(dtype).reshape(B, K, G * T, S), values, 2)
    mixed = mixed if unit is None else mixed * unit[:, :, 0]
    for numbers in odd if T > 1 else ():
        mixed = _with_odd_values(mixed, numbers, jnp.tile(block.seen, G))
    return mixed


def _counts(x: Float[Array, "*b S"], block: Block) -> Bool[Array, "*b S"]:
    """Whether each number, positions last, enters the product: one that the only token sees; of several tokens, a finite one."""
    if block.seen.shape[0] > 1:
        return jnp.isfinite(x)
    return jnp.broadcast_to(jnp.arange(x.shape[-1]) < block.seen[0], x.shape)


def _with_odd_values(
    mixed: Float[Array, "B K R h"], values: Float[Array, "B J S w"], seen: Int[Array, " R"]
) -> Float[Array, "B K R h"]:
    """The mixture with NaN and infinities for the rows that see such values, of which it has zeros.

    A row sees the first positions, so all that counts is where the first value of each kind stands: those that make `+inf` or
    NaN, and those that make `-inf` or NaN. Where all heads or coordinates of a position share a scale, J or w is 1.
    """
    S = values.shape[2]
    place = jax.lax.broadcasted_iota(jnp.int32, values.shape, 2)
    is_odd = ~jnp.isfinite(values)

    def sees(kind: Bool[Array, "B J S w"]) -> Bool[Array, "B J R w"]:
        first = jnp.min(jnp.where(kind, place, S), axis=2, keepdims=True, initial=S)
        return first < seen.reshape(1, 1, -1, 1)

    rises, falls = sees(is_odd & ~(values == -jnp.inf)), sees(is_odd & ~(values == jnp.inf))
    inf = jnp.float32(jnp.inf)
    odd = jnp.where(rises, inf, 0.0) + jnp.where(falls, -inf, 0.0)
    return jnp.where(rises | falls, odd, mixed)


def _numbers(held: Held, dtype: DTypeLike) -> Float[Array, "B K S h"]:
    """The keys or values, or the numbers that their codes stand for, without the scales."""
    if not isinstance(held, QArray):
        return held
    fmt = held.scheme.format
    return fmt.decode(unpack(held.codes, fmt.bits, held.shape[-1], held.scheme.packing), dtype)


def _beside(held: QArray) -> Float[Array, "B J 1 1 S"]:
    """The scales along the last axis, as they meet scores and weights; J is K, or 1 when all heads share them."""
    scale = scale_values(held)  # [B, J, S, 1]
    return scale.reshape(*scale.shape[:2], 1, 1, scale.shape[2])


def _product(lhs: Array, rhs: Array, over: int) -> Float[Array, "B K M N"]:
    """A product for each batch row and key head over the last axis of `lhs` and axis `over` of `rhs`, float32.

    Float32 operands are not rounded first, as accelerators do by default.
    """
    precision = lax.Precision.HIGHEST if lhs.dtype == jnp.float32 else None
    numbers = (((3,), (over,)), ((0, 1), (0, 1)))
    return lax.dot_general(lhs, rhs, numbers, precision=precision, preferred_element_type=jnp.float32)


BACKENDS.add("reference", Reference())
