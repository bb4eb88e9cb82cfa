"""A GGUF file's metadata becomes a configuration, and its tensors compute what the Hugging Face checkpoint does."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fewbit.errors import QuantError, UnsupportedError
from fewbit.models import (
    FAMILIES,
    DecoderConfig,
    Family,
    FullAttention,
    LinearAttention,
    Mamba2,
    ShortConvolution,
    config_from_gguf,
    config_from_hf,
    forward,
    params_from_named,
    paths_of_params,
    shapes,
)
from fewbit.models.attention.rope_scaling import Linear, LongRope, Proportional, Yarn
from tests.nets.families import CASES
from tests.nets.random_decoder import random_params, random_tokens

run = jax.jit(forward, static_argnums=2)

GGUF_FIELDS = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.context_length": 64,
    "llama.embedding_length": 24,
    "llama.feed_forward_length": 40,
    "llama.attention.head_count": 6,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 500.0,
    "llama.rope.dimension_count": 4,
    "llama.vocab_size": 67,
}
EXPECTED = {
    "vocab": 67,
    "layers": 2,
    "width": 24,
    "heads": 6,
    "kv_heads": 2,
    "head_dim": 4,
    "hidden": 40,
    "norm_eps": 1e-5,
    "rope_theta": 500.0,
    "context": 64,
}


def test_gguf():
    assert config_from_gguf(GGUF_FIELDS, ["token_embd.weight"]) == DecoderConfig(**EXPECTED, rope="interleaved", tied=True)
    untied = config_from_gguf({**GGUF_FIELDS, "tokenizer.ggml.tokens": ["a"] * 70}, ["output.weight"])
    assert (untied.tied, untied.vocab) == (False, 70)  # the tokens say how long the embedding is, the field may be absent
    wide = config_from_gguf({**GGUF_FIELDS, "llama.attention.key_length": 8, "llama.rope.dimension_count": 8}, [])
    assert (wide.head_dim, wide.rotary_dim) == (8, 0)
    assert config_from_gguf({**GGUF_FIELDS, "llama.rope.dimension_count": 2}, []).rotary_dim == 2
    by_layer = {"llama.attention.head_count_kv": [2, 2], "llama.feed_forward_length": [40, 40]}
    assert config_from_gguf({**GGUF_FIELDS, **by_layer}, []) == config_from_gguf(GGUF_FIELDS, [])


def test_scaled_rotary_embedding():
    fields = {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0}
    scaling = config_from_gguf({**GGUF_FIELDS, **fields}, []).rope_scaling
    assert (scaling.kind, scaling.factor, scaling.original_context) == ("yarn", 4.0, 64)
    factors = config_from_gguf(GGUF_FIELDS, {"rope_freqs.weight": np.array([1, 8], np.float32)}).rope_scaling
    assert (factors.short, factors.long, factors.gain) == ((1.0, 8.0), (1.0, 8.0), 1.0)


def test_factors_of_the_file_and_a_linear_factor_are_multiplied_as_in_llama_cpp():
    tensors = {"rope_freqs.weight": np.array([1, 8], np.float32)}
    fields = {**GGUF_FIELDS, "llama.rope.scaling.factor": 4.0}
    assert config_from_gguf(fields, tensors).rope_scaling.short == (4.0, 32.0)
    assert config_from_gguf({**fields, "llama.rope.scaling.type": "none"}, tensors).rope_scaling.short == (1.0, 8.0)
    both = {f"rope_factors_{name}.weight": np.array(by, np.float32) for name, by in (("short", [1, 2]), ("long", [3, 4]))}
    assert config_from_gguf(fields, both).rope_scaling.long == (12.0, 16.0)
    with pytest.raises(UnsupportedError, match=r"with rope_freqs\.weight has llama\.rope\.scaling\.type = 'yarn'"):
        config_from_gguf({**fields, "llama.rope.scaling.type": "yarn"}, tensors)


@pytest.mark.parametrize("key", ["scale_linear", "scaling.factor"])
def test_a_factor_without_a_type_is_linear(key: str):
    assert config_from_gguf({**GGUF_FIELDS, f"llama.rope.{key}": 4.0}, []).rope_scaling == Linear(4.0)
    unscaled = {f"llama.rope.{key}": 4.0, "llama.rope.scaling.type": "none"}
    assert config_from_gguf({**GGUF_FIELDS, **unscaled}, []).rope_scaling is None


def of_architecture(name: str, **fields: Any) -> dict[str, Any]:
    """`GGUF_FIELDS` of another architecture, with further fields."""
    found = {key.replace("llama", name): value for key, value in GGUF_FIELDS.items()}
    return {**found, "general.architecture": name, **{f"{name}.{key}": value for key, value in fields.items()}}


def test_gemma_2_has_the_soft_caps_and_the_window_of_llama_cpp_where_the_file_has_none():
    config = config_from_gguf(of_architecture("gemma2"), [])
    assert (config.attention_cap, config.logit_cap) == (50.0, 30.0)
    assert (config.window, config.window_layers) == (4096, (0,))


def test_olmo_3_has_windows_and_scaled_frequencies_only_outside_them():
    yarn = {"type": "yarn", "factor": 8.0, "original_context_length": 16}
    yarn["attn_factor"] = 1.2079441541679836  # as llama.cpp's converter wrote it
    fields = {"block_count": 8, "attention.sliding_window": 6}
    fields |= {f"rope.scaling.{key}": value for key, value in yarn.items()}
    config = config_from_gguf(of_architecture("olmo2", **fields), [])
    assert (config.window, config.window_layers) == (6, (0, 1, 2, 4, 5, 6))
    assert (config.rope_scaling, config.window_rope_theta) == (Yarn(8.0, 16), 500.0)


@pytest.mark.parametrize(
    ("pattern", "windows", "nope"),
    [(4, 48, 16), ([True] * 64, 0, 0), ([False] * 64, 0, 64)],
    ids=["every fourth", "everywhere", "nowhere"],
)
def test_exaone_rotates_where_it_has_a_window(pattern: int | list[bool], windows: int, nope: int):
    fields = {"block_count": 64, "attention.sliding_window": 6, "attention.sliding_window_pattern": pattern}
    config = config_from_gguf(of_architecture("exaone4", **fields), [f"{i}" for i in range(64)])
    assert (len(config.window_layers), len(config.nope_layers)) == (windows, nope)


@pytest.mark.parametrize("model_type", ["qwen3_moe", "dots1"])
def test_gates_and_up_projections_of_experts_may_be_joined(model_type: str):
    """Also where the first layer is dense."""
    settings = {**CASES[model_type][1], **CHANGED.get(model_type, {}), "model_type": model_type}
    config, family = config_from_hf(settings), FAMILIES[model_type]
    params = random_params(config)
    fields, arrays = as_gguf(params, config, family)
    for i in range(config.layers):
        if config.experts_of(i) is None:
            continue
        both = [arrays.pop(f"blk.{i}.ffn_{part}_exps.weight") for part in ("gate", "up")]
        arrays[f"blk.{i}.ffn_gate_up_exps.weight"] = jnp.concatenate(both, axis=1)
    found = config_from_gguf(fields, arrays)
    assert found.experts is not None and found.experts.layout == "joined"
    tokens = random_tokens(config, 1, 9)
    expected = np.asarray(run(params, tokens, config))
    got = run(params_from_named(arrays, family.gguf_table_of(found), found), tokens, found)
    np.testing.assert_allclose(got, expected, atol=1e-5 * np.abs(expected).max(), rtol=0)


GEMMA4 = {
    "attention.key_length": 8,
    "attention.key_length_swa": 4,
    "attention.sliding_window": 6,
    "attention.sliding_window_pattern": [True, False],
    "rope.dimension_count": 8,
}


def gemma4(tensors: Any = (), **fields: Any) -> DecoderConfig:
    changed = {key.replace("__", "."): value for key, value in fields.items()}
    return config_from_gguf(of_architecture("gemma4", **GEMMA4, **changed), tensors)


def test_factors_of_gemma_4_say_which_pairs_rotate():
    def scaling(*factors: float) -> Any:
        return gemma4({"rope_freqs.weight": np.array(factors, np.float32)}).rope_scaling

    assert scaling(1, 1e30, 1e30, 1e30) == Proportional(1)
    assert scaling(8, 8, 1e30, 1e30) == Proportional(2, 8.0)
    assert (scaling(1, 1, 1, 1), scaling(8, 8, 8, 8)) == (None, Linear(8.0))
    assert scaling(1, 2, 3, 4) == LongRope((1.0, 2.0, 3.0, 4.0), (1.0, 2.0, 3.0, 4.0), 64, 1.0)


def test_logits_of_gemma_4_are_capped_where_the_file_does_not_say_as_in_llama_cpp():
    assert gemma4().logit_cap == 30.0
    assert gemma4(final_logit_softcapping=0.0).logit_cap == 0.0


def test_values_of_gemma_4_are_its_keys_where_the_file_has_none():
    assert gemma4().full == FullAttention(2, 8, keys_are_values=True)
    assert gemma4({"blk.1.attn_v.weight": None}).full == FullAttention(2, 8)
    assert gemma4({"blk.0.attn_v.weight": None}).full == FullAttention(2, 8, keys_are_values=True)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"rope__dimension_count_swa": 2}, r"gemma4\.rope\.dimension_count_swa = 2; supported is 4"),
        ({"attention__shared_kv_layers": 2}, "is not of layers with and without a sliding window"),
        ({"block_count": 3, "feed_forward_length": [40, 40, 50]}, "sliding_window_pattern' of 2 layers; expected 3"),
        ({"feed_forward_length": [40, 50]}, "heads or feed-forward blocks of other sizes in layers of one kind"),
        ({"feed_forward_length": [40]}, r"gemma4\.feed_forward_length of 1 layers; expected 2"),
    ],
)
def test_layers_of_gemma_4_that_the_decoder_cannot_run_are_refused(changed: dict[str, Any], message: str):
    with pytest.raises((QuantError, UnsupportedError), match=message):
        gemma4(**changed)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({}, r"lacks the field 'granitehybrid\.ssm\.time_step_rank'"),
        ({"ssm.time_step_rank": 5}, r"ssm\.inner_size = 48, which 5 heads do not divide"),
        ({"ssm.time_step_rank": 6, "attention.head_count_kv": [0]}, "head_count_kv of 1 layers; expected 2"),
    ],
)
def test_state_spaces_that_do_not_fit_are_refused(changed: dict[str, Any], message: str):
    sizes = {"ssm.inner_size": 48, "ssm.state_size": 8, "ssm.group_count": 1, "ssm.conv_kernel": 4}
    with pytest.raises(QuantError, match=message):
        config_from_gguf(of_architecture("granitehybrid", **sizes, **changed), [])


def test_lfm2():
    with pytest.raises(QuantError, match=r"lacks the field 'lfm2\.shortconv\.l_cache'"):
        config_from_gguf(of_architecture("lfm2"), [])
    sizes = {"shortconv.l_cache": 4, "attention.head_count_kv": [0, 2]}
    config = config_from_gguf(of_architecture("lfm2", **sizes, **{"attention.sliding_window": 7}), [])
    assert (config.short_conv, config.kv_heads, config.window) == (
        ShortConvolution((0,), config.width, 4, is_gguf=True),
        2,
        7,
    )


def test_layers_for_multi_token_prediction_are_left_out():
    settings = {**CASES["glm4_moe"][1], "model_type": "glm4_moe", "num_nextn_predict_layers": 0}
    config, family = config_from_hf(settings), FAMILIES["glm4_moe"]
    fields, arrays = as_gguf(random_params(config), config, family)
    arrays |= {f"blk.3.{name}.weight": arrays["blk.2.attn_q.weight"] for name in ("attn_q", "nextn.eh_proj")}
    found = config_from_gguf({**fields, "glm4moe.block_count": 4, "glm4moe.nextn_predict_layers": 1}, arrays)
    assert (found.layers, found.extra_layers) == (3, 1)
    assert len(params_from_named(arrays, family.gguf_table_of(found), found)["layers"]) == 3
    with pytest.raises(QuantError, match="has 1 layers, and 1 of them for multi-token prediction"):
        config_from_gguf({**fields, "glm4moe.block_count": 1, "glm4moe.nextn_predict_layers": 1}, arrays)


@pytest.mark.parametrize(
    ("pattern", "layers"),
    [(3, (0, 1, 3)), (1, None), ([True, False, False, True], (0, 3)), ([False] * 4, None), ([True] * 4, ())],
)
def test_the_pattern_of_windows_is_that_of_the_file(pattern: int | list[bool], layers: tuple[int, ...] | None):
    fields = {"block_count": 4, "attention.sliding_window": 6, "attention.sliding_window_pattern": pattern}
    config = config_from_gguf(of_architecture("gemma3", **fields), [])
    assert (config.window, config.window_layers) == ((6, layers) if layers is not None else (0, ()))


def test_a_pattern_of_windows_has_every_layer():
    fields = {"attention.sliding_window": 6, "attention.sliding_window_pattern": [True]}
    with pytest.raises(QuantError, match="'sliding_window_pattern' of 1 layers; expected 2"):
        config_from_gguf(of_architecture("gemma3", **fields), [])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"general.architecture": "gemma5"}, "architecture is 'gemma5', which the decoder cannot run; did you mean 'gemma"),
        ({"llama.attention.head_count_kv": [2, 1]}, r"different llama\.attention\.head_count_kv = 2; supported is 1"),
        ({"llama.rope.scaling.type": "su"}, r"llama\.rope\.scaling\.type = 'su'; supported is 'none' or 'linear'"),
        (
            {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 2.0, "llama.rope.scaling.attn_factor": 0.5},
            r"llama\.rope\.scaling\.attn_factor = 0\.5 of YaRN; supported is 1\.0",
        ),
        ({"llama.attention.value_length": 2}, r"llama\.attention\.value_length = 2; supported is 4"),
        ({"llama.expert_count": 8, "llama.expert_used_count": 2}, r"has experts, but the file has no 'blk\.0\.ffn_down"),
    ],
    ids=["architecture", "by layer", "scaled", "gain", "values", "experts"],
)
def test_gguf_refuses(change: dict[str, Any], message: str):
    with pytest.raises(UnsupportedError, match=message):
        config_from_gguf({**GGUF_FIELDS, **change}, [])


def test_factors_of_rotary_embedding_need_their_values():
    with pytest.raises(UnsupportedError, match=r"rope_freqs\.weight: pass its tensors"):
        config_from_gguf(GGUF_FIELDS, ["rope_freqs.weight"])


def test_llama_4_norms_queries_and_keys_unless_it_has_128_experts():
    fields = of_architecture("llama4", expert_count=128, expert_used_count=1, block_count=4)
    config = config_from_gguf(fields, ["blk.1.ffn_down_exps.weight", *"abcd"])
    assert (config.qk_norm, config.nope_layers, config.window_layers) == ("none", (3,), (0, 1, 2))
    with pytest.raises(UnsupportedError, match=r"llama4\.attention\.sliding_window = 0; supported is None or 8192"):
        config_from_gguf({**fields, "llama4.attention.sliding_window": 0}, ["blk.1.ffn_down_exps.weight", *"abcd"])


def test_missing_keys_are_named():
    with pytest.raises(QuantError, match=r"the GGUF metadata lacks the field 'llama\.block_count'"):
        config_from_gguf({k: v for k, v in GGUF_FIELDS.items() if k != "llama.block_count"}, [])
    with pytest.raises(
        QuantError, match=r"has llama\.rope\.scaling\.type = 'linear', but no 'llama\.rope\.scaling\.factor'"
    ):
        config_from_gguf({**GGUF_FIELDS, "llama.rope.scaling.type": "linear"}, [])
    with pytest.raises(QuantError, match=r"lacks the field 'llama\.expert_used_count'"):
        config_from_gguf({**GGUF_FIELDS, "llama.expert_count": 2}, [])
    with pytest.raises(QuantError, match=r"lacks the field 'gpt-oss\.attention\.sliding_window'"):
        config_from_gguf(of_architecture("gpt-oss"), [])


IN_GGUF = [model_type for model_type, family in FAMILIES.items() if family.gguf]
"""The families whose GGUF files the decoder runs."""

KINDS_OF_LAYERS = ["gemma4_text-experts", "gemma4_text-shared", "granitemoehybrid-experts", "nemotron_h-mlp"]
"""Further cases of families whose layers differ."""

KEYS = {
    "block_count": "layers",
    "context_length": "context",
    "embedding_length": "width",
    "feed_forward_length": "hidden",
    "attention.head_count": "heads",
    "attention.head_count_kv": "kv_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "norm_eps",
    "rope.freq_base": "rope_theta",
    "vocab_size": "vocab",
    "attention.sliding_window": "window",
    "attn_logit_softcapping": "attention_cap",
    "final_logit_softcapping": "logit_cap",
    "attention.scale": "attention_scale",
    "embedding_scale": "embed_scale",
    "residual_scale": "residual_scale",
}
"""The fields that llama.cpp's converter writes, and ours."""

