"""Any checkpoint becomes a model: with its network where it is known, as flat tensors where not."""

import os

import numpy as np
import pytest

from fewbit import io, models, workflows
from fewbit.errors import QuantError, UnsupportedError
from tests.nets.checkpoints import needs_glassllm
from tests.nets.families import CASES
from tests.nets.random_decoder import SMALL, random_params
from tests.workflows.checkpoints import family_directory, llama_directory, needs_tokenizers, text_file


@needs_tokenizers
def test_a_hugging_face_directory_is_a_llama_under_our_paths(tmp_path):
    model = workflows.load(llama_directory(tmp_path / "hf"))
    assert (model.architecture, model.kind, model.config) == ("llama", "safetensors", SMALL)
    assert list(model.info) == list(models.shapes(SMALL))
    expected = models.paths_of_params(random_params(SMALL), SMALL)
    for path, array in models.paths_of_params(model.params(), SMALL).items():
        np.testing.assert_array_equal(array, expected[path])
    assert model.readable_tokenizer().vocab == SMALL.vocab


@needs_glassllm
def test_glassllm_matrices_are_turned_to_out_in():
    model = workflows.load("glassllm")
    assert model.info["layers/0/mlp/down"].shape == (128, 341) == model.load("layers/0/mlp/down").shape
    assert model.tokenizer is not None


def test_an_unknown_network_loads_as_flat_tensors(tmp_path):
    np.savez(tmp_path / "a.npz", weight=np.ones((4, 8), np.float32))
    model = workflows.load(tmp_path / "a.npz")
    assert model.config is None
    assert list(model.info) == ["weight"]
    with pytest.raises(
        UnsupportedError,
        match=r"a\.npz cannot be run by fewbit's decoder: .*the architecture is unknown.*evaluated by `fewbit eval`",
    ):
        model.runnable_config()
    with pytest.raises(UnsupportedError, match=r"has no tokenizer: the architecture is unknown"):
        model.readable_tokenizer()


@needs_tokenizers
def test_an_incomplete_llama_says_what_it_lacks(tmp_path):
    from safetensors.numpy import load_file, save_file

    directory = llama_directory(tmp_path / "hf")
    arrays = load_file(directory / "model.safetensors")
    del arrays["model.layers.1.mlp.up_proj.weight"]
    save_file(arrays, str(directory / "model.safetensors"))
    model = workflows.load(directory)
    assert model.config is None
    assert "lacks model.layers.1.mlp.up_proj.weight" in model.why_not_run


@pytest.mark.parametrize("name", ["decoder", "llama"])
def test_a_fewbit_directory_with_other_tensors_than_its_network_is_flat(name, tmp_path):
    config = {"architecture": name, name: SMALL.to_json()}
    io.write(tmp_path / "q", {"embed": np.ones((3, 4), np.float32)}, config=config)
    assert "the configuration has 3 layers, but the checkpoint has 1 tensors" in workflows.load(tmp_path / "q").why_not_run


@needs_tokenizers
@pytest.mark.parametrize(
    ("model_type", "roles"),
    [
        ("gpt_oss", {"experts": {("experts", (-2,))}, "sinks": {("sinks", ())}, "bias": {("bias", ())}}),
        ("qwen2_moe", {"experts": {("matmul", (-1,))}, "shared_expert_gate": {("router", ())}, "bias": {("bias", ())}}),
        ("deepseek_v3", {"experts": {("matmul", (-1,))}, "bias": {("bias", ())}}),
    ],
    ids=["gpt_oss", "qwen2_moe", "deepseek_v3"],
)
def test_the_trace_of_a_mixture_gives_the_roles_of_its_family(model_type, roles, tmp_path):
    model = workflows.load(family_directory(tmp_path, model_type, CASES[model_type][1]))
    assert (model.architecture, model.why_not_run) == (model_type, "")
    assert model.names["layers/2/mlp/router"].startswith("model.layers.2.mlp.")
    found = {}
    for row in workflows.plan_model(model, recipe="nf4"):
        parts = row.path.split("/")
        kind = "bias" if row.path.endswith("bias") else next((part for part in parts if part in roles), parts[-1])
        found.setdefault(kind, set()).add((str(row.role), row.axis))
        assert (row.policy is not None) == (str(row.role) in ("matmul", "embedding", "experts"))
    assert {kind: found[kind] for kind in roles} == roles
    assert found["router"] == {("router", ())} and found["norm"] == {("norm", ())}


