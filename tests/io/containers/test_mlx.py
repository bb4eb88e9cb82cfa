"""MLX weights: element for element those of mlx, both ways."""

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest

import fewbit as fb
from fewbit import io
from fewbit.errors import QuantError, UnsupportedError
from fewbit.io.containers.container import Weight
from fewbit.io.containers.encodings.integer_words import codes_of_words
from fewbit.io.containers.mlx import MLX
from fewbit.io.containers.writer import ContainerWriter
from tests.io.containers.stored import MODULE, NAME, quantized, read_back, tensors, values

SHAPE = (3, 128)
MODES = {"mxfp4": (32, 4), "mxfp8": (32, 8), "nvfp4": (16, 4)}


@pytest.fixture(scope="module")
def mx():
    return pytest.importorskip("mlx.core", reason="mlx is not installed")


def array(mx, x):
    """An array of mlx, and bfloat16 through its bits, which numpy's buffers lack."""
    if x.dtype == jnp.bfloat16:
        return mx.array(x.view(np.uint16)).view(mx.bfloat16)
    return mx.array(np.array(x))


def from_mlx(mx, x):
    if x.dtype == mx.bfloat16:
        return np.array(x.view(mx.uint16)).view(jnp.bfloat16)
    return np.array(x)


def stored_by_mlx(mx, dtype, shape=SHAPE, **form):
    """The arrays that mlx makes of a weight."""
    x = mx.array(np.random.default_rng(0).normal(size=shape).astype(np.float32)).astype(getattr(mx, dtype))
    parts = mx.quantize(x, **form)
    return {f"{MODULE}.{p}": from_mlx(mx, a) for p, a in zip(("weight", "scales", "biases"), parts, strict=False)}


def dequantized_by_mlx(mx, arrays, *, dtype=None, **form):
    """What mlx makes of stored arrays; scales and biases in another dtype than stored, if given."""
    parts = [array(mx, arrays[f"{MODULE}.{p}"]) for p in ("weight", "scales", "biases") if f"{MODULE}.{p}" in arrays]
    if dtype is not None:
        parts[1:] = [part.astype(dtype) for part in parts[1:]]
    return np.array(mx.dequantize(*parts, **form).astype(mx.float32))


def config(**settings):
    return {"quantization": {"group_size": 64, "bits": 4, **settings}}


@pytest.mark.oracle
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("bits", [1, 2, 3, 4, 5, 6, 8])
def test_affine_reads_as_mlx_computes(mx, bits, dtype):
    """In float32. In 16 bits mlx rounds the product before it adds; our numbers are rounded once."""
    form = {"group_size": 32, "bits": bits}
    arrays = stored_by_mlx(mx, dtype, **form)
    q = MLX().decoded(config(**form), tensors(arrays), "here")[NAME]
    assert q.dtype.name == dtype and q.scheme.format.bits == bits
    np.testing.assert_array_equal(values(q), dequantized_by_mlx(mx, arrays, dtype=mx.float32, **form))
    scale, offset = (np.repeat(np.asarray(leaf, np.float32), 32, -1) for leaf in (q.scale, q.zero_point))
    product = (codes_of_words(np.asarray(q.codes), bits) * scale).astype(q.dtype).astype(np.float32)
    np.testing.assert_array_equal((product + offset).astype(q.dtype), dequantized_by_mlx(mx, arrays, **form))


