"""Quantizing a checkpoint into a directory: read back bit for bit, the same bytes again, nothing on failure."""

import dataclasses
import hashlib
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fewbit as fb
from fewbit import io, workflows
from fewbit.array import nm_mask
from fewbit.errors import QuantError
from fewbit.io.gguf.writer import GGUFWriter
from fewbit.workflows.tensors import worst
from tests.workflows.checkpoints import last_axis, llama_directory, needs_tokenizers


def hashes(directory):
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in directory.iterdir()}


@pytest.mark.slow
@needs_tokenizers
def test_what_is_read_back_is_what_was_quantized(tmp_path):
    model = workflows.load(llama_directory(tmp_path / "hf"))
    plan = workflows.plan_model(model, recipe="nvfp4")
    outcome = workflows.quantize(model, plan, tmp_path / "q")
    expected = workflows.quantized_tensors(model, plan)
    stored = workflows.load(outcome.path)
    for value, result in expected:
        back = stored.load(result.path)
        assert jax.tree.structure(back) == jax.tree.structure(value)
        for a, b in zip(jax.tree.leaves(back), jax.tree.leaves(value), strict=True):
            np.testing.assert_array_equal(np.asarray(a).view(np.uint8), np.asarray(b).view(np.uint8))
    assert workflows.load(outcome.path).config == model.config


@pytest.mark.slow
@needs_tokenizers
def test_the_same_run_gives_the_same_bytes(tmp_path):
    model = workflows.load(llama_directory(tmp_path / "hf"))
    for name in ("a", "b"):
        workflows.quantize(model, workflows.plan_model(model, recipe="nf4"), tmp_path / name)
    assert hashes(tmp_path / "a") == hashes(tmp_path / "b")


@pytest.mark.slow
@needs_tokenizers
def test_sizes_are_those_of_the_files_and_of_the_arrays(tmp_path):
    model = workflows.load(llama_directory(tmp_path / "hf"))
    outcome = workflows.quantize(model, workflows.plan_model(model, recipe="int4"), tmp_path / "q")
    assert outcome.file_bytes == sum(f.stat().st_size for f in (tmp_path / "q").iterdir())
    assert outcome.tensor_file_bytes == (tmp_path / "q" / "fewbit.safetensors").stat().st_size
    stored = io.read(tmp_path / "q").tensors
    assert outcome.array_bytes == sum(stored[name].nbytes for name in stored)
    assert outcome.size == model.size
    lowest = worst(outcome.tensors)
    assert len(lowest) == 5
    assert lowest == sorted(lowest, key=lambda t: t.sqnr_db)
    # A step of absmax / 7.5 makes noise of step**2 / 12 for a signal of about (absmax / 2.5)**2: some 20 dB.
    assert all(15 < t.sqnr_db < 30 for t in lowest)


def test_keep_gives_every_tensor_back_bit_for_bit(tmp_path):
    arrays = {
        "half": np.array([[1.5, -0.0], [6e-8, 65504]], np.float16),
        "wide": np.array([[math.pi, 1e300]]),
        "ids": np.array([[1, 2]], np.int64),
        "wave": np.ones((2, 2), np.complex64),
        "step": np.float32(3),
    }
    np.savez(tmp_path / "a.npz", **arrays)
    model = workflows.load(tmp_path / "a.npz")
    workflows.quantize(model, workflows.plan_model(model, recipe="keep"), tmp_path / "kept")
    stored = io.read(tmp_path / "kept").tensors
    for name, array in arrays.items():
        assert stored[name].dtype == array.dtype
        assert stored[name].tobytes() == array.tobytes()


def test_a_quantized_tensor_in_the_planned_scheme_keeps_its_codes(tmp_path):
    x = np.random.default_rng(0).normal(size=(4, 64)).astype(np.float32)
    q = fb.quantize(x, "nf4")
    io.write(tmp_path / "q", {"w": q})
    model = workflows.load(tmp_path / "q")
    outcome = workflows.quantize(model, workflows.plan_model(model, recipe=last_axis("nf4")), tmp_path / "again")
    assert outcome.tensors[0].sqnr_db is None
    np.testing.assert_array_equal(io.read(tmp_path / "again").tensors["w"].codes, q.codes)


