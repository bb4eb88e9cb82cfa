"""The inline PTX of numbers in pairs of bfloat16, evaluated in numpy for every code."""

import ml_dtypes
import numpy as np
import pytest

from fewbit.formats import FORMATS, AbstractFormat
from fewbit.kernels.qmatmul.gpu import ptx as gpu_pairs
from tests.kernels.ptx import evaluated, halves

NAMES = ("int4", "uint4", "int8", "int8_narrow", "uint8", "e2m1", "e4m3fn", "nf4")


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
    pairs = [halves(r, ml_dtypes.bfloat16) for r in evaluated(gpu_pairs.ptx(fmt, 90), [word], results)]
    bits = [np.where(np.isnan(p), np.uint16(0x7FC0), p.view(np.uint16)) for p in pairs]
    found = [np.concatenate(bits[i : i + 2], 1) for i in range(0, results, 2)]
    if fmt.bits == 4:
        assert np.array_equal(found[0], expected(fmt, bytes_ & 15))
        assert np.array_equal(found[1], expected(fmt, bytes_ >> 4))
    else:
        assert np.array_equal(found[0], expected(fmt, bytes_))


def test_raw_numbers_lack_a_factor() -> None:
    word, fmt = np.arange(1 << 16, dtype=np.uint32) * 0x10001, FORMATS["e2m1"]
    whole, raw = (
        np.stack([halves(r, ml_dtypes.bfloat16) for r in evaluated(gpu_pairs.ptx(fmt, 90, is_raw=is_raw), [word], 4)])
        for is_raw in (False, True)
    )
    assert np.array_equal(raw.astype(np.float64) * 2.0**126, whole.astype(np.float64))


@pytest.mark.parametrize("name", [name for name in NAMES if name != "nf4"])
def test_bfloat16_holds_every_number(name: str) -> None:
    values = np.asarray(FORMATS[name].values(), np.float32)
    assert np.array_equal(values.astype(ml_dtypes.bfloat16).astype(np.float32), values, equal_nan=True)


def test_e4m3_needs_its_instruction() -> None:
    assert gpu_pairs.ptx(FORMATS["e4m3fn"], 80) == ""


@pytest.mark.parametrize(("name", "text"), [("e5m2", "numbers of e5m2"), ("nf4", None), ("int8", None)])
def test_what_is_not_made_says_why(name: str, text: str | None) -> None:
    assert gpu_pairs.unsupported(FORMATS[name]) == text
