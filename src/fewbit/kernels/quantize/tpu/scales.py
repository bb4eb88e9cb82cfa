"""Scales of tiles inside the TPU kernel.

A search tries the candidates that `array.scales` proves sufficient, unrolled, in units of a power of two near amax; ties
are resolved as there. Candidates for an E4M3 scale are offsets from the smallest code that saturates nothing.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from ....array.scales.absmax import AbsMax
from ....array.scales.calibration import Target, symmetric_or_range
from ....array.scales.minmax import MinMax
from ....array.scales.mx import MX, bits_added
from ....array.scales.nvfp4 import NVFP4
from ....array.scales.search.candidates import needed_doublings, needed_halvings
from ....array.scales.search.mse import MSE
from ....array.scales.search.stored import SMALLEST, proven_window
from ....array.scales.store import ScaleStore
from ....array.scheme import ScaleHolder, Scheme
from ....formats.e8m0 import E8M0
from ....formats.format import FORMATS, AbstractFormat, power_of_two, quotient
from ....formats.minifloat import Minifloat

TINY = np.float32(np.finfo(np.float32).tiny)
TIE = np.float32(1 - 2.0**-16)
OFFSETS = (0, -1, -2, 3, 4, 5)
"""The candidates of "cheap6", in codes from the smallest scale that saturates nothing."""


@dataclasses.dataclass(frozen=True)
class Chosen:
    """The scales of tiles `[T, K, N]`, each array `[T, 1, N]`.

    Attributes:
        stored: in the scheme's scale format.
        divisor: float32, the elements' divisor; NaN for a tile with a non-finite element.
        zero: the stored zero points, or None.
        offset: float32, subtracted from the elements before the division, or None.
    """

    stored: jax.Array
    divisor: jax.Array
    zero: jax.Array | None = None
    offset: jax.Array | None = None


def unchosen(scheme: Scheme, tile: int) -> str | None:
    """Why the kernel cannot compute the scales of a scheme; None when it can.

    Args:
        scheme: the scheme.
        tile: the tile (block) size.
    """
    stored, calibration, is_range = scheme.scale, scheme.calibration, scheme.zero_point is not None
    if isinstance(stored, Scheme):
        return "quantized scales: use backend='reference'"
    for holder in (stored, scheme.zero_point):
        if not isinstance(holder, AbstractFormat | None) and np.dtype(holder).name == "float16":  # type: ignore[arg-type]
            return "scales or offsets are stored as float16, which TPUs do not compute with"
    if isinstance(stored, E8M0):
        is_supported = isinstance(calibration, MX) and not is_range
    else:
        is_search = isinstance(calibration, MSE | NVFP4) and not is_range and _is_searched(scheme, tile)
        is_supported = is_search or isinstance(calibration, AbsMax | MinMax)
    if is_supported:
        return None
    return f"calibration {calibration} with scales stored as {_text(stored)}"


def _text(holder: ScaleHolder) -> str:
    if isinstance(holder, AbstractFormat):
        return holder.name
    return np.dtype(holder).name  # type: ignore[arg-type]


def _is_searched(scheme: Scheme, tile: int) -> bool:
    """Whether scales are E4M3, and only a few of them can be optimal."""
    stored, rule = scheme.scale, scheme.calibration
    if not isinstance(stored, Minifloat) or stored.mantissa != 3:
        return False
    if isinstance(rule, NVFP4) and rule.rule == "four_over_six":
        return scheme.format.name == "e2m1"
    return isinstance(rule, NVFP4) or proven_window(scheme.format, stored, tile) is not None


def chosen(tiles: jax.Array, valid: jax.Array | None, scheme: Scheme, unit: jax.Array | None) -> Chosen:
    """The scales of tiles.

    Args:
        tiles: `[T, K, N]`, float32, zero-padded where the last tile is short.
        valid: which values are elements of the array; None: all.
        scheme: a scheme that `unchosen` accepts.
        unit: the tensor scale, `[1, 1, 1]`, or None.
    """
    bits = jax.lax.bitcast_convert_type(tiles, jnp.int32) & 0x7FFFFFFF
    magnitude = jax.lax.bitcast_convert_type(jnp.where(bits < 0x00800000, 0, bits), jnp.float32)
    magnitude = jnp.where(bits < 0x7F800000, magnitude, jnp.float32(jnp.inf))
    amax = jnp.max(magnitude, axis=1, keepdims=True)  # [T, 1, N]
    is_finite = amax < jnp.float32(jnp.inf)
    amax = jnp.where(is_finite, amax, 0.0)
    if isinstance(scheme.calibration, MX):
        exponent = _exponents(tiles, amax, scheme)
        stored = jnp.where(is_finite, exponent + 127, 255).astype(jnp.uint8)
        return Chosen(stored, _or_nan(power_of_two(exponent), is_finite))
    store = ScaleStore(scheme.scale, unit, scheme.scale_limit)  # type: ignore[arg-type]
    target = Target(scheme.format, store, scheme.zero_holder)
    ideal, low = _ideal(tiles, valid, amax, scheme, target)
    stored = store.stored(_or_nan(jnp.where(ideal < TINY, jnp.ones_like(ideal), ideal), is_finite))
    used = store.loaded(stored)
    divisor = _or_nan(jnp.where(used == 0, jnp.ones_like(used), used), is_finite)
    if low is None:
        return Chosen(stored, divisor)
    if not isinstance(target.zero, AbstractFormat):
        low = _or_nan(low, is_finite)
    zero = target.stored_zero(low, divisor)
    return Chosen(stored, divisor, zero, target.loaded_offset(zero, divisor))


def _ideal(
    tiles: jax.Array, valid: jax.Array | None, amax: jax.Array, scheme: Scheme, target: Target
) -> tuple[jax.Array, jax.Array | None]:
    """The scale of each tile before rounding, and the lower end of its range if the scheme has a zero point."""
    calibration = scheme.calibration
    if isinstance(calibration, MSE | NVFP4):
        return _searched(tiles, amax, scheme, target.store), None
    assert isinstance(calibration, AbsMax | MinMax)
    low, high = -amax, amax
    if isinstance(calibration, MinMax):
        is_real = ~jnp.isnan(tiles)
        if valid is not None:
            is_real &= valid
        low = jnp.min(jnp.where(is_real, tiles, jnp.float32(jnp.inf)), axis=1, keepdims=True)
        high = jnp.max(jnp.where(is_real, tiles, jnp.float32(-jnp.inf)), axis=1, keepdims=True)
        if calibration.contains_zero:
            low, high = jnp.minimum(low, 0.0), jnp.maximum(high, 0.0)
    return symmetric_or_range(low * calibration.factor, high * calibration.factor, target)


def _or_nan(scale: jax.Array, is_finite: jax.Array) -> jax.Array:
    return jnp.where(is_finite, scale, jnp.float32(jnp.nan))


# --- powers of two ---


def _exponents(tiles: jax.Array, amax: jax.Array, scheme: Scheme) -> jax.Array:
    """The exponent of each tile's power of two, 0 for an all-zero tile."""
    fmt, calibration = scheme.format, scheme.calibration
    assert isinstance(calibration, MX)
    bits = jax.lax.bitcast_convert_type(amax, jnp.int32)
    top = 127 + int(np.frexp(fmt.max)[1]) - 1
    first = ((bits + bits_added(calibration.rule, fmt)) >> 23) - top
    best = jnp.clip(first, -126, 127)
    if calibration.rule == "optimal":
        exponent = jnp.clip((bits >> 23) - 127, -126, 126)
        x = jnp.where(amax > 0, tiles, 0.0) * power_of_two(-exponent)
        least = _power_error(x, best - exponent, fmt)
        halvings = needed_halvings(fmt, tiles.shape[1])
        for step in (*range(1, needed_doublings(fmt) + 1), *range(-halvings, 0)):
            tried = jnp.clip(first + step, -126, 127)
            found = _power_error(x, tried - exponent, fmt)
            is_lower = found < least * TIE
            best, least = jnp.where(is_lower, tried, best), jnp.where(is_lower, found, least)
    best = jnp.minimum(best, int(np.frexp(ScaleStore(FORMATS["e8m0"], limit=scheme.scale_limit).largest)[1]) - 1)
    return jnp.where(amax > 0, best, 0)


