"""Triton scale searches: the candidate of least squared error for each tile.

The candidates are those that `array.scales.candidates` and `array.scales.search` prove sufficient, unrolled: two for E2M1
under powers of two, eleven codes for NVFP4 (low codes need fifteen, in a branch that few programs take). Tiles are in units
of a power of two near their amax, so nothing overflows, and are multiplied by reciprocals.

**Five instructions** an element and candidate for minifloats: `x / scale 2**(bias - 127)` is a float32 whose upper bits are
the code, subnormals included; adding half a unit in the last place as an integer and clearing the bits below rounds it; two
FMAs compute the squared error and its sum. Ties round up instead of to even, which has the same error. Above the first
scale that saturates nothing, clipping is skipped.
"""

# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportMissingImports=false, reportCallIssue=false
# (pyright takes `import triton` for this folder's own file)

import typing

import triton
import triton.language as tl

from ...triton.formats import as_bits, as_float, flushed, minifloat_code, minifloat_value, nearest, power_of_two  # fmt: skip

_TIE = tl.constexpr(1 - 2.0**-16)


@triton.jit
@typing.no_type_check
def error(x, scale, CLIPS: tl.constexpr, CODES: tl.constexpr):
    """The squared error of each tile under a scale; without CLIPS no element may need saturation.

    Distances round once, as XLA's do: among scales that hold a tile nearly exactly, two roundings choose another one.
    """
    if CODES.kind == "minifloat":
        # Infinite only where the whole tile rounds to zero: its error is NaN, never less.
        raised = scale * (2.0 ** (127 - CODES.bias))
        bits = as_bits(x * (1 / raised)[:, None])
        bits = (bits + (1 << (22 - CODES.mantissa))) & -(1 << (23 - CODES.mantissa))
        if CLIPS:
            bits = tl.minimum(bits, as_bits(tl.full((1, 1), CODES.high, tl.float32) * (2.0 ** (CODES.bias - 127))))
        off = as_float(bits) * raised[:, None] - x  # contracted; on sm_100 two at once, which `tl.fma` is not
    else:
        y = x * (1 / scale)[:, None]
        value = nearest(y, CODES)
        off = tl.fma(value, tl.broadcast_to(-scale[:, None], x.shape), x)
    return tl.sum(off * off, axis=1)


@triton.jit
@typing.no_type_check
def exponent_chosen(x, amax_bits, unit, RULE: tl.constexpr, CODES: tl.constexpr):
    """The exponent of each tile's power of two; 0 for an all-zero tile."""
    first = ((amax_bits + RULE.round_up) >> 23) - (127 + RULE.top_exponent)
    best = tl.minimum(tl.maximum(first, -126), 127)
    if RULE.kind == "search":
        least = error(x, power_of_two(best - unit), True, CODES)
        tries: tl.constexpr = RULE.doublings + RULE.halvings
        for i in tl.static_range(tries):
            step = i + 1 if i < RULE.doublings else i - tries
            tried = tl.minimum(tl.maximum(first + step, -126), 127)
            found = error(x, power_of_two(tried - unit), True, CODES)
            is_lower = found < least * _TIE
            best = tl.where(is_lower, tried, best)
            least = tl.where(is_lower, found, least)
    return tl.where(amax_bits == 0, 0, tl.minimum(best, RULE.largest_power))


@triton.jit
@typing.no_type_check
def first_place(needed, FMT: tl.constexpr):
    """The index, among the positive numbers of a minifloat, of the smallest that is >= `needed`; or the last."""
    steps: tl.constexpr = 2.0 ** (FMT.bias - 1 + FMT.mantissa)
    low = tl.ceil(needed * steps).to(tl.int32)
    high = ((as_bits(needed) + ((1 << (23 - FMT.mantissa)) - 1)) >> (23 - FMT.mantissa)) - ((127 - FMT.bias) << FMT.mantissa)
    last = minifloat_code(tl.full(needed.shape, FMT.high, tl.float32), FMT)
    code = tl.where(needed < 2.0 ** (1 - FMT.bias), low, high)
    return tl.where(needed >= FMT.high, last, tl.maximum(code, 1)) - 1


@triton.jit
@typing.no_type_check
def place_chosen(x, needed, factor, SCALES: tl.constexpr, RULE: tl.constexpr, CODES: tl.constexpr):
    """The code of each tile's best minifloat scale; `factor` converts scales to the units of `x`."""
    last = first_place(tl.full(needed.shape, SCALES.high, tl.float32), SCALES)
    ceiling = first_place(needed, SCALES)
    best = ceiling
    scale = minifloat_value(best + 1, SCALES) * factor
    least = error(x, scale, True, CODES)
    first_error = least
    for i in tl.static_range(RULE.below + RULE.above + 1):
        if i != RULE.below:
            place = (
                tl.minimum(ceiling + (i - RULE.below), last) if i > RULE.below else tl.maximum(ceiling + (i - RULE.below), 0)
            )
            scale = minifloat_value(place + 1, SCALES) * factor
            found = error(x, scale, i < RULE.below, CODES)
            # At the last index elements may saturate, which the error without clipping ignores.
            is_lower = (found < least * _TIE) & (place != ceiling)
            best = tl.where(is_lower, place, best)
            least = tl.where(is_lower, found, least)
    if RULE.is_proven:
        is_low = ceiling < RULE.low_places
        if tl.max(is_low.to(tl.int32), axis=0) > 0:
            low = low_place_chosen(x, ceiling, first_error, factor, SCALES, RULE, CODES)
            best = tl.where(is_low, low, best)
    else:
        for step in range(1, tl.max(ceiling, axis=0) + 1):
            lower = tl.maximum(ceiling - step, 0)
            scale = minifloat_value(lower + 1, SCALES) * factor
            found = error(x, scale, True, CODES)
            is_lower = found < least * _TIE
            best = tl.where(is_lower, lower, best)
            least = tl.where(is_lower, found, least)
    return best + 1


@triton.jit
@typing.no_type_check
def low_place_chosen(x, best, least, factor, SCALES: tl.constexpr, RULE: tl.constexpr, CODES: tl.constexpr):
    """The best of the lowest indices, starting from one whose error is known."""
    for place in range(RULE.low_last + 1):
        scale = minifloat_value(tl.zeros_like(best) + place + 1, SCALES) * factor
        found = error(x, scale, True, CODES)
        is_lower = found < least * _TIE
        best = tl.where(is_lower, place, best)
        least = tl.where(is_lower, found, least)
    return best


@triton.jit
@typing.no_type_check
def fraction_chosen(
    x, amax, inverse, fractions_ptr, scale_ptr, SCALES: tl.constexpr, RULE: tl.constexpr, CODES: tl.constexpr
):
    """Each tile's best float scale, as stored, among fractions of the absmax scale; `inverse` converts to units of `x`."""
    best = tl.zeros_like(amax)
    least = tl.full(amax.shape, float("inf"), tl.float32)
    bound = tl.full(amax.shape, RULE.bound, tl.float32)
    for i in range(RULE.fractions):
        scale = flushed(tl.div_rn(amax * tl.load(fractions_ptr + i), bound))
        scale = tl.where(scale == 0, 0.0, tl.minimum(tl.maximum(scale, SCALES.low), SCALES.high))
        scale = scale.to(scale_ptr.dtype.element_ty).to(tl.float32)
        tried = tl.maximum(scale * inverse, 2.0**-120)
        found = error(x, tried, True, CODES)
        is_lower = found < least * _TIE
        best = tl.where(is_lower, scale, best)
        least = tl.where(is_lower, found, least)
    return best
