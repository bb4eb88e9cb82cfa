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
def nearest_magnitude(y, FMT: tl.constexpr):
    """Each magnitude rounded to a minifloat, ties to even, saturated."""
    y = tl.minimum(y, FMT.high)
    exponent = tl.maximum(as_bits(y) & 0x7F800000, (128 - FMT.bias) << 23)
    shifter = as_float(exponent) * 2.0 ** (23 - FMT.mantissa)  # a factor that is fused into both additions
    return (y + shifter) - shifter


@triton.jit
@typing.no_type_check
def minifloat_code(number, FMT: tl.constexpr):
    """The unsigned code of each non-negative minifloat number."""
    return as_bits(number * (2.0 ** (FMT.bias - 127))) >> (23 - FMT.mantissa)


@triton.jit
@typing.no_type_check
def minifloat_value(code, FMT: tl.constexpr):
    """The number of each unsigned code."""
    return as_float(code << (23 - FMT.mantissa)) * (2.0 ** (127 - FMT.bias))


@triton.jit
@typing.no_type_check
def codebook_code(y, CODES: tl.constexpr):
    """How many of 15 ascending thresholds are below each element. It is a tree of four comparisons."""
    T: tl.constexpr = CODES.thresholds
    a = y > T[7]
    b = y > tl.where(a, T[11], T[3])
    c = y > tl.where(a, tl.where(b, T[13], T[9]), tl.where(b, T[5], T[1]))
    high = tl.where(b, tl.where(c, T[14], T[12]), tl.where(c, T[10], T[8]))
    low = tl.where(b, tl.where(c, T[6], T[4]), tl.where(c, T[2], T[0]))
    d = y > tl.where(a, high, low)
    return a.to(tl.int32) * 8 + b.to(tl.int32) * 4 + c.to(tl.int32) * 2 + d.to(tl.int32)


@triton.jit
@typing.no_type_check
def codebook_value(code, CODES: tl.constexpr):
    """The number of each code of a 16-entry codebook."""
    value = tl.full(code.shape, CODES.table[0], tl.float32)
    for i in tl.static_range(1, 16):
        value = tl.where(code == i, CODES.table[i], value)
    return value


@triton.jit
@typing.no_type_check
def nearest(y, CODES: tl.constexpr):
    """Each element rounded to the format; for minifloats elements are magnitudes."""
    if CODES.kind == "minifloat":
        number = nearest_magnitude(y, CODES)
    elif CODES.kind == "integer":
        shifter: tl.constexpr = 12582912.0 * CODES.step
        number = (tl.minimum(tl.maximum(y, CODES.low), CODES.high) + shifter) - shifter
    else:
        number = codebook_value(codebook_code(y, CODES), CODES)
    return number


@triton.jit
@typing.no_type_check
def encode(y, sign, CODES: tl.constexpr):
    """The code of each element, given as a magnitude and a sign bit."""
    if CODES.kind == "minifloat":
        code = minifloat_code(nearest_magnitude(y, CODES), CODES)
        code = code | ((sign >> (32 - CODES.bits)) & (1 << (CODES.bits - 1)))
    elif CODES.kind == "integer":
        y = as_float(as_bits(y) | sign)
        shifter: tl.constexpr = 12582912.0 * CODES.step
        code = as_bits(tl.minimum(tl.maximum(y, CODES.low), CODES.high) + shifter) & ((1 << CODES.bits) - 1)
    else:
        code = codebook_code(as_float(as_bits(y) | sign), CODES)
    return code
