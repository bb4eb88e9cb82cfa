"""Weights that a server multiplies at once are quantized with one tensor scale."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import fewbit as fb
from fewbit import io, workflows
from fewbit.methods import GPTQ
from fewbit.workflows.convert import targets
from fewbit.workflows.convert.fused import fused_rows, quantized_together
from tests.workflows.checkpoints import family_directory, needs_tokenizers, text_file

pytestmark = needs_tokenizers

LAYER = "model.layers.0."
QKV = tuple(f"{LAYER}self_attn.{name}_proj.weight" for name in "qkv")
GATE_UP = tuple(f"{LAYER}mlp.{name}_proj.weight" for name in ("gate", "up"))


SETTINGS = {
    "num_hidden_layers": 1,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 32,
    "rms_norm_eps": 1e-5,
}


def source(directory, changed=None):
    """A random Llama in bfloat16, whose q is ten times as large as k and v; `changed` replaces tensors."""
    family_directory(directory, "llama", SETTINGS)
    file = str(directory / "model.safetensors")
    arrays = load_file(file)
    arrays[QKV[0]] = 10 * arrays[QKV[0]]
    save_file({name: x.astype(ml_dtypes.bfloat16) for name, x in (arrays | (changed or {})).items()}, file)
    return workflows.load(directory)


def quantized(model, directory, to, recipe="nvfp4"):
    plan = workflows.plan_model(model, recipe=recipe)
    return io.read(workflows.quantize(model, targets.fitted(to, model, plan), directory / to, to=to).path).tensors


@pytest.mark.slow
@pytest.mark.parametrize("to", ["modelopt", pytest.param("compressed-tensors", marks=pytest.mark.long)])
def test_a_method_for_a_layout(to, tmp_path):
    """The tensors of other programs are those of the method, with a tensor scale for what is multiplied at once."""
    model = source(tmp_path / "hf")
    plan = targets.fitted(to, model, workflows.plan_model(model, recipe="nvfp4"))
    data = workflows.calibration_data(model, str(text_file(tmp_path)), windows=8)
    path, rounded = tmp_path / "better", quantized(model, tmp_path, to)
    stored = io.read(workflows.quantize(model, plan, path, to=to, method=GPTQ(), calibration=data).path).tensors
    assert {name: stored.info[name].scheme for name in stored} == {name: rounded.info[name].scheme for name in rounded}
    loaded = [workflows.load(p) for p in (path, tmp_path / to)]
    divergences = [workflows.evaluate(m, against=model, text=str(text_file(tmp_path))).against.kl.mean.value for m in loaded]
    assert divergences[0] < 0.7 * divergences[1]
    assert len({float(stored[name].tensor_scale.reshape(())) for name in QKV}) == 1


def test_matrices_are_quantized_together(tmp_path):
    model = source(tmp_path / "hf")
    sets = fused_rows(model, workflows.plan_model(model, recipe="nvfp4"), targets.fused_modules("modelopt"))
    assert {path: [row.path for row in rows] for path, rows in sets.items()} == {
        **{f"layers/0/attn/{name}": [f"layers/0/attn/{n}" for n in "qkv"] for name in "qkv"},
        **{f"layers/0/mlp/{name}": ["layers/0/mlp/gate", "layers/0/mlp/up"] for name in ("gate", "up")},
    }
    arrays = {name: model.load(f"layers/0/attn/{name}") for name in "kv"}
    found = quantized_together(arrays, sets["layers/0/attn/k"][1])
    together = fb.quantize(jnp.concatenate([jnp.asarray(x) for x in arrays.values()]), "nvfp4")
    np.testing.assert_array_equal(np.concatenate([fb.dequantize(q) for q in found.values()]), fb.dequantize(together))
    assert found["k"].tensor_scale == found["v"].tensor_scale


def test_projections_of_linear_attention_are_quantized_together(tmp_path):
    settings = {**SETTINGS, "num_hidden_layers": 2, "full_attention_interval": 2}
    heads = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16}
    model = workflows.load(family_directory(tmp_path / "hf", "qwen3_5_text", {**settings, **heads, "head_dim": 16}))
    sets = fused_rows(model, workflows.plan_model(model, recipe="nvfp4"), targets.fused_modules("modelopt"))
    assert [row.path for row in sets["layers/0/attn/z"]] == ["layers/0/attn/qkv", "layers/0/attn/z"]
    assert "layers/0/attn/out" not in sets and "layers/0/attn/alpha" not in sets


@pytest.mark.slow
@pytest.mark.parametrize("to", ["compressed-tensors", "modelopt"])
def test_a_set_is_quantized_as_the_rows_of_one_matrix(to, tmp_path):
    model = source(tmp_path / "hf")
    found = quantized(model, tmp_path, to)
    for names in (QKV, GATE_UP):
        arrays = [jnp.asarray(io.read(tmp_path / "hf").tensors[name]) for name in names]
        together = fb.dequantize(fb.quantize(jnp.concatenate(arrays), "nvfp4"))
        np.testing.assert_array_equal(np.concatenate([fb.dequantize(found[name]) for name in names]), together)
    alone = fb.quantize(jnp.asarray(model.load("layers/0/attn/k")), "nvfp4")
    assert np.asarray(found[QKV[1]].tensor_scale) != np.asarray(alone.tensor_scale)


@pytest.mark.slow
def test_other_targets_and_schemes_are_quantized_alone(tmp_path):
    model = source(tmp_path / "hf")
    alone = fb.quantize(jnp.asarray(model.load("layers/0/attn/k")), "nvfp4")
    found = quantized(model, tmp_path, "orbax")[QKV[1]]
    np.testing.assert_array_equal(fb.dequantize(found), fb.dequantize(alone))
    found = quantized(model, tmp_path, "compressed-tensors", "mxfp4")[QKV[1]]
    alone = fb.quantize(jnp.asarray(model.load("layers/0/attn/k")), "mxfp4")
    np.testing.assert_array_equal(fb.dequantize(found), fb.dequantize(alone))


def test_a_value_that_is_not_finite_is_named(tmp_path):
    bad = np.ones((32, 64), np.float32)
    bad[0, 0] = np.nan
    model = source(tmp_path / "hf", {QKV[2]: bad})
    with pytest.raises(fb.QuantError, match=r"layers/0/attn/v \(1 of"):
        quantized(model, tmp_path, "modelopt")
    assert not (tmp_path / "modelopt").exists()
