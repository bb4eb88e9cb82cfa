"""Every registered scheme keeps every law of quantization; a scheme that is added is tested by that alone."""

import dataclasses
import json
from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fewbit as fb
from fewbit.array import pack
from fewbit.array.scales import MX, AbsMean
from fewbit.formats import AbstractFormat
from tests.conformance import array_laws as laws

ALL = list(fb.SCHEMES.names())

# Every scheme is compiled, which takes its time: those that differ from a tested sibling by their width, their element or
# one field only are left to the full run. A scheme that is added is in the fast run.
_INTEGERS = {f"{sign}int{b}{end}" for sign in ("", "u") for b in range(2, 9) for end in ("", "_narrow")}
SIBLINGS = _INTEGERS - {"int3", "int8", "int4_narrow", "uint4"} | {
    *("fp8_e5m2", "fp8_e4m3fnuz", "fp8_e5m2fnuz", "fp8_tensor", "fp4", "bnb_fp4", "q8_0", "q5_0", "q5_1"),
    *("mxfp6", "mxfp6_e3m2", "mxfp8", "mxfp8_e5m2", "nvfp4_absmax", "nvint4"),
    *("int4_aqt", "int8_aqt", "fp8_e5m2_tensor", "fp8_e4m3fnuz_tensor", "fp8_e5m2fnuz_tensor", "mxfp8_rceil"),
    *("int4_f16", "int8_f16", "uint4_f16", "affine8", "nvfp4_one_level"),
}
# Of these, those that `make test` leaves to `make test-long`: the same code as another sibling's, with another table.
DISTANT = _INTEGERS - {
    "int2",
    "int3",
    "int8",
    "int8_narrow",
    "int4_narrow",
    "int5_narrow",
    "int7",
    "uint2",
    "uint4",
    "uint8",
} | {
    *("fp8_e5m2fnuz", "fp8_e5m2_tensor", "fp8_e4m3fnuz_tensor", "fp8_e5m2fnuz_tensor", "mxfp6_e3m2", "mxfp8_e5m2"),
    *("mxfp8_rceil", "int4_aqt", "q5_0"),
    *("int8_f16", "affine8"),
}
_FEW = ("int8", "uint4", "nf4", "q4_1", "mxfp4", "nvfp4_16x16")


def schemes(
    names: list[str], fast: Iterable[str] = frozenset(ALL) - SIBLINGS, *, long: Iterable[str] = ()
) -> pytest.MarkDecorator:
    """A test for each of these schemes: slow for those that are not in `fast`, one of `make test-long` for distant siblings and `long`."""
    long = DISTANT | set(long)

    def marks(name: str) -> list[pytest.MarkDecorator]:
        return [] if name in fast else [pytest.mark.slow, pytest.mark.long] if name in long else [pytest.mark.slow]

    return pytest.mark.parametrize("name", [pytest.param(name, marks=marks(name)) for name in names])


each_scheme = schemes(ALL)

# The mean of the tile (or of all scales) is a sum, and XLA adds in another order when it compiles another program.
_SUMS = {name for name in ALL if isinstance(fb.SCHEMES[name].calibration, AbsMean)} | {"nf4_dq"}


