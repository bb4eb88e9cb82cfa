"""Random blocks of every ggml type decode to the very bits that the gguf package decodes."""

import dataclasses

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fewbit as fb
from fewbit import QuantError
from fewbit.io.gguf.blocks import LAYOUTS, blocks_from_qarray, is_lossless, qarray_from_blocks, type_of, why_not

KINDS = {name: gguf.GGMLQuantizationType[name] for name in LAYOUTS}
dequantize = jax.jit(fb.dequantize)
# XLA on CPU takes float32 numbers below this for zero; gguf's numpy does not.
SMALLEST_NORMAL = np.float32(2.0**-126)

# float16 scales and minima: zeros of both signs, the smallest and largest subnormals, ordinary ones, the largest.
HALVES = np.array([0.0, -0.0, 6e-8, -6e-8, 6.1e-5, -6.1e-5, 1.0, -1.0, 0.0123, -3.25, 65504.0, -65504.0], np.float16)


def random_blocks(name: str, rows: int, blocks: int, halves=HALVES) -> np.ndarray:
    """Blocks with random codes, and scales and minima from a list."""
    rng = np.random.default_rng(1)
    layout = LAYOUTS[name]
    data = rng.integers(0, 256, (rows, blocks, layout.nbytes), np.uint8)
    if name == "TQ2_0":
        data &= ~(data & data >> 1 & 0b01010101)  # no quantizer writes code 3
    if name == "NVFP4":
        data[..., :4] = rng.integers(0, 127, (rows, blocks, 4))
    elif name != "MXFP4":
        starts = [layout.scale] if layout.minimum is None else [layout.scale, layout.minimum]
        for start in starts:
            data[..., start : start + 2] = rng.choice(halves, (rows, blocks, 1)).view(np.uint8)
    return data.reshape(rows, blocks * layout.nbytes)


TERNARY = {"TQ1_0": "TQ1_0"}


def bits(x) -> np.ndarray:
    return np.asarray(x, np.float32).view(np.uint32)


@pytest.mark.parametrize("name", [n for n in LAYOUTS if n != "MXFP4"])
def test_random_blocks_decode_to_the_bits_that_gguf_decodes(name):
    data = random_blocks(name, 37, 12)
    q = qarray_from_blocks(data, name, (37, 12 * LAYOUTS[name].length))
    assert q.shape == (37, 12 * LAYOUTS[name].length)
    assert q.scheme == fb.SCHEMES[LAYOUTS[name].scheme]
    np.testing.assert_array_equal(bits(dequantize(q)), bits(gguf.dequantize(data, KINDS[name])))


@pytest.mark.parametrize("name", [n for n in LAYOUTS if n not in ("MXFP4", "NVFP4")])
def test_scales_that_are_not_finite_stay_so(name):
    # A scale of -inf beside a minimum is left out: `dequantize` bounds products from below before it adds to them.
    halves = [np.inf, np.nan, 1.0] if name in ("Q4_1", "Q5_1") else [np.inf, -np.inf, np.nan, 1.0]
    data = random_blocks(name, 4, 4, np.array(halves, np.float16))
    with np.errstate(all="ignore"):
        want = gguf.dequantize(data, KINDS[name])
    got = np.asarray(dequantize(qarray_from_blocks(data, name, (4, 4 * LAYOUTS[name].length))))
    np.testing.assert_array_equal(got, want)  # NaN equals NaN here


def mxfp4_of_every_exponent() -> np.ndarray:
    """One row of 32 elements for each exponent byte but 255, each with all 16 codes."""
    data = np.empty((255, 17), np.uint8)
    data[:, 0] = np.arange(255)
    data[:, 1:] = np.arange(16) | (15 - np.arange(16)) << 4
    return data


def decoded(data: np.ndarray) -> np.ndarray:
    """What gguf reads; exponent bytes 253 and 254 overflow to infinity at its largest codes, as in ggml."""
    with np.errstate(over="ignore"):
        return gguf.dequantize(data, KINDS["MXFP4"])


