"""Quantize and dequantize in plain JAX: the reference that every kernel is tested against."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Float, Int32, Key

from .._tiles import Tile, blocked, blocked_scale, from_front, tile_counts, unblocked, valid_elements
from ..errors import QuantError, UnsupportedError
from ..formats import E8M0, AbstractFormat
from ..formats.format import power_of_two, quotient, settled
from .packing import code_capacity, pack, packed_length, unpack
from .qarray import QArray
from .scales import ScaleStore, Target, Tiles, best_tensor_scale, unsaturated
from .scales.limits import largest_scale, largest_unit
from .scheme import Scheme
from .scheme import scheme as as_scheme
from .sharding import refuse_cut_tiles
from .validity import refuse_invalid

_TINY = np.float32(np.finfo(np.float32).tiny)
_FAR = np.float32(2.0**100)


def quantize(
    x: ArrayLike,
    scheme: str | Scheme | Mapping[str, Any],
    *,
    axis: int | tuple[int, ...] = -1,
    error_weights: ArrayLike | None = None,
    key: Key[Array, ""] | None = None,
    scale: ArrayLike | None = None,
    offset: ArrayLike | None = None,
    shared_noise: tuple[int, ...] = (),
) -> QArray:
    """`fb.quantize` in plain JAX, with its arguments, its result and its errors; `kernels.quantize` describes them.

    >>> quantize(jnp.array([[1.0, -0.5, 0.25, 0.0]]), "int8")
    QArray(int8, float32[1, 4], 8 bytes, 16.000 bits/weight)
    """
    x, bound = checked(x, scheme, axis, error_weights, scale, offset)
    return quantized(x, bound, error_weights, key, scale, offset, shared_axes(shared_noise, x.ndim, key))


def checked(
    x: ArrayLike,
    scheme: str | Scheme | Mapping[str, Any],
    axis: int | tuple[int, ...],
    error_weights: ArrayLike | None,
    scale: ArrayLike | None,
    offset: ArrayLike | None,
) -> tuple[Array, Scheme]:
    """The array that is quantized, and the scheme as it applies to its axes; QuantError where the arguments do not fit."""
    x = _checked_array(x)
    bound = laid_along(as_scheme(scheme), axis, x.shape)
    refuse_cut_tiles(x, bound)
    _check_given(scale, offset, error_weights, bound)
    return x, bound


def laid_along(scheme: Scheme, axis: int | tuple[int, ...], shape: tuple[int, ...]) -> Scheme:
    """The scheme as it applies to an array of a shape: `Scheme.along`, where an axis of one element counts as none.

    Of several axes tiles run along the last that has more: along the window of a depthwise convolution, whose kernel has one
    input channel, so that not every number has a scale of its own.

    >>> laid_along(as_scheme("mxfp8"), (0, 1, 2), (3, 3, 1, 8)).tile
    {...: 1, -3: 32}
    """
    axes = tuple(axis) if isinstance(axis, tuple | list) else (axis,)
    ones = tuple(a for a in axes if shape[from_front(a, len(shape))] == 1)
    return scheme.along((*ones, *(a for a in axes if a not in ones)), len(shape))


@dataclasses.dataclass(frozen=True)
class ChosenScales:
    """The scales of an array's tiles, as they are stored and as the elements meet them.

    Attributes:
        stored: the leaf `scale` of the QArray.
        zero_point: the leaf `zero_point`, or None.
        tensor_scale: the leaf `tensor_scale`, or None.
        divisor: float32, what the elements of each tile are divided by, beside the blocked array.
        offset: float32, the number that is subtracted from them first, or None.
    """

    stored: Any
    zero_point: Array | None
    tensor_scale: Array | None
    divisor: Array
    offset: Array | None


@functools.partial(jax.jit, static_argnames=("bound", "shared"), inline=True)
def quantized(
    x: Array, bound: Scheme, error_weights: Any, key: Any, scale: Any, offset: Any, shared: tuple[int, ...] = ()
) -> QArray:
    """`quantize` of checked arguments: one program, where operations one by one would each be compiled and wait."""
    if not x.size:
        return _empty(x, bound, scale, offset)
    tiles = bound.tiles(x.ndim)
    chosen = chosen_scales(x, bound, error_weights, scale, offset, is_stochastic=key is not None)
    view = blocked(x.astype(jnp.float32), tiles)[0]
    units = _bounded(in_units(view, chosen.divisor, chosen.offset), bound.format)
    if shared:
        codes = _alike(bound.format, key, shared)(unblocked(units, x.shape, tiles))
    else:
        codes = unblocked(bound.format.encode(units, key=key), x.shape, tiles)
    packed = pack(codes, bound.format.bits, bound.packing, axis=bound.pack_axis)
    return assembled(x, bound, packed, chosen.stored, chosen.zero_point, chosen.tensor_scale)


def chosen_scales(
    x: Array, bound: Scheme, error_weights: Any, scale: Any, offset: Any, *, is_stochastic: bool = False
) -> ChosenScales:
    """The scales that the scheme's calibration chooses, or those that are given, for checked arguments.

    For stochastic rounding they are widened until no element saturates, see `scales.unsaturated`; given ones are not.
    """
    is_widened = is_stochastic and scale is None
    if is_widened:
        _check_can_widen(bound, error_weights)
    tiles = bound.tiles(x.ndim)
    counts = tile_counts(x.shape, tiles)
    view = _view(x, tiles, error_weights, bound)
    if scale is None:
        if is_widened:
            unit = chosen_tensor_scale(view.x, bound.format.max, bound)
        else:
            unit = tensor_scale_of(x, bound, error_weights)
        target = _target(bound, None if unit is None else unit.reshape((1,) * view.x.ndim))
        ideal, low = unsaturated(view, target, bound.calibration) if is_widened else bound.calibration.scale(view, target)
    else:
        ideal, low = (None if g is None else blocked_scale(_for_tiles(g, counts), tiles) for g in (scale, offset))
        assert ideal is not None
        target = _target(bound, chosen_tensor_scale(ideal, 1.0, bound))
    stored, used = _stored_scale(_guarded(ideal, view, bound.format), target, bound, counts, tiles, is_widened)
    divisor = jnp.where(used == 0, jnp.ones_like(used), used)
    if low is not None and not isinstance(target.zero, AbstractFormat) and low.shape == view.is_finite.shape:
        low = jnp.where(view.is_finite, low, jnp.full_like(low, jnp.nan))
    zero = None
    if low is not None:
        zero = (target.stored_zero_up if is_widened else target.stored_zero)(low, divisor)
    loaded = None if zero is None else target.loaded_offset(zero, divisor)
    ones = (1,) * x.ndim
    zero = None if zero is None else zero.reshape(counts if zero.size != 1 else ones)
    tensor_scale = None if target.store.unit is None else target.store.unit.reshape(ones)
    return ChosenScales(stored, zero, tensor_scale, divisor, loaded)


def _empty(x: Array, bound: Scheme, scale: Any, offset: Any) -> QArray:
    """The QArray of an array without elements: no codes; tiles that are whole axes have the given scale, else 1."""
    counts, ones = tile_counts(x.shape, bound.tiles(x.ndim)), (1,) * x.ndim
    ideal, low = (_for_tiles(g, counts) for g in (1.0 if scale is None else scale, 0.0 if offset is None else offset))
    unit = jnp.ones(ones, jnp.float32) if bound.tensor_scale else None
    target = _target(bound, unit)
    if isinstance(bound.scale, Scheme):
        stored: Any = quantize(ideal, bound.scale, axis=bound.pack_axis)
    else:
        stored = target.store.stored(ideal)
    zero = target.stored_zero(low, ideal) if target.asymmetric else None
    packed = list(x.shape)
    packed[bound.pack_axis] = packed_length(x.shape[bound.pack_axis], bound.format.bits, bound.packing)
    return assembled(x, bound, jnp.zeros(packed, jnp.uint8), stored, zero, unit)


def assembled(x: Array, bound: Scheme, packed: Array, stored: Any, zero: Array | None, tensor_scale: Array | None) -> QArray:
    """The QArray of `x` from its leaves."""
    slack = code_capacity(packed.shape[bound.pack_axis], bound.format.bits) - x.shape[bound.pack_axis]
    return QArray(packed, stored, zero, tensor_scale, bound, np.dtype(x.dtype), slack)


def dequantize(q: QArray, dtype: DTypeLike | None = None) -> Float[Array, "*s"]:
    """`fb.dequantize` in plain JAX, with its arguments, its result and its errors; `kernels.quantize` describes them.

    >>> dequantize(quantize(jnp.array([[6.0, -0.4, 0.0]]), "mxfp4")).tolist()
    [[6.0, -0.5, 0.0]]
    """
    return dequantized(q, float_dtype(q, dtype))


def float_dtype(q: QArray, dtype: DTypeLike | None) -> np.dtype:
    """The dtype that a QArray is decoded to; QuantError for one that is not floating, and for what is no valid QArray."""
    if not isinstance(q, QArray):
        raise QuantError(f"dequantize takes a QArray, not {type(q).__name__}")
    refuse_invalid(q)
    dtype = q.dtype if dtype is None else jnp.dtype(dtype)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise QuantError(f"dequantize gives floating numbers, not {dtype.name}")
    return dtype


@functools.partial(jax.jit, static_argnames="dtype", inline=True)
def dequantized(q: QArray, dtype: np.dtype) -> Array:
    """`dequantize` as one program."""
    scheme, tiles, shape = q.scheme, q.tiles, q.shape
    if not q.size:
        return jnp.zeros(shape, dtype)
    codes = unpack(q.codes, scheme.format.bits, shape[scheme.pack_axis], scheme.packing, axis=scheme.pack_axis)
    view, _ = blocked(codes, tiles)
    values = scheme.format.decode(view)

    def beside(leaf: Array) -> Array:
        return blocked_scale(leaf, tiles)

    if isinstance(scheme.zero_point, AbstractFormat):
        assert q.zero_point is not None
        values = values - scheme.zero_point.decode(beside(q.zero_point))
    for factor in scale_factors(q):
        values = values * beside(factor)
    if scheme.zero_point is not None and not isinstance(scheme.zero_point, AbstractFormat):
        assert q.zero_point is not None
        values = settled(values) + beside(q.zero_point).astype(jnp.float32)
    return unblocked(values, shape, tiles).astype(dtype)


def _checked_array(x: ArrayLike) -> Array:
    """The argument as an array, refused unless it is floating and has an axis."""
    if isinstance(x, QArray):
        raise QuantError("x is quantized already; fb.dequantize it first to quantize it in another scheme")
    x = jnp.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise QuantError(f"x is {x.dtype.name}; only floating arrays are quantized")
    if x.ndim == 0:
        raise QuantError("x has shape (); an array of at least one axis is expected")
    return x


def _view(x: Array, tiles: tuple[Tile, ...], weights: ArrayLike | None, scheme: Scheme) -> Tiles:
    """The array and its error weights as calibrations see them."""
    view, within = blocked(x.astype(jnp.float32), tiles)
    if weights is not None:
        if not scheme.calibration.uses_error_weights:
            raise QuantError(f"error_weights mean nothing to calibration {scheme.calibration}; use one that searches (mse)")
        weights = jnp.asarray(weights, jnp.float32)
        if not _broadcasts(weights.shape, x.shape):
            raise QuantError(f"error_weights have shape {weights.shape}, which does not broadcast to {x.shape}")
        full = jnp.broadcast_to(weights, x.shape)
        weights = blocked(full, tiles)[0]
    return Tiles(view, within, valid_elements(x.shape, tiles), weights)


def _plain_holder(scheme: Scheme) -> AbstractFormat | np.dtype:
    """What holds the scales while they are searched; scales that are quantized afterwards are searched as float32."""
    return np.dtype(np.float32) if isinstance(scheme.scale, Scheme) else scheme.scale  # type: ignore[return-value]


def _check_given(scale: ArrayLike | None, offset: ArrayLike | None, weights: ArrayLike | None, scheme: Scheme) -> None:
    """Refuses a given scale without its offset, an offset without its scale, and weights for a search that is not made."""
    if scale is None and offset is not None:
        raise QuantError("offset is given without scale; pass both, or neither to calibrate")
    if scale is not None and (offset is None) != (scheme.zero_point is None):
        has, need = ("no zero point", "leave offset out") if offset is not None else ("a zero point", "pass offset= as well")
        raise QuantError(f"scale is given and scheme {scheme.name} has {has}: {need}")
    if scale is not None and weights is not None:
        raise QuantError("error_weights mean nothing where scale is given; no scale is searched")


def _check_can_widen(scheme: Scheme, weights: ArrayLike | None) -> None:
    """Refuses what stochastic rounding cannot do without bias, or would ignore."""
    if weights is not None:
        raise QuantError(
            "error_weights mean nothing with key: stochastic rounding takes the smallest scale that clips nothing"
        )
    if isinstance(scheme.scale, Scheme):
        raise UnsupportedError(
            f"stochastic rounding in {scheme.name} would be biased: its scales are rounded to {scheme.scale.format.name}, "
            "also downwards, and the largest elements saturate. Take a scheme whose scales are not quantized, or pass scale="
        )


def shared_axes(axes: tuple[int, ...], ndim: int, key: Any) -> tuple[int, ...]:
    """The axes that share random numbers, counted from the front and in order."""
    if axes and key is None:
        raise QuantError("shared_noise is given without key; stochastic rounding needs both")
    if any(not -ndim <= a < ndim for a in axes):
        raise QuantError(f"shared_noise is {axes}, but the array has {ndim} axes")
    return tuple(sorted({a % ndim for a in axes}))


def _alike(fmt: AbstractFormat, key: Any, axes: tuple[int, ...]) -> Callable[[Array], Array]:
    """The format's stochastic encoding, all elements along the axes by the same random number.

    A key that is not mapped draws once for everything that is.
    """
    encode = functools.partial(fmt.encode, key=key)
    for axis in axes:
        encode = jax.vmap(encode, axis, axis)
    return encode


def _for_tiles(given: ArrayLike, counts: tuple[int, ...]) -> Array:
    """A given scale or offset as float32, one element a tile."""
    given = jnp.asarray(given)
    if not _broadcasts(given.shape, counts) or not jnp.issubdtype(given.dtype, jnp.floating):
        raise QuantError(
            f"scale and offset must be floating and broadcast to the tiles {counts}; got {given.dtype.name}{given.shape}"
        )
    return jnp.broadcast_to(given.astype(jnp.float32), counts)


def _broadcasts(shape: tuple[int, ...], onto: tuple[int, ...]) -> bool:
    """Whether an array of one shape broadcasts to another."""
    return len(shape) <= len(onto) and all(n in (1, m) for n, m in zip(shape[::-1], onto[::-1], strict=False))


def _target(scheme: Scheme, tensor_scale: Array | None) -> Target:
    """What the scales of a scheme are for."""
    return Target(scheme.format, ScaleStore(_plain_holder(scheme), tensor_scale, scale_limit(scheme)), scheme.zero_holder)


def scale_limit(scheme: Scheme) -> float:
    """The largest scale that a scheme stores: every code of it stands for a finite float32.

    Under a tensor scale, which has a limit of its own, the stored scales have none.
    """
    if scheme.tensor_scale:
        return np.inf
    limit = largest_scale(scheme.format, isinstance(scheme.zero_point, AbstractFormat))
    # Scales that are quantized themselves come back as the nearest sum of a code and a mean, each rounded.
    return limit * (1 - 2.0**-20) if isinstance(scheme.scale, Scheme) else limit


def chosen_tensor_scale(values: Array, bound: float, scheme: Scheme) -> Array | None:
    """The scale that takes the largest finite magnitude to `bound` times the largest scale to store, 1 where all are zero.

    None where the scheme has none.
    """
    if not scheme.tensor_scale:
        return None
    magnitude = jnp.where(jnp.isfinite(values), jnp.abs(values), jnp.zeros_like(values))
    holder = _plain_holder(scheme)
    largest = scheme.calibration.largest_stored(holder) or ScaleStore(holder).largest
    scale = quotient(jnp.max(magnitude, keepdims=True), jnp.float32(bound * largest))
    scale = jnp.minimum(scale, jnp.float32(largest_unit(scheme.format, ScaleStore(holder).largest)))
    return jnp.where(scale < _TINY, jnp.ones_like(scale), scale)


def tensor_scale_of(x: Array, scheme: Scheme, error_weights: ArrayLike | None = None) -> Array | None:
    """The tensor scale that the scheme's calibration chooses for an array, with one axis for each of its; None without one."""
    x, calibration = x.astype(jnp.float32), scheme.calibration
    smallest = chosen_tensor_scale(x, scheme.format.bound, scheme)
    holder = scheme.scale
    if (
        smallest is None
        or not calibration.searches_tensor_scale
        or not isinstance(holder, AbstractFormat)
        or isinstance(holder, E8M0)
    ):
        return smallest
    weights = None if error_weights is None else jnp.broadcast_to(jnp.asarray(error_weights, jnp.float32), x.shape)
    return best_tensor_scale(x, weights, scheme.tiles(x.ndim), smallest, scheme.format, holder, calibration)


