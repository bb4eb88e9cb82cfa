"""The language model of a multimodal checkpoint runs as transformers runs it on text; its other parts are kept as they are."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fewbit as fb
from fewbit import QuantError, UnsupportedError, workflows
from fewbit.models import forward
from fewbit.models.attention.rope_scaling import Linear
from fewbit.models.families.multimodal import decoder_of, language_config
from fewbit.workflows.convert.gguf import write_gguf
from fewbit.workflows.methods.importance_file import tensor_names
from tests.io.gguf.families import save_tokenizer
from tests.nets.families import SIZES, opener, their_logits
from tests.nets.multimodal import CASES, theirs

TEXT = {**SIZES, "model_type": "llama"}
TOKENS = np.random.default_rng(1).integers(3, 96, size=(2, 20))


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Opens the checkpoint of a case that transformers wrote."""
    return opener(theirs, tmp_path_factory)


def logits(model: workflows.Model) -> np.ndarray:
    params = jax.tree.map(jnp.asarray, model.params())
    run = jax.jit(fb.transparent(functools.partial(forward, config=model.runnable_config())))
    return np.asarray(run(params, jnp.asarray(TOKENS, jnp.int32)))


def others(model: workflows.Model) -> dict[str, np.ndarray]:
    return {name: np.asarray(model.load(name)) for name in model.others}


@pytest.mark.oracle
@pytest.mark.parametrize("case", CASES)
def test_the_logits_of_text_are_those_of_transformers(case: str, opened: Any):
    model, expected = opened(case), their_logits(theirs(case), TOKENS)
    np.testing.assert_allclose(logits(model), expected, atol=1e-5 * np.abs(expected).max(), rtol=0)
    assert len(model.others) > 10 and model.architecture == case
    assert f"{len(model.others)} tensors belong to other parts than the language model" in model.notes[-1]


@pytest.mark.oracle
@pytest.mark.slow
@pytest.mark.parametrize("to", ["fewbit", "compressed-tensors", "hf"])
@pytest.mark.parametrize("case", ["gemma3", "qwen2_5_vl"])  # names before and after that of the language model
def test_the_other_parts_are_written_as_they_are(case: str, to: str, opened: Any, tmp_path: Any):
    model = opened(case)
    plan = workflows.plan_model(model, recipe="w4")
    rows = [plan[path] for path in model.others]
    assert all(row.policy is None and row.reason == "not a part of the language model" for row in rows)
    out = workflows.quantize(model, plan, tmp_path / "out", to=to)
    again = workflows.load(out.path)
    assert again.config == model.config and again.others == model.others
    for name, array in others(again).items():
        np.testing.assert_array_equal(array.astype(np.float32), np.asarray(model.load(name)))
    assert (to == "hf") == (not again.quantized)
    if to == "compressed-tensors":
        served = type(theirs(case)).from_pretrained(out.path).eval()
        expected = their_logits(served, TOKENS)
        np.testing.assert_allclose(logits(again), expected, atol=1e-5 * np.abs(expected).max(), rtol=0)


@pytest.mark.oracle
@pytest.mark.slow
def test_transformers_runs_two_schemes_of_the_language_model_alone(opened: Any, tmp_path: Any):
    """Its modules have other names than the tensors of the file."""
    model = opened("gemma3")
    rules = (fb.Rule(r".*(down|o)", "int8"), fb.Rule(r"layers/.*/(q|k|v|gate|up)", "int4"))
    plan = workflows.plan_model(model, recipe=fb.Recipe(rules))
    out = workflows.quantize(model, plan, tmp_path / "out", to="compressed-tensors")
    served = type(theirs("gemma3")).from_pretrained(out.path).eval()
    expected = their_logits(served, TOKENS)
    np.testing.assert_allclose(logits(workflows.load(out.path)), expected, atol=1e-5 * np.abs(expected).max(), rtol=0)


@pytest.mark.oracle
@pytest.mark.slow
def test_a_gguf_file_has_the_language_model(opened: Any, tmp_path: Any):
    save_tokenizer(tmp_path / "tokenizer")
    files = {file.name: file.read_bytes() for file in (tmp_path / "tokenizer").iterdir()}
    model = dataclasses.replace(opened("gemma3"), files=files)
    path = write_gguf(model, ((name, model.load(name)) for name in model.info), tmp_path / "m.gguf")
    again = workflows.load(path)
    assert again.metadata["general.architecture"] == "gemma3" and not again.others
    assert tensor_names(model, "layers/0/mlp/up") == ("blk.0.ffn_up.weight",)  # of importance matrices
    expected = logits(model)
    np.testing.assert_allclose(logits(again), expected, atol=1e-5 * np.abs(expected).max(), rtol=0)