# What a GGUF file cannot say has the value that llama.cpp has for the architecture.
CHANGED: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": None},
    "qwen2": {"use_sliding_window": False},
    "qwen3_next": {"mlp_only_layers": []},
    "gemma2": {"query_pre_attn_scalar": 16},
    "gemma3_text": {
        "query_pre_attn_scalar": 16,
        "layer_types": None,
        "rope_parameters": None,
        "rope_theta": 300.0,
        "rope_local_base_freq": 70.0,
    },
    "granitemoehybrid": {**CASES["granitemoehybrid-mamba"][1], "mamba_proj_bias": False, "intermediate_size": 40},
    "granitemoehybrid-experts": {"position_embedding_type": "rope"},
    "ernie4_5_moe": {"moe_layer_interval": 1},
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
        "intermediate_size": 24,
    },
    "nemotron_h-mlp": {"use_bias": False},
    "exaone_moe": {"n_group": 1, "num_hidden_layers": 4, "layer_types": None},
    "solar_open": {"n_group": 1, "topk_group": 1},
    "lfm2": {"conv_bias": False},
    "starcoder2": {"sliding_window": None},
    "cohere2": {"layer_types": None, "num_hidden_layers": 4},
    "llama4_text": {"attention_chunk_size": 8192, "floor_scale": 8192, "rope_parameters": None},
    "smollm3": {"no_rope_layer_interval": 4, "num_hidden_layers": 4},
    "gpt_oss": {"swiglu_limit": 7.0},
    "dots1": {"sliding_window": None},
    "exaone4": {"sliding_window": None},
    "glm4_moe_lite": {"rms_norm_eps": 1e-6},
    "deepseek_v2": {"rms_norm_eps": 1e-6},
    "deepseek_v3": {"rms_norm_eps": 1e-6, "attention_bias": False, "num_nextn_predict_layers": 0},
}


