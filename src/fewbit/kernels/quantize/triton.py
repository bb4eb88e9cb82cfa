"""Quantizing rows on a GPU: amax, scale search, codes and packing in one read of the input.

**Layout.** The input is `[rows, n]`, contiguous; a row is cut into tiles of K. A program holds R tiles as a matrix `[R, KP]`
(KP: K up to a power of two) in registers, R KP = 2048 for 4 warps: 16 elements a thread, read as two loads of 128 bits in
bfloat16. Where tiles divide the row the addresses are those of a flat array, and loads and stores are vectors; else every
element is masked, which is slower and as right. Codes leave packed: of 4 bits as pairs (`tl.split`), of 6 as four codes in
three bytes. A tile longer than 16384 does not fit and is refused.

**Rounding without tables.** With `M = 2**(e + 23 - mantissa)`, e the exponent of y (at least that of the smallest normal), the sum
`y + M` has the format's last place as its own, so `(y + M) - M` is the nearest number of the format, ties to even, by the
adder: six instructions for any minifloat. Its code: times `2**(bias - 127)` the number becomes a float32 whose exponent field is
the format's, subnormals included, and the code is its upper bits. Integers take M = 1.5 2**23, whose low bits are the
two's complement. NF4 walks its 15 thresholds as a tree of selects.

**Scales.** All from the bits of the largest magnitude: the maximum is taken over integers, so a NaN or an infinity wins and its
tile becomes NaN. Powers of two: an addition of a constant below the exponent is the rule (floor, rceil, even). The
search tries the candidates that `array.scales.candidates` proves sufficient, unrolled: two for E2M1 under powers of two, eleven
codes for NVFP4 (the low codes, which need fifteen, in a branch that few programs take). It works on tiles in units of a power
of two near their largest magnitude, where nothing overflows, and multiplies by reciprocals; the codes are taken with
one division that rounds as IEEE 754 says, so they are the reference's to the bit.

**The bound** is memory: 2.53 bytes an element for bfloat16 to 4.25 bits. Instructions an element are in `bench/results/triton.json`;
a test fails when they grow by a tenth.

**Inline PTX**, an option that nothing takes by itself: pairs of E2M1 codes by `cvt.rn.satfinite.e2m1x2` on sm_100, E4M3 scales by
`cvt.rn.satfinite.e4m3x2` from sm_89 on. Both round as the portable path does; no interpreter runs them, so CI compiles them only.
For powers of two there is nothing to gain: the portable path takes their codes from the bits as it is.

Codes by a division that rounds correctly cost about a dozen instructions an element, the larger part of what the naive NVFP4 kernel
takes over the naive MXFP4 one.

**Not done.** Sorting and prefix sums (fewer candidates' arithmetic, but gathers cost more than rounding); pruning by the clip sum inside
the NVFP4 window (threads diverge).
"""

# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportMissingImports=false, reportCallIssue=false
# (pyright takes `import triton` for this folder's own file; a launch takes settings that are no parameters of the kernel.)

import typing

import triton
import triton.language as tl

from .triton_problem import FIXED, FLOAT, INTEGER, MINIFLOAT, POWER, SEARCH, SMALL_FLOAT, TileProblem

_MINIFLOAT, _INTEGER = tl.constexpr(MINIFLOAT), tl.constexpr(INTEGER)
_POWER, _SMALL_FLOAT, _FLOAT = tl.constexpr(POWER), tl.constexpr(SMALL_FLOAT), tl.constexpr(FLOAT)
_FIXED, _SEARCH = tl.constexpr(FIXED), tl.constexpr(SEARCH)
_TINY = tl.constexpr(2.0**-126)
_TIE = tl.constexpr(1 - 2.0**-16)


@triton.jit
@typing.no_type_check
def as_float(bits):
    """The float32 of its bits."""
    return bits.to(tl.float32, bitcast=True)


@triton.jit
@typing.no_type_check
def as_bits(x):
    """The bits of a float32."""
    return x.to(tl.int32, bitcast=True)


@triton.jit
@typing.no_type_check
def nearest_magnitude(y, MAN: tl.constexpr, BIAS: tl.constexpr, HIGH: tl.constexpr):
    """The number of a minifloat nearest to each magnitude, ties to even, saturated."""
    y = tl.minimum(y, HIGH)
    exponent = tl.maximum(as_bits(y) & 0x7F800000, (128 - BIAS) << 23)
    shifter = as_float(exponent + ((23 - MAN) << 23))
    return (y + shifter) - shifter


