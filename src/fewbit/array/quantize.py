"""Reference quantize and dequantize in plain JAX."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Float, Int32, Key

from .._explicit_mesh import explicit_sharding
from .._tiles import Tile, blocked, blocked_scale, tile_counts, unblocked, valid_elements
from ..errors import QuantError, UnsupportedError
from ..formats.e8m0 import E8M0
from ..formats.format import AbstractFormat, power_of_two, quotient, settled
from .packing import code_capacity, pack, packed_length, unpack
from .qarray import QArray
from .scales import unsaturated
from .scales.calibration import Target, Tiles, largest_magnitude
from .scales.limits import LARGEST, largest_unit
from .scales.search.tensor_scale import TensorScaleKernels, best_tensor_scale
from .scales.store import ScaleStore
from .scheme import Scheme, laid_along
from .scheme import scheme as as_scheme
from .sharding import refuse_cut_tiles
from .validity import refuse_invalid

Given: TypeAlias = ArrayLike | None
PRNGKey: TypeAlias = Key[Array, ""] | None

_TINY = np.float32(np.finfo(np.float32).tiny)
_FAR = np.float32(2.0**100)


def quantize(
    x: ArrayLike,
    scheme: str | Scheme | Mapping[str, Any],
    *,
    axis: int | tuple[int, ...] = -1,
    error_weights: Given = None,
    key: PRNGKey = None,
    scale: Given = None,
    offset: Given = None,
    shared_noise: tuple[int, ...] = (),
) -> QArray:
    """`fb.quantize` in plain JAX; see `kernels.quantize` for arguments and errors.

    >>> quantize(jnp.array([[1.0, -0.5, 0.25, 0.0]]), "int8")
    QArray(int8, float32[1, 4], 8 bytes, 16.000 bits/weight)
    """
    x, bound = checked(x, scheme, axis, error_weights, scale, offset)
    return quantized(x, bound, error_weights, key, scale, offset, shared_axes(shared_noise, x.ndim, key))


def checked(
    x: ArrayLike,
    scheme: str | Scheme | Mapping[str, Any],
    axis: int | tuple[int, ...],
    error_weights: Given,
    scale: Given,
    offset: Given,
) -> tuple[Array, Scheme]:
    """The array, and the scheme bound to its axes; QuantError for invalid arguments."""
    x = _checked_array(x)
    bound = laid_along(as_scheme(scheme), axis, x.shape)
    refuse_cut_tiles(x, bound)
    _check_given(scale, offset, error_weights, bound)
    return x, bound


@dataclasses.dataclass(frozen=True)
class ChosenScales:
    """The scales of an array's tiles, stored and as float32.

    Attributes:
        stored: the leaf `scale` of the QArray.
        zero_point: the leaf `zero_point`, or None.
        tensor_scale: the leaf `tensor_scale`, or None.
        divisor: float32, divides the elements of each tile; broadcasts to the blocked array.
        offset: float32, subtracted from the elements first; or None.
    """

    stored: Any
    zero_point: Array | None
    tensor_scale: Array | None
    divisor: Array
    offset: Array | None


@functools.partial(jax.jit, static_argnames=("bound", "shared"), inline=True)
def quantized(
    x: Array, bound: Scheme, error_weights: Given, key: PRNGKey, scale: Given, offset: Given, shared: tuple[int, ...] = ()
) -> QArray:
    """`quantize` of checked arguments, jitted."""
    if not x.size:
        return _empty(x, bound, scale, offset)
    tiles = bound.tiles(x.ndim)
    chosen = chosen_scales(x, bound, error_weights, scale, offset, is_stochastic=key is not None)
    view = blocked(x.astype(jnp.float32), tiles)[0]
    units = _bounded(in_units(view, chosen.divisor, chosen.offset), bound.format)
    if shared:
        codes = _shared_encode(bound.format, key, shared)(unblocked(units, x.shape, tiles))
    else:
        codes = unblocked(bound.format.encode(units, key=key), x.shape, tiles)
    packed = pack(codes, bound.format.bits, bound.packing, axis=bound.pack_axis)
    return assembled(x, bound, packed, chosen.stored, chosen.zero_point, chosen.tensor_scale)


def chosen_scales(
    x: Array, bound: Scheme, error_weights: Given, scale: Given, offset: Given, *, is_stochastic: bool = False
) -> ChosenScales:
    """The given scales, or those of the scheme's calibration, for checked arguments.

    For stochastic rounding chosen scales are widened until no element saturates, see `scales.unsaturated`.
    """
    is_widened = is_stochastic and scale is None
    if is_widened:
        _check_can_widen(bound, error_weights)
    tiles = bound.tiles(x.ndim)
    counts = tile_counts(x.shape, tiles)
    view = _view(x, tiles, error_weights, bound)
    low = None
    if scale is not None:
        ideal = blocked_scale(_for_tiles(scale, counts), tiles)
        if offset is not None:
            low = blocked_scale(_for_tiles(offset, counts), tiles)
        target = _target(bound, chosen_tensor_scale(ideal, 1.0, bound))
    elif is_widened:
        ideal, low = unsaturated(view, _target(bound, None), bound.calibration)
        if bound.zero_point is None and not bound.calibration.exceeds_amax:
            unit = chosen_tensor_scale(view.x, bound.format.max, bound)
        else:
            unit = chosen_tensor_scale(jnp.where(view.is_finite, ideal, jnp.nan), 1.0, bound)
        target = _target(bound, unit)
    else:
        unit = tensor_scale_of(x, bound, error_weights)
        target = _target(bound, jax.tree.map(lambda leaf: leaf.reshape((1,) * view.x.ndim), unit))
        ideal, low = bound.calibration.scale(view, target)
    stored, used = _stored_scale(_guarded(ideal, view, bound), target, bound, counts, tiles, is_widened)
    divisor = jnp.where(used == 0, jnp.ones_like(used), used)
    if low is not None and not isinstance(target.zero, AbstractFormat) and low.shape == view.is_finite.shape:
        low = jnp.where(view.is_finite, low, jnp.nan)
    zero = loaded = None
    if low is not None:
        if is_widened:
            zero = target.stored_zero_up(low, divisor)
        else:
            zero = target.stored_zero(low, divisor)
        loaded = target.loaded_offset(zero, divisor)
        zero = zero.reshape(counts if zero.size != 1 else (1,) * x.ndim)
    tensor_scale = jax.tree.map(lambda leaf: leaf.reshape((1,) * x.ndim), target.store.unit)
    return ChosenScales(stored, zero, tensor_scale, divisor, loaded)


def _empty(x: Array, bound: Scheme, scale: Given, offset: Given) -> QArray:
    """The QArray of an empty array. Whole-axis tiles get the given scale, else 1."""
    counts = tile_counts(x.shape, bound.tiles(x.ndim))
    if scale is None:
        scale = 1.0
    if offset is None:
        offset = 0.0
    ideal, low = _for_tiles(scale, counts), _for_tiles(offset, counts)
    unit = zero = None
    if bound.tensor_scale:
        unit = jnp.ones((1,) * x.ndim, jnp.float32)
    target = _target(bound, unit)
    if isinstance(bound.scale, Scheme):
        stored: Any = quantize(ideal, bound.scale, axis=bound.pack_axis)
    else:
        stored = target.store.stored(ideal)
    if target.asymmetric:
        zero = target.stored_zero(low, ideal)
    packed = list(x.shape)
    packed[bound.pack_axis] = packed_length(x.shape[bound.pack_axis], bound.format.bits, bound.packing)
    return assembled(x, bound, jnp.zeros(packed, jnp.uint8), stored, zero, unit)


def assembled(
    x: Array, bound: Scheme, packed: Array, stored: Array | QArray, zero: Array | None, tensor_scale: Array | None
) -> QArray:
    """The QArray of `x` from its leaves."""
    slack = code_capacity(packed.shape[bound.pack_axis], bound.format.bits) - x.shape[bound.pack_axis]
    return QArray(packed, stored, zero, tensor_scale, bound, np.dtype(x.dtype), slack)


def dequantize(q: QArray, dtype: DTypeLike | None = None) -> Float[Array, "*s"]:
    """`fb.dequantize` in plain JAX; see `kernels.quantize` for arguments and errors.

    >>> dequantize(quantize(jnp.array([[6.0, -0.4, 0.0]]), "mxfp4")).tolist()
    [[6.0, -0.5, 0.0]]
    """
    return dequantized(q, float_dtype(q, dtype))


def float_dtype(q: QArray, dtype: DTypeLike | None) -> np.dtype:
    """The output dtype of `dequantize`. QuantError for one that is not floating, or an invalid QArray."""
    refuse_invalid(q)
    if dtype is None:
        return q.dtype
    dtype = jnp.dtype(dtype)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise QuantError(f"dequantize returns a floating dtype, not {dtype.name}")
    return dtype


@functools.partial(jax.jit, static_argnames="dtype", inline=True)
def dequantized(q: QArray, dtype: np.dtype) -> Array:
    """`dequantize` of checked arguments, jitted."""
    scheme, tiles, shape = q.scheme, q.tiles, q.shape
    if not q.size:
        return jnp.zeros(shape, dtype)
    codes = unpack(q.codes, scheme.format.bits, shape[scheme.pack_axis], scheme.packing, axis=scheme.pack_axis)
    view, _ = blocked(codes, tiles)
    values = scheme.format.decode(view)
    if isinstance(scheme.zero_point, AbstractFormat):
        assert q.zero_point is not None
        values = values - scheme.zero_point.decode(blocked_scale(q.zero_point, tiles))
    for factor in scale_factors(q):
        values = values * blocked_scale(factor, tiles)
    if scheme.zero_point is not None and not isinstance(scheme.zero_point, AbstractFormat):
        assert q.zero_point is not None
        values = settled(values) + blocked_scale(q.zero_point, tiles).astype(jnp.float32)
    return unblocked(values, shape, tiles).astype(dtype)


def _checked_array(x: ArrayLike) -> Array:
    """The argument as an array. QuantError unless it is floating and has an axis."""
    if isinstance(x, QArray):
        raise QuantError("x is quantized already; fb.dequantize it first to quantize it in another scheme")
    x = jnp.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise QuantError(f"x is {x.dtype.name}; only floating arrays are quantized")
    if x.ndim == 0:
        raise QuantError("x has shape (), expected at least one axis")
    return x


def _view(x: Array, tiles: tuple[Tile, ...], weights: Given, scheme: Scheme) -> Tiles:
    """The blocked array and its blocked error weights."""
    view, within = blocked(x.astype(jnp.float32), tiles)
    if weights is not None:
        if not scheme.calibration.uses_error_weights:
            raise QuantError(f"calibration {scheme.calibration} ignores error_weights; use one that searches (mse)")
        weights = jnp.asarray(weights, jnp.float32)
        if not _broadcasts(weights.shape, x.shape):
            raise QuantError(f"error_weights have shape {weights.shape}, which does not broadcast to {x.shape}")
        weights = blocked(jnp.broadcast_to(weights, x.shape), tiles)[0]
    return Tiles(view, within, valid_elements(x.shape, tiles), weights)


def _plain_holder(scheme: Scheme) -> AbstractFormat | np.dtype:
    """The format or dtype of the scales during calibration: float32 for double quantization."""
    if isinstance(scheme.scale, Scheme):
        return np.dtype(np.float32)
    return scheme.scale  # type: ignore[return-value]


def _check_given(scale: Given, offset: Given, weights: Given, scheme: Scheme) -> None:
    """Raises QuantError unless scale, offset and error weights go together."""
    if scale is None:
        if offset is not None:
            raise QuantError("offset is given without scale; pass both, or neither to calibrate")
        return
    if scheme.zero_point is None and offset is not None:
        raise QuantError(f"scale is given and scheme {scheme.name} has no zero point: leave offset out")
    if scheme.zero_point is not None and offset is None:
        raise QuantError(f"scale is given and scheme {scheme.name} has a zero point: pass offset= as well")
    if weights is not None:
        raise QuantError("error_weights have no effect when scale is given")


def _check_can_widen(scheme: Scheme, weights: Given) -> None:
    """Raises for arguments that stochastic rounding would ignore, or round with bias."""
    if weights is not None:
        raise QuantError(
            "error_weights have no effect with key: stochastic rounding takes the smallest scale that clips nothing"
        )
    if isinstance(scheme.scale, Scheme):
        raise UnsupportedError(
            f"stochastic rounding in {scheme.name} would be biased: its scales are rounded to {scheme.scale.format.name}, "
            "also downwards, and the largest elements saturate. Use a scheme whose scales are not quantized, or pass scale="
        )


def shared_axes(axes: tuple[int, ...], ndim: int, key: PRNGKey) -> tuple[int, ...]:
    """The axes that share random numbers, non-negative and sorted."""
    if axes and key is None:
        raise QuantError("shared_noise is given without key; stochastic rounding needs both")
    if any(not -ndim <= a < ndim for a in axes):
        raise QuantError(f"shared_noise is {axes}, but the array has {ndim} axes")
    return tuple(sorted({a % ndim for a in axes}))


def _shared_encode(fmt: AbstractFormat, key: PRNGKey, axes: tuple[int, ...]) -> Callable[[Array], Array]:
    """The format's stochastic `encode`, with one random number for all elements along the axes."""
    encode = functools.partial(fmt.encode, key=key)
    for axis in axes:  # vmap without mapping the key: every element draws the same number
        encode = jax.vmap(encode, axis, axis)
    return encode


