"""Integers against plain NumPy arithmetic: two's complement, the two ranges, steps, refusals."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from fewbit.errors import QuantError
from fewbit.formats import FORMATS, Integer
from tests.conformance import format_laws as laws

INTEGERS = [fmt for fmt in FORMATS if isinstance(fmt, Integer)]


@pytest.mark.parametrize("fmt", INTEGERS, ids=lambda f: f.name)
def test_codes_of_every_bfloat16_are_rint_and_clip(fmt: Integer):
    x = laws.ALL_NUMBERS
    low, high = fmt.min / fmt.step, fmt.max / fmt.step
    expected = np.rint(np.clip(x.astype(np.float64) / fmt.step, low, high)).astype(np.int64) % 2**fmt.width
    assert np.array_equal(fmt.encode(jnp.asarray(x)), expected)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("int2", ml_dtypes.int2),
        ("uint2", ml_dtypes.uint2),
        ("int4", ml_dtypes.int4),
        ("uint4", ml_dtypes.uint4),
        ("int8", np.int8),
        ("uint8", np.uint8),
    ],
    ids=str,
)
def test_values_are_those_of_the_dtype(name: str, dtype: type):
    fmt = FORMATS[name]
    codes = np.arange(2**fmt.bits).astype(np.uint8)
    wrapped = codes.astype(np.int8) << (8 - fmt.bits) >> (8 - fmt.bits) if fmt.signed else codes
    assert np.array_equal(fmt.values(), wrapped.astype(dtype).astype(np.float64))
    x = np.clip(laws.ALL_NUMBERS, fmt.min, fmt.max)
    assert np.array_equal(fmt.decode(fmt.encode(jnp.asarray(x))), np.rint(x).astype(dtype).astype(np.float32))


@pytest.mark.parametrize("bits", range(1, 9))
def test_bound_of_each_convention(bits: int):
    top = 2 ** (bits - 1) - 1
    full = FORMATS[f"int{bits}"]
    assert (full.bound, full.min, full.max) == (top + 0.5, -top - 1, top)
    assert FORMATS[f"uint{bits}"].bound == 2**bits - 1
    if bits > 1:
        narrow = FORMATS[f"int{bits}_narrow"]
        assert (narrow.bound, narrow.min, narrow.max) == (top, -top, top)


def test_narrow_never_encodes_the_most_negative_code_but_decodes_it():
    fmt = FORMATS["int4_narrow"]
    assert 8 not in np.asarray(fmt.encode(jnp.asarray(laws.ALL_NUMBERS)))
    assert fmt.decode(jnp.uint8([8])).tolist() == [-8.0]


def test_unsigned_takes_negative_numbers_as_zero():
    assert FORMATS["uint4"].encode(jnp.array([-0.1, -7.0, -jnp.inf])).tolist() == [0, 0, 0]


def test_nan_and_negative_zero_are_zero():
    for fmt in INTEGERS:
        assert np.asarray(fmt.encode(jnp.array([jnp.nan, -0.0]))).tolist() == [0, 0]


@pytest.mark.parametrize("step", [0.5, 2.0, 2**70, 2.0**123, 2.0**-126])
def test_step(step: float):
    stepped = Integer("stepped", 4, step=step)
    assert (stepped.max, stepped.min, stepped.bound) == (7 * step, -8 * step, 7.5 * step)
    laws.check_codes(stepped)
    laws.check_identity(stepped)
    laws.check_nearest(stepped)
    laws.check_json(stepped)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"width": 0}, "format 'x': width is 0, must be 1 to 8 bits"),
        ({"width": 9}, "format 'x': width is 9, must be 1 to 8 bits"),
        ({"width": 1, "narrow": True}, "the narrow range needs a signed format of at least 2 bits"),
        ({"width": 4, "narrow": True, "signed": False}, "the narrow range needs a signed format of at least 2 bits"),
        ({"width": 4, "step": 0.3}, "step is 0.3, must be a power of two"),
        ({"width": 4, "step": -1.0}, "step is -1.0, must be a power of two"),
        ({"width": 4, "step": float("nan")}, "step is nan, must be a power of two"),
        (
            {"width": 8, "step": 2.0**120},
            "step is 1.32.*e.36, must be a power of two whose codes are normal float32 numbers",
        ),
        (
            {"width": 8, "step": 2.0**-127},
            "step is 5.87.*e-39, must be a power of two whose codes are normal float32 numbers",
        ),
        ({"width": 8, "step": 10**400}, "must be a power of two whose codes are normal float32 numbers"),
    ],
    ids=str,
)
def test_refusals(fields: dict, message: str):
    with pytest.raises(QuantError, match=message):
        Integer("x", **fields)
