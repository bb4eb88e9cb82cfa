"""Codes to pairs of bfloat16 by a few integer instructions: the PTX of each format that has a short way, for `triton_pairs.py`.

A register holds four bytes: eight codes of 4 bits, or four of 8. What comes out are registers of two numbers each. Numbers of
16 bits are made two at a time, so that an instruction serves two weights:

- Whole numbers are put below an exponent that makes the last place 1, and what this adds is taken off by one fused operation.
  Of 8 bits, seven fit there; the eighth is bit 7 of what is taken off, too: 128 or 256.
- E2M1: one multiplication by a number with two bits copies the code to the sign and to the exponent; a mask leaves both, and a
  factor of `2**126` corrects the exponent, subnormals included.
- E4M3: the instruction of sm_89 and later, by way of float16, which holds all of it, NaN included.
- Tables of 16: byte permutes, whose selectors the packed codes are already. Low and high bytes of eight numbers are two
  registers; one permute looks four codes up, and another one takes the upper or the lower half of the table.

All are exact but tables, whose numbers are rounded to bfloat16. `tests/kernels/test_gpu_pairs.py` evaluates the text for every
code.
"""

import ml_dtypes
import numpy as np

from ...formats import AbstractFormat, Codebook, Integer, Minifloat

LEAST_SM_OF_E4M3 = 89


def unsupported(fmt: AbstractFormat) -> str | None:
    """Why no numbers of a format are made in bfloat16, in a sentence; None when they are, by PTX or without."""
    if isinstance(fmt, Integer):
        return None if fmt.step == 1 else "whole numbers in steps other than 1"
    is_short = isinstance(fmt, Codebook) and fmt.bits == 4
    return None if is_short or fmt.name in ("e2m1", "e4m3fn") else f"numbers of {fmt.name}"


def ptx(fmt: AbstractFormat, sm: int, *, is_raw: bool = False) -> str:
    """The PTX from four bytes, the last argument, to pairs of bfloat16, the first ones; empty where there is none.

    Args:
        fmt: of the codes. Those of 4 bits become four registers: the low codes of bytes 0 and 1, of 2 and 3, and the high ones.
        sm: the compute capability, 90 for 9.0.
        is_raw: whether E2M1 is left without its factor, `2**126`, because the scales that it meets have it.

    Returns:
        The text, with `$0` for the first argument.
    """
    if isinstance(fmt, Codebook):
        lines = _table(np.asarray(fmt.values(), np.float32))
    elif isinstance(fmt, Integer):
        lines = _whole_of_4(signed=fmt.signed) if fmt.bits == 4 else _whole_of_8(signed=fmt.signed)
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


def _whole_of_4(*, signed: bool) -> list[str]:
    middle = 0x43084308 if signed else 0x43004300  # 128, and 8 where the sign bit is turned
    lines = [_SPREAD.format(word="$4"), _ONE, f"mov.b32 u, {middle ^ 0x80008000:#x};"]
    for i in range(4):
        half = f"s{i % 2}"
        lines += [f"shr.u32 {half}, {half}, 4;"] if i > 1 else []
        lines += [f"lop3.b32 t, {half}, 0x000f000f, {middle:#x}, 0x6a;", f"fma.rn.bf16x2 ${i}, t, factor, u;"]
    return lines


def _whole_of_8(*, signed: bool) -> list[str]:
    lines = [_SPREAD.format(word="$2"), _ONE]
    off = 0xC300C300 if signed else 0xC380C380  # -128 where bit 7 adds to it, else -256, from which it takes
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
        mask, copies = ("0x000f000f", "0x1040") if i < 2 else ("0x00f000f0", "0x0104")
        lines += [f"and.b32 t, s{i % 2}, {mask};", f"mul.lo.u32 t, t, {copies};"]
        lines += [f"and.b32 {f'${i}' if is_raw else 't'}, t, 0x81c081c0;"]
        lines += [] if is_raw else [f"fma.rn.bf16x2 ${i}, t, factor, u;"]
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
        lines += ["shr.u32 s, s, 16;", "shr.u32 w, w, 16;"] if half else []
        for name, plane in (("l", bits & 0xFF), ("h", bits >> 8)):
            r = [int.from_bytes(plane[i : i + 4].astype(np.uint8).tobytes(), "little") for i in range(0, 16, 4)]
            lines += [f"mov.b32 a, {r[0]:#x}; mov.b32 b, {r[1]:#x}; prmt.b32 {name}, a, b, s;"]
            lines += [f"mov.b32 a, {r[2]:#x}; mov.b32 b, {r[3]:#x}; prmt.b32 a, a, b, s;", f"prmt.b32 {name}, {name}, a, w;"]
        lines += [f"prmt.b32 ${half}, l, h, 0x6240;", f"prmt.b32 ${2 + half}, l, h, 0x7351;"]
    return lines