def _for_tiles(given: ArrayLike, counts: tuple[int, ...]) -> Array:
    """A given scale or offset as float32, one element per tile."""
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
    """The calibration target of a scheme."""
    return Target(scheme.format, ScaleStore(_plain_holder(scheme), tensor_scale, scheme.scale_limit), scheme.zero_holder)


def chosen_tensor_scale(values: Array, bound: float, scheme: Scheme, largest: Array | None = None) -> Array | None:
    """The tensor scale that maps the largest finite magnitude to `bound` times the largest stored scale.

    1 if all values are zero; None if the scheme has no tensor scale. `largest`: the largest finite magnitude, with as many
    axes as the values, if it is known.
    """
    if not scheme.tensor_scale:
        return None
    holder = _plain_holder(scheme)
    most = scheme.calibration.largest_stored(holder) or ScaleStore(holder).largest
    if largest is None:
        largest = _largest_finite(values)
    scale = quotient(largest, jnp.float32(min(bound * most, LARGEST)))
    scale = jnp.minimum(scale, jnp.float32(largest_unit(scheme.format, ScaleStore(holder).largest)))
    return jnp.where(scale < _TINY, jnp.ones_like(scale), scale)


def _largest_finite(x: Array) -> Array:
    """The largest finite magnitude of `x`, with as many axes as `x`.

    It is reduced by rows first: a reduction over all axes at once takes ten times as long.
    """
    rows = largest_magnitude(x, -1)
    is_finite = jnp.isfinite(jnp.sum(jnp.sum(x, axis=-1)))  # or so large that sums overflow: then it takes longer

    def carefully(x: Array) -> Array:
        magnitude = jnp.where(jnp.isfinite(x), jnp.abs(x), jnp.zeros_like(x))
        return jnp.max(magnitude, axis=-1, keepdims=True)

    if explicit_sharding(x) is not None:  # vmap of cond fails there
        rows = carefully(x)
    else:
        rows = jax.lax.cond(is_finite, lambda x, rows: rows, lambda x, rows: carefully(x), x, rows)
    return jnp.max(rows, keepdims=True)


