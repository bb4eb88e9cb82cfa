"""Rounding, encoding and decoding of small formats in Triton.

With `M = 2**(e + 23 - mantissa)`, e the exponent of y (at least that of the smallest normal), the unit in the last place of
`y + M` is the format's, so `(y + M) - M` is y rounded to the format, ties to even: five instructions for any minifloat.
Times `2**(bias - 127)` the number becomes a float32 whose exponent field is the format's, subnormals included, and its
upper bits are the code. Integers use M = 1.5 2**23, where the low bits of the sum are the two's complement. NF4's 15
thresholds are compared in a tree of selects.
"""

# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportMissingImports=false, reportCallIssue=false
# (pyright takes `import triton` for this folder's own file)

import typing

import triton
import triton.language as tl

from ..quantize.gpu.problem import INTEGER, MINIFLOAT

_MINIFLOAT, _INTEGER = tl.constexpr(MINIFLOAT), tl.constexpr(INTEGER)
_TINY = tl.constexpr(2.0**-126)


@triton.jit
@typing.no_type_check
def as_float(bits):
    """The float32 with these bits."""
    return bits.to(tl.float32, bitcast=True)


@triton.jit
@typing.no_type_check
def as_bits(x):
    """The bits of a float32."""
    return x.to(tl.int32, bitcast=True)


@triton.jit
@typing.no_type_check
def power_of_two(exponent):
    """`2**exponent` for exponents -127..127."""
    return as_float(tl.where(exponent < -126, 1 << 22, (exponent + 127) << 23))


@triton.jit
@typing.no_type_check
def flushed(x):
    """Magnitudes with subnormals flushed to zero."""
    return tl.where(x < _TINY, 0.0, x)


@triton.jit
@typing.no_type_check
def nearest_magnitude(y, MAN: tl.constexpr, BIAS: tl.constexpr, HIGH: tl.constexpr):
    """Each magnitude rounded to a minifloat, ties to even, saturated."""
    y = tl.minimum(y, HIGH)
    exponent = tl.maximum(as_bits(y) & 0x7F800000, (128 - BIAS) << 23)
    shifter = as_float(exponent) * 2.0 ** (23 - MAN)  # a factor that is fused into both additions
    return (y + shifter) - shifter


@triton.jit
@typing.no_type_check
def minifloat_code(number, MAN: tl.constexpr, BIAS: tl.constexpr):
    """The unsigned code of each non-negative minifloat number."""
    return as_bits(number * (2.0 ** (BIAS - 127))) >> (23 - MAN)


@triton.jit
@typing.no_type_check
def minifloat_value(code, MAN: tl.constexpr, BIAS: tl.constexpr):
    """The number of each unsigned code."""
    return as_float(code << (23 - MAN)) * (2.0 ** (127 - BIAS))


@triton.jit
@typing.no_type_check
def codebook_code(y, T: tl.constexpr):
    """How many of 15 ascending thresholds are below each element: a tree of four comparisons."""
    a = y > T[7]
    b = y > tl.where(a, T[11], T[3])
    c = y > tl.where(a, tl.where(b, T[13], T[9]), tl.where(b, T[5], T[1]))
    high = tl.where(b, tl.where(c, T[14], T[12]), tl.where(c, T[10], T[8]))
    low = tl.where(b, tl.where(c, T[6], T[4]), tl.where(c, T[2], T[0]))
    d = y > tl.where(a, high, low)
    return a.to(tl.int32) * 8 + b.to(tl.int32) * 4 + c.to(tl.int32) * 2 + d.to(tl.int32)


@triton.jit
@typing.no_type_check
def codebook_value(code, V: tl.constexpr):
    """The number of each code of a 16-entry codebook."""
    value = tl.full(code.shape, V[0], tl.float32)
    for i in tl.static_range(1, 16):
        value = tl.where(code == i, V[i], value)
    return value


@triton.jit
@typing.no_type_check
def nearest(
    y,
    KIND: tl.constexpr,
    MAN: tl.constexpr,
    BIAS: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    STEP: tl.constexpr,
    THRESHOLDS: tl.constexpr,
    TABLE: tl.constexpr,
):
    """Each element rounded to the format; for minifloats elements are magnitudes."""
    if KIND == _MINIFLOAT:
        number = nearest_magnitude(y, MAN, BIAS, HIGH)
    elif KIND == _INTEGER:
        shifter: tl.constexpr = 12582912.0 * STEP
        number = (tl.minimum(tl.maximum(y, LOW), HIGH) + shifter) - shifter
    else:
        number = codebook_value(codebook_code(y, THRESHOLDS), TABLE)
    return number


@triton.jit
@typing.no_type_check
def encode(
    y,
    sign,
    KIND: tl.constexpr,
    BITS: tl.constexpr,
    MAN: tl.constexpr,
    BIAS: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    STEP: tl.constexpr,
    THRESHOLDS: tl.constexpr,
):
    """The code of each element, given as a magnitude and a sign bit."""
    if KIND == _MINIFLOAT:
        code = minifloat_code(nearest_magnitude(y, MAN, BIAS, HIGH), MAN, BIAS)
        code = code | ((sign >> (32 - BITS)) & (1 << (BITS - 1)))
    elif KIND == _INTEGER:
        y = as_float(as_bits(y) | sign)
        shifter: tl.constexpr = 12582912.0 * STEP
        code = as_bits(tl.minimum(tl.maximum(y, LOW), HIGH) + shifter) & ((1 << BITS) - 1)
    else:
        code = codebook_code(as_float(as_bits(y) | sign), THRESHOLDS)
    return code