def _guarded(scale: Array, view: Tiles, fmt: AbstractFormat) -> Array:
    """The scales with NaN for tiles that are not finite, and 1 for those too small to divide by.

    A format without a zero gets scale 0 there, since its codes cannot say zero themselves.
    """
    for_zero = 1.0 if 0.0 in fmt.values() else 0.0
    scale = jnp.where(jnp.abs(scale) < _TINY, jnp.full_like(scale, for_zero), scale)
    return jnp.where(view.is_finite, scale, jnp.full_like(scale, jnp.nan))


def in_units(x: Array, divisor: Array, offset: Array | None) -> Array:
    """The elements, less the offset of their tile where there is one, divided by its scale.

    Where the offset is so large that the difference may exceed float32, halves are subtracted and the quotient is doubled, which
    rounds alike.
    """
    if offset is None:
        return quotient(x, divisor)
    half = jnp.where(jnp.abs(offset) >= _FAR, jnp.float32(0.5), jnp.float32(1))
    return quotient(x * half - offset * half, divisor) * (1 / half)


def _bounded(units: Array, fmt: AbstractFormat) -> Array:
    """Elements in units of their scales; for codes of a byte, those below all numbers of the format at the lowest.

    XLA on CPU fuses a division into what follows it only where a single operation uses it, and `encode` looks at its
    argument several times. With this bound, which changes no code, fp8 takes a third of the time. Narrower codes are fused
    with their packing, and there it is faster to have the quotients written to memory once.
    """
    return jnp.maximum(units, jnp.float32(fmt.min)) if fmt.bits == 8 else units


