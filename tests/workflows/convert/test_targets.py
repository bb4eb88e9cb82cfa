"""Writing a model in another layout."""

import dataclasses

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import fewbit as fb
from fewbit import io, workflows
from fewbit.errors import QuantError, UnsupportedError
from fewbit.evaluate.metrics import sqnr_db
from fewbit.io.containers import reader, registry
from fewbit.io.gguf.writer import GGUFWriter
from fewbit.workflows.convert import targets
from fewbit.workflows.tensors import worst
from tests.io.containers.simple import Simple
from tests.nets.families import CASES
from tests.workflows.checkpoints import family_directory, llama_directory, needs_tokenizers
from tests.workflows.convert.test_hugging_face import model as gguf_llama


@pytest.fixture
def _simple(monkeypatch):
    for module in (registry, reader, targets):
        monkeypatch.setattr(module, "CONTAINERS", (Simple(),))


@needs_tokenizers
@pytest.mark.usefixtures("_simple")
def test_a_quantized_model_keeps_its_names_config_and_files(tmp_path):
    model = workflows.load(llama_directory(tmp_path / "hf"))
    plan = targets.fitted("simple", model, workflows.plan_model(model, recipe="int8"))
    assert plan["embed"].reason == "simple: weights of role embedding are not quantized in it"
    out = workflows.quantize(model, plan, tmp_path / "q", to="simple").path
    found, source = io.read(out), io.read(tmp_path / "hf")
    assert set(found.tensors) == set(source.tensors)
    assert {key: found.metadata[key] for key in source.metadata} == source.metadata and found.files == source.files
    name = "model.layers.0.mlp.up_proj.weight"
    np.testing.assert_array_equal(
        fb.dequantize(found.tensors[name]), fb.dequantize(fb.quantize(jnp.asarray(source.tensors[name]), "int8"))
    )
    again = workflows.load(out)
    assert again.config == model.config and again.tokenizer is not None
    outcome = workflows.quantize(again, workflows.plan_model(again, recipe="keep"), tmp_path / "b", to="hf")
    decoded = outcome.path
    expected = np.asarray(fb.dequantize(found.tensors[name])).astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(io.read(decoded).tensors[name], expected)
    result = next(one for one in outcome.tensors if again.names[one.path] == name)  # bfloat16 has lost something, too
    assert result.sqnr_db == sqnr_db(fb.dequantize(found.tensors[name]), expected) < 60
    assert result in worst(outcome.tensors) and result.bytes_after == expected.nbytes
    direct = workflows.quantize(model, plan, tmp_path / "d", to="hf").tensors
    written = io.read(tmp_path / "d").tensors[name]
    assert next(one.sqnr_db for one in direct if one.path == result.path) == sqnr_db(source.tensors[name], written)


@needs_tokenizers
@pytest.mark.parametrize("to", ["fewbit", "hf", "orbax"])
def test_weights_that_a_checkpoint_has_transposed_are_written_so(tmp_path, to):
    settings = {**CASES["gpt2"][1], "n_embd": 64, "n_layer": 1}
    model = workflows.load(family_directory(tmp_path / "m", "gpt2", settings))
    plan = workflows.plan_model(model, recipe="int4_g32")
    path, name = "layers/0/mlp/up", "transformer.h.0.mlp.c_fc.weight"
    out = workflows.quantize(model, plan, tmp_path / "q", to=to).path
    again, expected = workflows.load(out), fb.dequantize(fb.quantize(jnp.asarray(model.load(path)), "int4_g32"))
    assert io.read(out).tensors[name].shape == io.read(tmp_path / "m").tensors[name].shape == (64, 256)
    assert again.info[path].shape == (256, 64)
    if to == "hf":
        np.testing.assert_array_equal(again.load(path), np.asarray(expected).astype(ml_dtypes.bfloat16))
    else:
        assert again.load(path).scheme == again.info[path].scheme
        np.testing.assert_array_equal(fb.dequantize(again.load(path)), expected)
    assert (
        targets.refusals("gguf", model, workflows.plan_model(model, recipe="q8_0")) == {}
    )  # which has every weight [out, in]
    for source in (model, again):
        plan = workflows.plan_model(source, recipe="int4_g32" if source is model else "keep")
        if to != "hf" or source is model:
            with pytest.raises(UnsupportedError, match="codes are packed along the last axis there, and along axis -2 here"):
                targets.check_target("compressed-tensors", source, plan)