@pytest.mark.oracle
@pytest.mark.parametrize("mode", MODES)
def test_block_floats_read_as_mlx_computes(mx, mode):
    """Every code, with every finite scale: of E4M3 also the negative ones, which no encoder writes."""
    group, bits = MODES[mode]
    form = {"group_size": group, "bits": bits, "mode": mode}
    codes = np.tile(np.arange(256, dtype=np.uint8), (256, 1))
    scales = np.repeat(np.arange(256, dtype=np.uint8)[:, None], 256 * 8 // bits // group, 1)
    # XLA flushes subnormal float32 to zero; E4M3 has NaN at 127 and 255.
    keep = scales[:, 0] % 128 != 127 if mode == "nvfp4" else (scales[:, 0] > 10) & (scales[:, 0] < 245)
    arrays = {f"{MODULE}.weight": codes[keep].view(np.uint32), f"{MODULE}.scales": scales[keep]}
    q = MLX().decoded(config(**form), tensors(arrays), "here")[NAME]
    np.testing.assert_array_equal(values(q), float32_by_mlx(mx, arrays, form))


def float32_by_mlx(mx, arrays, form):
    """What mlx makes of codes and scales of one byte."""
    parts = [mx.array(arrays[f"{MODULE}.{part}"]) for part in ("weight", "scales")]
    return np.array(mx.dequantize(*parts, dtype=mx.float32, **form))


@pytest.mark.oracle
def test_a_global_scale_is_a_tensor_scale(mx):
    """As mlx-lm stores stacked experts: one for each."""
    x = np.random.default_rng(0).normal(size=(2, 4, 64)).astype(np.float32)
    x[1] *= 7
    largest = np.abs(x).max((1, 2))
    parts = [mx.quantize(mx.array(e), mode="nvfp4", global_scale=mx.array(g)) for e, g in zip(x, largest, strict=True)]
    arrays = {f"{MODULE}.{p}": np.stack([np.array(part[i]) for part in parts]) for i, p in enumerate(("weight", "scales"))}
    form = {"group_size": 16, "bits": 4, "mode": "nvfp4"}
    found = MLX().decoded(config(**form), tensors(arrays | {f"{MODULE}.global_scale": largest}), "here")
    expected = [
        np.array(mx.dequantize(*part, mode="nvfp4", global_scale=mx.array(g), dtype=mx.float32))
        for part, g in zip(parts, largest, strict=True)
    ]
    assert list(found) == [NAME] and found.info[NAME].scheme.tensor_scale
    np.testing.assert_array_equal(values(found[NAME]), np.stack(expected))


@pytest.mark.oracle
@pytest.mark.parametrize("scheme", ["affine4", "3 bits", "6 bits", "affine8_g128", "q4_1_g64", "q5_1", "q4_0", "q8_0"])
def test_mlx_computes_the_values_of_what_is_written(mx, scheme):
    """Symmetric schemes have the offset -8 (or -128) times the scale."""
    if scheme.endswith("bits"):
        scheme = fb.scheme("affine4_g32").to_json() | {"format": f"uint{scheme[0]}"}
    weight, q = quantized(scheme, SHAPE, "bfloat16")
    arrays, back = read_back(MLX(), weight, q)
    assert arrays[NAME].dtype == np.uint32 and arrays[NAME].shape == (3, 128 * q.scheme.format.bits // 32)
    form = {"group_size": q.scheme.tile[-1], "bits": q.scheme.format.bits}
    np.testing.assert_array_equal(dequantized_by_mlx(mx, arrays, dtype=mx.float32, **form), values(q))
    np.testing.assert_array_equal(values(back), values(q))
    if q.scheme.zero_point is not None:
        assert dataclasses.replace(back.scheme, calibration=q.scheme.calibration) == q.scheme


@pytest.mark.oracle
@pytest.mark.parametrize(("scheme", "mode"), [("mxfp4", "mxfp4"), ("mxfp8", "mxfp8"), ("nvfp4_one_level", "nvfp4")])
def test_mlx_computes_the_values_of_block_floats(mx, scheme, mode):
    weight, q = quantized(scheme, (2, 3, 64))
    arrays, back = read_back(MLX(), weight, q)
    form = dict(zip(("group_size", "bits"), MODES[mode], strict=True), mode=mode)
    np.testing.assert_array_equal(np.isnan(values(q)), np.isnan(float32_by_mlx(mx, arrays, form)))
    np.testing.assert_array_equal(float32_by_mlx(mx, arrays, form), values(q))
    assert back.scheme == q.scheme and back.dtype == jnp.bfloat16


def test_the_most_common_form_is_at_the_top_and_others_by_name():
    weights = [quantized(s, SHAPE, name=f"{n}.weight")[0] for n, s in (("a", "affine4"), ("b", "affine4"), ("c", "mxfp4"))]
    files = MLX().files(weights, [], {})
    expected = {"group_size": 64, "bits": 4, "mode": "affine", "c": {"group_size": 32, "bits": 4, "mode": "mxfp4"}}
    assert files.config == {"quantization": expected, "quantization_config": expected}
    assert files.metadata == {"format": "mlx"}
    arrays = {"norm.weight": np.ones(3, np.float16), "gate.weight": np.ones((3, 4), np.float16)}
    for weight in weights:
        arrays |= MLX().encoded(weight, quantized(weight.scheme, SHAPE)[1])
    assert MLX().recognises(files.config, tensors(arrays))
    found = MLX().decoded(files.config, tensors(arrays), "here")
    assert {n: i.scheme.name for n, i in found.info.items() if i.scheme} == {
        "a.weight": "affine4",
        "b.weight": "affine4",
        "c.weight": "mxfp4",
    }


@pytest.mark.parametrize(
    ("scheme", "shape", "reason"),
    [
        ("nvfp4", SHAPE, r"it has a tensor scale, which MLX's linear layers lack \(nvfp4_one_level has none\)"),
        ("uint4_f16_g64", SHAPE, "its offsets are not float16 like its scales"),
        ("int4_g64", SHAPE, "signed, which MLX stores exactly only with float16 or bfloat16 scales"),
        ("affine4_g16", SHAPE, "groups of 16 and 4 bits; there are groups of 32, 64, 128"),
        ("affine4", (3, 96), "groups of 64 do not divide its rows of 96"),
        ("nf4", SHAPE, "of floats there are mxfp4, mxfp8 and nvfp4_one_level"),
        ("int8", SHAPE, "its groups do not run along the rows"),
    ],
)
def test_what_does_not_fit_is_refused(scheme, shape, reason):
    with pytest.raises(UnsupportedError, match=reason):
        MLX().check([Weight(NAME, shape, "float32", fb.scheme(scheme))])


@pytest.mark.parametrize(
    ("settings", "change", "message"),
    [
        ({"bits": 8}, {}, "do not fit 8 bits in groups of 64"),
        ({"group_size": 1}, {}, "do not fit 4 bits in groups of 1"),
        ({"mode": "mxfp4"}, {}, "not of mode mxfp4"),
        ({"mode": "nf4"}, {}, "mode"),
        ({MODULE: {"bits": 2}}, {}, "do not fit 2 bits"),
        ({}, {"biases": None}, "biases' is missing, or not bfloat16"),
        ({}, {"scales": np.ones((3, 2), np.int32)}, "scales of int32"),
        ({}, {"scales": np.ones((3, 2), np.uint8)}, "not of mode affine"),
    ],
)
def test_damaged_modules_are_refused(settings, change, message):
    weight, q = quantized("affine4", SHAPE)
    arrays = MLX().encoded(weight, q) | {f"{MODULE}.{part}": a for part, a in change.items()}
    arrays = {name: a for name, a in arrays.items() if a is not None}
    with pytest.raises(QuantError, match=message):
        MLX().decoded(config(**settings), tensors(arrays), "here")


@pytest.mark.slow
@pytest.mark.oracle
def test_mlx_lm_loads_what_is_written(mx, tmp_path):
    """Its logits are those of transformers with our decoded weights; four forms, the embedding and tied head included."""
    transformers, utils = pytest.importorskip("transformers"), pytest.importorskip("mlx_lm.utils")
    import torch

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 40}
    config = transformers.LlamaConfig(**sizes, num_key_value_heads=2, initializer_range=0.2, tie_word_embeddings=True)
    model = transformers.LlamaForCausalLM(config).eval()
    arrays = {name: tensor.detach().numpy() for name, tensor in model.named_parameters()}
    # float32 scales, so that mlx computes in float32
    affine = fb.scheme(fb.scheme("affine4").to_json() | {"scale": "float32", "zero_point": "float32"})
    forms = {"embed": affine, "q_proj": "mxfp4", "down_proj": "mxfp8", "up_proj": "nvfp4_one_level", "gate_proj": affine}
    qs = {n: fb.quantize(jnp.asarray(a), scheme) for n, a in arrays.items() for part, scheme in forms.items() if part in n}
    weights = [Weight(n, q.shape, q.dtype.name, q.scheme) for n, q in qs.items()]
    kept = [name for name in arrays if name not in qs]
    settings = json.loads(config.to_json_string(use_diff=False)) | {"rope_theta": 10000.0}
    with ContainerWriter(tmp_path / "m", MLX(), weights=weights, kept=kept, config=settings) as writer:
        for name, value in arrays.items():
            writer.add(name, qs.get(name, value))
    theirs, _ = utils.load_model(tmp_path / "m")
    found = io.read(tmp_path / "m").tensors
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.tensor(values(found[name])))
        mine = model(torch.arange(12)[None]).logits.numpy()
    np.testing.assert_allclose(np.array(theirs(mx.arange(12)[None])), mine, rtol=2e-4, atol=2e-4)
