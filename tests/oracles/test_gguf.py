"""ggml's block types against the gguf package's encoders."""

import jax.numpy as jnp
import numpy as np
import pytest

import fewbit as fb
from fewbit.array.scales import MX
from fewbit.formats import FORMATS
from tests.conformance import array_laws as laws
from tests.oracles.comparing import quantize, weights

pytestmark = pytest.mark.oracle
gguf = pytest.importorskip("gguf")


def encoded(x: np.ndarray, name: str) -> tuple[np.ndarray, list[np.ndarray]]:
    """gguf's codes as unsigned integers, and the float16 fields of each block."""
    kind = gguf.GGMLQuantizationType[name.upper()]
    halves = 2 if name.endswith("_1") else 1
    raw = gguf.quants.quantize(x, kind).reshape(-1, gguf.GGML_QUANT_SIZES[kind][1])
    fields = [raw[:, 2 * i : 2 * i + 2].copy().view(np.float16) for i in range(halves)]
    rest = raw[:, 2 * halves :]
    if name == "q8_0":
        return rest.view(np.int8).astype(int).reshape(x.shape), [f.reshape(len(x), -1) for f in fields]
    high = np.zeros((len(raw), 32), int)
    if name.startswith("q5"):
        high = np.unpackbits(rest[:, :4], axis=1, bitorder="little").astype(int) << 4
        rest = rest[:, 4:]
    codes = np.concatenate([rest & 15, rest >> 4], axis=1) + high
    return codes.reshape(x.shape), [f.reshape(len(x), -1) for f in fields]


def our_codes(q: fb.QArray) -> np.ndarray:
    """Our codes in ggml's numbering: signed for Q8_0, with an offset for Q4_0 and Q5_0."""
    values = q.scheme.format.values()[laws.unpacked(q)].astype(int)
    return values - int(q.scheme.format.min) if q.scheme.name in ("q4_0", "q5_0") else values


NAMES = ["q8_0", "q4_0", "q5_0", "q4_1", "q5_1"]


@pytest.mark.parametrize("name", NAMES)
def test_scales_are_equal_bytes(name: str):
    x = weights()
    q = quantize(jnp.asarray(x), name)
    _, fields = encoded(x, name)
    assert np.asarray(q.scale).tobytes() == fields[0].tobytes()
    if len(fields) == 2:
        assert np.asarray(q.zero_point).tobytes() == fields[1].tobytes()


@pytest.mark.parametrize("name", NAMES)
def test_codes_are_equal_where_the_scale_is_exact(name: str):
    # Blocks whose scale is a power of two, elements that are multiples of a 64th of it, and no ties.
    rng = np.random.default_rng(0)
    levels = {"q8_0": 127, "q4_0": 8, "q5_0": 16, "q4_1": 15, "q5_1": 31}[name]
    steps = rng.integers(0 if name.endswith("_1") else -levels * 64 + 64, levels * 64 - 64, (64, 32))
    steps = steps + (steps % 64 == 32)
    steps[:, 3] = levels * 64 if not name.endswith("_0") or name == "q8_0" else -levels * 64
    if name.endswith("_1"):
        steps[:, 7] = 0
    x = (steps / 64 * 2.0 ** rng.integers(-8, 3, (64, 1))).astype(np.float32)
    q = quantize(jnp.asarray(x), name)
    codes, _ = encoded(x, name)
    np.testing.assert_array_equal(our_codes(q), codes)
    np.testing.assert_array_equal(
        fb.dequantize(q),
        gguf.quants.dequantize(
            gguf.quants.quantize(x, gguf.GGMLQuantizationType[name.upper()]), gguf.GGMLQuantizationType[name.upper()]
        ),
    )


@pytest.mark.parametrize("name", NAMES)
def test_elsewhere_ours_are_nearer(name: str):
    # ggml chooses codes with the float32 scale and then stores it in float16; we choose them with the scale as stored.
    x = weights()
    q = quantize(jnp.asarray(x), name)
    kind = gguf.GGMLQuantizationType[name.upper()]
    codes, _ = encoded(x, name)
    theirs = gguf.quants.dequantize(gguf.quants.quantize(x, kind), kind)
    different = our_codes(q) != codes
    assert different.mean() < 0.05 and np.abs(our_codes(q) - codes).max() <= 1
    ours = np.asarray(fb.dequantize(q))
    np.testing.assert_array_equal(ours[~different], theirs[~different])
    # Two roundings of a product and a sum in float32 may make equal errors differ by this much.
    slack = 2.0**-22 * np.abs(x).max()
    assert (np.abs(ours - x) <= np.abs(theirs - x) + slack)[different].all()


def test_zero_blocks():
    x = np.zeros((1, 32), np.float32)
    for name in NAMES:
        codes, fields = encoded(x, name)
        q = quantize(jnp.asarray(x), name)
        # ggml stores a scale of 0, we store 1: no division by zero, the same zeros.
        assert fields[0].item() == 0 and np.asarray(q.scale).item() == 1
        assert not np.asarray(fb.dequantize(q)).any()
        np.testing.assert_array_equal(our_codes(q), codes)


def test_mxfp4_floor():
    x = weights((64, 32))
    scheme = fb.Scheme(FORMATS["e2m1"], {...: 1, -1: 32}, scale=FORMATS["e8m0"], calibration=MX("floor"))
    q = quantize(jnp.asarray(x), scheme)
    kind = gguf.GGMLQuantizationType.MXFP4
    raw = gguf.quants.quantize(x, kind)
    np.testing.assert_array_equal(q.scale[:, 0], raw[:, 0])
    codes = np.concatenate([raw[:, 1:] & 15, raw[:, 1:] >> 4], axis=1)
    # Its numbers that are nearer 0 than to the first step take code 0 whatever their sign; ours keep the sign.
    np.testing.assert_array_equal(np.where(laws.unpacked(q) == 8, 0, laws.unpacked(q)), codes)
    np.testing.assert_array_equal(fb.dequantize(q), gguf.quants.dequantize(raw, kind))


def test_mxfp4_ties_and_zero_blocks_differ():
    ties = np.float32([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 4.0] * 4)[None]
    scheme = fb.Scheme(FORMATS["e2m1"], {...: 1, -1: 32}, scale=FORMATS["e8m0"], calibration=MX("floor"))
    raw = gguf.quants.quantize(ties, gguf.GGMLQuantizationType.MXFP4)
    # ggml: the first of two equal errors, so the smaller code; ours: the even code.
    assert (raw[0, 1:9] & 15).tolist() == [0, 1, 2, 3, 4, 5, 6, 6]
    assert laws.unpacked(quantize(jnp.asarray(ties), scheme))[0, :8].tolist() == [0, 2, 2, 4, 4, 6, 6, 6]
    zeros = np.zeros((1, 32), np.float32)
    assert gguf.quants.quantize(zeros, gguf.GGMLQuantizationType.MXFP4)[0, 0] == 0
    assert np.asarray(quantize(jnp.asarray(zeros), scheme).scale).item() == 127
