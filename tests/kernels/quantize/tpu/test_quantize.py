"""The TPU quantizer: its bytes in interpret mode are the reference's, and it is lowered for TPUs."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fewbit as fb
from fewbit.array.scales import MSE, MX, NVFP4
from fewbit.kernels.quantize import (
    Decoding,
    PallasTPUDequantizer,
    PallasTPUQuantizer,
    Quantization,
)
from fewbit.kernels.quantize.tpu.quantize import Blocks


def awkward(shape: tuple[int, ...]) -> jax.Array:
    """Tiles of many magnitudes: zeros, a NaN, an infinity, subnormal, tiny and huge ones, heavy tails."""
    rng = np.random.default_rng(0)
    x = rng.standard_t(3, size=shape).astype(np.float32) * rng.choice([1e-3, 1.0, 30.0], size=(shape[0], 1)).astype(
        np.float32
    )
    x[0], x[1, 3], x[2, 5], x[3], x[4, ::3], x[5, :32] = 0, np.nan, np.inf, 1e-39, -0.0, 1e38
    x[6] *= 1e-35
    return jnp.asarray(x)


def assert_same(x: jax.Array, scheme: fb.Scheme, axis: int) -> None:
    """The kernel's leaves are the reference's, and so are the numbers that are decoded from them."""
    bound = scheme.along(axis, x.ndim)
    problem = Quantization(x.shape, x.dtype.name, bound)
    backend = PallasTPUQuantizer(interpret=True)
    assert backend.unsupported(problem) is None
    ours = backend.run(problem, x, None, None, None, None)
    reference = fb.quantize(x, scheme, axis=axis, backend="reference")
    assert jax.tree.structure(ours) == jax.tree.structure(reference)
    for own, wanted in zip(jax.tree.leaves(ours), jax.tree.leaves(reference), strict=True):
        np.testing.assert_array_equal(np.asarray(own), np.asarray(wanted))
    decoding = Decoding(reference.shape, x.dtype.name, reference.scheme, reference.tiles)
    decoder = PallasTPUDequantizer(interpret=True)
    assert decoder.unsupported(decoding) is None
    np.testing.assert_array_equal(decoder.run(decoding, reference), fb.dequantize(reference, backend="reference"))


CASES = [("int4_g32", -1), ("nvfp4_absmax", -2), ("mxfp4", -2), ("int8", -1), ("fp8", -2), ("nf4", -1), ("mxfp8", -1)]
CASES += [("int8", -2), ("nvfp4", -1), ("nvint4", -1), ("uint4_g32", -1), ("uint8", -2)]
QUICK = CASES[:2]


@pytest.mark.parametrize(
    ("name", "axis"), [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in CASES if case not in QUICK)]
)
def test_bytes_are_the_references(name: str, axis: int):
    x = awkward((20, 64))
    assert_same(x if axis == -1 else x.T, fb.scheme(name), axis)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "axis"), [("uint4_g32", -1), ("mxfp6", -2), ("nf4", -1), ("int5_g32", -1)])
def test_a_short_last_tile_and_a_last_byte_that_is_not_full(name: str, axis: int):
    x = awkward((20, 77))
    assert_same(x if axis == -1 else x.T, fb.scheme(name), axis)


@pytest.mark.slow
def test_one_short_tile():
    assert_same(awkward((20, 13)), fb.scheme("mxfp6"), -1)
    assert_same(awkward((20, 13)), fb.scheme("uint4"), -1)


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["cheap6", "four_over_six"])
def test_rules_of_nvfp4(rule: str):
    """But for tiles of one magnitude, which 4 and 6 both hit: there the roundings of the errors decide."""
    x = awkward((20, 64)).at[5, :32].multiply(jnp.linspace(0.2, 1, 32))
    assert_same(x, dataclasses.replace(fb.scheme("nvfp4"), calibration=NVFP4(rule)), -1)


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["floor", "rceil", "even", "threshold", "optimal"])
def test_rules_of_powers_of_two(rule: str):
    assert_same(awkward((20, 64)), dataclasses.replace(fb.scheme("mxfp4"), calibration=MX(rule)), -1)


@pytest.mark.slow
def test_several_blocks_and_axes_and_bfloat16():
    x = jnp.asarray(np.random.default_rng(1).normal(size=(2, 2560, 130)), jnp.bfloat16)
    assert Blocks.of(2560, 130, 32, 4, is_last=False).grid == (2, 2)
    assert_same(x, fb.scheme("mxfp4"), -2)


@pytest.mark.slow
def test_the_last_of_several_blocks_is_short():
    x = jnp.asarray(np.random.default_rng(1).normal(size=(3, 4200)), jnp.float32)
    cut = Blocks.of(4200, 3, 64, 4, is_last=True)
    assert cut.grid == (1, 3)
    assert 4200 % cut.rows % 64 > 0
    assert_same(x, fb.scheme("uint4_g64"), -1)


def test_reasons():
    problem = Quantization((4, 64), "float32", fb.scheme("mxfp4").along(-1, 2))
    backend = PallasTPUQuantizer()
    assert backend.unsupported(problem) is None
    assert str(backend.not_chosen(problem)).startswith("there are several devices")
    for changed, reason in (
        ({"dtype": "float16"}, "the array is float16, must be float32 or bfloat16"),
        ({"key_impl": "threefry2x32"}, "stochastic rounding, given scales"),
        ({"shape": (4, 8192), "scheme": fb.scheme("int8").along(-1, 2)}, "tiles of 8192; up to 4096 fit in VMEM"),
        ({"scheme": fb.scheme("int3_g20").along(-1, 2)}, "tiles of 20 on axis -1; the length must be a multiple of 8"),
        ({"scheme": fb.scheme("q4_1").along(-1, 2)}, "scales or offsets are stored as float16"),
        ({"scheme": fb.scheme("nf4_dq").along(-1, 2)}, "quantized scales"),
        ({"scheme": dataclasses.replace(fb.scheme("int4"), packing=fb.Packing(high_first=True))}, "high-first packing"),
        ({"scheme": dataclasses.replace(fb.scheme("int4_g32"), calibration=MSE()).along(-1, 2)}, "calibration mse with"),
        ({"scheme": fb.scheme("fp8_block128").along(-1, 2), "shape": (256, 256)}, "extend over several axes"),
    ):
        refusal = backend.unsupported(dataclasses.replace(problem, **changed))
        assert refusal is not None
        assert reason in refusal


@pytest.mark.newest
@pytest.mark.parametrize(("name", "axis"), [("mxfp4", -1), ("nf4", -2), ("int8", -1), ("mxfp6", -2), ("uint4_g64", -1)])
def test_it_is_lowered_for_tpus_and_reads_its_input_once(name: str, axis: int):
    x = jax.ShapeDtypeStruct((1024, 2048), jnp.bfloat16)
    traced = jax.jit(lambda x: fb.quantize(x, name, axis=axis, backend="pallas_tpu")).trace(x)
    text = traced.lower(lowering_platforms=("tpu",)).as_text()
    assert text.count("tpu_custom_call") == 1
    assert text.count("1024x2048xf32") == 0  # nothing of the input's size beside the kernel
    with pytest.raises(fb.UnsupportedError, match="it runs on tpu, and the program is compiled for cpu"):
        traced.lower(lowering_platforms=("cpu",))


def test_decoding_is_lowered_for_tpus_and_makes_no_array_of_codes():
    q = jax.eval_shape(lambda x: fb.quantize(x, "mxfp6"), jax.ShapeDtypeStruct((1024, 2048), jnp.bfloat16))
    traced = jax.jit(lambda q: fb.dequantize(q, backend="pallas_tpu")).trace(q)
    text = traced.lower(lowering_platforms=("tpu",)).as_text()
    assert text.count("tpu_custom_call") == 1
    assert "1024x2048xui8" not in text


def test_reasons_of_decoding():
    def refusal(name: str, shape: tuple[int, ...] = (4, 64), dtype: str = "float32") -> str | None:
        scheme = fb.scheme(name).along(-1, len(shape))
        return PallasTPUDequantizer().unsupported(Decoding(shape, dtype, scheme, scheme.tiles(len(shape))))

    assert refusal("q8_0") is None  # scales in float16 come as their bits
    assert refusal("int4", dtype="float16") == "the array is float16, must be float32 or bfloat16"
    assert refusal("nf4_dq") == "interleaved or high-first packing, or quantized scales: use backend='reference'"
    assert (
        refusal("fp8_block128", (256, 256)) == "tiles (128, 128) extend over several axes, or not along one of the last two"
    )


def test_a_named_backend_is_not_replaced_on_another_platform():
    x = jnp.ones((4, 64))
    for run in (jax.jit, jax.vmap, without_jit):
        with pytest.raises(fb.UnsupportedError) as refusal:
            run(lambda x: fb.quantize(x, "mxfp4", backend="pallas_tpu"))(x[None] if run is jax.vmap else x)
        assert refusal.value.reasons == {"pallas_tpu": "it runs on tpu, and the program is compiled for cpu"}


def without_jit(f: Callable[..., Any]) -> Callable[..., Any]:
    return jax.disable_jit()(f)