@triton.jit
@typing.no_type_check
def minifloat_code(number, MAN: tl.constexpr, BIAS: tl.constexpr):
    """The code, without a sign, of each number of a minifloat."""
    return as_bits(number * (2.0 ** (BIAS - 127))) >> (23 - MAN)


@triton.jit
@typing.no_type_check
def minifloat_value(code, MAN: tl.constexpr, BIAS: tl.constexpr):
    """The number of each code without a sign."""
    return as_float(code << (23 - MAN)) * (2.0 ** (127 - BIAS))


@triton.jit
@typing.no_type_check
def codebook_code(y, T: tl.constexpr):
    """How many of 15 ascending thresholds lie below each element: a tree of four comparisons."""
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
    """The number of each code of a table of 16."""
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
    """The format's number nearest to each element; of minifloats the elements are magnitudes."""
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
    """The code of each element, given as magnitude and sign bit."""
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


@triton.jit
@typing.no_type_check
def power_of_two(exponent):
    """`2**exponent` for exponents -127..127."""
    return as_float(tl.where(exponent < -126, 1 << 22, (exponent + 127) << 23))


@triton.jit
@typing.no_type_check
def flushed(x):
    """Magnitudes with zero in place of subnormals."""
    return tl.where(x < _TINY, 0.0, x)


@triton.jit
@typing.no_type_check
def first_place(needed, MAN: tl.constexpr, BIAS: tl.constexpr, HIGH: tl.constexpr):
    """The place, among the positive numbers of a minifloat, of the smallest that is not below; or the last."""
    steps: tl.constexpr = 2.0 ** (BIAS - 1 + MAN)
    low = tl.ceil(needed * steps).to(tl.int32)
    high = ((as_bits(needed) + ((1 << (23 - MAN)) - 1)) >> (23 - MAN)) - ((127 - BIAS) << MAN)
    last: tl.constexpr = HIGH
    code = tl.where(needed < 2.0 ** (1 - BIAS), low, high)
    return (
        tl.where(needed >= last, minifloat_code(tl.full(needed.shape, last, tl.float32), MAN, BIAS), tl.maximum(code, 1)) - 1
    )


@triton.jit
@typing.no_type_check
def error(
    x,
    scale,
    KIND: tl.constexpr,
    MAN: tl.constexpr,
    BIAS: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    STEP: tl.constexpr,
    THRESHOLDS: tl.constexpr,
    TABLE: tl.constexpr,
):
    """The squared error of each tile under a scale."""
    y = x * (1 / scale)[:, None]
    off = nearest(y, KIND, MAN, BIAS, LOW, HIGH, STEP, THRESHOLDS, TABLE) * scale[:, None] - x
    return tl.sum(off * off, axis=1)


@triton.jit
@typing.no_type_check
def exponent_chosen(
    x,
    amax_bits,
    unit,
    RULE: tl.constexpr,
    TOP_EXPONENT: tl.constexpr,
    ROUND_UP: tl.constexpr,
    DOUBLINGS: tl.constexpr,
    HALVINGS: tl.constexpr,
    KIND: tl.constexpr,
    MAN: tl.constexpr,
    BIAS: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    STEP: tl.constexpr,
    THRESHOLDS: tl.constexpr,
    TABLE: tl.constexpr,
):
    """The exponent of each tile's power of two; 0 for an all-zero tile."""
    first = ((amax_bits + ROUND_UP) >> 23) - (127 + TOP_EXPONENT)
    best = tl.minimum(tl.maximum(first, -126), 127)
    if RULE == _SEARCH:
        least = error(x, power_of_two(best - unit), KIND, MAN, BIAS, LOW, HIGH, STEP, THRESHOLDS, TABLE)
        for i in tl.static_range(DOUBLINGS + HALVINGS):
            step = i + 1 if i < DOUBLINGS else i - DOUBLINGS - HALVINGS
            tried = tl.minimum(tl.maximum(first + step, -126), 127)
            found = error(x, power_of_two(tried - unit), KIND, MAN, BIAS, LOW, HIGH, STEP, THRESHOLDS, TABLE)
            is_lower = found < least * _TIE
            best = tl.where(is_lower, tried, best)
            least = tl.where(is_lower, found, least)
    return tl.where(amax_bits == 0, 0, best)