def test_mxfp4_decodes_to_the_bits_that_gguf_decodes_for_every_exponent_byte():
    data = mxfp4_of_every_exponent()
    want = decoded(data)
    got = np.asarray(dequantize(qarray_from_blocks(data, "MXFP4", (255, 32))))
    is_normal = (np.abs(want) >= SMALLEST_NORMAL) | (want == 0)
    np.testing.assert_array_equal(bits(got)[is_normal], bits(want)[is_normal])
    # What is left is below float32's normal numbers: exponent bytes 0 (1, 2, 3 times 2**-128) and 1 (1 times 2**-127).
    assert sorted(set(np.nonzero(~is_normal)[0])) == [0, 1]
    assert sorted(set(np.abs(want[~is_normal]))) == [2.0**-128, 2.0**-127, 3 * 2.0**-128]
    assert set(got[~is_normal]) <= {0.0}


def test_mxfp4_codes_hold_what_a_flushing_device_does_not_show():
    """The codes and scales mean the exact numbers, subnormal ones too: decoded in float64 they are gguf's."""
    data = mxfp4_of_every_exponent()
    q = qarray_from_blocks(data, "MXFP4", (255, 32))
    codes = np.asarray(fb.array.unpack(q.codes, 4, 32))
    values = q.scheme.format.values()[codes] * q.scheme.scale.values()[np.asarray(q.scale)]
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(values.astype(np.float32), decoded(data))


def test_both_zeros_of_mxfp4_are_the_zero_that_ggml_reads():
    data = np.full((1, 17), 0x88, np.uint8)
    assert not np.signbit(np.asarray(dequantize(qarray_from_blocks(data, "MXFP4", (1, 32))))).any()


def test_only_exponent_byte_255_has_no_qarray():
    data = mxfp4_of_every_exponent()
    assert is_lossless(data, "MXFP4")
    data[7, 0] = 255
    assert not is_lossless(data, "MXFP4")
    assert all(is_lossless(random_blocks(n, 1, 1), n) for n in LAYOUTS if n != "MXFP4")
    assert not is_lossless(random_blocks("NVFP4", 1, 1) | 127, "NVFP4")


def test_code_3_of_tq2_0_has_no_qarray():
    data = random_blocks("TQ2_0", 1, 2)
    assert is_lossless(data, "TQ2_0")
    data[0, 70] |= 0b1100  # a code of the second block
    assert not is_lossless(data, "TQ2_0")


@pytest.mark.parametrize("name", LAYOUTS)
def test_nothing_is_larger_than_in_the_file(name):
    """Scales, minima and codes take exactly the bytes of the blocks; two bits instead of 1.6 for TQ1_0."""
    data = random_blocks(name, 3, 2, HALVES)
    if name == "MXFP4":
        data[:, 0] = np.minimum(data[:, 0], 254)
    q = qarray_from_blocks(data, name, (3, 2 * LAYOUTS[name].length))
    more = {"NVFP4": 4, "TQ1_0": 12 * 6}  # the tensor scale; 64 bytes of codes for 52
    assert q.nbytes == data.size + more.get(name, 0)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("rows", [(), (5,), (2, 3)], ids=str)
def test_any_number_of_axes(name, rows):
    shape = (*rows, 2 * LAYOUTS[name].length)
    data = random_blocks(name, int(np.prod(rows)), 2, np.array([0.5, -2.0], np.float16))
    if name == "MXFP4":
        data.reshape(-1, 17)[:, 0] = 120
    q = qarray_from_blocks(data.reshape(-1), name, shape)
    assert q.shape == shape
    np.testing.assert_array_equal(bits(dequantize(q)), bits(gguf.dequantize(data, KINDS[name])).reshape(shape))


# --- back to blocks ---


@pytest.mark.parametrize("name", [n for n in LAYOUTS if n not in ("MXFP4", "NVFP4", "TQ1_0")])
def test_every_block_comes_back_byte_for_byte(name):
    data = random_blocks(name, 37, 12)
    again, back = blocks_from_qarray(
        qarray_from_blocks(data, name, (37, 12 * LAYOUTS[name].length)), "w", TERNARY.get(name, "TQ2_0")
    )
    assert again == name
    np.testing.assert_array_equal(back, data)


