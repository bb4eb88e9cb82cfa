"""Attention in plain JAX; quantized keys and values are not dequantized.

A scale is per token (and head), so it factors out of the product over the head dimension and is folded into the softmax
weights of the product over tokens:

    q . (k_codes * k_scale)     = (q . k_codes) * k_scale            [B, K, G T, S]
    weights . (v_codes * v_scale) = (weights * v_scale) . v_codes    [B, K, G T, h]

That is one multiplication for each query and token instead of one for each element of the cache. Codes are cast to the
compute dtype, which represents integers and minifloats exactly. Queries in int8 are multiplied with codes in int8, and so are
softmax weights, rounded for `RUN` positions at a time.

Dimension letters: B batch, H heads, K key heads, G = H / K, T new tokens, S positions of the cache, h head width.
"""

from collections.abc import Sequence
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int8, Num, PyTree

from ...array.packing import unpack
from ...array.qarray import QArray
from ...array.quantize import dequantized, scale_values
from ...formats.format import exponent_of, power_of_two
from ..backend import AbstractBackend
from .problem import AttentionProblem, Block, KVValues, Queries

RUN = 64
"""How many positions share a scale of softmax weights in int8."""


class Reference(AbstractBackend[AttentionProblem]):
    """Plain JAX, on any device, for any blocks."""

    name: ClassVar[str] = "reference"

    def unsupported(self, problem: AttentionProblem) -> str | None:
        return None

    def run(self, problem: AttentionProblem, *operands: PyTree) -> jax.Array:
        return attended(*operands, soft_cap=problem.soft_cap)


