"""Models become GGUF files: names, metadata and tokenizer, from each container that models come in."""

import dataclasses
import functools
import json
import pathlib
import shutil
from collections.abc import Callable

import gguf
import jax.numpy as jnp
import numpy as np
import pytest

import fewbit as fb
from fewbit import QuantError, UnsupportedError, io, workflows
from fewbit.io import write_imatrix
from fewbit.io.containers.container import Weight
from fewbit.io.gguf.header import read_header
from fewbit.io.gguf.stored import stored
from fewbit.io.gguf.writer import GGUFWriter
from fewbit.models.names import shapes
from fewbit.workflows.convert.gguf import why_not, why_not_model, why_not_weight, write_gguf
from fewbit.workflows.convert.targets import check_target
from tests.io.gguf.families import COMMON, FAMILIES, save_tokenizer
from tests.models.tokenizers.fields import sentencepiece_source
from tests.nets.families import CASES
from tests.nets.random_decoder import compiled_logits
from tests.workflows.checkpoints import family_directory, llama_directory, needs_tokenizers
from tests.workflows.families import run_json

pytestmark = needs_tokenizers
CONFIG = {
    **COMMON,
    "model_type": "llama",
    "vocab_size": 300,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
    "tie_word_embeddings": True,
}


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> pathlib.Path:
    """A Hugging Face directory of a Llama with a byte-level BPE."""
    from safetensors.numpy import save_file

    path = tmp_path_factory.mktemp("hf") / "tiny"
    save_tokenizer(path)
    tokenizer = json.loads((path / "tokenizer.json").read_text())
    steps = [{"type": "Digits", "individual_digits": True}]
    steps.append({"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True})
    tokenizer["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": steps}  # a rule that fewbit reads from GGUF too
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    (path / "config.json").write_text(json.dumps(CONFIG))
    (path / "chat_template.jinja").write_text("<|im_start|>{{ x }}")
    arrays = {"model.embed_tokens.weight": normal(300, 64), "model.norm.weight": normal(64)}
    for i in range(2):
        layer = f"model.layers.{i}."
        arrays |= {f"{layer}{part}layernorm.weight": normal(64) for part in ("input_", "post_attention_")}
        rows = {"self_attn.q": (64, 64), "self_attn.k": (32, 64), "self_attn.v": (32, 64), "self_attn.o": (64, 64)}
        rows |= {"mlp.gate": (96, 64), "mlp.up": (96, 64), "mlp.down": (64, 96)}
        arrays |= {f"{layer}{part}_proj.weight": normal(*shape) for part, shape in rows.items()}
    save_file(arrays, str(path / "model.safetensors"))
    return path


def unchanged(model):
    return ((path, model.load(path)) for path in model.info)


@pytest.fixture(scope="module")
def written(directory, tmp_path_factory) -> pathlib.Path:
    model = workflows.load(directory)
    return write_gguf(model, unchanged(model), tmp_path_factory.mktemp("gguf") / "m.gguf")


def test_a_hugging_face_directory_becomes_a_model_that_runs_the_same(directory, written):
    one, other = workflows.load(directory), workflows.load(written)
    assert other.why_not_run == ""
    assert set(io.read(written).tensors) == set(gguf_names())
    tokens = jnp.arange(20)[None]
    logits = [compiled_logits(m.params(), tokens, m.runnable_config()) for m in (one, other)]
    np.testing.assert_allclose(*logits, rtol=0, atol=1e-5 * float(jnp.abs(logits[0]).max()))
    fields = io.read(written).metadata
    assert fields["general.name"] == "tiny"
    assert fields["tokenizer.chat_template"] == "<|im_start|>{{ x }}"
    assert fields["llama.rope.freq_base"] == 1e4


def gguf_names():
    yield from ("token_embd.weight", "output_norm.weight")
    for i in range(2):
        for part in ["attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm", "ffn_gate", "ffn_up", "ffn_down"]:
            yield f"blk.{i}.{part}.weight"


SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GEMMA = {"query_pre_attn_scalar": 8, "sliding_window": 8, "hidden_activation": "gelu_pytorch_tanh"}
TEXT = "the mother bathes them both; <s> then tea at 12. é\n"


def text_directory(path: pathlib.Path, family: str) -> pathlib.Path:
    """A random model of a family with the family's kind of tokenizer."""
    if family == "qwen3":
        save_tokenizer(path)
        tokenizer, vocab = (path / "tokenizer.json").read_text(), 300
    else:
        source = sentencepiece_source(adds_space=family == "llama")
        tokenizer, vocab = source.to_str(), source.get_vocab_size()
    settings = {**SIZES, **(GEMMA if family == "gemma2" else {}), "vocab_size": vocab}
    return family_directory(path, family, settings, tokenizer)


@pytest.fixture(scope="module", params=["llama", "gemma2", "qwen3"])
def both(request, tmp_path_factory) -> tuple[pathlib.Path, pathlib.Path]:
    """The directory of a family and the GGUF file written from it."""
    directory = text_directory(tmp_path_factory.mktemp("text") / request.param, request.param)
    model = workflows.load(directory)
    return directory, write_gguf(model, unchanged(model), directory.with_name("m.gguf"))


def test_a_gguf_file_reads_text_as_its_directory_does(both):
    one, other = map(workflows.load, both)
    assert other.tokenizer is not None, other.why_no_tokenizer
    assert one.tokenizer.start_ids == other.tokenizer.start_ids == (() if both[0].name == "qwen3" else (1,))
    ids = [model.tokenizer.encode(TEXT, add_start=True) for model in (one, other)]
    assert np.array_equal(*ids)
    assert one.tokenizer.decode(ids[0]) == other.tokenizer.decode(ids[0])
    windows = [workflows.evaluation_windows(model, TEXT * 2, tokens=32, window=16) for model in (one, other)]
    assert np.array_equal(*windows)


@pytest.mark.slow
def test_a_gguf_file_continues_a_prompt_as_its_directory_does(both):
    samples = [run_json("generate", path, TEXT, "--max-tokens", 12) for path in both]
    assert samples[0]["text"] == samples[1]["text"]
    assert len(samples[0]["text"]) > 5
    assert samples[0]["prompt_tokens"] == len(workflows.load(both[0]).tokenizer.encode(TEXT, add_start=True))


@pytest.mark.oracle
def test_transformers_reads_the_tokenizer_of_a_gguf_file(both):
    """Without the blanks and special tokens that its class of Llama treats otherwise than SentencePiece."""
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(both[1].parent, gguf_file=both[1].name, local_files_only=True)
    text = "the mother bathes them both; then tea at 12. é"
    assert workflows.load(both[1]).tokenizer.encode(text, add_start=True).tolist() == theirs(text)["input_ids"]


def test_a_gguf_file_passes_through(written, tmp_path):
    """Names, metadata and tokenizer byte for byte; the file type follows the new tensors."""
    model = workflows.load(written)
    quantized = {}
    for path in model.info:
        value = model.load(path)
        quantized[path] = value
        if path.endswith("mlp/up"):
            quantized[path] = fb.quantize(jnp.asarray(value), "q8_0")
    out = write_gguf(model, reversed(quantized.items()), tmp_path / "n.gguf")
    before, after = (read_header(np.fromfile(path, np.uint8), str(path)) for path in (written, out))
    assert after.encoded == before.encoded
    assert {e.name for e in after.entries} == {e.name for e in before.entries}
    kinds = {t.name: t.tensor_type.name for t in gguf.GGUFReader(out).tensors}
    assert {name for name, kind in kinds.items() if kind == "Q8_0"} == {f"blk.{i}.ffn_up.weight" for i in range(2)}
    same = write_gguf(model, unchanged(model), tmp_path / "same.gguf")
    assert same.read_bytes() == written.read_bytes()


def test_layers_for_multi_token_prediction_are_left_out_of_a_gguf_file(written, tmp_path):
    """Also of its metadata, from which llama.cpp takes the tensors that must be there."""
    header, tensors = read_header(np.fromfile(written, np.uint8), str(written)), io.read(written).tensors
    fields = {**header.encoded, "llama.block_count": 3, "llama.nextn_predict_layers": 1}
    with GGUFWriter(tmp_path / "in.gguf", fields) as writer:
        for name in tensors:
            writer.add(name, stored(tensors[name], name))
        for name in ("blk.2.attn_q.weight", "blk.2.nextn.eh_proj.weight"):
            writer.add(name, np.ones((64, 64), np.float32))
    model = workflows.load(tmp_path / "in.gguf")
    assert model.notes[-1].startswith("2 tensors of layers for multi-token prediction are not run")
    again = io.read(write_gguf(model, unchanged(model), tmp_path / "out.gguf"))
    assert (again.metadata["llama.block_count"], again.metadata["llama.nextn_predict_layers"]) == (2, 0)
    assert set(again.tensors) == set(tensors)


def test_factors_of_the_rotary_embedding_stay_in_a_gguf_file(directory, tmp_path):
    """As in the files of Llama 3.1: `rope_freqs.weight` is no parameter, and without it the model is another."""
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    }
    shutil.copytree(directory, tmp_path / "hf")
    (tmp_path / "hf" / "config.json").write_text(json.dumps(CONFIG | {"rope_scaling": scaling}))
    model = workflows.load(tmp_path / "hf")
    first = write_gguf(model, unchanged(model), tmp_path / "first.gguf")
    model = workflows.load(first)
    workflows.quantize(model, workflows.plan_model(model, recipe="q8_0"), tmp_path / "q.gguf", to="gguf")
    factors = [io.read(path).tensors["rope_freqs.weight"] for path in (first, tmp_path / "q.gguf")]
    assert len(set(factors[0].tolist())) > 1
    np.testing.assert_array_equal(*factors)


@pytest.mark.parametrize(("model_type", "is_refused"), [("gpt_oss", False), ("qwen3_moe", True)])
def test_experts_that_contract_their_first_axis_fit_in_gpt_oss_alone(tmp_path, model_type, is_refused):
    io.write(tmp_path / "m", {"w": np.ones(2, np.float32)}, config={"model_type": model_type})
    name, scheme = "model.layers.0.mlp.experts.down_proj", fb.scheme("mxfp4").along(-2, 3)
    reason = why_not_weight(workflows.load(tmp_path / "m"), Weight(name, (2, 64, 48), "bfloat16", scheme))
    assert (reason is not None) == is_refused


def test_a_quantized_router_is_refused_before_any_work(tmp_path):
    kind, settings = FAMILIES["qwen2-moe"]
    save_tokenizer(tmp_path / "m")
    tokenizer = (tmp_path / "m" / "tokenizer.json").read_text()
    model = workflows.load(family_directory(tmp_path / "m", kind, {**CONFIG, **settings}, tokenizer))
    for name, stored_name in (("router", "gate"), ("shared_expert_gate", "shared_expert_gate")):
        rule = {"path": f".*/{name}", "roles": ["router"], "policy": {"weight": "q4_0"}}
        said = rf"mlp.{stored_name}.weight cannot be stored exactly: llama.cpp needs routers in float32"
        with pytest.raises(UnsupportedError, match=said):
            check_target("gguf", model, workflows.plan_model(model, recipe={"rules": [rule]}))


@pytest.mark.slow
def test_experts_of_gpt_oss_keep_their_blocks(tmp_path):
    """transformers contracts their first axis, llama.cpp the last; gpt-oss was published in MXFP4."""
    save_tokenizer(tmp_path / "tokenizer")
    tokenizer = (tmp_path / "tokenizer" / "tokenizer.json").read_text()
    settings = {**COMMON, **FAMILIES["gpt-oss"][1], "vocab_size": 300, "rms_norm_eps": 1e-5, "num_hidden_layers": 2}
    model = workflows.load(family_directory(tmp_path / "hf", "gpt_oss", settings, tokenizer))
    rules = [{"path": ".*experts/(gate.up|down)", "policy": "mxfp4"}, {"path": ".*", "policy": None}]
    plan = workflows.plan_model(model, recipe={"rules": rules})
    workflows.quantize(model, plan, tmp_path / "q", to="gpt-oss")
    kept = workflows.load(tmp_path / "q")
    workflows.quantize(kept, workflows.plan_model(kept, recipe="keep"), tmp_path / "m.gguf", to="gguf")
    joined = np.asarray(fb.dequantize(kept.load("layers/0/mlp/experts/gate+up"), jnp.float32)).swapaxes(1, 2)  # [E, 2 F, in]
    found = io.read(tmp_path / "m.gguf").tensors
    for name, rows in (("gate", joined[:, 0::2]), ("up", joined[:, 1::2])):
        np.testing.assert_array_equal(fb.dequantize(found[f"blk.0.ffn_{name}_exps.weight"]), rows)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["q4_0", "nvfp4"])
