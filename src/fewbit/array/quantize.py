"""Quantize and dequantize in plain JAX: the reference that every kernel is tested against."""

import functools
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Float, Key

from .._tiles import Tile, blocked, blocked_scale, tile_counts, unblocked, valid_elements
from ..errors import QuantError
from ..formats import E8M0, AbstractFormat
from ..formats.format import power_of_two, quotient, settled
from .packing import code_capacity, pack, unpack
from .qarray import QArray
from .scales import ScaleStore, Target, Tiles
from .scheme import Scheme
from .scheme import scheme as as_scheme
from .sharding import refuse_cut_tiles

_TINY = np.float32(np.finfo(np.float32).tiny)


def quantize(
    x: ArrayLike,
    scheme: str | Scheme | Mapping[str, Any],
    *,
    axis: int | tuple[int, ...] = -1,
    error_weights: ArrayLike | None = None,
    key: Key[Array, ""] | None = None,
) -> QArray:
    """Quantizes an array: for each tile a scale, for each element the code of the nearest number.

    `code = encode((x - offset) / scale)`, computed in float32 with the scale as it is stored. A tile whose scale would be
    below the smallest normal float32 number gets scale 1 and codes of zero, so an all-zero tile decodes to exact zeros. A
    NaN or an infinity makes its whole tile NaN. Jit-compatible.

    Args:
        x: floating array of at least one axis: float16, bfloat16, float32 or float64 (which is rounded to float32).
        scheme: a Scheme, or anything that `fb.scheme` takes: `"nf4"`, `"int4_g64"`, a JSON form.
        axis: the axis that takes the place of the scheme's last one, the axis that a product contracts: -1 for weights
            `[out, in]`, -2 for `[in, out]`; several when a product contracts several.
        error_weights: how much each element's squared error counts in a scale search, broadcast to `x`; None: all alike.
            Refused by calibrations that do not search.
        key: a JAX random key for stochastic rounding of the codes; None rounds to the nearest.

    Returns:
        The QArray, of the shape and dtype of `x`.

    Raises:
        QuantError: for an array that is not floating or has no axis, an axis it does not have, an unknown scheme, or a
            sharding on an explicit mesh that cuts tiles.

    >>> quantize(jnp.array([[1.0, -0.5, 0.25, 0.0]]), "int8")
    QArray(int8, float32[1, 4], 8 bytes, 16.000 bits/weight)
    """
    x = _checked(x)
    bound = as_scheme(scheme).along(axis, x.ndim)
    refuse_cut_tiles(x, bound)
    tiles = bound.tiles(x.ndim)
    view = _view(x, tiles, error_weights, bound)
    tensor_scale = _tensor_scale(view, bound) if bound.tensor_scale else None
    target = Target(bound.format, ScaleStore(_plain_holder(bound), tensor_scale), bound.zero_holder)
    ideal, offset = bound.calibration.scale(view, target)
    counts = tile_counts(x.shape, tiles)
    stored, scale = _stored_scale(_guarded(ideal, view, bound.format), target, bound, counts, tiles)
    divisor = jnp.where(scale == 0, jnp.ones_like(scale), scale)
    zero = None if offset is None else target.stored_zero(offset, divisor)
    shifted = view.x if zero is None else view.x - target.loaded_offset(zero, divisor)
    codes = unblocked(bound.format.encode(_in_units(shifted, divisor, bound.format), key=key), x.shape, tiles)
    packed = pack(codes, bound.format.bits, bound.packing, axis=bound.pack_axis)
    slack = code_capacity(packed.shape[bound.pack_axis], bound.format.bits) - x.shape[bound.pack_axis]
    ones = (1,) * x.ndim
    zero = None if zero is None else zero.reshape(counts if zero.size != 1 else ones)
    tensor_scale = None if tensor_scale is None else tensor_scale.reshape(ones)
    return QArray(packed, stored, zero, tensor_scale, bound, np.dtype(x.dtype), slack)


def dequantize(q: QArray, dtype: DTypeLike | None = None) -> Float[Array, "*s"]:
    """The array that a QArray stands for: `(decode(code) - zero_point) * scale`, or `decode(code) * scale + offset`.

    Computed in float32 from exact decoded values, and rounded once to `dtype`. Jit-compatible and differentiable in the
    scales.

    Args:
        q: the quantized array.
        dtype: the floating dtype of the result; None takes `q.dtype`.

    Returns:
        An array of the shape of `q`.

    >>> dequantize(quantize(jnp.array([[6.0, -0.4, 0.0]]), "mxfp4")).tolist()
    [[6.0, -0.5, 0.0]]
    """
    dtype = q.dtype if dtype is None else jnp.dtype(dtype)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise QuantError(f"dequantize gives floating numbers, not {dtype.name}")
    scheme, tiles, shape = q.scheme, q.tiles, q.shape
    codes = unpack(q.codes, scheme.format.bits, shape[scheme.pack_axis], scheme.packing, axis=scheme.pack_axis)
    view, _ = blocked(codes, tiles)
    values = scheme.format.decode(view)

    def beside(leaf: Array) -> Array:
        return blocked_scale(leaf, tiles)

    if isinstance(scheme.zero_point, AbstractFormat):
        assert q.zero_point is not None
        values = values - scheme.zero_point.decode(beside(q.zero_point))
    for factor in _scale_factors(q):
        values = values * beside(factor)
    if scheme.zero_point is not None and not isinstance(scheme.zero_point, AbstractFormat):
        assert q.zero_point is not None
        values = settled(values) + beside(q.zero_point).astype(jnp.float32)
    return unblocked(values, shape, tiles).astype(dtype)


