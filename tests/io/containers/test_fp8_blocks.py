"""FP8 in blocks: transformers decodes what we write to our numbers, and we decode what it writes to its numbers."""

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fewbit as fb
from fewbit import QuantError, UnsupportedError, workflows
from fewbit.io.containers.fp8_blocks import FP8Blocks
from fewbit.models import forward, stack_experts, stack_layers
from fewbit.workflows.convert import targets
from tests.nets.families import CASES, their_logits, theirs

from .stored_weights import ROUNDS, example, fuzz, numbers, read_back, same, stored, tensors_of, weight
from .torch_arrays import to_numpy, to_torch

FP8 = FP8Blocks()
NAME = "model.layers.0.mlp.up_proj.weight"
SCALE = f"{NAME}_scale_inv"
BLOCK = fb.scheme("fp8_block128")
SHAPE = (200, 300)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("scheme", "shape"),
    [
        (BLOCK, SHAPE),
        (BLOCK, (5, 7)),
        (dataclasses.replace(BLOCK, scale="bfloat16"), (576, 128)),  # the dtype of Qwen3-FP8, the rows of kv_a_proj
        (dataclasses.replace(BLOCK, tile={...: 1, -2: 64, -1: 32}), SHAPE),
    ],
    ids=["blocks", "small", "bfloat16", "64x32"],
)
def test_what_we_write_is_read_back(scheme, shape, dtype):
    q = example(scheme, shape, dtype)
    found = stored(FP8, {NAME: q}, {"model.norm.weight": np.ones(3, np.float32)}, {"torch_dtype": dtype})
    assert list(found.arrays) == ["model.norm.weight", NAME, SCALE]
    again = read_back(FP8, found)
    assert list(again) == ["model.norm.weight", NAME]
    same(q, again[NAME])
    assert (again.info[NAME].shape, again.info[NAME].dtype, again.info[NAME].scheme) == (q.shape, dtype, again[NAME].scheme)


def test_a_scale_is_a_factor():
    q = example(BLOCK, SHAPE)
    arrays = stored(FP8, {NAME: q}).arrays
    assert (arrays[NAME].dtype.name, arrays[SCALE].dtype.name) == ("float8_e4m3fn", "float32")
    assert arrays[SCALE].shape == (2, 3)
    spread = np.repeat(np.repeat(arrays[SCALE], 128, axis=0), 128, axis=1)[:200, :300]
    np.testing.assert_array_equal(arrays[NAME].astype(np.float32) * spread, numbers(q))


@pytest.fixture(scope="module")
def finegrained():
    """Their quantizer and dequantizer."""
    pytest.importorskip("torch")
    return pytest.importorskip("transformers.integrations.finegrained_fp8")


@pytest.mark.oracle
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_transformers_decodes_what_we_write(dtype, finegrained):
    import torch

    q = example(BLOCK, (256, 384), dtype)
    arrays = stored(FP8, {NAME: q}).arrays
    decode = finegrained.Fp8Dequantize(None)._dequantize_one
    result = decode(to_torch(arrays[NAME]), to_torch(arrays[SCALE]), getattr(torch, dtype))
    np.testing.assert_array_equal(to_numpy(result), numbers(q))


@pytest.mark.oracle
def test_transformers_decodes_blocks_that_are_cut_off(finegrained):
    """By the formula of its gradients; its loader takes whole blocks."""
    import torch

    q = example(BLOCK, SHAPE)
    arrays = stored(FP8, {NAME: q}).arrays
    result = finegrained._dequantize_fp8_weight(to_torch(arrays[NAME]), to_torch(arrays[SCALE]), [128, 128], torch.float32)
    np.testing.assert_array_equal(to_numpy(result), numbers(q))


@pytest.mark.oracle
@pytest.mark.parametrize("block", [(128, 128), (32, 64), None], ids=str)
def test_we_decode_what_transformers_writes(block, finegrained):
    import torch

    x = np.random.default_rng(0).standard_normal((256, 384)).astype(np.float32)
    x[:128, :128], x[128:, 7] = 0, -0.0
    config = pytest.importorskip("transformers").FineGrainedFP8Config(weight_block_size=block)
    quantizer = types.SimpleNamespace(quantization_config=config)
    parts = finegrained.Fp8Quantize(quantizer).convert({NAME: torch.from_numpy(x)})
    expected = finegrained.Fp8Dequantize(None)._dequantize_one(parts[NAME], parts[SCALE], torch.float32)
    arrays = {name: to_numpy(tensor) for name, tensor in parts.items()}
    q = FP8.decoded({"quantization_config": config.to_dict(), "dtype": "float32"}, tensors_of(arrays), "here")[NAME]
    assert q.scheme.tiles(2) == (block or (None, None))
    np.testing.assert_array_equal(numbers(q), to_numpy(expected))


SERVED = {
    "qwen3": {"hidden_size": 128, "intermediate_size": 256, "head_dim": 64},  # several blocks in a matrix
    "deepseek_v3": {},  # experts, a router, and matrices smaller than a block
}