def tensor_scale_of(
    x: Array, scheme: Scheme, error_weights: Given = None, kernels: TensorScaleKernels | None = None
) -> Array | None:
    """The tensor scale of the scheme's calibration, with as many axes as `x`. None if the scheme has none."""
    if not scheme.tensor_scale:
        return None
    x, calibration, holder = x.astype(jnp.float32), scheme.calibration, scheme.scale
    tiles = scheme.tiles(x.ndim)
    if calibration.exceeds_amax:
        view = _view(x, tiles, None, scheme)
        scale, _ = calibration.scale(view, _target(scheme, None))
        unit = chosen_tensor_scale(jnp.where(view.is_finite, scale, jnp.nan), 1.0, scheme)
        return jax.tree.map(lambda leaf: leaf.reshape((1,) * x.ndim), unit)
    rows, largest = None, None
    if kernels is not None:
        rows = kernels.row_magnitudes(x)
        largest = jnp.max(rows[..., 0], keepdims=True).reshape((1,) * x.ndim)
    bound = scheme.format.bound
    if scheme.zero_point is not None:  # the widest range is -amax to amax
        bound = (scheme.format.max - scheme.format.min) / 2
    smallest = chosen_tensor_scale(x, bound, scheme, largest)
    if smallest is None or scheme.zero_point is not None or not calibration.searches_tensor_scale:
        return smallest
    if not isinstance(holder, AbstractFormat) or isinstance(holder, E8M0):
        return smallest
    weights = None
    if error_weights is not None:
        weights = jnp.broadcast_to(jnp.asarray(error_weights, jnp.float32), x.shape)
    return best_tensor_scale(x, weights, tiles, smallest, scheme.format, holder, calibration, kernels, rows)