def test_experts_of_gemma_4_and_their_factors_come_back(tmp_path, scheme):
    """In NVFP4 the factors are in the tensor scales, so that a file has none of its own."""
    save_tokenizer(tmp_path / "tokenizer")
    tokenizer = (tmp_path / "tokenizer" / "tokenizer.json").read_text()
    kind, settings = FAMILIES["gemma4-experts"]
    settings = {**CONFIG, **settings, "hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 64}
    model = workflows.load(family_directory(tmp_path / "hf", kind, settings, tokenizer))
    workflows.quantize(model, workflows.plan_model(model, recipe=scheme), tmp_path / "m.gguf", to="gguf")
    kept = workflows.load(workflows.quantize(model, workflows.plan_model(model, recipe=scheme), tmp_path / "q").path)
    found = workflows.load(tmp_path / "m.gguf")
    assert fb.is_qarray(found.load("layers/0/moe/experts/down"))
    assert ("layers/0/moe/router_scale" in found.info) == (scheme == "q4_0")
    tokens = jnp.arange(20).reshape(2, 10)
    expected = np.asarray(compiled_logits(kept.params(), tokens, kept.runnable_config()))
    got = np.asarray(compiled_logits(found.params(), tokens, found.runnable_config()))
    np.testing.assert_allclose(got, expected, atol=1e-5 * np.abs(expected).max(), rtol=0)
    again = workflows.quantize(found, workflows.plan_model(found, recipe="keep"), tmp_path / "again.gguf", to="gguf")
    assert again.path.read_bytes() == (tmp_path / "m.gguf").read_bytes()


NVFP4 = {"w": fb.quantize(normal(4, 64), "nvfp4"), "e": fb.quantize(normal(3, 4, 64), "nvfp4")}
ONE = dataclasses.replace(NVFP4["w"], tensor_scale=jnp.ones((1, 1)))


@pytest.mark.parametrize(
    ("architecture", "name", "value", "scale"),
    [
        ("qwen3moe", "blk.0.ffn_up_exps", NVFP4["e"], (3,)),
        ("qwen3", "blk.0.ffn_up", NVFP4["w"], (1,)),
        ("gemma3", "blk.0.ffn_up", ONE, None),
        ("gemma3", "blk.0.ffn_up", NVFP4["w"], "architecture gemma3"),
        ("qwen3", "token_embd", NVFP4["w"], "token_embd.weight of architecture qwen3"),
    ],
)
def test_a_gguf_source_gets_tensor_scales_where_llama_cpp_applies_them(tmp_path, architecture, name, value, scale):
    array = np.asarray(fb.dequantize(value))
    with GGUFWriter(tmp_path / "in.gguf", {"general.architecture": architecture}) as writer:
        writer.add(f"{name}.weight", array)
    model = workflows.load(tmp_path / "in.gguf")
    if isinstance(scale, str):
        with pytest.raises(UnsupportedError, match=f"ignores the tensor scale of NVFP4 in .*{scale}"):
            write_gguf(model, [(f"{name}.weight", value)], tmp_path / "out.gguf")
        return
    write_gguf(model, [(f"{name}.weight", value)], tmp_path / "out.gguf")
    found = {e.name: e.shape for e in read_header(np.fromfile(tmp_path / "out.gguf", np.uint8), "").entries}
    assert found.get(f"{name}.scale") == scale
    np.testing.assert_array_equal(fb.dequantize(io.read(tmp_path / "out.gguf").tensors[f"{name}.weight"]), array)


def test_a_tensor_scale_of_a_gguf_file_is_kept_for_any_architecture(tmp_path):
    with GGUFWriter(tmp_path / "in.gguf", {"general.architecture": "gemma3"}) as writer:
        writer.add("blk.0.ffn_up.weight", NVFP4["w"])
    model = workflows.load(tmp_path / "in.gguf")
    write_gguf(model, [("blk.0.ffn_up.weight", model.load("blk.0.ffn_up.weight"))], tmp_path / "out.gguf")
    assert (tmp_path / "out.gguf").read_bytes() == (tmp_path / "in.gguf").read_bytes()


def test_a_fewbit_directory_of_a_gguf_model_becomes_the_same_file(written, tmp_path):
    """Its rows are in GGUF's order already."""
    model = workflows.load(written)
    workflows.quantize(model, workflows.plan_model(model, recipe="keep"), tmp_path / "d")
    again = workflows.load(tmp_path / "d")
    out = write_gguf(again, unchanged(again), tmp_path / "n.gguf")
    tensors = [{name: np.asarray(c.tensors[name]) for name in c.tensors} for c in (io.read(written), io.read(out))]
    assert tensors[0].keys() == tensors[1].keys()
    for name, value in tensors[0].items():
        np.testing.assert_array_equal(tensors[1][name], value)
    one, other = (io.read(path).metadata for path in (written, out))
    changed = {key for key in one | other if one.get(key) != other.get(key)}
    assert changed <= {
        "llama.attention.key_length",  # written, though it is hidden_size / heads
        "llama.attention.value_length",
        "general.name",
        "tokenizer.ggml.bos_token_id",
        "tokenizer.ggml.padding_token_id",
        "tokenizer.ggml.add_bos_token",
    }


def test_a_fewbit_directory_of_a_hugging_face_model_becomes_the_same_file(directory, written, tmp_path):
    model = workflows.load(directory)
    workflows.quantize(model, workflows.plan_model(model, recipe="keep"), tmp_path / "tiny")
    again = workflows.load(tmp_path / "tiny")
    out = write_gguf(again, unchanged(again), tmp_path / "n.gguf")
    assert {n: np.asarray(t).tobytes() for n, t in io.read(out).tensors.items()} == {
        n: np.asarray(t).tobytes() for n, t in io.read(written).tensors.items()
    }


def test_quantized_activations_are_refused_as_llama_cpp_chooses_its_own(directory, tmp_path):
    rule = {"path": ".*", "policy": {"weight": "q8_0", "activation": "int8"}}
    model = workflows.load(directory)
    plan = workflows.plan_model(model, recipe={"rules": [rule]})
    with pytest.raises(
        UnsupportedError, match=r"llama\.cpp chooses how activations are quantized; leave them out of the recipe"
    ):
        workflows.quantize(model, plan, tmp_path / "m.gguf", to="gguf")


def test_what_cannot_become_a_gguf_file_is_refused_before_any_tensor_is_read(directory, tmp_path):
    def never():
        raise AssertionError("a tensor was read")
        yield

    other = llama_directory(tmp_path / "words")
    model = workflows.load(other)
    assert (
        why_not_model(model)
        == "tokenizer.json is not a BPE; a GGUF tokenizer of fewbit is byte-level BPE or BPE of SentencePiece"
    )
    with pytest.raises(UnsupportedError, match=r"tokenizer\.json is not a BPE"):
        write_gguf(model, never(), tmp_path / "m.gguf")
    np.savez(tmp_path / "a.npz", w=normal(4, 4))
    assert "has neither GGUF metadata nor a config.json with a model_type" in why_not_model(
        workflows.load(tmp_path / "a.npz")
    )
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"model_type": "t5"}))
    assert why_not_model(workflows.load(other)).startswith("model_type 't5' has no GGUF conversion in fewbit")
    assert why_not_model(workflows.load(directory)) is None
    llama = workflows.load(directory)
    # What a fewbit directory that was written from a GGUF file of OLMo 2 has.
    olmo = dataclasses.replace(llama.config, norms="post", qk_norm="projection")
    own = dataclasses.replace(
        llama, kind="fewbit", metadata={}, names={}, config=olmo, info=dict.fromkeys(shapes(olmo), llama.info["embed"])
    )
    assert why_not_model(own).startswith("the model is not a Llama, so no config.json can be made for it")
    assert not (tmp_path / "m.gguf").exists()