@pytest.mark.slow
@needs_tokenizers
def test_a_qwen3_directory_is_quantized_evaluated_and_generates(tmp_path):
    model = workflows.load(family_directory(tmp_path / "hf", "qwen3", CASES["qwen3"][1]))
    workflows.quantize(model, workflows.plan_model(model, recipe="int8"), tmp_path / "q")
    stored = workflows.load(tmp_path / "q")
    assert (stored.config, stored.architecture, stored.names) == (model.config, "qwen3", model.names)
    quality = workflows.evaluate(stored, against=model, text=str(text_file(tmp_path)), tokens=128, window=32)
    assert 0 <= quality.against.kl.mean.value < 1e-2
    sample = workflows.generate_text(stored, "The quick ", max_tokens=4)
    assert sample.tokens == 4


@needs_tokenizers
def test_layers_of_multi_token_prediction_are_left_out(tmp_path):
    from safetensors.numpy import load_file, save_file

    directory = family_directory(tmp_path, "deepseek_v3", CASES["deepseek_v3"][1])
    file = str(directory / "model.safetensors")
    extra = {f"model.layers.3.{name}": np.ones((2, 2), np.float32) for name in ("eh_proj.weight", "self_attn.o_proj.weight")}
    save_file({**load_file(file), **extra}, file)
    model = workflows.load(directory)
    assert model.why_not_run == "" and list(model.info) == list(models.shapes(model.config))
    assert model.notes == ("2 tensors of layers for multi-token prediction are not run, and left out of what is written",)
    save_file({**load_file(file), "model.layers.4.enorm.weight": np.ones(2, np.float32)}, file)
    assert "'model.layers.4.enorm.weight'" in workflows.load(directory).why_not_run


@needs_tokenizers
def test_ranges_of_a_cache_and_biases_of_zeros_are_left_out(tmp_path):
    scale, wide = np.ones(1, np.float32), np.zeros(SMALL.hidden, np.float32)
    layer = "model.layers.0."
    ranges = {f"{layer}self_attn.{name}": scale for name in ("k_scale", "v_scale", "k_proj.k_scale", "v_proj.v_scale")}
    directory = llama_directory(tmp_path, changed={**ranges, f"{layer}mlp.up_proj.bias": wide})
    model = workflows.load(directory)
    assert model.why_not_run == "" and list(model.info) == list(models.shapes(model.config))
    llama_directory(tmp_path, changed={f"{layer}mlp.up_proj.bias": wide + 1})
    assert "'model.layers.0.mlp.up_proj.bias' is layers/0/mlp/up_bias" in workflows.load(directory).why_not_run


def test_a_model_is_called_by_its_directory_however_it_is_given(tmp_path, monkeypatch):
    io.write(tmp_path / "net", {"w": np.ones((4, 32), np.float32)})
    (tmp_path / "net-other").mkdir()
    for place, given in (("net", "."), ("net-other", "../net"), (".", "net/")):
        monkeypatch.chdir(tmp_path / place)
        assert workflows.load(given).name == "net"


def test_a_name_that_is_no_utf8_can_be_written(tmp_path):
    path = tmp_path / os.fsdecode(b"net\xff.npz")
    np.savez(path, w=np.ones((4, 32), np.float32))
    model = workflows.load(path)
    assert model.name == "net\ufffd.npz"
    facts = io.read(workflows.quantize(model, workflows.plan_model(model, recipe="keep"), tmp_path / "out").path).facts
    assert (facts["source"]["name"], list(facts["source"]["sha256"])) == (model.name, [model.name])


def test_a_missing_path_says_so(tmp_path):
    with pytest.raises(QuantError, match=r"nothing\.gguf does not exist"):
        workflows.load(tmp_path / "nothing.gguf")