@triton.jit
@typing.no_type_check
def place_chosen(
    x,
    needed,
    factor,
    SCALE_MAN: tl.constexpr,
    SCALE_BIAS: tl.constexpr,
    SCALE_HIGH: tl.constexpr,
    BELOW: tl.constexpr,
    ABOVE: tl.constexpr,
    LOW_PLACES: tl.constexpr,
    LOW_LAST: tl.constexpr,
    PROVEN: tl.constexpr,
    KIND: tl.constexpr,
    MAN: tl.constexpr,
    BIAS: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    STEP: tl.constexpr,
    THRESHOLDS: tl.constexpr,
    TABLE: tl.constexpr,
):
    """The code of each tile's best scale among those of a small float format; `factor` takes them to the units of `x`."""
    last = first_place(tl.full(needed.shape, SCALE_HIGH, tl.float32), SCALE_MAN, SCALE_BIAS, SCALE_HIGH)
    ceiling = first_place(needed, SCALE_MAN, SCALE_BIAS, SCALE_HIGH)
    best = ceiling
    scale = minifloat_value(best + 1, SCALE_MAN, SCALE_BIAS) * factor
    least = error(x, scale, KIND, MAN, BIAS, LOW, HIGH, STEP, THRESHOLDS, TABLE)
    first_error = least
    for i in tl.static_range(BELOW + ABOVE + 1):
        if i != BELOW:
            place = tl.minimum(tl.maximum(ceiling + (i - BELOW), 0), last)
            scale = minifloat_value(place + 1, SCALE_MAN, SCALE_BIAS) * factor
            found = error(x, scale, KIND, MAN, BIAS, LOW, HIGH, STEP, THRESHOLDS, TABLE)
            is_lower = found < least * _TIE
            best = tl.where(is_lower, place, best)
            least = tl.where(is_lower, found, least)
    if PROVEN:
        is_low = ceiling < LOW_PLACES
        if tl.max(is_low.to(tl.int32), axis=0) > 0:
            best = tl.where(is_low, ceiling, best)
            least = tl.where(is_low, first_error, least)
            for low_place in range(LOW_LAST + 1):
                scale = minifloat_value(tl.zeros_like(best) + low_place + 1, SCALE_MAN, SCALE_BIAS) * factor
                found = error(x, scale, KIND, MAN, BIAS, LOW, HIGH, STEP, THRESHOLDS, TABLE)
                is_lower = (found < least * _TIE) & is_low
                best = tl.where(is_lower, low_place, best)
                least = tl.where(is_lower, found, least)
    else:
        for step in range(1, tl.max(ceiling, axis=0) + 1):
            lower = tl.maximum(ceiling - step, 0)
            scale = minifloat_value(lower + 1, SCALE_MAN, SCALE_BIAS) * factor
            found = error(x, scale, KIND, MAN, BIAS, LOW, HIGH, STEP, THRESHOLDS, TABLE)
            is_lower = found < least * _TIE
            best = tl.where(is_lower, lower, best)
            least = tl.where(is_lower, found, least)
    return best + 1


@triton.jit
@typing.no_type_check
def fraction_chosen(
    x,
    amax,
    inverse,
    fractions_ptr,
    scale_ptr,
    FRACTIONS: tl.constexpr,
    BOUND: tl.constexpr,
    SCALE_LOW: tl.constexpr,
    SCALE_HIGH: tl.constexpr,
    KIND: tl.constexpr,
    MAN: tl.constexpr,
    BIAS: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    STEP: tl.constexpr,
    THRESHOLDS: tl.constexpr,
    TABLE: tl.constexpr,
):
    """Each tile's best float scale among fractions of the largest, as it will be stored; `inverse` takes it to units of `x`."""
    best = tl.zeros_like(amax)
    least = tl.full(amax.shape, float("inf"), tl.float32)
    bound = tl.full(amax.shape, BOUND, tl.float32)
    for i in range(FRACTIONS):
        scale = flushed(tl.div_rn(amax * tl.load(fractions_ptr + i), bound))
        scale = tl.where(scale == 0, 0.0, tl.minimum(tl.maximum(scale, SCALE_LOW), SCALE_HIGH))
        scale = scale.to(scale_ptr.dtype.element_ty).to(tl.float32)
        tried = tl.maximum(scale * inverse, 2.0**-120)
        found = error(x, tried, KIND, MAN, BIAS, LOW, HIGH, STEP, THRESHOLDS, TABLE)
        is_lower = found < least * _TIE
        best = tl.where(is_lower, scale, best)
        least = tl.where(is_lower, found, least)
    return best