def test_a_scheme_without_a_type_leaves_no_file(directory, tmp_path):
    model = workflows.load(directory)
    q = fb.quantize(jnp.ones((64, 64)), "nf4")
    assert why_not(q.scheme, q.shape) == "GGUF has no type for nf4; the nearest schemes that fit are q4_0, q4_1, iq4_nl"
    values = ((path, q if path.endswith("attn/q") else model.load(path)) for path in model.info)
    with pytest.raises(QuantError, match=r"q_proj.* cannot be written: GGUF has no type for nf4"):
        write_gguf(model, values, tmp_path / "m.gguf")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(QuantError, match="is the model itself"):
        write_gguf(workflows.load(directory), [], directory, overwrite=True)


def test_ternary_tensors_are_written_in_either_type(tmp_path):
    q = fb.quantize(jnp.ones((2, 256)), "tq2_0")
    assert [stored(q, "w", kind).type_name for kind in ("TQ2_0", "TQ1_0")] == ["TQ2_0", "TQ1_0"]


@pytest.fixture(scope="module")
def hybrids(tmp_path_factory) -> Callable[[str], workflows.Model]:
    """Opens a small checkpoint of a family of tests/io/gguf/families.py."""

    @functools.cache
    def opened(case: str) -> workflows.Model:
        kind, settings = FAMILIES[case]
        save_tokenizer(directory := tmp_path_factory.mktemp(case) / "tokenizer")
        tokenizer = (directory / "tokenizer.json").read_text()
        return workflows.load(family_directory(directory.parent / "hf", kind, {**CONFIG, **settings}, tokenizer))

    return opened


