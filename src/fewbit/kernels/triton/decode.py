"""Decodes codes and scales in GPU registers.

Integers are inserted into the mantissa of a float32 whose exponent makes its last place 1, and the number that this adds is
subtracted: two instructions, where an integer conversion costs as much as four. Small floats are shifted up to the sign of a
float32, then down, with copies of the sign, to its exponent and mantissa: so one mask keeps sign and magnitude, which is their
value times a power of two, subnormals included. The sixteen numbers of a codebook are loaded from memory: they fit in one L1
cache line, and fifteen selects per code would take longer.
"""

# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportMissingImports=false, reportCallIssue=false
# (a launch takes settings that are not parameters of the kernel)

import typing

import triton
import triton.language as tl

from .formats import as_float, minifloat_value, power_of_two

_WHOLE = tl.constexpr(1 << 23)
_WHOLE_BITS = tl.constexpr(0x4B000000)


@triton.jit
@typing.no_type_check
def whole_number(code, CODES: tl.constexpr):
    """Decodes integer codes, whose other bits are zero."""
    half: tl.constexpr = (1 << (CODES.bits - 1)) if CODES.signed else 0
    value = as_float((code ^ half) | _WHOLE_BITS) - (_WHOLE + half)
    if CODES.step != 1.0:
        value = value * CODES.step
    return value


@triton.jit
@typing.no_type_check
def small_float(top, CODES: tl.constexpr):
    """Decodes minifloat codes in the upper bits of an int32. The other bits are ignored."""
    kept: tl.constexpr = -0x80000000 | (((1 << (CODES.bits - 1)) - 1) << (23 - CODES.mantissa))
    bits = (top >> (9 - CODES.bits + CODES.mantissa)) & kept  # an arithmetic shift: copies of the sign fill the top
    value = as_float(bits) * (2.0 ** (127 - CODES.bias))
    if CODES.specials != "none":
        beyond: tl.constexpr = CODES.high
        if CODES.specials == "ieee":
            is_nan = (bits & (((1 << CODES.mantissa) - 1) << (23 - CODES.mantissa))) != 0
            special = tl.where(is_nan, float("nan"), value * float("inf"))
        else:
            special = tl.full(value.shape, float("nan"), tl.float32)
        value = tl.where(tl.abs(value) > beyond, special, value)
    return value


@triton.jit
@typing.no_type_check
def number_of(code, table_ptr, CODES: tl.constexpr):
    """Decodes int32 codes, whose other bits are zero, to float32."""
    if CODES.kind == "minifloat":
        value = small_float(code << (32 - CODES.bits), CODES)
    elif CODES.kind == "integer":
        value = whole_number(code, CODES)
    else:
        value = tl.load(table_ptr + code)
    return value


@triton.jit
@typing.no_type_check
def numbers_in(word, table_ptr, CODES: tl.constexpr):
    """Decodes the codes in 32-bit words to float32: `[R, W]` to `[R, W, 32 / bits]`.

    Integers are decoded at their position in the word, under an exponent that makes their lowest place 1; those that
    would reach into the exponent are shifted down, several by one shift.
    """
    BITS: tl.constexpr = CODES.bits
    place = (tl.arange(0, 32 // BITS) * BITS)[None, None, :]
    if CODES.kind == "integer":
        half: tl.constexpr = (1 << (BITS - 1)) if CODES.signed else 0
        last: tl.constexpr = (23 - BITS) // BITS * BITS
        down: tl.constexpr = last - BITS if BITS == 4 else 2 * BITS
        at = tl.where(place > last, place - down, place)
        bits = tl.where(place > last, word[:, :, None] >> down, word[:, :, None])
        magic = ((150 - at) << 23) | (half << at)
        value = as_float((bits & (((1 << BITS) - 1) << at)) ^ magic) - as_float(magic)
        if CODES.step != 1.0:
            value = value * CODES.step
    elif CODES.kind == "minifloat":
        value = small_float(word[:, :, None] << (32 - BITS - place), CODES)
    else:
        value = tl.load(table_ptr + ((word[:, :, None] >> place) & ((1 << BITS) - 1)))
    return value


@triton.jit
@typing.no_type_check
def scale_of(stored, SCALES: tl.constexpr):
    """Decodes stored scales to float32, without the tensor scale."""
    if SCALES.kind == "power":
        scale = power_of_two(stored.to(tl.int32) - 127)
        scale = tl.where(stored == 255, float("nan"), scale)
    elif SCALES.kind == "minifloat":
        scale = minifloat_value(stored.to(tl.int32), SCALES)
        scale = tl.where(scale > SCALES.high, float("nan"), scale)
    else:
        scale = stored.to(tl.float32)
    return scale


@triton.jit
@typing.no_type_check
def zero_of(stored, SCALES: tl.constexpr):
    """Decodes zero points (units of codes) or offsets (units of values) to float32."""
    if SCALES.zero == "codes" and SCALES.zero_signed:
        zero = stored.to(tl.int8, bitcast=True).to(tl.float32)
    else:
        zero = stored.to(tl.float32)
    return zero