def as_gguf(
    params: dict[str, Any], config: DecoderConfig, family: Family, *, split: bool = True
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The metadata and the arrays of a GGUF file, as llama.cpp's converter makes them of a Hugging Face checkpoint.

    `split` is whether the projection of DeepSeek's latents has two parts, as in files since April 2025.
    """
    arrays: dict[str, Any] = {}
    for path, array in paths_of_params(params, config).items():
        part = path.split("/", 2)[-1]
        if family.permutes and part in ("attn/q", "attn/k", "attn/q_bias", "attn/k_bias"):
            pairs = array.reshape(-1, 2, config.head_dim // 2, *array.shape[1:])
            array = pairs.swapaxes(1, 2).reshape(array.shape)
        if config.norm_offset and path.endswith("norm") and not path.endswith("out_norm"):
            array = array + config.norm_offset
        arrays[path] = array
    if config.experts is not None:
        arrays = {path: array.reshape(-1) if "correction" in path else array for path, array in arrays.items()}
        arrays = with_parts_of_blocks(with_stacks(arrays, config))
    if config.latent is not None and split:
        arrays = with_parts(arrays, config)
    if config.linear is not None:
        arrays = with_llama_cpp_heads(arrays, config.linear)
    if config.mamba is not None:
        arrays = with_parts_of_blocks(with_llama_cpp_states(arrays, config.mamba))
    if config.short_conv is not None:
        arrays = {path: array[:, 0] if path.endswith("conv1d") else array for path, array in arrays.items()}
    if config.fused_by_head:
        arrays = {path: queries_first(array, config) if "/q+k+v" in path else array for path, array in arrays.items()}
    named = {family.gguf_table_of(config).name(path): array for path, array in arrays.items()}
    architecture = "nemotron_h_moe" if config.mlp_layers and config.experts is not None else family.gguf
    fields = {"general.architecture": architecture, **{f"{architecture}.{k}": getattr(config, v) for k, v in KEYS.items()}}
    if config.norm_kind == "layer":
        fields[f"{architecture}.attention.layer_norm_epsilon"] = fields.pop(
            f"{architecture}.attention.layer_norm_rms_epsilon"
        )
    if architecture == "llama4":
        del fields["llama4.attention.sliding_window"]
    if config.window_rope_theta:
        fields[f"{architecture}.rope.freq_base_swa"] = config.window_rope_theta
    fields[f"{architecture}.rope.dimension_count"] = config.rotated
    fields[f"{architecture}.logit_scale"] = config.logit_scale if config.norm_kind == "layer" else 1 / config.logit_scale
    if architecture == "gptneox":
        fields["gptneox.use_parallel_residual"] = config.parallel == "two_norms"
    if config.experts is not None:
        of_experts = {"count": "expert_count", "active": "expert_used_count", "hidden": "expert_feed_forward_length"}
        for name, key in {**of_experts, "shared_hidden": "expert_shared_feed_forward_length"}.items():
            fields[f"{architecture}.{key}"] = getattr(config.experts, name)
    if architecture == "olmo2" and config.window:
        pattern = [layer in config.window_layers for layer in range(config.layers)]
        fields["olmo2.attention.sliding_window_pattern"] = pattern
    if architecture in ("deepseek2", "glm4moe", "dots1", "minimax-m2", "lfm2moe", "exaone-moe", "nemotron_h_moe"):
        fields |= {f"{architecture}.{key}": value for key, value in routed_fields(config).items()}
    if config.linear is not None:
        fields |= {f"{architecture}.{key}": value for key, value in linear_fields(config.linear).items()}
    if config.latent is not None:
        fields |= {f"deepseek2.{key}": value for key, value in latent_fields(config, split=split).items()}
    if config.mamba is not None:
        fields |= {f"{architecture}.{key}": value for key, value in state_space_fields(config, config.mamba).items()}
    if config.mlp_layers:
        fields |= {f"{architecture}.{key}": value for key, value in single_block_fields(config).items()}
    if config.short_conv is not None:
        heads = [0 if layer in config.short_conv.layers else config.kv_heads for layer in range(config.layers)]
        fields |= {
            f"{architecture}.attention.head_count_kv": heads,
            f"{architecture}.shortconv.l_cache": config.short_conv.kernel,
        }
    if architecture == "gemma4":
        fields |= {f"gemma4.{key}": value for key, value in fields_of_kinds(config).items()}
    if isinstance(config.rope_scaling, Proportional):
        named["rope_freqs.weight"] = jnp.asarray(factors_of_pairs(config, config.rope_scaling))
    elif config.rope_scaling is not None:
        fields[f"{architecture}.rope.scaling.type"] = "yarn"
        fields[f"{architecture}.rope.scaling.factor"] = config.rope_scaling.factor
        fields[f"{architecture}.rope.scaling.original_context_length"] = config.rope_scaling.original_context
    return fields, named


def fields_of_kinds(config: DecoderConfig) -> dict[str, Any]:
    """The fields of Gemma 4, whose layers without a window have other heads than those with one."""
    layers, full = range(config.layers), config.full
    assert full is not None
    has_window = [layer in config.window_layers for layer in layers]
    return {
        "attention.head_count_kv": [config.kv_heads if one else full.kv_heads for one in has_window],
        "attention.key_length": full.head_dim,
        "attention.key_length_swa": config.head_dim,
        "attention.sliding_window_pattern": has_window,
        "attention.shared_kv_layers": config.shared_keys.layers if config.shared_keys else 0,
        "feed_forward_length": [config.hidden_of(layer) for layer in layers],
        "embedding_length_per_layer_input": config.per_layer.width if config.per_layer else 0,
        "rope.dimension_count": full.head_dim,
    }


def single_block_fields(config: DecoderConfig) -> dict[str, Any]:
    """The fields of Nemotron-H, whose layers have attention, a state or a feed-forward block."""
    keys = [layer for layer in range(config.layers) if config.has_keys(layer) and config.recurrent_of(layer) is None]
    fields: dict[str, Any] = {
        "attention.head_count_kv": [config.kv_heads if layer in keys else 0 for layer in range(config.layers)],
        "feed_forward_length": [config.hidden if config.has_mlp(layer) else 0 for layer in range(config.layers)],
    }
    if config.experts is not None:
        fields["moe_latent_size"] = config.experts.latent
    return fields


def state_space_fields(config: DecoderConfig, mamba: Mamba2) -> dict[str, Any]:
    """The fields of state spaces."""
    fields: dict[str, Any] = {
        "attention.head_count_kv": [0 if layer in mamba.layers else config.kv_heads for layer in range(config.layers)],
        "rope.scaling.finetuned": not config.nope_layers,
        "ssm.conv_kernel": mamba.kernel,
        "ssm.state_size": mamba.state_dim,
        "ssm.group_count": mamba.groups,
        "ssm.inner_size": mamba.width,
        "ssm.time_step_rank": mamba.heads,
    }
    if config.experts is not None:
        fields["feed_forward_length"] = config.experts.hidden
    return fields


def with_llama_cpp_states(arrays: dict[str, Any], mamba: Mamba2) -> dict[str, Any]:
    """The arrays with what state spaces have in llama.cpp's form."""
    found: dict[str, Any] = {}
    for path, x in arrays.items():
        name = path.rpartition("/")[2]
        if name == "A_log":
            found[path.replace("A_log", "A")] = -jnp.exp(x)[:, None]
        else:
            shapes = {"D": (-1, 1), "conv1d": (mamba.channels, mamba.kernel), "out_norm": (mamba.groups, -1)}
            found[path] = x.reshape(shapes[name]) if name in shapes else x
    return found


def with_parts_of_blocks(arrays: dict[str, Any]) -> dict[str, Any]:
    """The arrays with gate and up apart."""
    found: dict[str, Any] = {}
    for path, x in arrays.items():
        parts = zip(("gate", "up"), jnp.split(x, 2), strict=True) if path.endswith("/gate+up") else (("gate+up", x),)
        found |= {path.replace("gate+up", name): part for name, part in parts}
    return found


def queries_first(array: Any, config: DecoderConfig) -> Any:
    """The rows of all queries, keys and values in place of those of each head in turn."""
    by_head = array.reshape(config.heads, 3, config.head_dim, *array.shape[1:])
    return by_head.swapaxes(0, 1).reshape(array.shape)


def factors_of_pairs(config: DecoderConfig, scaling: Proportional) -> np.ndarray:
    """What divides the frequencies: of pairs that do not rotate, a number so large that they stand still."""
    assert config.full is not None
    rotates = np.arange(config.full.head_dim // 2) < scaling.pairs
    return np.where(rotates, np.float32(scaling.factor), np.float32(1e30))


def routed_fields(config: DecoderConfig) -> dict[str, Any]:
    """The fields of DeepSeek's experts, and of those after them."""
    experts = config.experts
    assert experts is not None
    return {
        "expert_shared_count": experts.shared_hidden // experts.hidden,
        "expert_weights_scale": experts.scale,
        "expert_weights_norm": experts.normalized,
        "expert_gating_func": 1 + (experts.scores == "sigmoid"),
        "expert_group_count": experts.groups,
        "expert_group_used_count": experts.active_groups,
    }


def latent_fields(config: DecoderConfig, *, split: bool) -> dict[str, Any]:
    """The fields of latent attention."""
    latent = config.latent
    assert latent is not None
    fields = {
        "attention.kv_lora_rank": latent.rank,
        "attention.q_lora_rank": latent.query_rank,
        "attention.key_length": config.head_dim,
        "attention.value_length": latent.value_dim,
    }
    if not split:
        return fields
    return fields | {
        "attention.head_count_kv": 1,
        "attention.key_length": latent.rank + config.rotary_dim,
        "attention.value_length": latent.rank,
        "attention.key_length_mla": config.head_dim,
        "attention.value_length_mla": latent.value_dim,
    }


def linear_fields(linear: LinearAttention) -> dict[str, Any]:
    """The fields of linear attention, in every second layer."""
    return {
        "full_attention_interval": 2,
        "ssm.conv_kernel": linear.kernel,
        "ssm.state_size": linear.key_dim,
        "ssm.group_count": linear.key_heads,
        "ssm.time_step_rank": linear.value_heads,
        "ssm.inner_size": linear.value_heads * linear.value_dim,
    }


def with_llama_cpp_heads(arrays: dict[str, Any], linear: LinearAttention) -> dict[str, Any]:
    """The arrays with what has heads of values in llama.cpp's order: those of Qwen3.5 by their place within a head of keys first."""
    N, M, n, m = linear.key_heads, linear.value_heads, linear.key_dim, linear.value_dim
    is_tiled = linear.layout == "separate"

    def in_order(x: Any, width: int, axis: int = 0) -> Any:
        if not is_tiled:
            return x
        heads = jnp.moveaxis(x, axis, 0).reshape(N, M // N, width, -1).swapaxes(0, 1)
        return jnp.moveaxis(heads.reshape(M * width, *jnp.moveaxis(x, axis, 0).shape[1:]), 0, axis)

    found: dict[str, Any] = {}
    for path, x in arrays.items():
        at, _, name = path.rpartition("/")
        if name == "qkvz":
            q, k, v, z = jnp.split(x.reshape(N, -1, x.shape[1]), [n, 2 * n, 2 * n + M // N * m], axis=1)
            found[f"{at}/qkv"] = jnp.concatenate([part.reshape(-1, x.shape[1]) for part in (q, k, v)])
            found[f"{at}/z"] = z.reshape(-1, x.shape[1])
        elif name in ("qkv", "conv1d"):
            x = x.reshape(len(x), -1)
            found[path] = jnp.concatenate([x[: 2 * N * n], in_order(x[2 * N * n :], m)])
        elif name in ("z", "beta", "alpha", "dt_bias"):
            found[path] = in_order(x, m if name == "z" else 1)
        elif name == "A_log":
            found[f"{at}/A"] = -jnp.exp(in_order(x, 1))
        elif name == "out":
            found[path] = in_order(x, m, axis=1)
        else:
            found[path] = x
    return found


def with_parts(arrays: dict[str, Any], config: DecoderConfig) -> dict[str, Any]:
    """The arrays with the projection of the latents in two parts, that of keys transposed."""
    found: dict[str, Any] = {}
    for path, array in arrays.items():
        if not path.endswith("attn/kv_b"):
            found[path] = array
            continue
        by_head = array.reshape(config.heads, -1, array.shape[-1])
        found[path.replace("kv_b", "k_b")] = by_head[:, : config.head_dim - config.rotary_dim].swapaxes(1, 2)
        found[path.replace("kv_b", "v_b")] = by_head[:, config.head_dim - config.rotary_dim :]
    return found


def with_stacks(arrays: dict[str, Any], config: DecoderConfig) -> dict[str, Any]:
    """The arrays with experts stacked, one stack for the gates and one for the up projections."""
    assert config.experts is not None
    is_joined = config.experts.layout == "joined"  # [E, 2 F, D], all gates first
    found: dict[str, Any] = {}
    for path, array in arrays.items():
        head, _, name = path.partition("/experts/")
        if not name:
            found[path] = array
        elif name[0].isdigit():
            found.setdefault(f"{head}/experts/{name.split('/')[1]}", []).append(array)
        else:  # interleaved, [E, in, out]
            array = array.swapaxes(1, 2) if array.ndim == 3 and not is_joined else array
            for i, part in enumerate(("gate", "up") if name.startswith("gate+up") else ()):
                rows = jnp.split(array, 2, axis=1)[i] if is_joined else array[:, i::2]
                found[f"{head}/experts/{name.replace('gate+up', part)}"] = rows
            if name.startswith("down"):
                found[path] = array
    return {path: jnp.stack(array) if isinstance(array, list) else array for path, array in found.items()}


def converted(model_type: str, *, split: bool = True) -> tuple[DecoderConfig, dict[str, Any], DecoderConfig, dict[str, Any]]:
    """Configuration and parameters of a Hugging Face checkpoint, and of the GGUF file made of it.

    `model_type` is a case of `CASES`.
    """
    family = FAMILIES[model_type.partition("-")[0]]
    settings = {**CASES[model_type][1], **CHANGED.get(model_type, {}), "model_type": family.model_type}
    config = config_from_hf(settings)
    params = random_params(config)
    fields, arrays = as_gguf(params, config, family, split=split)
    found = config_from_gguf(fields, arrays)
    return config, params, found, params_from_named(arrays, family.gguf_table_of(found), found)


@pytest.mark.parametrize("model_type", [*IN_GGUF, *KINDS_OF_LAYERS])
def test_a_gguf_file_has_the_configuration_of_the_hugging_face_checkpoint(model_type: str):
    config, _, found, _ = converted(model_type)
    same: dict[str, Any] = {"rope": config.rope, "norm_offset": config.norm_offset, "fused_by_head": config.fused_by_head}
    if config.experts is not None:
        # LFM2-MoE has no shared expert, ERNIE a row of corrections, and Granite joins gate and up of the shared expert.
        stored = {name: getattr(config.experts, name) for name in ("layout", "shared_gate", "correction_row")}
        assert dataclasses.replace(found.experts, **stored) == config.experts
        same |= {"experts": config.experts, "fused_mlp": config.fused_mlp}
    if config.latent is not None:
        assert found.latent == dataclasses.replace(config.latent, split=True)
        same["latent"] = config.latent
    if config.linear is not None:
        layout = "gguf_tiled" if config.linear.layout == "separate" else "gguf"
        assert found.linear == dataclasses.replace(config.linear, layout=layout)
        same["linear"] = config.linear
    if config.mamba is not None:
        assert found.mamba == dataclasses.replace(config.mamba, is_gguf=True)
        same |= {"mamba": config.mamba, "fused_mlp": config.fused_mlp}
    if config.short_conv is not None:
        assert found.short_conv == dataclasses.replace(config.short_conv, is_gguf=True)
        same["short_conv"] = config.short_conv
    assert dataclasses.replace(found, **same) == config


@pytest.mark.slow
@pytest.mark.parametrize("model_type", [*IN_GGUF, *KINDS_OF_LAYERS])
def test_a_gguf_file_computes_what_the_hugging_face_checkpoint_does(model_type: str):
    config, params, found, again = converted(model_type)
    tokens = random_tokens(config, 1, 9)
    expected = np.asarray(run(params, tokens, config))
    np.testing.assert_allclose(run(again, tokens, found), expected, atol=1e-5 * np.abs(expected).max(), rtol=0)


@pytest.mark.slow
def test_older_files_of_deepseek_compute_the_same():
    config, params, found, again = converted("deepseek_v3", split=False)
    assert found.latent == config.latent
    tokens = random_tokens(config, 1, 9)
    expected = np.asarray(run(params, tokens, config))
    np.testing.assert_allclose(run(again, tokens, found), expected, atol=1e-5 * np.abs(expected).max(), rtol=0)


DEEPSEEK = {
    **{key.replace("llama", "deepseek2"): value for key, value in GGUF_FIELDS.items()},
    "general.architecture": "deepseek2",
    "deepseek2.attention.kv_lora_rank": 8,
    "deepseek2.attention.key_length_mla": 12,
    "deepseek2.attention.value_length_mla": 6,
}


def test_yarn_of_deepseek_scales_attention_by_its_multiplier():
    fields = {"scaling.type": "yarn", "scaling.factor": 4.0, "scaling.yarn_log_multiplier": 0.0707}
    fields |= {"scaling.yarn_beta_fast": 16.0, "scaling.yarn_beta_slow": 2.0}
    config = config_from_gguf(DEEPSEEK | {f"deepseek2.rope.{key}": value for key, value in fields.items()}, [])
    assert config.rope_scaling == Yarn(4.0, 64, 16.0, 2.0, attention_factor=1.0)
    assert config.attention_scale == pytest.approx(12**-0.5 * (0.0707 * np.log(4) + 1) ** 2, rel=1e-6)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 2.0},
            UnsupportedError,
            "'yarn', but no 'yarn_log_multiplier'",
        ),
        ({"attention.temperature_scale": 0.1}, UnsupportedError, r"temperature_scale = 0\.1; supported is 0\.0"),
        ({"attention.kv_lora_rank": None}, QuantError, r"lacks the field 'deepseek2\.attention\.kv_lora_rank'"),
        ({"rope.dimension_count": None}, QuantError, r"lacks the field 'deepseek2\.rope\.dimension_count'"),
        ({"attention.value_length_mla": None}, QuantError, "lacks the lengths of keys or values"),
        ({"expert_gating_func": 3}, UnsupportedError, "expert_gating_func = 3; supported is 0 or 1 or 2"),
    ],
)
def test_what_deepseek_lacks_is_named(change: dict[str, Any], error: type[Exception], message: str):
    experts = {"deepseek2.expert_count": 4, "deepseek2.expert_used_count": 2}
    fields = DEEPSEEK | experts | {f"deepseek2.{key}": value for key, value in change.items()}
    fields = {key: value for key, value in fields.items() if value is not None}
    with pytest.raises(error, match=message):
        config_from_gguf(fields, ["blk.0.ffn_down_exps.weight"])


@pytest.mark.oracle
@pytest.mark.parametrize("model_type", IN_GGUF)
def test_names_are_those_of_the_gguf_package(model_type: str):
    gguf = pytest.importorskip("gguf")
    settings = {**CASES[model_type][1], "model_type": model_type, "mlp_only_layers": None}  # which llama.cpp lacks
    config, family = config_from_hf({**settings, **CHANGED.get(model_type, {})}), FAMILIES[model_type]
    architecture = "nemotron_h_moe" if family.gguf == "nemotron_h" else family.gguf
    number = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(number, config.layers)
    for path in shapes(config):
        if "/experts/" in path and family.gguf not in ("gpt-oss", "granitemoe"):
            layer, part = path.split("/")[1], path.rsplit("/", 1)[1]
            theirs = names.get_name(f"model.layers.{layer}.mlp.experts.{part}_proj")
            ours = family.gguf_table_of(config).name(f"layers/{layer}/mlp/experts/{part}")
        elif "/experts/" in path:
            continue  # the converter splits gate and up by hand
        elif path.endswith(("attn/qkvz", "shared/gate+up")) or (
            family.gguf == "granitehybrid" and path.endswith(("mlp/gate+up", "mlp/down"))
        ):
            continue  # the converter names these by hand: attn_qkv and attn_gate; ffn_gate and ffn_up, and ffn_down
        else:
            source = (
                family.table_of(config).name(path).replace("correction_bias", "correction.bias")
            )  # as the converter does
            source = source.replace("dt_bias", "dt_proj.bias").replace(".expert_bias", ".expert_bias.bias")
            path = path.replace("A_log", "A")
            theirs = names.get_name(source, try_suffixes=(".weight", ".bias"))
            ours = family.gguf_table_of(config).name(path)
        assert theirs is not None, path
        assert ours.removesuffix(".weight") == theirs.removesuffix(".weight"), path
        if path.endswith("kv_b"):
            for part in ("k_b", "v_b"):
                ours = family.gguf_table_of(config).name(path.replace("kv_b", part))
                assert ours == names.get_name(source.replace("kv_b", part), try_suffixes=(".weight",))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ssm.group_count": None}, r"lacks the field 'qwen35\.ssm\.group_count'"),
        ({"ssm.inner_size": 13}, r"qwen35\.ssm\.inner_size = 13, which 4 heads do not divide"),
        ({"ssm.group_count": 3}, r"linear\.key_heads is 3, must divide linear\.value_heads, 4"),
    ],
    ids=["missing", "width", "heads"],
)
def test_what_linear_attention_lacks_is_named(change: dict[str, Any], message: str):
    sizes = {"ssm.conv_kernel": 4, "ssm.state_size": 8, "ssm.group_count": 2, "ssm.time_step_rank": 4, "ssm.inner_size": 24}
    fields = {key.replace("llama", "qwen35"): value for key, value in GGUF_FIELDS.items()} | {
        "general.architecture": "qwen35"
    }
    fields |= {f"qwen35.{key}": value for key, value in {**sizes, **change}.items()}
    with pytest.raises(QuantError, match=message):
        config_from_gguf({key: value for key, value in fields.items() if value is not None}, [])