@pytest.mark.slow
@pytest.mark.parametrize("case", ["qwen3-next", "qwen3.5", "qwen3.5-moe"])
def test_quantized_linear_attention_computes_the_same_from_a_gguf_file(case, hybrids, tmp_path):
    written = computes_the_same(hybrids(case), tmp_path, quantized="layers/0/attn/out")
    assert fb.is_qarray(written.load("layers/0/attn/out")) and fb.is_qarray(written.load("layers/0/attn/qkv"))


@pytest.mark.slow
def test_quantized_short_convolutions_compute_the_same_from_a_gguf_file(hybrids, tmp_path):
    written = computes_the_same(hybrids("lfm2"), tmp_path, quantized="layers/0/attn/out")
    assert fb.is_qarray(written.load("layers/0/attn/in")) and fb.is_qarray(written.load("layers/0/mlp/down"))


@pytest.mark.slow
@pytest.mark.parametrize("case", ["granite-hybrid", "granite-4", "granite-4-moe"])
def test_quantized_granite_4_computes_the_same_from_a_gguf_file(case, hybrids, tmp_path):
    shared = "layers/0/mlp/shared" if case == "granite-4-moe" else "layers/0/mlp"
    written = computes_the_same(hybrids(case), tmp_path, quantized=f"{shared}/down")
    assert fb.is_qarray(written.load(f"{shared}/down")) and fb.is_qarray(written.load(f"{shared}/gate"))


