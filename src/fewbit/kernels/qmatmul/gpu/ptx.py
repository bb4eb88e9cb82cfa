"""PTX that decodes codes to bfloat16 pairs.

A register contains four bytes: eight 4-bit codes, or four 8-bit ones. The outputs are registers of two bfloat16 each, so that one
instruction processes two weights (`gemv_bf16.py`):

- Integers are inserted into the mantissa below an exponent that makes the last place 1, and the offset is subtracted by one
  FMA. Seven bits fit there; of 8-bit codes, bit 7 selects the offset: 128 or 256.
- E2M1: one multiplication by a number with two bits copies the code to the sign and to the exponent; a mask keeps both, and a
  factor of `2**126` corrects the exponent, subnormals included.
- E4M3: the conversion instruction of sm_89 and later, through float16, which represents all of it, NaN included.
- Codebooks of 16: byte permutes, with the packed codes as selectors. The low and the high bytes of eight numbers are two
  registers; one permute looks up four codes, and another selects the upper or the lower half of the table.

All are exact except codebooks, which are rounded to bfloat16. `tests/kernels/qmatmul/gpu/test_ptx.py` evaluates the text for every code.
"""

import ml_dtypes
import numpy as np

from ....formats.codebook import Codebook
from ....formats.format import AbstractFormat
from ....formats.integer import Integer
from ....formats.minifloat import Minifloat

LEAST_SM_OF_E4M3 = 89


def unsupported(fmt: AbstractFormat) -> str | None:
    """Why a format is not decoded to bfloat16; None when it is."""
    if isinstance(fmt, Integer):
        return None if fmt.step == 1 else "integers in steps other than 1"
    if fmt.name in ("e2m1", "e4m3fn") or (isinstance(fmt, Codebook) and fmt.bits == 4):
        return None
    return f"numbers of {fmt.name}"


def ptx(fmt: AbstractFormat, sm: int, *, is_raw: bool = False) -> str:
    """The PTX from four bytes (the last argument) to pairs of bfloat16 (the first ones).

    Args:
        fmt: of the codes. 4-bit codes give four registers: the low codes of bytes 0 and 1, those of 2 and 3, then the high ones.
        sm: the compute capability, 90 for 9.0.
        is_raw: whether E2M1 omits its factor `2**126`, because the scales include it.

    Returns:
        The text, with `$0` for the first argument; empty if the format has none.
    """
    if isinstance(fmt, Codebook):
        lines = _table(np.asarray(fmt.values(), np.float32))
    elif isinstance(fmt, Integer):
        lines = {4: _int4, 8: _int8}[fmt.bits](signed=fmt.signed)
    elif fmt.bits == 4:
        lines = _e2m1(is_raw=is_raw)
    elif isinstance(fmt, Minifloat) and sm >= LEAST_SM_OF_E4M3:
        lines = _e4m3()
    else:
        return ""
    return "{ " + " ".join(lines) + " }"


_SPREAD = ".reg .b32 s0, s1, t, u, factor; prmt.b32 s0, {word}, 0, 0x4140; prmt.b32 s1, {word}, 0, 0x4342;"
"""Bytes 0 and 1, and 2 and 3, each in the low half of 16 bits."""

_ONE = "mov.b32 factor, 0x3f803f80;"


def _int4(*, signed: bool) -> list[str]:
    middle = 0x43084308 if signed else 0x43004300  # 128, plus 8 where the sign bit is flipped
    lines = [_SPREAD.format(word="$4"), _ONE, f"mov.b32 u, {middle ^ 0x80008000:#x};"]
    for i in range(4):
        half = f"s{i % 2}"
        if i > 1:
            lines.append(f"shr.u32 {half}, {half}, 4;")
        lines += [f"lop3.b32 t, {half}, 0x000f000f, {middle:#x}, 0x6a;", f"fma.rn.bf16x2 ${i}, t, factor, u;"]
    return lines


def _int8(*, signed: bool) -> list[str]:
    lines = [_SPREAD.format(word="$2"), _ONE]
    off = 0xC300C300 if signed else 0xC380C380  # -128, which bit 7 adds to, or -256, which it reduces
    for i in range(2):
        lines += [f"lop3.b32 t, s{i}, 0x007f007f, 0x43004300, 0x6a;", f"lop3.b32 u, s{i}, 0x00800080, {off:#x}, 0x6a;"]
        if signed:
            lines += [f"fma.rn.bf16x2 ${i}, t, factor, u;"]
        else:
            lines += ["fma.rn.bf16x2 t, t, factor, u;", "mov.b32 u, 0x43004300;", f"fma.rn.bf16x2 ${i}, t, factor, u;"]
    return lines


def _e2m1(*, is_raw: bool) -> list[str]:
    lines = [_SPREAD.format(word="$4"), "mov.b32 factor, 0x7e807e80; mov.b32 u, 0x80008000;"]
    for i in range(4):
        mask, copies = (("0x000f000f", "0x1040"), ("0x00f000f0", "0x0104"))[i // 2]
        lines += [f"and.b32 t, s{i % 2}, {mask};", f"mul.lo.u32 t, t, {copies};"]
        if is_raw:
            lines.append(f"and.b32 ${i}, t, 0x81c081c0;")
        else:
            lines += ["and.b32 t, t, 0x81c081c0;", f"fma.rn.bf16x2 ${i}, t, factor, u;"]
    return lines


def _e4m3() -> list[str]:
    lines = [".reg .b16 c0, c1, h0, h1; .reg .b32 p; .reg .f32 f0, f1; mov.b32 {c0, c1}, $2;"]
    for i in range(2):
        lines += [f"cvt.rn.f16x2.e4m3x2 p, c{i};", "mov.b32 {h0, h1}, p;", "cvt.f32.f16 f0, h0;", "cvt.f32.f16 f1, h1;"]
        lines += [f"cvt.rn.bf16x2.f32 ${i}, f1, f0;"]
    return lines


def _table(values: np.ndarray) -> list[str]:
    bits = np.zeros(16, np.uint16)
    bits[: len(values)] = values.astype(ml_dtypes.bfloat16).view(np.uint16)
    lines = [".reg .b32 s, w, a, b, l, h; and.b32 s, $4, 0x77777777; shr.u32 w, $4, 1;"]
    lines += ["lop3.b32 w, w, 0x44444444, 0x32103210, 0xea;"]
    for half in range(2):
        if half:
            lines += ["shr.u32 s, s, 16;", "shr.u32 w, w, 16;"]
        for name, plane in (("l", bits & 0xFF), ("h", bits >> 8)):
            r = [int.from_bytes(plane[i : i + 4].astype(np.uint8).tobytes(), "little") for i in range(0, 16, 4)]
            lines += [f"mov.b32 a, {r[0]:#x}; mov.b32 b, {r[1]:#x}; prmt.b32 {name}, a, b, s;"]
            lines += [f"mov.b32 a, {r[2]:#x}; mov.b32 b, {r[3]:#x}; prmt.b32 a, a, b, s;", f"prmt.b32 {name}, {name}, a, w;"]
        lines += [f"prmt.b32 ${half}, l, h, 0x6240;", f"prmt.b32 ${2 + half}, l, h, 0x7351;"]
    return lines