def _stored_scale(
    scale: Array, target: Target, scheme: Scheme, counts: tuple[int, ...], tiles: tuple[Tile, ...], is_widened: bool
) -> tuple[Any, Array]:
    """The scales as they are stored (rounded up where `is_widened`), and as they will be read back."""
    if isinstance(scheme.scale, Scheme):
        stored = quantize(scale.reshape(counts), scheme.scale, axis=scheme.pack_axis)
        return stored, blocked_scale(dequantize(stored), tiles)
    stored = target.store.stored_up(scale) if is_widened else target.store.stored(scale)
    return stored.reshape(counts), target.store.loaded(stored)


def scale_values(q: QArray) -> Float[Array, "*t"]:
    """The scale of each tile, float32, with the tensor scale in it."""
    factors = scale_factors(q)
    return functools.reduce(jnp.multiply, factors)


def expanded_scale(q: QArray, *, but: int | None = None) -> Float[Array, "*t"]:
    """The scale of each element, float32: every tile's value repeated along it.

    Args:
        q: the quantized array.
        but: an axis along which there stays one value a tile; None: none.

    Returns:
        An array that broadcasts to the shape of `q`; axes with a single tile have length 1.
    """
    return _expanded(q, scale_values(q), but)


def _expanded(q: QArray, values: Array, but: int | None) -> Array:
    """One value a tile, repeated along the tiles of all axes but one."""
    for axis, (length, tile, count) in enumerate(zip(q.shape, q.tiles, values.shape, strict=True)):
        if axis != but and count > 1 and tile is not None and tile > 1:
            values = jax.lax.slice_in_dim(jnp.repeat(values, tile, axis=axis), 0, length, axis=axis)
    return values


def expanded_zero_point(q: QArray, *, but: int | None = None) -> Int32[Array, "*t"]:
    """The whole zero point of each element, repeated like `expanded_scale`; for schemes whose zero points are whole."""
    assert q.zero_point is not None
    assert isinstance(q.scheme.zero_point, AbstractFormat)
    return _expanded(q, q.scheme.zero_point.decode(q.zero_point).astype(jnp.int32), but)


def scale_factors(q: QArray) -> tuple[Array, ...]:
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