@pytest.mark.parametrize(
    ("architecture", "scheme", "is_refused"),
    [("gemma3", "nvfp4", True), ("gemma3", "mxfp4", False), ("qwen3", "nvfp4", False)],
)
def test_a_tensor_scale_that_llama_cpp_ignores_is_refused_before_work(tmp_path, architecture, scheme, is_refused):
    with GGUFWriter(tmp_path / "in.gguf", {"general.architecture": architecture}) as writer:
        for name, shape in (("token_embd", (4, 64)), ("blk.0.ffn_up", (4, 64))):
            writer.add(f"{name}.weight", np.ones(shape, np.float32))
    model = workflows.load(tmp_path / "in.gguf")
    plan = workflows.plan_model(
        model, recipe={"rules": [{"path": "blk.*", "policy": scheme, "axis": -1}, {"path": ".*", "policy": None}]}
    )
    message = (
        "cannot be stored exactly: llama.cpp ignores the tensor scale of NVFP4 in blk.0.ffn_up.weight of architecture gemma3"
    )
    if not is_refused:
        targets.check_target("gguf", model, plan)
        assert targets.refusals("gguf", model, plan) == {}
        return
    with pytest.raises(UnsupportedError, match=message):
        targets.check_target("gguf", model, plan)
    assert list(targets.refusals("gguf", model, plan)) == ["blk.0.ffn_up.weight"]


@needs_tokenizers
@pytest.mark.usefixtures("_simple")
def test_what_does_not_fit_is_refused_before_work(tmp_path):
    model = workflows.load(llama_directory(tmp_path / "hf"))
    with pytest.raises(UnsupportedError, match="nf4 is not int8"):
        workflows.quantize(model, workflows.plan_model(model, recipe="nf4"), tmp_path / "q", to="simple")
    with pytest.raises(QuantError, match="--to 'simpel' is not a file layout; did you mean"):
        workflows.quantize(model, workflows.plan_model(model, recipe="nf4"), tmp_path / "q", to="simpel")
    np.savez(tmp_path / "w.npz", w=np.ones((4, 4), np.float32))
    flat = workflows.load(tmp_path / "w.npz")
    with pytest.raises(UnsupportedError, match=r"has no config\.json with a model_type"):
        workflows.quantize(flat, workflows.plan_model(flat, recipe="keep"), tmp_path / "q", to="hf")
    assert not (tmp_path / "q").exists()


@needs_tokenizers
@pytest.mark.usefixtures("_simple")
def test_a_weight_that_the_source_stores_quantized_is_refused_with_a_way_to_decode_it(tmp_path):
    model = workflows.load(llama_directory(tmp_path / "hf"))
    workflows.quantize(model, workflows.plan_model(model, recipe="nf4"), tmp_path / "q")
    stored = workflows.load(tmp_path / "q")
    with pytest.raises(UnsupportedError, match=r"is quantized in .* already; `fewbit convert .* DIRECTORY --to hf` decodes"):
        workflows.quantize(stored, workflows.plan_model(stored, recipe="keep"), tmp_path / "out", to="simple")


@needs_tokenizers
@pytest.mark.parametrize("to", ["fewbit", "hf", "orbax"])
def test_sizes_are_those_of_what_is_written(tmp_path, to):
    if to == "orbax":
        pytest.importorskip("orbax.checkpoint")
    model = workflows.load(llama_directory(tmp_path / "llama"))
    done = workflows.quantize(model, workflows.plan_model(model, recipe="int8"), tmp_path / "q", to=to)
    written = workflows.load(done.path)
    assert done.array_bytes == written.nbytes
    assert done.file_bytes == workflows.inspect(done.path).file_bytes


