"""The inline PTX of numbers in pairs of bfloat16, evaluated in numpy for every code: no interpreter of Triton runs it."""

import re
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from fewbit.formats import FORMATS, AbstractFormat
from fewbit.kernels.qmatmul import gpu_pairs

NAMES = ("int4", "uint4", "int8", "int8_narrow", "uint8", "e2m1", "e4m3fn", "nf4")


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


def evaluated(text: str, word: np.ndarray, results: int) -> list[np.ndarray]:
    """The first registers of a PTX text whose last argument is a word, as pairs of bfloat16."""
    held: dict[str, np.ndarray] = {f"${results}": word}

    def value(name: str) -> np.ndarray:
        return held[name] if name in held else np.full(len(word), int(name, 0), np.uint32)

    for statement in text.strip("{} ").split(";"):
        if not statement.strip() or statement.strip().startswith(".reg"):
            continue
        operation, rest = statement.split(maxsplit=1)
        if split := re.match(r"\{(\w+), (\w+)\}, (\$?\w+)", rest):
            low, high = value(split[3]).astype("<u4").view("<u2").reshape(-1, 2).T
            held |= {split[1]: low.copy(), split[2]: high.copy()}
            continue
        target, *operands = (name.strip() for name in rest.split(","))
        held[target] = OPERATIONS[operation](*(value(name) for name in operands))
    return [halves(held[f"${i}"], ml_dtypes.bfloat16) for i in range(results)]


def expected(fmt: AbstractFormat, codes: np.ndarray) -> np.ndarray:
    """The bits of the codes' numbers in bfloat16, every NaN as one."""
    number = np.asarray(fmt.values(), np.float32)[codes].astype(ml_dtypes.bfloat16)
    return np.where(np.isnan(number), np.uint16(0x7FC0), number.view(np.uint16))


@pytest.mark.parametrize("name", NAMES)
def test_every_code_in_every_place(name: str) -> None:
    fmt = FORMATS[name]
    rng = np.random.default_rng(0)
    bytes_ = np.stack([rng.permutation(256) for _ in range(4)], 1).astype(np.uint8)
    word, results = bytes_.view("<u4")[:, 0], 4 if fmt.bits == 4 else 2
    pairs = evaluated(gpu_pairs.ptx(fmt, 90), word, results)
    bits = [np.where(np.isnan(p), np.uint16(0x7FC0), p.view(np.uint16)) for p in pairs]
    found = [np.concatenate(bits[i : i + 2], 1) for i in range(0, results, 2)]
    if fmt.bits == 4:
        assert np.array_equal(found[0], expected(fmt, bytes_ & 15))
        assert np.array_equal(found[1], expected(fmt, bytes_ >> 4))
    else:
        assert np.array_equal(found[0], expected(fmt, bytes_))


@pytest.mark.parametrize("name", [name for name in NAMES if name != "nf4"])
def test_bfloat16_holds_every_number(name: str) -> None:
    values = np.asarray(FORMATS[name].values(), np.float32)
    assert np.array_equal(values.astype(ml_dtypes.bfloat16).astype(np.float32), values, equal_nan=True)


def test_e4m3_needs_its_instruction() -> None:
    assert gpu_pairs.ptx(FORMATS["e4m3fn"], 80) == ""


@pytest.mark.parametrize(("name", "text"), [("e5m2", "numbers of e5m2"), ("nf4", None), ("int8", None)])
def test_what_is_not_made_says_why(name: str, text: str | None) -> None:
    assert gpu_pairs.unsupported(FORMATS[name]) == text