def computes_the_same(model: workflows.Model, tmp_path: pathlib.Path, quantized: str) -> workflows.Model:
    """Quantizes a model with q4_0, and writes that as a GGUF file, which has the same logits."""
    plan = workflows.plan_model(model, recipe="q4_0")
    assert plan[quantized].policy is not None
    kept = workflows.load(workflows.quantize(model, plan, tmp_path / "q").path)
    written = workflows.load(
        workflows.quantize(kept, workflows.plan_model(kept, recipe="keep"), tmp_path / "m.gguf", to="gguf").path
    )
    tokens = jnp.arange(20).reshape(2, 10)

    def logits(model: workflows.Model) -> np.ndarray:
        return np.asarray(compiled_logits(model.params(), tokens, model.runnable_config()))

    expected = logits(kept)
    np.testing.assert_allclose(logits(written), expected, atol=1e-5 * np.abs(expected).max(), rtol=0)
    return written


@pytest.mark.slow
def test_an_importance_matrix_has_the_channels_of_linear_attention_in_llama_cpp_order(hybrids, tmp_path):
    model = hybrids("qwen3.5")
    written = workflows.load(write_gguf(model, ((path, model.load(path)) for path in model.info), tmp_path / "m.gguf"))
    data = workflows.CalibrationData("ids", np.arange(64, dtype=np.int32).reshape(2, 32))
    ours, theirs = (workflows.importance_matrix(one, data) for one in (model, written))
    assert set(ours.entries) == set(theirs.entries) and "blk.0.ssm_out.weight" in ours.entries
    for name, one in theirs.entries.items():
        # Means of float32 numbers whose sums are in another order, 1e-6, which the norm of values near zero amplifies: 6e-5 measured.
        np.testing.assert_allclose(ours.entries[name].squares, one.squares, rtol=2e-4, err_msg=name)
    file = workflows.ImportanceFile(tmp_path / "a.gguf", theirs)
    write_imatrix(file.path, theirs)
    plan = workflows.plan_model(model, recipe="q4_0")
    found = file.observations(model, plan)["layers/0/attn/out"].squares
    order = np.arange(128).reshape(2, 2, 32).swapaxes(0, 1).reshape(-1)
    in_file = theirs.entries["blk.0.ssm_out.weight"].squares[0]
    np.testing.assert_array_equal(np.asarray(found)[order], in_file)
    assert not np.allclose(found, in_file, rtol=0.01), "channels differ, so that their order shows"