def _guarded(scale: Array, view: Tiles, scheme: Scheme) -> Array:
    """The scales, with NaN or 1 where they cannot be used.

    NaN is for tiles that are not finite, 1 for scales too small to divide by. A format without zero gets scale 0 there, so
    that it decodes to zero; and so do scales that are quantized themselves, since a 1 among them would widen their range.
    """
    for_zero = float(0.0 in scheme.format.values() and not isinstance(scheme.scale, Scheme))
    scale = jnp.where(jnp.abs(scale) < _TINY, for_zero, scale)
    return jnp.where(view.is_finite, scale, jnp.nan)


def in_units(x: Array, divisor: Array, offset: Array | None) -> Array:
    """`(x - offset) / divisor`."""
    if offset is None:
        return quotient(x, divisor)
    # With a large offset the difference may exceed float32: halves are subtracted, the quotient doubled. Same rounding.
    half = jnp.where(jnp.abs(offset) >= _FAR, jnp.float32(0.5), jnp.float32(1))
    return quotient(x * half - offset * half, divisor) * (1 / half)


def _bounded(units: Array, fmt: AbstractFormat) -> Array:
    """Bounds the elements of 8-bit formats from below, for speed on CPU. No code changes.

    XLA on CPU fuses a division only into a single user, and `encode` has several; with the bound fp8 takes a third of the
    time. Narrower codes are fused with their packing, where writing the quotients to memory once is faster.
    """
    if fmt.bits < 8:
        return units
    return jnp.maximum(units, jnp.float32(fmt.min))


