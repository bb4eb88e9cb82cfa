"""Random blocks of every ggml type decode to the very bits that the gguf package decodes."""

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fewbit as fb
from fewbit.io.gguf.blocks import LAYOUTS, is_lossless, qarray_from_blocks

KINDS = {name: gguf.GGMLQuantizationType[name] for name in LAYOUTS}
dequantize = jax.jit(fb.dequantize)
# XLA on CPU takes float32 numbers below this for zero; gguf's numpy does not.
SMALLEST_NORMAL = np.float32(2.0**-126)

# float16 scales and minima: zeros of both signs, the smallest and largest subnormals, ordinary ones, the largest.
HALVES = np.array([0.0, -0.0, 6e-8, -6e-8, 6.1e-5, -6.1e-5, 1.0, -1.0, 0.0123, -3.25, 65504.0, -65504.0], np.float16)


def random_blocks(name: str, rows: int, blocks: int, halves=HALVES) -> np.ndarray:
    """Blocks with random codes, and scales and minima from a list."""
    rng = np.random.default_rng(1)
    _, size = gguf.GGML_QUANT_SIZES[KINDS[name]]
    data = rng.integers(0, 256, (rows, blocks, size), np.uint8)
    for start in range(0, {"MXFP4": 0, "Q4_1": 4, "Q5_1": 4}.get(name, 2), 2):
        data[..., start : start + 2] = rng.choice(halves, (rows, blocks, 1)).view(np.uint8)
    return data.reshape(rows, blocks * size)


def bits(x) -> np.ndarray:
    return np.asarray(x, np.float32).view(np.uint32)


@pytest.mark.parametrize("name", [n for n in LAYOUTS if n != "MXFP4"])
def test_integer_blocks_decode_to_the_bits_that_gguf_decodes(name):
    data = random_blocks(name, 37, 12)
    q = qarray_from_blocks(data, name, (37, 384))
    assert q.shape == (37, 384)
    assert q.scheme == fb.SCHEMES[LAYOUTS[name].scheme]
    np.testing.assert_array_equal(bits(dequantize(q)), bits(gguf.dequantize(data, KINDS[name])))


@pytest.mark.parametrize("name", [n for n in LAYOUTS if n != "MXFP4"])
def test_scales_that_are_not_finite_stay_so(name):
    # A scale of -inf beside a minimum is left out: `dequantize` bounds products from below before it adds to them.
    halves = [np.inf, np.nan, 1.0] if name in ("Q4_1", "Q5_1") else [np.inf, -np.inf, np.nan, 1.0]
    data = random_blocks(name, 4, 4, np.array(halves, np.float16))
    with np.errstate(all="ignore"):
        want = gguf.dequantize(data, KINDS[name])
    got = np.asarray(dequantize(qarray_from_blocks(data, name, (4, 128))))
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


@pytest.mark.parametrize("name", LAYOUTS)
def test_nothing_is_larger_than_in_the_file(name):
    """Scales, minima and codes take exactly the bytes of the blocks."""
    data = random_blocks(name, 3, 2, HALVES)
    data[:, 0] = np.minimum(data[:, 0], 254)
    assert qarray_from_blocks(data, name, (3, 64)).nbytes == data.size


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("shape", [(32,), (5, 64), (2, 3, 32)], ids=str)
def test_any_number_of_axes(name, shape):
    _, size = gguf.GGML_QUANT_SIZES[KINDS[name]]
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    data = gguf.quantize(x, KINDS[name])
    q = qarray_from_blocks(data.reshape(-1), name, shape)
    assert q.shape == shape
    assert data.size == x.size // 32 * size
    np.testing.assert_array_equal(bits(dequantize(q)), bits(gguf.dequantize(data, KINDS[name])))


@pytest.mark.parametrize("name", ["Q8_0", "Q4_1", "MXFP4"])
def test_a_product_runs_on_what_was_read(name):
    x = np.random.default_rng(0).normal(size=(8, 64)).astype(np.float32)
    q = qarray_from_blocks(gguf.quantize(x, KINDS[name]).reshape(-1), name, x.shape)
    y = jnp.ones((3, 64), jnp.float32) @ q.T
    # The sums of 64 products are rounded differently in another order: 64 half steps of float32 at the largest sum.
    np.testing.assert_allclose(y, jnp.ones((3, 64), jnp.float32) @ dequantize(q).T, rtol=0, atol=64 * 2**-24 * 64)
