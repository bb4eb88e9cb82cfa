"""Qwix: full-range integers, NF4, fp8, and its block formats."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fewbit as fb
from fewbit.array.scales import MX, AbsMax, MinMax
from fewbit.formats import FORMATS
from tests.conformance import array_laws as laws
from tests.oracles.comparing import assert_same_codes, lenient_jax, quantize, weights

pytestmark = pytest.mark.oracle
pytest.importorskip("qwix")
qarray = pytest.importorskip("qwix._src.core.qarray")


def theirs(x: np.ndarray, qtype: object, tile: int | None = None, method: str = "absmax"):
    """Qwix's quantized array, one scale a row or a tile of the last axis."""
    axes = {"channelwise_axes": (0,), "tiled_axes": {1: tile} if tile else {}}
    with lenient_jax():
        return qarray.quantize(jnp.asarray(x), qarray.HowToQuantize(qtype=qtype, calibration_method=method, **axes))


def codes_of(q, fmt: str) -> np.ndarray:
    """Their numbers as our codes."""
    values = np.asarray(
        q.qvalue.astype(jnp.int32) if jnp.issubdtype(q.qvalue.dtype, jnp.integer) else q.qvalue.astype(jnp.float32)
    )
    if fmt == "nf4":
        return values
    # The encoding of a number that the format has is the number itself.
    return np.asarray(FORMATS[fmt].encode(jnp.asarray(values, jnp.float32)))


