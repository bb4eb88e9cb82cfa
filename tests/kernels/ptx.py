"""Enough of PTX, in numpy, for the inline PTX of the products: no interpreter of Triton runs it."""

import re
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np


def halves(register: np.ndarray, dtype: Any) -> np.ndarray:
    """A register of 32 bits as two numbers, the lower one first: `[words, 2]`."""
    return register.astype("<u4").view("<u2").reshape(-1, 2).view(dtype)


def register(numbers: np.ndarray) -> np.ndarray:
    """The register of two numbers."""
    return np.ascontiguousarray(numbers).view("<u2").reshape(-1, 2).view("<u4")[:, 0]


def lop3(a: np.ndarray, b: np.ndarray, c: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Bit i of the result is bit `4 a_i + 2 b_i + c_i` of the table."""
    out = np.zeros_like(a)
    for bit in range(32):
        row = 4 * (a >> bit & 1) + 2 * (b >> bit & 1) + (c >> bit & 1)
        out |= (table >> row & 1) << np.uint32(bit)
    return out


def prmt(a: np.ndarray, b: np.ndarray, selector: np.ndarray) -> np.ndarray:
    """Each byte is the one of `b:a` that three bits of a selector of four name; the fourth bit, which repeats a sign, is not used."""
    assert not (selector & 0x8888).any()
    both = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32)
    byte = [both >> (8 * (selector >> 4 * i & 7)).astype(np.uint64) & np.uint64(0xFF) for i in range(4)]
    return sum((byte[i] << np.uint64(8 * i) for i in range(1, 4)), byte[0]).astype(np.uint32)


def fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """In bfloat16, rounded once: float64 holds the products and sums of these few bits."""
    x, y, z = (halves(r, ml_dtypes.bfloat16).astype(np.float64) for r in (a, b, c))
    return register((x * y + z).astype(ml_dtypes.bfloat16))


def e4m3(pair: np.ndarray) -> np.ndarray:
    codes = pair.astype("<u2").view(np.uint8).reshape(-1, 2)
    return register(codes.view(ml_dtypes.float8_e4m3fn).astype(np.float16))


OPERATIONS: dict[str, Callable[..., np.ndarray]] = {
    "mov.b32": lambda a: a,
    "and.b32": lambda a, b: a & b,
    "shr.u32": lambda a, b: a >> b,
    "mul.lo.u32": lambda a, b: a * b,
    "lop3.b32": lop3,
    "prmt.b32": prmt,
    "fma.rn.bf16x2": fma,
    "cvt.rn.f16x2.e4m3x2": e4m3,
    "cvt.f32.f16": lambda a: a.view(np.float16).astype(np.float32),
    "cvt.rn.bf16x2.f32": lambda high, low: register(np.stack([low, high], 1).astype(ml_dtypes.bfloat16)),
}


def evaluated(text: str, words: Sequence[np.ndarray], results: int) -> list[np.ndarray]:
    """The first registers of a text, `$0` and on, from those that follow them, uint32 each."""
    held = {f"${results + i}": word for i, word in enumerate(words)}

    def value(name: str) -> np.ndarray:
        return held[name] if name in held else np.full(len(words[0]), int(name, 0), np.uint32)

    for statement in text.strip("{} ").split(";"):
        if not statement.strip() or statement.strip().startswith(".reg"):
            continue
        operation, rest = statement.split(maxsplit=1)
        if split := re.match(r"\{(\w+), (\w+)\}, (\$?\w+)", rest):
            low, high = halves(value(split[3]), np.uint16).T
            held |= {split[1]: low.copy(), split[2]: high.copy()}
            continue
        target, *operands = (name.strip() for name in rest.split(","))
        held[target] = OPERATIONS[operation](*(value(name) for name in operands))
    return [held[f"${i}"] for i in range(results)]