def _stored_scale(
    scale: Array, target: Target, scheme: Scheme, counts: tuple[int, ...], tiles: tuple[Tile, ...], is_widened: bool
) -> tuple[Any, Array]:
    """The stored scales (rounded up if `is_widened`), and their float32 values."""
    if isinstance(scheme.scale, Scheme):
        stored = quantize(scale.reshape(counts), scheme.scale, axis=scheme.pack_axis)
        return stored, blocked_scale(dequantize(stored), tiles)
    if is_widened:
        stored = target.store.stored_up(scale)
    else:
        stored = target.store.stored(scale)
    return stored.reshape(counts), target.store.loaded(stored)


def scale_values(q: QArray) -> Float[Array, "*t"]:
    """The scale of each tile, float32, times the tensor scale."""
    return functools.reduce(jnp.multiply, scale_factors(q))


def expanded_scale(q: QArray, *, but: int | None = None) -> Float[Array, "*t"]:
    """The scale of each element, float32, broadcastable to the shape of `q`.

    Args:
        q: the quantized array.
        but: an axis along which there remains one value per tile; None: none.
    """
    return _expanded(q, scale_values(q), but)


def _expanded(q: QArray, values: Array, but: int | None) -> Array:
    """One value per tile, repeated along the tiles of all axes but one."""
    for axis, (length, tile, count) in enumerate(zip(q.shape, q.tiles, values.shape, strict=True)):
        if axis != but and tile is not None and tile > 1 and count > 1:
            before, after = values.shape[:axis], values.shape[axis + 1 :]
            copies = jnp.broadcast_to(jnp.expand_dims(values, axis + 1), (*before, count, tile, *after))
            values = jax.lax.slice_in_dim(copies.reshape(*before, count * tile, *after), 0, length, axis=axis)
    return values


def expanded_zero_point(q: QArray, *, but: int | None = None) -> Int32[Array, "*t"]:
    """The integer zero point of each element, repeated like `expanded_scale`."""
    assert q.zero_point is not None
    assert isinstance(q.scheme.zero_point, AbstractFormat)
    return _expanded(q, q.scheme.zero_point.decode(q.zero_point).astype(jnp.int32), but)


def expanded_offset(q: QArray) -> Float[Array, "*t"] | None:
    """The value of code 0 of each element, in float32. It broadcasts to the shape of `q`; None for a symmetric scheme."""
    if q.zero_point is None:
        return None
    if isinstance(q.scheme.zero_point, AbstractFormat):
        return -expanded_zero_point(q).astype(jnp.float32) * expanded_scale(q)
    return _expanded(q, q.zero_point.astype(jnp.float32), None)


def scale_factors(q: QArray) -> tuple[Array, ...]:
    """Float32 arrays whose product is the scale. There are two for E8M0, whose 2**-127 may be flushed to zero in float32."""
    holder = q.scheme.scale
    if isinstance(holder, Scheme):
        return with_tensor_scale((dequantize(q.scale),), q)
    assert isinstance(holder, AbstractFormat | np.dtype)
    return with_tensor_scale(stored_factors(holder, q.scale), q)


def stored_factors(holder: AbstractFormat | np.dtype, stored: Array) -> tuple[Array, ...]:
    """The factors of stored scales, without a tensor scale."""
    if not isinstance(holder, E8M0):
        return (ScaleStore(holder).loaded(stored),)
    code = stored.astype(jnp.int32)
    half = (code - 127) // 2
    low = jnp.where(code == 255, jnp.nan, power_of_two(half))
    return low, power_of_two(code - 127 - half)


def with_tensor_scale(factors: tuple[Array, ...], q: QArray) -> tuple[Array, ...]:
    """The factors of a scale, the last one times the tensor scale.

    That product is rounded once, as when the codes were chosen.
    """
    if q.tensor_scale is None:
        return factors
    return (*factors[:-1], factors[-1] * q.tensor_scale)