@pytest.mark.parametrize("name", ["MXFP4", "NVFP4", "TQ1_0"])
def test_blocks_with_several_codes_of_one_number_come_back_with_the_same_numbers(name):
    """ggml has two codes of 0 in E2M1, and 256 bytes for the 243 numbers of five ternary digits."""
    data = random_blocks(name, 37, 12)
    if name == "MXFP4":
        data.reshape(-1, 17)[:, 0] = np.arange(444) % 255
    _, back = blocks_from_qarray(
        qarray_from_blocks(data, name, (37, 12 * LAYOUTS[name].length)), "w", TERNARY.get(name, "TQ2_0")
    )
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(gguf.dequantize(back, KINDS[name]), gguf.dequantize(data, KINDS[name]))
    np.testing.assert_array_equal(
        back,
        blocks_from_qarray(qarray_from_blocks(back, name, (37, 12 * LAYOUTS[name].length)), "w", TERNARY.get(name, "TQ2_0"))[
            1
        ],
    )


@pytest.mark.parametrize("name", ["TQ1_0", "TQ2_0", "Q4_0", "Q5_1"])
def test_the_bytes_of_the_packages_own_quantizer_come_back(name):
    x = np.random.default_rng(0).normal(size=(6, 512)).astype(np.float32)
    data = gguf.quantize(x, KINDS[name])
    np.testing.assert_array_equal(
        blocks_from_qarray(qarray_from_blocks(data, name, x.shape), "w", TERNARY.get(name, "TQ2_0"))[1], data
    )


@pytest.mark.parametrize("name", dict.fromkeys(layout.scheme for layout in LAYOUTS.values()))
def test_what_we_quantize_is_what_ggml_reads(name):
    """Each scheme in the type that it is written in by default: gguf decodes the numbers that we decode."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=(4, 512)), jnp.float32)
    q = fb.quantize(x, name)
    kind, data = blocks_from_qarray(q, "w")
    assert kind == type_of(q.scheme)
    want = gguf.dequantize(data, KINDS[kind])
    if q.tensor_scale is not None:
        want = want * np.asarray(q.tensor_scale)
        np.testing.assert_allclose(dequantize(q), want, rtol=2**-23)  # the scales are multiplied in another order
    else:
        np.testing.assert_array_equal(dequantize(q), want)


@pytest.mark.parametrize(
    "name", ["int4_g64", "nf4", "int8", "fp8_block128", "mxfp8", "nvfp4_16x16", "nf4_dq", "int4_g32", "uint4_g32", "ternary"]
)
def test_other_schemes_are_refused_with_the_nearest_that_fit(name):
    q = fb.quantize(jnp.ones((128, 256)), name)
    with pytest.raises(
        QuantError, match=f"'w' cannot be written: GGUF has no type for {name}; the nearest schemes that fit are"
    ):
        blocks_from_qarray(q, "'w'")


def test_the_nearest_schemes_fit_the_row():
    assert why_not(fb.scheme("tq2_0"), (4, 96)) == (
        "GGUF stores tq2_0 in blocks of 256, which do not divide the last axis of (4, 96); the nearest schemes that fit are q4_0, "
        "q4_1, iq4_nl"
    )
    assert "which do not divide the last axis of (4, 80); keep it float" in why_not(fb.scheme("q4_0"), (4, 80))


def test_a_scheme_along_another_axis_is_refused():
    q = fb.quantize(jnp.ones((64, 8)), "q4_0", axis=0)
    assert why_not(q.scheme, q.shape) is not None
    assert why_not(q.T.scheme, q.T.shape) is None


def test_scales_that_ggml_reads_otherwise_are_refused():
    q = fb.quantize(jnp.ones((2, 64)), "mxfp4")
    bad = dataclasses.replace(q, scale=q.scale.at[0, 0].set(255))
    with pytest.raises(QuantError, match="w has a NaN or negative scale, which MXFP4 cannot store"):
        blocks_from_qarray(bad, "w")


@pytest.mark.parametrize("name", ["Q8_0", "Q4_1", "MXFP4"])
def test_a_product_runs_on_what_was_read(name):
    x = np.random.default_rng(0).normal(size=(8, 64)).astype(np.float32)
    q = qarray_from_blocks(gguf.quantize(x, KINDS[name]).reshape(-1), name, x.shape)
    y = jnp.ones((3, 64), jnp.float32) @ q.T
    # The sums of 64 products are rounded differently in another order: 64 half steps of float32 at the largest sum.
    np.testing.assert_allclose(y, jnp.ones((3, 64), jnp.float32) @ dequantize(q).T, rtol=0, atol=64 * 2**-24 * 64)