def _checked(x: ArrayLike) -> Array:
    """The argument as an array, refused unless it is floating and has an axis."""
    if isinstance(x, QArray):
        raise QuantError("x is quantized already; fb.dequantize it first to quantize it in another scheme")
    x = jnp.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise QuantError(f"x is {x.dtype.name}; only floating arrays are quantized")
    if x.ndim == 0 or x.size == 0:
        raise QuantError(f"x has shape {x.shape}; an array of at least one axis and one element is expected")
    return x


def _view(x: Array, tiles: tuple[Tile, ...], weights: ArrayLike | None, scheme: Scheme) -> Tiles:
    """The array and its error weights as calibrations see them."""
    view, within = blocked(x.astype(jnp.float32), tiles)
    if weights is not None:
        if not scheme.calibration.uses_error_weights:
            raise QuantError(f"error_weights mean nothing to calibration {scheme.calibration}; use one that searches (mse)")
        full = jnp.broadcast_to(jnp.asarray(weights, jnp.float32), x.shape)
        weights = blocked(full, tiles)[0]
    return Tiles(view, within, valid_elements(x.shape, tiles), weights)


def _plain_holder(scheme: Scheme) -> AbstractFormat | np.dtype:
    """What holds the scales while they are searched; scales that are quantized afterwards are searched as float32."""
    return np.dtype(np.float32) if isinstance(scheme.scale, Scheme) else scheme.scale  # type: ignore[return-value]


def _tensor_scale(view: Tiles, scheme: Scheme) -> Array:
    """The largest finite magnitude over the largest product of a code and a scale; 1 for an all-zero array."""
    magnitude = jnp.where(jnp.isfinite(view.x), jnp.abs(view.x), jnp.zeros_like(view.x))
    largest = scheme.format.bound * ScaleStore(_plain_holder(scheme)).largest
    scale = quotient(jnp.max(magnitude, keepdims=True), jnp.float32(largest))
    return jnp.where(scale < _TINY, jnp.ones_like(scale), scale)


def _guarded(scale: Array, view: Tiles, fmt: AbstractFormat) -> Array:
    """The scales with NaN for tiles that are not finite, and 1 for those too small to divide by.

    A format without a zero gets scale 0 there, since its codes cannot say zero themselves.
    """
    for_zero = 1.0 if 0.0 in fmt.values() else 0.0
    scale = jnp.where(jnp.abs(scale) < _TINY, jnp.full_like(scale, for_zero), scale)
    is_finite = jnp.isfinite(view.amax)
    return jnp.where(is_finite, scale, jnp.full_like(scale, jnp.nan))


def _in_units(x: Array, divisor: Array, fmt: AbstractFormat) -> Array:
    """The elements in units of their scales; for codes of a byte, those below all numbers of the format at the lowest.

    XLA on CPU fuses a division into what follows it only where a single operation uses it, and `encode` looks at its
    argument several times. With this bound, which changes no code, fp8 takes a third of the time. Narrower codes are fused
    with their packing, and there it is faster to have the quotients written to memory once.
    """
    units = quotient(x, divisor)
    return jnp.maximum(units, jnp.float32(fmt.min)) if fmt.bits == 8 else units


def _stored_scale(
    scale: Array, target: Target, scheme: Scheme, counts: tuple[int, ...], tiles: tuple[Tile, ...]
) -> tuple[Any, Array]:
    """The scales as they are stored, and as they will be read back beside the blocked array."""
    if isinstance(scheme.scale, Scheme):
        stored = quantize(scale.reshape(counts), scheme.scale, axis=scheme.pack_axis)
        return stored, blocked_scale(dequantize(stored), tiles)
    stored = target.store.stored(scale)
    return stored.reshape(counts), target.store.loaded(stored)


def scale_values(q: QArray) -> Float[Array, "*t"]:
    """The scale of each tile, float32, with the tensor scale in it."""
    factors = _scale_factors(q)
    return functools.reduce(jnp.multiply, factors)


def _scale_factors(q: QArray) -> tuple[Array, ...]:
    """Float32 arrays whose product is the scale: two for E8M0, whose smallest number, 2**-127, float32 may flush to zero."""
    held = _held_scale_factors(q)
    # The product of both levels is rounded once, as when the codes were chosen.
    return held if q.tensor_scale is None else (*held[:-1], held[-1] * q.tensor_scale)


def _held_scale_factors(q: QArray) -> tuple[Array, ...]:
    holder = q.scheme.scale
    if isinstance(holder, Scheme):
        return (dequantize(q.scale),)
    if isinstance(holder, E8M0):
        code = q.scale.astype(jnp.int32)
        half = (code - 127) // 2
        is_nan = code == 255
        low = jnp.where(is_nan, jnp.full(code.shape, jnp.nan, jnp.float32), power_of_two(half))
        return low, power_of_two(code - 127 - half)
    return (ScaleStore(holder).loaded(q.scale),)  # type: ignore[arg-type]
