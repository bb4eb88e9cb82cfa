"""Codebooks: published tables, exact thresholds, doubled numbers, tables of users, refusals."""

import hashlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fewbit.errors import QuantError
from fewbit.formats import FORMATS, Codebook, bnb_fp4, dynamic8, iq4_nl, nf4
from tests.conformance import format_laws as laws


def test_nf4_quantiles():
    # QLoRA, appendix E: the means of neighbouring quantiles' ends, 8 on the positive and 7 on the negative side.
    normal_quantile = np.vectorize(__import__("statistics").NormalDist().inv_cdf)
    offset = 0.9677083
    positive = normal_quantile(np.linspace(offset, 0.5, 9)[:-1])
    negative = -normal_quantile(np.linspace(offset, 0.5, 8)[:-1])
    table = np.sort(np.concatenate([positive, [0.0], negative])) / positive.max()
    # The published table holds seven digits of a float32 computation.
    np.testing.assert_allclose(nf4.values(), table, rtol=0, atol=3e-6)


def test_bnb_fp4_is_twelfths_in_its_own_order():
    assert (bnb_fp4.values()[:8] * 12).round(6).tolist() == [0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0]
    assert bnb_fp4.encode(jnp.array([1.0, -1.0, 0.5, -0.0, 0.0])).tolist() == [3, 11, 5, 8, 0]


def test_tables_in_int8():
    for fmt in (nf4, bnb_fp4, iq4_nl):
        rounded = fmt.in_int8()
        steps = rounded.values() / rounded.bound * 127
        np.testing.assert_allclose(steps, np.rint(steps), atol=1e-5)  # of float32
        assert np.abs(rounded.values() - fmt.values()).max() <= fmt.bound * 0.5 / 127 * (1 + 1e-6)
        assert rounded.bound == fmt.bound
    assert iq4_nl.in_int8().table == iq4_nl.table


def test_iq4_nl_and_dynamic8_ends():
    assert (iq4_nl.min, iq4_nl.max, iq4_nl.bound) == (-127.0, 113.0, 127.0)
    assert (len(dynamic8.table), dynamic8.max, 0.0 in dynamic8.table) == (256, 1.0, True)
    numbers = np.array(dynamic8.table, "<f4")  # a change of one bit is noticed
    assert hashlib.sha256(numbers.tobytes()).hexdigest().startswith("e732639a65f497b4")


def test_thresholds_are_exact():
    # For every two neighbours: the largest float32 not above the midpoint goes down, the next one goes up.
    for fmt in (nf4, bnb_fp4, iq4_nl, dynamic8):
        numbers, _ = laws.numbers_of(fmt)
        middles = (numbers[1:] + numbers[:-1]) / 2
        below = middles.astype(np.float32)
        below = np.where(below.astype(np.float64) > middles, np.nextafter(below, np.float32(-9e9)), below)
        above = np.nextafter(below, np.float32(9e9))
        assert np.array_equal(fmt.decode(fmt.encode(jnp.asarray(below))), numbers[:-1].astype(np.float32))
        assert np.array_equal(fmt.decode(fmt.encode(jnp.asarray(above))), numbers[1:].astype(np.float32))


tables = st.lists(st.floats(-1000, 1000, width=32).filter(lambda v: v == 0 or abs(v) > 1e-30), min_size=2, max_size=256)


@settings(max_examples=20)
@given(tables.filter(lambda t: len(set(t)) > 1))
def test_any_table(table: list[float]):
    fmt = Codebook("drawn", tuple(table))
    assert fmt.bits == max(1, int(np.ceil(np.log2(len(table)))))
    numbers, _ = laws.numbers_of(fmt)
    middles = ((numbers[1:] + numbers[:-1]) / 2).astype(np.float32)
    middles = middles[(np.abs(middles) > 1e-30) | (middles == 0)]
    laws.check_nearest(fmt, None, laws.repeated(np.concatenate([middles, numbers.astype(np.float32)]), 1024))
    laws.check_identity(fmt)


def test_doubled_numbers_take_their_first_code():
    fmt = Codebook("doubled", (1.0, -1.0, 1.0, 0.5))
    assert fmt.encode(jnp.array([1.0, 5.0, -1.0, 0.6])).tolist() == [0, 0, 1, 3]


@pytest.mark.parametrize("size", [2, 3, 5, 17, 100, 256])
def test_sizes(size: int):
    fmt = Codebook("sized", tuple(np.linspace(-1, 1, size).tolist()))
    assert fmt.bits == (size - 1).bit_length()
    assert np.array_equal(fmt.encode(fmt.decode(jnp.arange(size, dtype=jnp.uint8))), np.arange(size))


def test_nan_is_the_number_nearest_zero():
    assert iq4_nl.decode(iq4_nl.encode(jnp.array([jnp.nan]))).tolist() == [1.0]
    assert nf4.encode(jnp.array([jnp.nan]), key=jax.random.key(0)).tolist() == [7]


def test_decimal_and_float32_tables_are_one_format():
    decimal = Codebook("same", (0.1, 0.7))
    binary = Codebook("same", tuple(float(np.float32(v)) for v in (0.1, 0.7)))
    assert decimal == binary and hash(decimal) == hash(binary)


def test_repr_does_not_print_the_table():
    assert repr(FORMATS["nf4"]) == "Codebook(name='nf4')"


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ((1.0,), "a table has 2 to 256 numbers, this one has 1"),
        (tuple(float(i) for i in range(257)), "this one has 257"),
        ((1.0, float("nan")), "every number of a table must be finite"),
        ((1.0, float("inf")), "every number of a table must be finite"),
        ((0.0, 1e39), "every number of a table must be finite in float32"),
        ((2.0, 2.0), "at least two numbers that differ in float32"),
        ((1.0, 1.0 + 1e-12), "at least two numbers that differ in float32"),
    ],
    ids=["one", "too-many", "nan", "inf", "beyond-float32", "equal", "equal-in-float32"],
)
def test_refusals(table: tuple[float, ...], message: str):
    with pytest.raises(QuantError, match=message):
        Codebook("x", table)