CASES = {
    "int8": (jnp.int8, "int8"),
    "int4": (jnp.int4, "int4"),
    "int2": ("int2", "int2"),
    "int6": ("int6", "int6"),
    "nf4": ("nf4", "nf4"),
    "e4m3fn": (jnp.float8_e4m3fn, "e4m3fn"),
    "e5m2": (jnp.float8_e5m2, "e5m2"),
    "e2m1": (jnp.float4_e2m1fn, "e2m1"),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("tile", [None, 32])
def test_codes_and_scales(case: str, tile: int | None):
    qtype, fmt = CASES[case]
    x = weights()
    other = theirs(x, qtype, tile)
    q = quantize(jnp.asarray(x), fb.Scheme(FORMATS[fmt], {...: 1, -1: tile}))
    # Its division by a constant is a multiplication with the reciprocal in XLA, one rounding more than ours.
    np.testing.assert_allclose(np.asarray(other.scale).reshape(q.scale.shape), q.scale, rtol=2.0**-23)
    assert_same_codes(codes_of(other, fmt), q, x)


def test_clipped_ranges():
    x = weights()
    for method, calibration in (("absmax,0.5", AbsMax(0.5)), ("rms,3", "rms,3"), ("fixed,-1,1", "fixed,-1,1")):
        other = theirs(x, jnp.int8, 32, method)
        spec = fb.Scheme.from_json({"format": "int8", "tile": {"*": 1, "-1": 32}, "calibration": str(calibration)})
        q = quantize(jnp.asarray(x), spec)
        scale = np.broadcast_to(np.asarray(other.scale).reshape(other.scale.shape[0], -1), q.scale.shape)
        # Means over 32 elements are added in another order.
        np.testing.assert_allclose(scale, q.scale, rtol=36 * 2.0**-24)


def test_minmax():
    x = weights()
    other = theirs(x, jnp.int8, None, "minmax")
    q = quantize(
        jnp.asarray(x), fb.Scheme(FORMATS["uint8"], {...: 1, -1: None}, zero_point=FORMATS["uint8"], calibration=MinMax())
    )
    np.testing.assert_allclose(np.asarray(other.scale), q.scale, rtol=2.0**-22)
    # Its codes are signed: 128 less than ours. We add the zero point before the rounding, it adds it after, so codes at a
    # midpoint may differ by one.
    np.testing.assert_array_equal(np.asarray(other.zero_point).astype(int) + 128, q.zero_point)
    difference = np.asarray(other.qvalue).astype(int) + 128 - np.asarray(q.codes).astype(int)
    assert np.abs(difference).max() <= 1 and (difference != 0).mean() < 0.001


def test_unsigned_negatives_are_zero_in_both():
    x = weights()
    q = quantize(jnp.asarray(x), fb.Scheme(FORMATS["uint8"], {...: 1, -1: None}))
    other = theirs(x, jnp.uint8)
    assert (np.asarray(other.qvalue)[x < 0] == 0).all() and (np.asarray(q.codes)[x < 0] == 0).all()


@pytest.mark.parametrize("place", range(0, 128, 19))
def test_nan_always_makes_its_tile_nan_here(place: int):
    # Qwix takes jnp.max, which on CPU loses a NaN in some layouts, and then its tile is finite and the element 0.
    x = weights()
    x[3, place] = np.nan
    expected = np.zeros(x.shape, bool)
    expected[3, place // 32 * 32 :][:32] = True
    np.testing.assert_array_equal(np.isnan(fb.dequantize(quantize(jnp.asarray(x), "int8_g32"))), expected)
    transposed = jax.jit(lambda x: fb.dequantize(fb.quantize(x, "int8_g32", axis=0)))(x.T)
    np.testing.assert_array_equal(np.isnan(transposed), expected.T)
    with lenient_jax():
        other = np.isnan(np.asarray(qarray.dequantize(theirs(x, jnp.int8, 32))))
    assert not (other & ~expected).any()


def test_mxfp4_is_rceil_or_later_almost_the_even_rule():
    # Releases up to 0.1.8 round the exponent up; later ones double the scale at a mantissa of 1.7466, "even" at 1.75.
    x = weights()
    other = theirs(x, "mxfp4", 32)
    scale = np.asarray(other.scale, np.float32).reshape(32, 4)
    found = {}
    for rule in ("even", "rceil"):
        spec = fb.Scheme(FORMATS["e2m1"], {...: 1, -1: 32}, scale=FORMATS["e8m0"], calibration=MX(rule))
        q = quantize(jnp.asarray(x), spec)
        found[rule] = np.array_equal(laws.scale_of(q), scale)
        if found[rule]:
            np.testing.assert_array_equal(codes_of(other, "e2m1"), laws.unpacked(q))
    assert any(found.values())


def test_nvfp4_without_the_tensor_scale():
    x = weights()
    other = theirs(x, "nvfp4", 16)
    q = quantize(jnp.asarray(x), fb.Scheme(FORMATS["e2m1"], {...: 1, -1: 16}, scale=FORMATS["e4m3fn"]))
    np.testing.assert_array_equal(np.asarray(other.scale, np.float32).reshape(32, 8), laws.scale_of(q))
    assert_same_codes(codes_of(other, "e2m1"), q, x)


def test_tiny_tiles_differ():
    # Qwix gives up below 1e-19 (and in float16 below 0.0078), we below the smallest normal float32.
    x = np.full((1, 32), 1e-22, np.float32)
    with warnings.catch_warnings(), lenient_jax():
        other = qarray.dequantize(theirs(x, jnp.int8, 32))
    assert not np.asarray(other).any()
    np.testing.assert_allclose(fb.dequantize(quantize(jnp.asarray(x), "int8_g32")), x, rtol=0.01)


def test_bfloat16_scales_differ():
    # Qwix divides in the array's dtype; codes of a bfloat16 array differ in about a tenth of the elements, ours are nearer.
    x = jnp.asarray(weights()).astype(jnp.bfloat16)
    with lenient_jax():
        other = qarray.quantize(x, qarray.HowToQuantize(qtype=jnp.int8, channelwise_axes=(0,)))
        dense = np.asarray(qarray.dequantize(other), np.float32)
    q = quantize(x, "int8")
    wide = np.asarray(x, np.float32)
    different = np.asarray(other.qvalue) != laws.unpacked(q).astype(np.uint8).view(np.int8)
    assert 0.02 < different.mean() < 0.2
    ours = np.linalg.norm(np.asarray(fb.dequantize(q, jnp.float32)) - wide)
    assert ours < np.linalg.norm(dense - wide)
    assert jax.tree.leaves(q)[1].dtype == jnp.float32


def test_static_ranges_are_means_over_rows_there():
    """`MeanRange` takes those of batches, and so Qwix's where a batch is one row."""
    nn = pytest.importorskip("flax.linen")
    providers = pytest.importorskip("qwix")
    x = jnp.asarray(weights((4, 64)))
    rule = providers.QtRule(module_path=".*", weight_qtype=jnp.int8, act_qtype=jnp.int8, act_static_scale=True)
    with lenient_jax(), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of Flax, in Qwix
        module = nn.Dense(8, use_bias=False)
        variables = module.init(jax.random.key(0), x)
        quantized = providers.quantize_model(module, providers.QtProvider([rule]))
        _, seen = quantized.apply(variables, x, mutable=["quant_stats"])
    (theirs,) = [leaf for leaf in jax.tree.leaves(seen) if leaf.ndim == 2]

    def ours(batches: list[jax.Array]) -> float:
        params = {"w": variables["params"]["kernel"]}
        ranges = fb.observe(lambda p, x: x @ p["w"], params, batches, "w8a8", rule=fb.calibration.MeanRange())
        return float(ranges["w"].range.high)

    assert ours(list(x[:, None])) == pytest.approx(theirs.item(), rel=1e-6)
    assert ours([x]) > 1.01 * theirs.item()