def attended(
    q: Queries,
    blocks: Sequence[Block],
    sinks: Float[Array, " H"] | None = None,
    *,
    soft_cap: float = 0.0,
) -> Float[Array, "B H T h"]:
    """`attention` in plain JAX; slices a layer out of a cache first."""
    blocks = [block.of_layer() for block in blocks]
    B, H, T, h = q.shape
    K = blocks[0].keys.shape[1]
    grouped = q.reshape(B, K, H // K * T, h)
    scores = [_scores(grouped, block, T, soft_cap) for block in blocks]
    if sinks is not None:
        column = sinks.astype(jnp.float32).reshape(1, K, H // K, 1, 1)
        scores.append(jnp.broadcast_to(column, (B, K, H // K, T, 1)))
    weights = jax.nn.softmax(jnp.concatenate(scores, axis=-1), axis=-1)  # [B, K, G, T, S]
    mixed, start = [], 0
    for block in blocks:
        end = start + block.keys.shape[2]
        of_block = lax.slice_in_dim(weights, start, end, axis=-1)
        mixed.append(_mixed(of_block, block, q.dtype, are_integers=isinstance(q, QArray)))
        start = end
    return sum(mixed[1:], mixed[0]).astype(q.dtype).reshape(B, H, T, h)


def _scores(grouped: Array | QArray, block: Block, T: int, soft_cap: float) -> Float[Array, "B K G T S"]:
    """The scaled products of queries and keys, with the soft cap, -inf at masked positions."""
    B, K, rows, h = grouped.shape
    if isinstance(grouped, QArray) and isinstance(block.keys, QArray):
        sums = _product(_int8(grouped), _int8(block.keys), 3).astype(jnp.float32)
        product = sums * jnp.broadcast_to(scale_values(grouped), sums.shape)
    elif isinstance(grouped, QArray):
        product = _product(dequantized(grouped, grouped.dtype), _numbers(block.keys, grouped.dtype), 3)
    else:
        product = _product(grouped, _numbers(block.keys, grouped.dtype), 3)
    product = product.reshape(B, K, rows // T, T, -1)
    factor = h**-0.5
    if isinstance(block.keys, QArray):
        factor = _token_scales(block.keys) * factor
    logits = product * factor
    if soft_cap:
        logits = soft_cap * jnp.tanh(logits / soft_cap)
    return jnp.where(jnp.broadcast_to(_is_seen(block, product.shape[-1]), product.shape), logits, -jnp.inf)


def _is_seen(block: Block, S: int) -> Bool[Array, "T S"]:
    """Which positions each new token attends to."""
    place = jnp.arange(S)[None, :]
    is_seen = place < block.seen[:, None]
    if block.first is not None:
        is_seen &= place >= block.first[:, None]
    return is_seen


def _mixed(
    weights: Float[Array, "B K G T S"], block: Block, dtype: DTypeLike, *, are_integers: bool
) -> Float[Array, "B K R h"]:
    """`weights . values` in float32; masked positions add nothing, even where they are NaN or infinite.

    Args:
        weights: the softmax weights.
        block: the positions.
        dtype: the dtype of the product's operands.
        are_integers: whether weights are rounded to int8, for quantized values.
    """
    B, K, G, T, S = weights.shape
    values, unit, may_be_odd = _numbers(block.values, dtype), None, True
    odd: list[Array] = []
    if isinstance(block.values, QArray):
        scale = _token_scales(block.values)
        may_be_odd = not np.isfinite(block.values.scheme.format.values()).all()
        is_nan = ~jnp.isfinite(scale[:, :, 0, 0, :, None])  # [B, J, S, 1]
        odd.append(jnp.where(is_nan, jnp.nan, 0.0))
        is_read = _counts(scale, block) & _is_seen(block, S)[None, None, None]  # [B, J, 1, T, S]
        scale = jnp.where(is_read, scale, 0.0)
        if are_integers:
            values = _int8(block.values)
        else:
            # A power of two, so that it changes no rounding, and what is written later changes no bit of what is read now.
            unit = power_of_two(jnp.clip(exponent_of(jnp.max(scale, axis=-1, keepdims=True)), -126, 126))
            scale = scale / unit
        weights = weights * scale
    if may_be_odd:
        odd.insert(0, values.astype(jnp.float32))  # a scale that is NaN comes last, for it makes NaN of infinities too
        counts = _counts(values.swapaxes(-1, -2), block).swapaxes(-1, -2)
        values = jnp.where(counts, values, jnp.zeros_like(values))
    weights = weights.reshape(B, K, G * T, S)
    if values.dtype == jnp.int8:
        mixed = _int8_mixed(weights, values)
    else:
        mixed = _product(weights.astype(dtype), values, 2)
    if unit is not None:
        mixed = mixed * jnp.broadcast_to(unit, (*unit.shape[:2], G, T, 1)).reshape(*unit.shape[:2], G * T, 1)
    if T > 1:
        for numbers in odd:
            mixed = _with_odd_values(mixed, numbers, block, G)
    return mixed


def _int8_mixed(weights: Float[Array, "B K R S"], values: Int8[Array, "B K S h"]) -> Float[Array, "B K R h"]:
    """`weights . values` with weights rounded to int8 for `RUN` positions at a time, added in float32 from the first run on."""
    B, K, R, S = weights.shape
    runs = -(-S // RUN)
    weights = jnp.pad(weights, [(0, 0)] * 3 + [(0, runs * RUN - S)]).reshape(B, K, R, runs, RUN)
    values = jnp.pad(values, [(0, 0)] * 2 + [(0, runs * RUN - S), (0, 0)]).reshape(B, K, runs, RUN, -1)
    highest = jnp.max(weights, axis=-1, keepdims=True)
    shares = weights / jnp.where(highest > 0, highest, 1.0)
    codes = jnp.round(shares * 127).astype(jnp.int8)
    numbers = (((4,), (3,)), ((0, 1, 3), (0, 1, 2)))
    sums = lax.dot_general(codes, values, numbers, preferred_element_type=jnp.int32)  # [B, K, runs, R, h]
    # XLA's maximum may lose a NaN, so weights that are not finite are found without it.
    unit = jnp.where(jnp.isfinite(weights).all(axis=-1, keepdims=True), highest / 127, jnp.nan)
    return jnp.sum(sums.astype(jnp.float32) * unit.swapaxes(2, 3), axis=2)


def _counts(x: Float[Array, "*b S"], block: Block) -> Bool[Array, "*b S"]:
    """Which values `[..., S]` enter the product. For one token these are the unmasked ones, for several the finite ones."""
    if block.seen.shape[0] > 1:
        return jnp.isfinite(x)
    return jnp.broadcast_to(_is_seen(block, x.shape[-1])[0], x.shape)


def _with_odd_values(
    mixed: Float[Array, "B K R h"], values: Float[Array, "B J S w"], block: Block, G: int
) -> Float[Array, "B K R h"]:
    """Adds non-finite values to the rows that attend to them. The product had replaced these values by zeros.

    Two kinds count: values that give `+inf` or NaN, and values that give `-inf` or NaN. Without a window, the first
    position of a kind decides; with one, the last position before the row's end. Where all heads or coordinates of a
    position share a scale, J or w is 1.
    """
    place = jax.lax.broadcasted_iota(jnp.int32, values.shape, 2)
    is_odd = ~jnp.isfinite(values)
    seen = jnp.tile(block.seen, G)  # [R]
    none = jnp.iinfo(jnp.int32)  # before and after every position, for `seen` and `first` may be out of bounds

    def sees(kind: Bool[Array, "B J S w"]) -> Bool[Array, "B J R w"]:
        if block.first is None:
            first = jnp.min(jnp.where(kind, place, none.max), axis=2, keepdims=True, initial=none.max)
            return first < seen.reshape(1, 1, -1, 1)
        last = lax.cummax(jnp.where(kind, place, none.min), axis=2)
        before = jnp.take(last, jnp.maximum(seen - 1, 0), axis=2, mode="clip")
        return (before >= jnp.tile(block.first, G).reshape(1, 1, -1, 1)) & (seen > 0).reshape(1, 1, -1, 1)

    rises, falls = sees(is_odd & ~(values == -jnp.inf)), sees(is_odd & ~(values == jnp.inf))
    inf = jnp.float32(jnp.inf)
    odd = jnp.where(rises, inf, 0.0) + jnp.where(falls, -inf, 0.0)
    return jnp.where(rises | falls, odd, mixed)


def _numbers(x: KVValues, dtype: DTypeLike) -> Float[Array, "B K S h"]:
    """The keys or values, or their decoded codes without the scales."""
    if not isinstance(x, QArray):
        return x
    fmt = x.scheme.format
    return fmt.decode(unpack(x.codes, fmt.bits, x.shape[-1], x.scheme.packing), dtype)


def _int8(x: QArray) -> Int8[Array, "B K S h"]:
    """The codes of int8, as integers."""
    return lax.bitcast_convert_type(x.codes, jnp.int8)


def _token_scales(x: QArray) -> Float[Array, "B J 1 1 S"]:
    """The scales in the layout of scores and weights. J is K, or 1 when all heads share them."""
    scale = scale_values(x)  # [B, J, S, 1]
    return scale.reshape(*scale.shape[:2], 1, 1, scale.shape[2])


def _product(lhs: Array, rhs: Array, over: int) -> Num[Array, "B K M N"]:
    """The batched product, in float32, or int32 for int8. It contracts the last axis of `lhs` and axis `over` of `rhs`.

    Float32 operands are multiplied at the highest precision, which is not the default on accelerators.
    """
    precision = lax.Precision.HIGHEST if lhs.dtype == jnp.float32 else None
    numbers = (((3,), (over,)), ((0, 1), (0, 1)))
    summed = jnp.int32 if lhs.dtype == jnp.int8 else jnp.float32
    return lax.dot_general(lhs, rhs, numbers, precision=precision, preferred_element_type=summed)