@needs_tokenizers
def test_a_resumed_run_has_the_sizes_of_an_uninterrupted_one(tmp_path):
    model = workflows.load(llama_directory(tmp_path / "llama"))
    plan, seen = workflows.plan_model(model, recipe="int8"), []

    def stop(result: object) -> None:
        seen.append(result)
        if len(seen) == 9:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        workflows.quantize(model, plan, tmp_path / "q", to="hf", on_tensor=stop)
    resumed = []
    done = workflows.quantize(model, plan, tmp_path / "q", to="hf", on_resume=resumed.extend)
    assert resumed
    assert done.array_bytes == workflows.load(done.path).nbytes


@pytest.mark.usefixtures("_simple")
def test_the_embedding_of_a_gguf_source_stays_in_float():
    """It may be quantized there, under a name that only GGUF has."""
    source = gguf_llama()
    embedding = fb.quantize(jnp.asarray(source.load("embed")), "q4_0")
    info = source.info | {"embed": dataclasses.replace(source.info["embed"], scheme=embedding.scheme)}
    quantized = dataclasses.replace(source, info=info, load=lambda path: embedding if path == "embed" else source.load(path))
    for one, expected in ((source, source.load("embed")), (quantized, fb.dequantize(embedding))):
        found = targets.prepared("simple", one)
        assert found.info["embed"].scheme is None
        np.testing.assert_array_equal(found.load("embed"), expected)
        plan = targets.fitted("simple", found, workflows.plan_model(one, recipe="int8"))
        assert plan["embed"].policy is None and "weights of role embedding are not quantized" in plan["embed"].reason
        assert plan["embed"].bytes_after == expected.nbytes
        kept = targets.fitted("simple", found, workflows.plan_model(one, recipe="keep"))
        assert kept["embed"].bytes_after == expected.nbytes
        assert "model.embed_tokens.weight" in targets.planned_weights(found, plan)[1]
        assert targets.prepared("simple", found).info == found.info


@needs_tokenizers
def test_quantized_activations_go_from_one_layout_to_another_or_are_refused(tmp_path):
    model = workflows.load(llama_directory(tmp_path / "hf"))
    rule = {"path": ".*mlp/(gate|up|down)", "policy": {"weight": "int8", "activation": "int8"}}
    workflows.quantize(model, workflows.plan_model(model, recipe={"rules": [rule]}), tmp_path / "fewbit")
    source = tmp_path / "fewbit"
    for to in ("compressed-tensors", "fewbit", "compressed-tensors"):
        stored = workflows.load(source)
        source = tmp_path / f"from_{source.name}_{to}"
        workflows.quantize(stored, workflows.plan_model(stored, recipe="keep"), source, to=to)
        weight = io.read(source).tensors["model.layers.0.mlp.up_proj.weight"]
        assert weight.policy is not None and weight.policy.activation == fb.scheme("int8"), to
    stored = workflows.load(source)
    with pytest.raises(UnsupportedError, match="MLX quantizes weights only"):
        workflows.quantize(stored, workflows.plan_model(stored, recipe="keep"), tmp_path / "mlx", to="mlx")


def test_an_orbax_checkpoint_is_replaced(tmp_path):
    pytest.importorskip("orbax.checkpoint")
    np.savez(tmp_path / "a.npz", w=np.ones((4, 32), np.float32))
    model = workflows.load(tmp_path / "a.npz")
    plan = workflows.plan_model(model, recipe="keep")
    for _ in range(2):
        workflows.quantize(model, plan, tmp_path / "out", to="orbax", overwrite=True)
    (tmp_path / "out" / "mine.txt").write_text("")
    with pytest.raises(QuantError, match=r"mine\.txt"):
        workflows.quantize(model, plan, tmp_path / "out", to="orbax", overwrite=True)