@pytest.mark.slow
@pytest.mark.oracle
@pytest.mark.parametrize("case", SERVED)
def test_transformers_runs_what_is_written(case, tmp_path, monkeypatch):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    name, settings = CASES[case]
    monkeypatch.setitem(CASES, f"{case}-fp8", (name, settings | SERVED[case]))
    theirs(f"{case}-fp8").save_pretrained(tmp_path / "hf")
    model = workflows.load(tmp_path / "hf")
    plan = targets.fitted("fp8-blocks", model, workflows.plan_model(model, recipe="fp8_block128"))
    out = workflows.quantize(model, plan, tmp_path / "q", to="fp8-blocks")
    again = workflows.load(out.path)
    config = again.runnable_config()
    quantized = again.quantized["FP8 in blocks"]
    assert again.notes == (f"fp8-blocks: {len(quantized)} weights in fp8_block128",)
    assert "layers/2/mlp/down" in quantized or "layers/2/mlp/experts/7/down" in quantized
    assert not any("router" in path or "norm" in path for path in quantized)
    tokens = np.random.default_rng(1).integers(3, config.vocab, size=(2, 9))
    served = transformers.AutoModelForCausalLM.from_pretrained(out.path, attn_implementation="eager").eval()
    expected = their_logits(served, tokens)
    params = stack_layers(stack_experts(jax.tree.map(jnp.asarray, again.params())))
    run = jax.jit(fb.transparent(functools.partial(forward, config=config)))
    logits = run(params, jnp.asarray(tokens, jnp.int32))
    np.testing.assert_allclose(logits, expected, atol=1e-5 * np.abs(expected).max(), rtol=0)


def test_the_section_names_what_is_not_quantized():
    kept = {"model.layers.0.mlp.gate.weight": np.ones((2, 2), np.float32), "model.norm.weight": np.ones(2, np.float32)}
    section = stored(FP8, {NAME: example(BLOCK, (4, 64))}, kept).config["quantization_config"]
    assert section == {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["model.layers.0.mlp.gate", "lm_head"],
    }


def test_static_ranges_of_activations_are_not_tensors_of_the_model():
    found = stored(FP8, {NAME: example(BLOCK, (4, 64))})
    scale = {NAME.replace("weight", "activation_scale"): np.ones((), np.float32)}
    again = FP8.decoded(found.config, tensors_of({**found.arrays, **scale}), "here")
    assert list(again) == [NAME]
    assert again[NAME].policy is None


def test_a_directory_has_one_block_size():
    other = example(dataclasses.replace(BLOCK, tile={...: 1, -2: 64, -1: 64}), (4, 64))
    with pytest.raises(UnsupportedError, match="one block size in a directory"):
        stored(FP8, {NAME: example(BLOCK, (4, 64)), "m.weight": other})


@pytest.mark.parametrize(
    ("q", "activations", "reason"),
    [
        (example("fp8", (4, 64)), None, "its blocks have rows and columns"),
        (example("fp8_tensor", (4, 64)), None, "its blocks have rows and columns"),
        (example("mxfp8", (4, 64)), None, "a float scale for each block, not mxfp8"),
        (example("int8", (4, 64)), None, "it stores E4M3 numbers"),
        (example(BLOCK, (2, 4, 64)), None, "the weight has 3 axes"),
        (example(BLOCK, (4, 64)), "fp8_g128", "the engine chooses there how activations are quantized"),
    ],
)
def test_what_does_not_fit_is_refused(q, activations, reason):
    with pytest.raises(UnsupportedError, match=reason):
        FP8.check([weight(q, NAME, activations)])


@pytest.mark.parametrize(
    ("change", "error", "reason"),
    [
        ({SCALE: None}, UnsupportedError, "has FP8 numbers, and there is no"),
        ({NAME: None}, QuantError, "is missing"),
        ({NAME: np.ones(SHAPE, np.float32)}, QuantError, "is float32, expected float8_e4m3fn"),
        ({SCALE: np.ones((2, 2), np.float32)}, QuantError, r"scales of shape \(2, 2\), expected \(2, 3\)"),
        ({SCALE: np.ones((2, 3), np.uint8)}, QuantError, "is uint8, expected float32"),
    ],
    ids=["no scale", "no codes", "floats", "shape", "dtype"],
)
def test_arrays_that_do_not_fit_are_named(change, error, reason):
    found = stored(FP8, {NAME: example(BLOCK, SHAPE)})
    arrays = {name: array for name, array in (found.arrays | change).items() if array is not None}
    with pytest.raises(error, match=reason):
        FP8.decoded(found.config, tensors_of(arrays), "here")


def test_a_section_is_checked():
    found = stored(FP8, {NAME: example(BLOCK, SHAPE)})
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [0, 128]}}
    with pytest.raises(QuantError, match="quantization_config"):
        FP8.decoded(config, found.tensors, "here")
    assert not FP8.recognises({"quantization_config": {"quant_method": "fbgemm_fp8"}}, found.tensors)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("rounds", [ROUNDS[0], pytest.param(ROUNDS[1], marks=pytest.mark.long)])
def test_mutated_directories_end_in_our_own_error(rounds, tmp_path):
    fuzz(
        FP8, stored(FP8, {NAME: example(BLOCK, (200, 140))}, {"model.norm.weight": np.ones(3, np.float32)}), tmp_path, rounds
    )