def _power_error(x: jax.Array, exponent: jax.Array, fmt: AbstractFormat) -> jax.Array:
    """The squared error of each tile under a power of two."""
    off = fmt.nearest(x * power_of_two(-exponent)) * power_of_two(exponent) - x
    return jnp.sum(off * off, axis=1, keepdims=True)


# --- E4M3 scales ---


def _searched(tiles: jax.Array, amax: jax.Array, scheme: Scheme, store: ScaleStore) -> jax.Array:
    """The candidate of least squared error, 0 for an all-zero tile; ties go to the first."""
    fmt = scheme.format
    exponent = jnp.clip((jax.lax.bitcast_convert_type(amax, jnp.int32) >> 23) - 127, -126, 126)
    inverse = power_of_two(-exponent)
    x = jnp.where(amax > 0, tiles, 0.0) * inverse
    best, least = None, None
    for scale in _candidates(amax, scheme, store, tiles.shape[1]):
        own = jnp.maximum(scale * inverse, jnp.float32(SMALLEST))
        off = fmt.nearest(x * (1 / own)) * own - x
        found = jnp.sum(off * off, axis=1, keepdims=True)
        if best is None or least is None:
            best, least = scale, found
            continue
        is_lower = found < least * TIE
        best, least = jnp.where(is_lower, scale, best), jnp.where(is_lower, found, least)
    assert best is not None
    return jnp.where(amax > 0, best, 0.0)


def _candidates(amax: jax.Array, scheme: Scheme, store: ScaleStore, length: int) -> list[jax.Array]:
    """The candidates for tiles of a length."""
    fmt, rule = store.holder, scheme.calibration
    assert isinstance(fmt, Minifloat)
    needed = quotient(amax, jnp.float32(scheme.format.bound))
    if isinstance(rule, NVFP4) and rule.rule == "four_over_six":
        return [store.snapped(needed), store.snapped(needed * 1.5)]

    def at(code: jax.Array) -> jax.Array:
        return store.loaded(jnp.clip(code, 1, fmt.max_code).astype(jnp.uint8))

    if store.unit is not None:
        needed = quotient(needed, store.unit)
    nearest = jnp.clip(fmt.encode(needed).astype(jnp.int32), 1, fmt.max_code)
    ceiling = jnp.minimum(nearest + jnp.where(fmt.decode(nearest.astype(jnp.uint8)) < needed, 1, 0), fmt.max_code)
    if isinstance(rule, NVFP4):
        return [at(ceiling + offset) for offset in OFFSETS]
    window = proven_window(scheme.format, fmt, length)
    assert window is not None
    # A scale's index in the window's table is its code - 1; the windows of the lowest indices all begin at the first scale.
    (first, last), steps = window, len(window[0]) - 1
    begin = jnp.where(ceiling <= int((first == 0).sum()), 1, ceiling - int(steps - first[-1]))
    return [at(ceiling), *(at(begin + step) for step in range(int((last - first).max()) + 1))]