def assert_same_bytes(a: fb.QArray, b: fb.QArray) -> None:
    """Equal leaves, bit for bit, and equal static parts."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for left, right in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert (left.shape, left.dtype) == (right.shape, right.dtype)
        assert np.asarray(left).tobytes() == np.asarray(right).tobytes()


def assert_same(name: str, a: fb.QArray, b: fb.QArray) -> None:
    """The same bytes; where the scale comes from a sum, scales that differ by its rounding."""
    if name not in _SUMS:
        return assert_same_bytes(a, b)
    # Two orders of adding n numbers differ by at most 2 (n - 1) roundings of a half ulp, the division by one more.
    count = a.size // a.scale.size
    np.testing.assert_allclose(laws.scale_of(a), laws.scale_of(b), rtol=2 * count * 2.0**-24)


@pytest.mark.slow
@each_scheme
def test_shape_dtype_and_bytes(name: str):
    stacked, dense, each = laws.results(name)
    q = each["normal"]
    assert (q.shape, q.ndim, q.size, q.dtype) == (laws.SHAPE, 2, 1400, np.float32)
    assert stacked.shape == (len(laws.CASES), *laws.SHAPE)
    assert dense["normal"].shape == laws.SHAPE and dense["normal"].dtype == np.float32
    assert q.codes.dtype == np.uint8
    assert q.nbytes == sum(leaf.nbytes for leaf in jax.tree.leaves(q))
    assert 8 * q.nbytes == laws.expected_bits(q.scheme, laws.SHAPE)
    assert q.bits_per_weight == laws.expected_bits(q.scheme, laws.SHAPE) / 1400
    assert jax.eval_shape(lambda x: fb.quantize(x, name), jnp.zeros(laws.SHAPE)).shape == laws.SHAPE


@each_scheme
@pytest.mark.parametrize("case", [c for c in laws.CASES if c != "denormal"])
def test_dequantize_is_its_formula(name: str, case: str):
    _, dense, each = laws.results(name)
    np.testing.assert_array_equal(dense[case], laws.numpy_dequantize(each[case]))


@schemes(ALL, _FEW, long=SIBLINGS)
def test_jit_and_vmap_give_the_bytes_of_eager(name: str):
    eager = fb.quantize(jnp.asarray(laws.case("normal")), name)
    assert_same(name, laws.results(name)[2]["normal"], eager)
    if name not in _SUMS:
        np.testing.assert_array_equal(fb.dequantize(eager), laws.results(name)[1]["normal"])


@each_scheme
def test_every_code_is_the_nearest(name: str):
    q = laws.results(name)[2]["normal"]
    if q.scheme.zero_point is not None or name in _SUMS - {"ternary", "binary"}:
        pytest.skip("tested with the error bound below")
    ratio = laws.case("normal") / laws.spread(laws.scale_of(q), q)
    numbers = q.scheme.format.values()
    numbers = np.unique(numbers[np.isfinite(numbers) & (numbers >= q.scheme.format.min)])
    nearest = np.abs(ratio[..., None] - numbers).min(-1)
    got = np.abs(ratio - q.scheme.format.values()[laws.unpacked(q)])
    # The ratio is rounded to float32 before a code is chosen, so a code may be wrong by that much at a midpoint.
    assert (got <= nearest + 2 * np.abs(ratio) * 2.0**-24).all()


@each_scheme
def test_error_is_at_most_half_a_step_in_range(name: str):
    x, q = laws.case("normal").astype(np.float64), laws.results(name)[2]["normal"]
    scale = np.abs(laws.spread(laws.scale_of(q), q))
    numbers = q.scheme.format.values()
    numbers = np.unique(numbers[np.isfinite(numbers) & (numbers >= q.scheme.format.min)])
    offset = np.zeros(())
    if isinstance(q.scheme.zero_point, AbstractFormat):
        offset = -laws.spread(q.scheme.zero_point.values()[np.asarray(q.zero_point)], q) * scale
    elif q.scheme.zero_point is not None:
        offset = laws.spread(np.asarray(q.zero_point, np.float64), q)
    error = np.abs(laws.results(name)[1]["normal"] - x)
    ratio = (x - offset) / laws.spread(laws.scale_of(q), q)
    in_range = (ratio >= numbers[0]) & (ratio <= numbers[-1])
    # Half the widest step, and the float32 roundings of the quotient and of the decoded number.
    bound = np.diff(numbers).max() / 2 * scale + 4 * 2.0**-24 * (np.abs(x) + np.abs(offset) + scale * np.abs(numbers).max())
    assert in_range.mean() > 0.1
    assert (error <= bound)[in_range].all()


@each_scheme
def test_zeros_are_exact(name: str):
    _, dense, _ = laws.results(name)
    assert (dense["zeros"] == 0).all()
    assert (dense["zero_tile"][:, :64][laws.case("zero_tile")[:, :64] == 0] == 0).all() or name == "binary"
    assert (dense["zero_tile"][2:4] == 0).all() or fb.SCHEMES[name].tile in ({}, {...: 1, -2: 16, -1: 16})


@each_scheme
def test_denormals_become_zero(name: str):
    _, dense, _ = laws.results(name)
    # Below the smallest normal float32 all is zero: the scale is replaced by 1.
    assert np.abs(dense["denormal"]).max() <= 2.0**-126


def _has_narrow_scale(name: str) -> bool:
    """Whether scales are float16, or E4M3 without a tensor scale."""
    scheme = fb.SCHEMES[name]
    if isinstance(scheme.scale, np.dtype):
        return scheme.scale == np.float16
    return scheme.scale == fb.FORMATS["e4m3fn"] and not scheme.tensor_scale


@each_scheme
def test_constant_huge_and_outlier_stay_finite(name: str):
    _, dense, each = laws.results(name)
    for case in ("constant", "huge", "outlier"):
        assert np.isfinite(dense[case]).all(), case
    assert (np.sign(dense["huge"]) * np.sign(laws.case("huge")) >= 0).all()
    # What a scale can hold is not saturated: the outlier and the huge numbers come back to within half a step.
    fmt, spot = fb.SCHEMES[name].format, laws.SPOT
    numbers = np.unique(np.abs(fmt.values()[np.isfinite(fmt.values())]))
    if not _has_narrow_scale(name) and name not in _SUMS and not isinstance(fb.SCHEMES[name].calibration, MX):
        for case, largest in (("huge", 1e38), ("outlier", 1000.0)):
            scale = np.abs(laws.spread(laws.scale_of(each[case]), each[case]))[spot]
            step = max(numbers[-1] - numbers[-2], 1) if len(numbers) > 1 else 1
            assert abs(abs(dense[case][spot]) - largest) <= step * scale * 0.501 + largest * 2.0**-22, case


@each_scheme
@pytest.mark.parametrize("case", ["nan", "inf"])
def test_nan_and_infinity_make_exactly_their_tile_nan(name: str, case: str):
    _, dense, each = laws.results(name)
    expected = laws.tile_mask(each[case], laws.SPOT)
    if name == "nf4_dq":
        # All scales share one mean, so one that is not a number makes the whole array NaN.
        expected = np.ones(laws.SHAPE, bool)
    np.testing.assert_array_equal(np.isnan(dense[case]), expected)


@each_scheme
def test_scaling_by_a_power_of_two_scales_the_result(name: str):
    if _has_narrow_scale(name):
        pytest.skip("a scale in float16 or E4M3 cannot be 2**-60")
    _, dense, each = laws.results(name)
    assert np.array_equal(each["scaled"].codes, each["normal"].codes)
    np.testing.assert_array_equal(dense["scaled"], dense["normal"] * np.float32(2.0**-60))


@schemes(ALL, (), long=SIBLINGS)  # packing of every width along every axis is tested in array/test_packing.py
def test_quantizing_the_transpose_is_transposing_the_quantized(name: str):
    x = jnp.asarray(laws.case("normal"))
    other = jax.jit(lambda x: fb.quantize(x, name, axis=-2))(x.T)
    q = laws.results(name)[2]["normal"]
    assert_same(name, q.T, other)
    assert jax.tree.structure(q.T.T) == jax.tree.structure(q)
    assert q.scheme.name == q.T.scheme.name == name


@schemes([n for n in ALL if fb.SCHEMES[n].format.bits < 8 or n in ("int8", "fp8")], (), long=SIBLINGS)
def test_half_precision_is_widened(name: str):
    dtype = (jnp.float16, jnp.bfloat16)[ALL.index(name) % 2]  # by turns: which one is nothing that a scheme sees
    x = jnp.asarray(laws.case("normal")).astype(dtype)
    q, wide = fb.quantize(x, name), fb.quantize(x.astype(jnp.float32), name)
    assert q.dtype == jnp.dtype(dtype) and fb.dequantize(q).dtype == dtype
    assert_same_bytes(q.astype(jnp.float32), wide)
    np.testing.assert_array_equal(fb.dequantize(q, jnp.float32), fb.dequantize(wide))


# Schemes whose grid contains its own values again: the largest element stays on the largest code, or (the searches) any
# scale that was found before fits without error.
_FIXED_POINTS = ["mxfp4", "mxfp6", "mxfp6_e3m2", "mxfp8", "mxfp8_e5m2", "nf4", "bnb_fp4", "q8_0", "q4_0", "q5_0"]
_FIXED_CODES = ["fp8", "fp8_tensor", "fp8_block128", "fp4", *(f"int{b}_narrow" for b in range(2, 9))]


@schemes(_FIXED_POINTS + _FIXED_CODES)
def test_quantizing_again_changes_nothing(name: str):
    _, dense, each = laws.results(name)
    again = jax.jit(lambda x: fb.quantize(x, name))(jnp.asarray(dense["normal"]))
    if name in _FIXED_POINTS:
        np.testing.assert_array_equal(fb.dequantize(again), dense["normal"])
    else:
        # The product of the largest code and the scale is rounded, so the scale may come back one rounding away.
        assert np.array_equal(again.codes, each["normal"].codes)
        np.testing.assert_allclose(again.scale, each["normal"].scale, rtol=2.0**-22)


@pytest.mark.slow_after(5)
@each_scheme
def test_stacked_slices_are_the_arrays_themselves(name: str):
    stacked, dense, _ = laws.results(name)
    assert stacked.ndim == 3

    def step(carry: None, q: fb.QArray) -> tuple[None, jax.Array]:
        assert q.shape == laws.SHAPE
        return carry, fb.dequantize(q)

    _, scanned = jax.lax.scan(step, None, stacked)
    np.testing.assert_array_equal(scanned, np.stack(list(dense.values())))
    np.testing.assert_array_equal(fb.dequantize(stacked), scanned)
    sliced = stacked[1:3]
    np.testing.assert_array_equal(laws.numpy_dequantize(sliced[0]), dense["zeros"])
    np.testing.assert_array_equal(laws.numpy_dequantize(sliced), np.stack([dense["zeros"], dense["constant"]]))


@each_scheme
def test_json_and_name_read_back(name: str):
    scheme = fb.SCHEMES[name]
    assert fb.scheme(json.loads(json.dumps(scheme.to_json()))) == scheme
    assert fb.scheme(name) is scheme and scheme.name == name
    assert hash(fb.scheme(scheme.to_json())) == hash(scheme)


@pytest.mark.slow
@schemes(
    [n for n in ALL if fb.SCHEMES[n].format.name in ("e2m1", "int8", "nf4", "uint4", "ternary", "binary")],
    ("int8", "uint4", "nf4"),
)
def test_stochastic_codes_are_the_neighbours(name: str):
    """Every element is between the numbers of the codes next to its own, under the scales chosen for a key."""
    x = jnp.asarray(laws.case("normal"))
    if name == "nf4_dq":
        with pytest.raises(fb.UnsupportedError, match="would be biased"):
            fb.quantize(x, name, key=jax.random.key(0))
        return
    q = jax.jit(lambda x, key: fb.quantize(x, name, key=key))(x, jax.random.key(0))
    assert not np.array_equal(q.codes, laws.results(name)[2]["normal"].codes)
    scheme, values = q.scheme, q.scheme.format.values()
    numbers, code_of = np.unique(values, return_index=True)
    rank = np.searchsorted(numbers, values[laws.unpacked(q)])

    def moved(step: int) -> np.ndarray:
        codes = jnp.asarray(code_of[np.clip(rank + step, 0, len(numbers) - 1)], jnp.uint8)
        packed = pack(codes, scheme.format.bits, scheme.packing, axis=scheme.pack_axis)
        return np.asarray(fb.dequantize(dataclasses.replace(q, codes=packed)))

    ends = np.stack([moved(-1), moved(1)])
    slack = 2.0**-20 * np.abs(ends).max()
    is_between = (ends.min(0) - slack <= x) & (x <= ends.max(0) + slack)
    assert (is_between | (rank == 0) | (rank == len(numbers) - 1)).all()