@pytest.mark.finding(7)
@needs_tokenizers
def test_a_hugging_face_checkpoint_keeps_its_config_names_and_files(tmp_path):
    """Our readers still take it for the network that it is, again after a second quantization, and rotated."""
    source = llama_directory(tmp_path / "hf")
    config = json.loads((source / "config.json").read_text()) | {
        "torch_dtype": "float32",
        "architectures": ["LlamaForCausalLM"],
    }
    (source / "config.json").write_text(json.dumps(config))
    files = {"LICENSE": b"free", "chat_template.jinja": b"{{ x }}", "generation_config.json": b"{}", "NOTICE.txt": b"n"}
    for name, data in files.items():
        (source / name).write_bytes(data)
    (source / "training.log").touch()
    model = workflows.load(source)
    for place, recipe in (("q", "int8"), ("again", "keep")):
        workflows.quantize(model, workflows.plan_model(model, recipe=recipe), tmp_path / place)
        written = json.loads((tmp_path / place / "config.json").read_text())
        assert written.pop("quantization_config")["quant_method"] == "fewbit"
        assert written == config
        stored = io.read(tmp_path / place)
        assert set(stored.tensors) == set(io.read(source).tensors)
        assert stored.files == files | {"tokenizer.json": (source / "tokenizer.json").read_bytes()}
        back = workflows.load(tmp_path / place)
        assert back.config == model.config and back.tokenizer is not None and list(back.info) == list(model.info)
        assert isinstance(back.load("layers/0/attn/q"), fb.QArray)
        model = back
    rotated = workflows.rotated(workflows.load(source))
    workflows.quantize(rotated, workflows.plan_model(rotated, recipe="keep"), tmp_path / "rotated")
    assert workflows.load(tmp_path / "rotated").config == rotated.config


@pytest.mark.oracle
@pytest.mark.finding(7)
def test_transformers_refuses_what_we_write(tmp_path):
    """It would otherwise return a model of random weights. Config and tokenizer are the source's own."""
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "hf")
    model = workflows.load(tmp_path / "hf")
    workflows.quantize(model, workflows.plan_model(model, recipe="int8"), tmp_path / "q")
    with pytest.raises(OSError, match=r"no file named model\.safetensors"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "q")
    found = transformers.AutoConfig.from_pretrained(tmp_path / "q")
    assert found.model_type == "llama" and found.quantization_config["quant_method"] == "fewbit"
    assert workflows.load(tmp_path / "q").config == model.config


def test_metadata_of_a_gguf_file_that_json_lacks_is_written_as_by_transformers(tmp_path):
    fields = {"general.architecture": "other", "scale": float("inf"), "limits": [float("nan"), 1.0]}
    with GGUFWriter(tmp_path / "in.gguf", fields) as writer:
        writer.add("w", np.ones((4, 32), np.float32))
    model = workflows.load(tmp_path / "in.gguf")
    workflows.quantize(model, workflows.plan_model(model, recipe="keep"), tmp_path / "out")
    found = io.read(tmp_path / "out").metadata
    assert (found["scale"], found["limits"]) == ({"__float__": "Infinity"}, [{"__float__": "NaN"}, 1.0])


def test_float64_is_rounded_to_float32_and_quantized(tmp_path):
    x = np.random.default_rng(0).normal(size=(4, 64))
    np.savez(tmp_path / "a.npz", w=x)
    model = workflows.load(tmp_path / "a.npz")
    workflows.quantize(model, workflows.plan_model(model, recipe=last_axis("int8")), tmp_path / "q")
    expected = fb.quantize(x.astype(np.float32), "int8")
    np.testing.assert_array_equal(io.read(tmp_path / "q").tensors["w"].codes, expected.codes)