def test_blocks_that_heads_of_values_cannot_be_reordered_in_are_refused_before_any_work(hybrids):
    model = hybrids("qwen3.5")
    plan = workflows.plan_model(model, recipe={"rules": [{"path": ".*/attn/out", "policy": "nvfp4"}]})
    said = r"linear_attn\.out_proj\.weight cannot be stored exactly: .*by heads of 32, which blocks of 64 do not divide"
    with pytest.raises(UnsupportedError, match=said):
        check_target("gguf", model, plan)


def test_linear_attention_in_another_pattern_of_layers_is_refused(hybrids, tmp_path):
    settings = {
        **CONFIG,
        **FAMILIES["qwen3.5"][1],
        "layer_types": ["full_attention", *["linear_attention"] * 2, "full_attention"],
    }
    model = workflows.load(family_directory(tmp_path / "m", "qwen3_5_text", settings))
    assert "every n-th layer of qwen3_5_text; layer_types is another pattern" in (why_not_model(model) or "")


def test_gpt2_that_the_decoder_does_not_run_is_refused(tmp_path):
    path = family_directory(tmp_path / "m", "gpt2", CASES["gpt2"][1])
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "add_cross_attention": True}))
    model = workflows.load(path)
    with pytest.raises(
        UnsupportedError, match=r"stores weights \[in, out\], which are not transposed: .*add_cross_attention"
    ):
        write_gguf(model, ((name, model.load(name)) for name in model.info), tmp_path / "m.gguf")