@pytest.mark.oracle
def test_changes_of_the_decoder_itself_are_refused(opened: Any):
    model = opened("llava")
    with pytest.raises(UnsupportedError, match="other parts than its language model, such as multi_modal_projector"):
        workflows.rotated(model)
    with pytest.raises(UnsupportedError, match="rotating inputs is for a language model alone"):
        workflows.with_rotated_inputs(model, ("down",))
    with pytest.raises(UnsupportedError, match="keeping scales of inputs is for a language model alone"):
        workflows.with_scaled_inputs(model, ("down",))


def test_a_base_model_has_names_without_their_first_part():
    """As `AutoModel` saves it; its embedding is the head."""
    names = ("embed_tokens.weight", "layers.0.self_attn.q_proj.weight", "norm.weight")
    config, table = decoder_of({**TEXT, "tie_word_embeddings": True}, names)
    assert config.tied and table.name("layers/3/attn/q") == "layers.3.self_attn.q_proj.weight"
    assert table.is_derived("layers.0.self_attn.rotary_emb.inv_freq")
    _, table = decoder_of(TEXT, [f"model.{name}" for name in names])
    assert table.name("embed") == "model.embed_tokens.weight"


def test_a_configuration_of_a_language_model_is_left_alone():
    assert language_config(TEXT) is TEXT
    assert language_config({**TEXT, "text_config": {}})["text_config"] == {}


def test_positions_of_images_are_left_out():
    rope = {"type": "mrope", "rope_theta": 5.0, "mrope_section": [1, 1, 2]}
    found = language_config({"model_type": "qwen2_vl", "text_config": {"model_type": "qwen2_vl_text", "rope_scaling": rope}})
    assert found == {"model_type": "qwen2", "rope_scaling": {"type": "default", "rope_theta": 5.0}}


def test_the_outer_configuration_says_whether_the_head_is_tied():
    outer = {"model_type": "llava", "text_config": {**TEXT, "tie_word_embeddings": True}, "tie_word_embeddings": False}
    names = ["language_model.model.embed_tokens.weight", "language_model.lm_head.weight", "vision_tower.embed_tokens.weight"]
    config, table = decoder_of(outer, names * 40)
    assert not config.tied and table.name("head") == "language_model.lm_head.weight"
    assert table.name("layers/1/attn/q") == "language_model.model.layers.1.self_attn.q_proj.weight"
    assert [table.is_other(name) for name in names] == [False, False, True]


def test_the_configuration_that_gemma_3_published():
    """Its `text_config` relies on the defaults of transformers."""
    inner = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    outer = {"model_type": "gemma3", "text_config": inner, "mm_tokens_per_image": 256, "boi_token_index": 255999}
    config, table = decoder_of(outer, [f"language_model.model.{name}" for name in ("embed_tokens.weight", *"abc" * 40)])
    assert (config.vocab, config.heads, config.kv_heads, config.head_dim, config.context) == (262208, 8, 4, 256, 131072)
    assert (config.rope_scaling, config.rope_theta, config.window_rope_theta) == (Linear(8.0), 1e6, 1e4)
    assert config.window == 1024 and 5 not in config.window_layers and len(config.window_layers) == 29
    assert config.tied and table.name("norm") == "language_model.model.norm.weight"
    assert table.is_other("vision_tower.vision_model.post_layernorm.weight")


def test_the_configuration_that_llava_published():
    inner = {"model_type": "llama", "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "vocab_size": 32064}
    names = [f"language_model.model.{name}" for name in ("embed_tokens.weight", *"abcdefghijkl" * 10)]
    config, _ = decoder_of({"model_type": "llava", "text_config": inner}, names)
    assert (config.vocab, config.width, config.layers, config.context) == (32064, 4096, 32, 4096)


def test_the_configuration_that_qwen2_5_vl_published():
    """It has no `text_config`: the keys of the language model stand beside those of its parts."""
    outer = {
        "model_type": "qwen2_5_vl",
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "max_position_embeddings": 128000,
        "max_window_layers": 28,
        "num_attention_heads": 28,
        "num_hidden_layers": 28,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "sliding_window": 32768,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "vision_config": {"depth": 32, "hidden_size": 1280},
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
        "vision_start_token_id": 151652,
        "image_token_id": 151655,
        "vocab_size": 152064,
    }
    names = ["model.embed_tokens.weight", "lm_head.weight", "visual.blocks.0.attn.qkv.weight", *"abcdefghijkl" * 10]
    config, table = decoder_of(outer, names)
    assert (config.layers, config.rope_scaling, config.qkv_bias, config.window) == (28, None, True, 0)
    assert [table.is_other(name) for name in names[:3]] == [False, False, True]


def test_what_has_no_language_model_is_refused():
    outer = {"model_type": "llava", "text_config": TEXT}
    with pytest.raises(QuantError, match="has a text_config, and no tensor is named embed_tokens"):
        decoder_of(outer, ["vision.weight"] * 40)
    with pytest.raises(UnsupportedError, match="model_type is 'made-up', which the decoder cannot run"):
        decoder_of({"model_type": "llava", "text_config": {**TEXT, "model_type": "made-up"}}, [])