def test_sparse_tensors_are_pruned_on_the_way(tmp_path):
    w = np.random.default_rng(0).standard_normal((4, 32)).astype(np.float32)
    quantized = fb.quantize(w, "int8")
    io.write(tmp_path / "m", {"w": w, "wide": w.astype(np.float64), "held": quantized})
    model = workflows.load(tmp_path / "m")
    sparsity = fb.Sparsity(2, 4)
    rules = (fb.Rule("wide", None, axis=-1, sparsity=sparsity), fb.Rule(".*", "int8", axis=-1, sparsity=sparsity))
    plan = workflows.plan_model(model, recipe=fb.Recipe(rules))
    assert plan["wide"].reason == "float64, rounded to float32 first"
    outcome = workflows.quantize(model, workflows.plan_model(model, plan=plan), tmp_path / "q")
    stored, kept = io.read(outcome.path).tensors, np.asarray(nm_mask(jnp.asarray(w), 2, 4, axis=-1))
    np.testing.assert_array_equal(stored["wide"], np.where(kept, w, 0))
    np.testing.assert_array_equal(np.asarray(stored["w"].codes), fb.quantize(np.where(kept, w, 0), "int8").codes)
    held = np.asarray(fb.dequantize(stored["held"]))
    assert (np.count_nonzero(held.reshape(4, 8, 4), axis=-1) <= 2).all()
    for result in outcome.tensors:
        assert result.is_quantized and 3 < result.sqnr_db < 20 and plan[result.path].bytes_after == result.bytes_after


def test_parameters_that_are_not_finite_are_named_and_counted(tmp_path):
    bad = np.ones((4, 64), np.float32)
    bad[1, 2], bad[3, 4] = np.nan, np.inf
    np.savez(tmp_path / "a.npz", good=np.ones((2, 32), np.float32), w=bad, gain=np.array([1, np.nan], np.float32))
    model = workflows.load(tmp_path / "a.npz")
    with pytest.raises(QuantError, match=r"NaN or infinite values in w \(2 of 256\), gain \(1 of 2\); nothing was written"):
        workflows.quantize(model, workflows.plan_model(model, recipe=last_axis("int8")), tmp_path / "q")
    assert {path.name for path in tmp_path.iterdir()} == {"a.npz", ".q.fewbit-partial", ".q.fewbit-work"}


def test_float64_beyond_float32_is_not_finite_when_it_is_quantized(tmp_path):
    np.savez(tmp_path / "a.npz", w=np.full((2, 32), 1e300))
    model = workflows.load(tmp_path / "a.npz")
    with pytest.raises(QuantError, match=r"w \(64 of 64\)"):
        workflows.quantize(model, workflows.plan_model(model, recipe=last_axis("int8")), tmp_path / "q")


def test_an_interruption_leaves_what_stood_and_a_second_run_finishes(tmp_path):
    np.savez(tmp_path / "a.npz", a=np.ones((2, 32), np.float32), b=np.ones((2, 32), np.float32))
    model = workflows.load(tmp_path / "a.npz")
    plan = workflows.plan_model(model, recipe=last_axis("int8"))
    workflows.quantize(model, workflows.plan_model(model, recipe="keep"), tmp_path / "q")
    before = hashes(tmp_path / "q")

    def interrupt(result):
        if result.path == "b":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        workflows.quantize(model, plan, tmp_path / "q", overwrite=True, on_tensor=interrupt)
    assert hashes(tmp_path / "q") == before
    assert {path.name for path in tmp_path.iterdir()} == {"a.npz", "q", ".q.fewbit-partial", ".q.fewbit-work"}
    resumed = []
    elsewhere = tuple(dataclasses.replace(row, sites=("dot_general at /elsewhere/net.py:1:2",)) for row in plan)
    plan = dataclasses.replace(plan, rows=elsewhere)  # as a fewbit in another place makes it
    workflows.quantize(model, plan, tmp_path / "q", overwrite=True, on_resume=resumed.append)
    assert [result.path for result in resumed[0]] == ["a", "b"]
    assert {path.name for path in tmp_path.iterdir()} == {"a.npz", "q"}
    assert io.read(tmp_path / "q").tensors["a"].scheme == fb.scheme("int8")


def test_the_model_itself_is_no_output(tmp_path):
    io.write(tmp_path / "q", {"w": np.ones((2, 32), np.float32)})
    model = workflows.load(tmp_path / "q")
    with pytest.raises(QuantError, match="is the model itself"):
        workflows.quantize(model, workflows.plan_model(model, recipe=last_axis("int8")), tmp_path / "q", overwrite=True)
