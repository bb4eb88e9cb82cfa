"""Decodes codes and scales to float32 in GPU registers.

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

from ..qmatmul.gpu.weight import FINITE, IEEE, NO_ZERO, ZERO_CODES
from ..quantize.gpu.problem import INTEGER, MINIFLOAT, POWER, SMALL_FLOAT
from .formats import as_float, minifloat_value, power_of_two

_MINIFLOAT, _INTEGER = tl.constexpr(MINIFLOAT), tl.constexpr(INTEGER)
_POWER, _SMALL_FLOAT = tl.constexpr(POWER), tl.constexpr(SMALL_FLOAT)
_FINITE, _IEEE = tl.constexpr(FINITE), tl.constexpr(IEEE)
_NO_ZERO, _ZERO_CODES = tl.constexpr(NO_ZERO), tl.constexpr(ZERO_CODES)
_WHOLE = tl.constexpr(1 << 23)
_WHOLE_BITS = tl.constexpr(0x4B000000)


@triton.jit
@typing.no_type_check
def whole_number(code, BITS: tl.constexpr, SIGNED: tl.constexpr):
    """Decodes integer codes, whose other bits are zero."""
    half: tl.constexpr = (1 << (BITS - 1)) if SIGNED else 0
    return as_float((code ^ half) | _WHOLE_BITS) - (_WHOLE + half)


@triton.jit
@typing.no_type_check
def small_float(top, BITS: tl.constexpr, MAN: tl.constexpr, BIAS: tl.constexpr, HIGH: tl.constexpr, SPECIALS: tl.constexpr):
    """Decodes minifloat codes in the upper bits of an int32; the other bits are ignored."""
    kept: tl.constexpr = -0x80000000 | (((1 << (BITS - 1)) - 1) << (23 - MAN))
    bits = (top >> (9 - BITS + MAN)) & kept  # an arithmetic shift: copies of the sign fill the top
    value = as_float(bits) * (2.0 ** (127 - BIAS))
    if SPECIALS != _FINITE:
        beyond: tl.constexpr = HIGH
        if SPECIALS == _IEEE:
            special = tl.where((bits & (((1 << MAN) - 1) << (23 - MAN))) != 0, float("nan"), value * float("inf"))
        else:
            special = tl.full(value.shape, float("nan"), tl.float32)
        value = tl.where(tl.abs(value) > beyond, special, value)
    return value


@triton.jit
@typing.no_type_check
def number_of(
    code,
    table_ptr,
    KIND: tl.constexpr,
    BITS: tl.constexpr,
    MAN: tl.constexpr,
    BIAS: tl.constexpr,
    HIGH: tl.constexpr,
    STEP: tl.constexpr,
    SIGNED: tl.constexpr,
    SPECIALS: tl.constexpr,
):
    """Decodes int32 codes, whose other bits are zero, to float32."""
    if KIND == _MINIFLOAT:
        value = small_float(code << (32 - BITS), BITS, MAN, BIAS, HIGH, SPECIALS)
    elif KIND == _INTEGER:
        value = whole_number(code, BITS, SIGNED)
        if STEP != 1.0:
            value = value * STEP
    else:
        value = tl.load(table_ptr + code)
    return value


@triton.jit
@typing.no_type_check
def numbers_in(
    word,
    table_ptr,
    KIND: tl.constexpr,
    BITS: tl.constexpr,
    MAN: tl.constexpr,
    BIAS: tl.constexpr,
    HIGH: tl.constexpr,
    STEP: tl.constexpr,
    SIGNED: tl.constexpr,
    SPECIALS: tl.constexpr,
):
    """Decodes the codes in 32-bit words to float32: `[R, W]` to `[R, W, 32 / BITS]`.

    Integers are decoded at their position in the word, under an exponent that makes their lowest place 1; those that
    would reach into the exponent are shifted down, several by one shift.
    """
    place = (tl.arange(0, 32 // BITS) * BITS)[None, None, :]
    if KIND == _INTEGER:
        half: tl.constexpr = (1 << (BITS - 1)) if SIGNED else 0
        last: tl.constexpr = (23 - BITS) // BITS * BITS
        down: tl.constexpr = last - BITS if BITS == 4 else 2 * BITS
        at = tl.where(place > last, place - down, place)
        bits = tl.where(place > last, word[:, :, None] >> down, word[:, :, None])
        magic = ((150 - at) << 23) | (half << at)
        value = as_float((bits & (((1 << BITS) - 1) << at)) ^ magic) - as_float(magic)
        if STEP != 1.0:
            value = value * STEP
    elif KIND == _MINIFLOAT:
        value = small_float(word[:, :, None] << (32 - BITS - place), BITS, MAN, BIAS, HIGH, SPECIALS)
    else:
        code = (word[:, :, None] >> place) & ((1 << BITS) - 1)
        value = number_of(code, table_ptr, KIND, BITS, MAN, BIAS, HIGH, STEP, SIGNED, SPECIALS)
    return value


@triton.jit
@typing.no_type_check
def scale_of(stored, SCALE: tl.constexpr, SCALE_MAN: tl.constexpr, SCALE_BIAS: tl.constexpr, SCALE_HIGH: tl.constexpr):
    """Decodes stored scales to float32, without the tensor scale."""
    if SCALE == _POWER:
        scale = power_of_two(stored.to(tl.int32) - 127)
        scale = tl.where(stored == 255, float("nan"), scale)
    elif SCALE == _SMALL_FLOAT:
        scale = minifloat_value(stored.to(tl.int32), SCALE_MAN, SCALE_BIAS)
        scale = tl.where(scale > SCALE_HIGH, float("nan"), scale)
    else:
        scale = stored.to(tl.float32)
    return scale


@triton.jit
@typing.no_type_check
def zero_of(stored, ZERO: tl.constexpr, ZERO_SIGNED: tl.constexpr):
    """Decodes zero points (units of codes) or offsets (units of values) to float32."""
    if ZERO == _ZERO_CODES and ZERO_SIGNED:
        zero = stored.to(tl.int8, bitcast=True).to(tl.float32)
    else:
        zero = stored.to(tl.float32)
    return zero