@triton.jit
@typing.no_type_check
def store_codes(
    codes_ptr,
    code,
    row,
    column,
    is_tile,
    length,
    row_bytes,
    BITS: tl.constexpr,
    R: tl.constexpr,
    K: tl.constexpr,
    KP: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Packs the codes of tiles `[R, KP]` and stores them at the tiles' rows and first columns."""
    if BITS == 8:
        k = tl.arange(0, KP)[None, :]
        is_code = is_tile[:, None] if EVEN else is_tile[:, None] & (k < K) & (column[:, None] + k < length)
        tl.store(codes_ptr + (row * row_bytes + column)[:, None] + k, code.to(tl.uint8), mask=is_code)
    elif BITS == 4:
        low, high = tl.split(tl.reshape(code.to(tl.uint8), (R, KP // 2, 2)))
        k = tl.arange(0, KP // 2)[None, :]
        is_pair = is_tile[:, None] if EVEN else is_tile[:, None] & (2 * k < K) & (column[:, None] + 2 * k < length)
        tl.store(codes_ptr + (row * row_bytes + column // 2)[:, None] + k, low | (high << 4), mask=is_pair)
    else:
        pairs = tl.reshape(code, (R, KP // 4, 2, 2))
        even, odd = tl.split(pairs)
        c0, c2 = tl.split(even)
        c1, c3 = tl.split(odd)
        word = c0 | (c1 << 6) | (c2 << 12) | (c3 << 18)
        start = (column * 3 // 4)[:, None] + 3 * tl.arange(0, KP // 4)[None, :]
        is_group = is_tile[:, None] & (4 * tl.arange(0, KP // 4) < K)[None, :]
        for byte in tl.static_range(3):
            is_byte = is_group if EVEN else is_group & (start + byte < row_bytes)
            tl.store(codes_ptr + (row * row_bytes)[:, None] + start + byte, (word >> 8 * byte).to(tl.uint8), mask=is_byte)


@triton.jit
@typing.no_type_check
def store_pairs_by_ptx(
    codes_ptr,
    y,
    sign,
    is_finite,
    tile,
    is_tile,
    R: tl.constexpr,
    KP: tl.constexpr,
):
    """Encodes pairs of E2M1 codes by one instruction of sm_100 and stores them; for rows that tiles divide."""
    even, odd = tl.split(tl.reshape(as_float(as_bits(y) | sign), (R, KP // 2, 2)))
    pair = tl.inline_asm_elementwise(
        "{ .reg .b8 pair; cvt.rn.satfinite.e2m1x2.f32 pair, $2, $1; cvt.u32.u8 $0, pair; }",
        "=r,f,f",
        [even, odd],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )
    pair = tl.where(is_finite[:, None], pair, 0).to(tl.uint8)
    tl.store(codes_ptr + (tile * (KP // 2))[:, None] + tl.arange(0, KP // 2)[None, :], pair, mask=is_tile[:, None])


@triton.jit
@typing.no_type_check
def e4m3_code_by_ptx(held):
    """The E4M3 code of each magnitude up to 448 by the instruction of sm_89 and later."""
    return tl.inline_asm_elementwise(
        "{ .reg .b16 pair; .reg .f32 zero; mov.f32 zero, 0f00000000; "
        "cvt.rn.satfinite.e4m3x2.f32 pair, zero, $1; cvt.u32.u16 $0, pair; }",
        "=r,f",
        [held],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )


@triton.jit
@typing.no_type_check
def quantize_kernel(
    x_ptr,
    codes_ptr,
    scale_ptr,
    unit_ptr,
    fractions_ptr,
    tiles,
    length,
    tiles_in_row,
    row_bytes,
    K: tl.constexpr,
    KP: tl.constexpr,
    R: tl.constexpr,
    EVEN: tl.constexpr,
    KIND: tl.constexpr,
    BITS: tl.constexpr,
    MAN: tl.constexpr,
    BIAS: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    STEP: tl.constexpr,
    THRESHOLDS: tl.constexpr,
    TABLE: tl.constexpr,
    SCALE: tl.constexpr,
    SCALE_MAN: tl.constexpr,
    SCALE_BIAS: tl.constexpr,
    SCALE_LOW: tl.constexpr,
    SCALE_HIGH: tl.constexpr,
    SCALE_NAN: tl.constexpr,
    HAS_UNIT: tl.constexpr,
    NAN: tl.constexpr,
    BOUND: tl.constexpr,
    FACTOR: tl.constexpr,
    TOP_EXPONENT: tl.constexpr,
    ROUND_UP: tl.constexpr,
    RULE: tl.constexpr,
    DOUBLINGS: tl.constexpr,
    HALVINGS: tl.constexpr,
    BELOW: tl.constexpr,
    ABOVE: tl.constexpr,
    LOW_PLACES: tl.constexpr,
    LOW_LAST: tl.constexpr,
    PROVEN: tl.constexpr,
    FRACTIONS: tl.constexpr,
    PTX_E2M1: tl.constexpr,
    PTX_E4M3: tl.constexpr,
):
    """Quantizes R tiles."""
    tile = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    is_tile = tile < tiles
    k = tl.arange(0, KP)[None, :]
    if EVEN:
        row, column = tile * 0, tile * K
        is_element = is_tile[:, None]
    else:
        row = tile // tiles_in_row
        column = (tile % tiles_in_row) * K
        is_element = is_tile[:, None] & (k < K) & (column[:, None] + k < length)
    loaded = tl.load(x_ptr + (row * length + column)[:, None] + k, mask=is_element, other=0.0).to(tl.float32)

    bits = as_bits(loaded)
    sign = bits & -0x80000000
    magnitude_bits = bits & 0x7FFFFFFF
    magnitude_bits = tl.where(magnitude_bits < 0x00800000, 0, magnitude_bits)
    amax_bits = tl.max(magnitude_bits, axis=1)
    is_finite = amax_bits < 0x7F800000
    magnitude, amax = as_float(magnitude_bits), as_float(amax_bits)

    # The tile in units of a power of two near its largest magnitude, for searches.
    unit_exponent = tl.minimum(tl.maximum((amax_bits >> 23) - 127, -126), 126)
    in_units = magnitude * power_of_two(-unit_exponent)[:, None]
    if KIND != _MINIFLOAT:
        in_units = as_float(as_bits(in_units) | sign)

    if SCALE == _POWER:
        exponent = exponent_chosen(
            in_units, amax_bits, unit_exponent, RULE, TOP_EXPONENT, ROUND_UP, DOUBLINGS, HALVINGS,
            KIND, MAN, BIAS, LOW, HIGH, STEP, THRESHOLDS, TABLE,
        )  # fmt: skip
        y = magnitude * power_of_two(-exponent)[:, None]
        stored = tl.where(is_finite, exponent + 127, 255)
        tl.store(scale_ptr + tile, stored.to(tl.uint8), mask=is_tile)
    else:
        unit = tl.load(unit_ptr) if HAS_UNIT else 1.0
        if RULE == _SEARCH and SCALE == _FLOAT:
            scale = fraction_chosen(
                in_units, amax, power_of_two(-unit_exponent), fractions_ptr, scale_ptr, FRACTIONS, BOUND, SCALE_LOW, SCALE_HIGH,
                KIND, MAN, BIAS, LOW, HIGH, STEP, THRESHOLDS, TABLE,
            )  # fmt: skip
        elif RULE == _SEARCH:
            needed = flushed(tl.div_rn(amax, tl.full(amax.shape, BOUND, tl.float32)))
            needed = flushed(tl.div_rn(needed, tl.zeros_like(needed) + unit)) if HAS_UNIT else needed
            code = place_chosen(
                in_units, needed, unit * power_of_two(-unit_exponent), SCALE_MAN, SCALE_BIAS, SCALE_HIGH,
                BELOW, ABOVE, LOW_PLACES, LOW_LAST, PROVEN, KIND, MAN, BIAS, LOW, HIGH, STEP, THRESHOLDS, TABLE,
            )  # fmt: skip
            scale = tl.where(amax > 0, minifloat_value(code, SCALE_MAN, SCALE_BIAS) * unit, 0.0)
        else:
            scale = tl.div_rn(amax * FACTOR, tl.full(amax.shape, BOUND, tl.float32))
        scale = tl.where(scale < _TINY, 1.0, scale)
        scale = flushed(tl.div_rn(scale, tl.zeros_like(scale) + unit)) if HAS_UNIT else scale
        held = tl.where(scale == 0, 0.0, tl.minimum(tl.maximum(scale, SCALE_LOW), SCALE_HIGH))
        if SCALE == _SMALL_FLOAT:
            if PTX_E4M3:
                code = e4m3_code_by_ptx(held)
            else:
                code = minifloat_code(nearest_magnitude(held, SCALE_MAN, SCALE_BIAS, SCALE_HIGH), SCALE_MAN, SCALE_BIAS)
            used = minifloat_value(code, SCALE_MAN, SCALE_BIAS)
            tl.store(scale_ptr + tile, tl.where(is_finite, code, SCALE_NAN).to(tl.uint8), mask=is_tile)
        else:
            kept = tl.where(is_finite, held, float("nan")).to(scale_ptr.dtype.element_ty)
            used = kept.to(tl.float32)
            tl.store(scale_ptr + tile, kept, mask=is_tile)
        used = flushed(used * unit) if HAS_UNIT else used
        divisor = tl.where(used == 0, 1.0, used)
        y = tl.div_rn(magnitude, tl.broadcast_to(divisor[:, None], (R, KP)))

    if PTX_E2M1:
        store_pairs_by_ptx(codes_ptr, y, sign, is_finite, tile, is_tile, R, KP)
    else:
        code = encode(y, sign, KIND, BITS, MAN, BIAS, LOW, HIGH, STEP, THRESHOLDS)
        code = tl.where(is_finite[:, None], code, NAN)
        code = code if EVEN else tl.where(is_element, code, 0)
        store_codes(codes_ptr, code, row, column, is_tile, length, row_bytes, BITS, R, K, KP, EVEN)


@triton.jit
@typing.no_type_check
def amax_kernel(x_ptr, amax_ptr, size, BLOCK: tl.constexpr):
    """Raises the int32 at `amax_ptr` to the bits of the largest finite magnitude."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    bits = as_bits(tl.load(x_ptr + place, mask=place < size, other=0.0).to(tl.float32)) & 0x7FFFFFFF
    tl.atomic_max(amax_ptr, tl.max(tl.where(bits < 0x7F800000, bits, 0), axis=0))


def quantize_rows(
    problem: TileProblem,
    x: typing.Any,
    codes: typing.Any,
    scale: typing.Any,
    unit: typing.Any,
    fractions: typing.Any,
    *,
    capability: int = 0,
) -> None:
    """Quantizes rows into tensors that the caller made.

    Args:
        problem: what is asked; `problem.unsupported()` must be None.
        x: floating `[rows, length]`, contiguous.
        codes: uint8 `[rows, bytes]`, written.
        scale: `[rows, tiles]`, uint8 or floating as the scheme holds its scales, written.
        unit: float32 of one element, the tensor scale; or None without one.
        fractions: float32, `problem.fractions` on the device; or None without any.
        capability: 10 times the device's compute capability, to use its own conversions by inline PTX; 0 for the portable path.
    """
    tiles = problem.rows * problem.tiles_in_row
    constants = problem.layout() | problem.numbers() | problem.scale_numbers() | problem.choice() | problem.ptx(capability)
    unit, fractions = (scale if given is None else given for given in (unit, fractions))  # what is not read can be anything
    quantize_kernel[(problem.programs,)](
        x, codes, scale, unit, fractions, tiles, problem.length, problem.tiles_in_row, codes.shape[-1],
        **constants, num_warps=problem.warps, enable_fp_fusion=True,
    )  # fmt: skip


def raise_to_amax(x: typing.Any, amax: typing.Any) -> None:
    """Raises `amax`, the bits of a float32 as an int32 of one element, to the largest finite magnitude of a contiguous tensor."""
    block = 8192
    amax_kernel[(triton.cdiv(x.numel(), block),)](x, amax, x.numel(), BLOCK=block, num_warps=8, enable_fp_fusion=True)
