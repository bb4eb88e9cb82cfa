"""Llama 4's stacks of experts become a matrix for each expert where other programs read them so."""

import json
import pathlib

import jax.numpy as jnp
import numpy as np
import pytest

import fewbit as fb
from fewbit import workflows
from fewbit.errors import UnsupportedError
from fewbit.models import FAMILIES, config_from_hf, named_from_params
from fewbit.workflows.convert.separate_experts import with_separate_experts
from fewbit.workflows.convert.targets import fitted, prepared
from tests.nets.families import CASES, their_logits
from tests.nets.random_decoder import compiled_logits, random_params

STACK = "layers/1/mlp/experts/gate+up"
SETTINGS = {
    **CASES["llama4_text"][1],
    "hidden_size": 64,
    "intermediate_size": 64,
    "intermediate_size_mlp": 96,
    "model_type": "llama4_text",
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> pathlib.Path:
    from safetensors.numpy import save_file

    path = tmp_path_factory.mktemp("llama4")
    config = config_from_hf(SETTINGS, ["model.layers.1.feed_forward.experts.gate_up_proj"])
    named = named_from_params(random_params(config), FAMILIES["llama4_text"].table, config)
    save_file({name: np.array(array) for name, array in named.items()}, str(path / "model.safetensors"))
    (path / "config.json").write_text(json.dumps(SETTINGS))
    return path


def logits(model: workflows.Model) -> np.ndarray:
    return np.asarray(compiled_logits(model.params(), jnp.arange(20).reshape(2, 10), model.runnable_config()))


def test_the_logits_do_not_change(directory):
    model = workflows.load(directory)
    separate = with_separate_experts(model)
    assert separate.runnable_config().experts.layout == "separate"
    assert separate.info["layers/1/mlp/experts/3/down"].shape == (64, 64)
    assert separate.names["layers/1/mlp/experts/3/up"] == "model.layers.1.feed_forward.experts.3.up_proj.weight"
    assert sum(one.nbytes for one in separate.info.values()) == model.nbytes
    expected = logits(model)
    np.testing.assert_allclose(logits(separate), expected, atol=2e-6 * np.abs(expected).max(), rtol=0)
    assert with_separate_experts(separate) is separate


def test_a_plan_has_a_row_for_each_matrix(directory):
    model = workflows.load(directory)
    plan, source = workflows.plan_model(model, recipe="int4_g32"), prepared("compressed-tensors", model)
    made = fitted("compressed-tensors", source, plan)
    own = [row for row in made if row.path.startswith("layers/1/mlp/experts/")]
    assert len(own) == 3 * 4 and {row.axis for row in own} == {(-1,)}
    assert sum(row.bytes_after for row in own) == sum(
        plan[path].bytes_after for path in (STACK, STACK.replace("gate+up", "down"))
    )
    assert "embed" in {row.path for row in made}


def test_layouts_of_modules_have_separate_experts(directory, tmp_path):
    model = workflows.load(directory)
    plan = fitted(
        "compressed-tensors", prepared("compressed-tensors", model), workflows.plan_model(model, recipe="int4_g32")
    )
    written = workflows.load(workflows.quantize(model, plan, tmp_path / "q", to="compressed-tensors").path)
    assert fb.is_qarray(written.load("layers/1/mlp/experts/2/gate"))
    same = workflows.load(workflows.quantize(model, workflows.plan_model(model, recipe="int4_g32"), tmp_path / "own").path)
    stack = np.asarray(fb.dequantize(same.load(STACK)))
    np.testing.assert_array_equal(fb.dequantize(written.load("layers/1/mlp/experts/2/gate")), stack[2, :, :64].T)


def test_float_and_own_layouts_keep_the_stacks(directory, tmp_path):
    model = workflows.load(directory)
    for to in ("hf", "fewbit"):
        plan = workflows.plan_model(model, recipe="keep")
        written = workflows.load(workflows.quantize(model, plan, tmp_path / to, to=to).path)
        assert written.info[STACK].shape == (4, 64, 128)


def test_quantized_stacks_are_refused_as_they_were(directory, tmp_path):
    model = workflows.load(directory)
    kept = workflows.load(workflows.quantize(model, workflows.plan_model(model, recipe="int4_g32"), tmp_path / "q").path)
    assert with_separate_experts(kept) is kept
    with pytest.raises(UnsupportedError, match="it stores weights of modules"):
        workflows.quantize(kept, workflows.plan_model(kept, recipe="keep"), tmp_path / "other", to="compressed-tensors")


@pytest.mark.oracle
def test_transformers_runs_it(tmp_path):
    import torch
    import transformers

    config = transformers.AutoConfig.for_model(**SETTINGS, attn_implementation="eager")
    torch.manual_seed(0)
    exact = transformers.Llama4ForCausalLM(config).eval()
    exact.save_pretrained(tmp_path / "hf")
    model = workflows.load(tmp_path / "hf")
    to, plan = "compressed-tensors", workflows.plan_model(model, recipe="int4_g32")
    workflows.quantize(model, fitted(to, prepared(to, model), plan), tmp_path / "q", to=to)
    tokens = np.arange(20)[None] + 3
    options = {"dtype": torch.float32, "attn_implementation": "eager"}
    expected = their_logits(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "q", **options).eval(), tokens)
    written = workflows.load(tmp_path / "q")
    got = compiled_logits(written.params(), jnp.asarray(tokens, jnp.int32), written.runnable_config())
    np.testing.assert_allclose(got, expected, atol=1e-5 * np.abs(expected).max(), rtol=0)
