"""A config.json becomes a configuration, and every feature that the decoder lacks is refused by its key."""

from typing import Any

import pytest

from fewbit.errors import QuantError, UnsupportedError
from fewbit.models import (
    FAMILIES,
    DecoderConfig,
    Experts,
    FullAttention,
    LatentAttention,
    LinearAttention,
    Mamba2,
    PerLayerInputs,
    SharedKeys,
    ShortConvolution,
    config_from_glassllm,
    config_from_hf,
    shapes,
)
from fewbit.models.attention.rope_scaling import Proportional
from tests.nets.families import CASES

HF_CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 67,
    "num_hidden_layers": 2,
    "hidden_size": 24,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 40,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500.0,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "attention_bias": False,
    "rope_scaling": None,
    "torch_dtype": "bfloat16",
    "unknown_but_unset": None,
    "is_llama_config": True,
    "transformers.js_config": {"dtype": "q4"},
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


def test_llama():
    assert config_from_hf(HF_CONFIG) == DecoderConfig(**EXPECTED, rope="half", tied=True)
    newer = {k: v for k, v in HF_CONFIG.items() if not k.startswith("rope")}
    newer["rope_parameters"] = {"rope_type": "default", "rope_theta": 500.0}
    assert config_from_hf(newer) == config_from_hf(HF_CONFIG)
    sparse = {k: v for k, v in HF_CONFIG.items() if k not in ("tie_word_embeddings", "num_key_value_heads", "head_dim")}
    assert (config_from_hf(sparse).tied, config_from_hf(sparse).kv_heads) == (False, 6)
    assert config_from_hf({**HF_CONFIG, "model_type": "mistral", "head_dim": 8, "sliding_window": None}).head_dim == 8


def test_glassllm():
    said = {"vocab_size": 64, "d_model": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "max_len": 16}
    config = config_from_glassllm({**said, "rope_base": 10000.0, "eps": 1e-6, "init_std": 0.02})
    assert (config.hidden, config.head_dim, config.rope, config.tied, config.context) == (85, 8, "interleaved", True, 16)
    with pytest.raises(QuantError, match="__config__ lacks the field 'vocab_size'"):
        config_from_glassllm({})


@pytest.mark.parametrize("case", CASES)
def test_the_older_and_the_newer_names_of_rotary_embedding_are_one(case: str):
    settings = dict(CASES[case][1], model_type=case.split("-")[0])
    rope = settings.pop("rope_parameters", None)
    if not rope or "full_attention" in rope:
        return
    older = {**rope, "type": rope["rope_type"]}
    for name in ("rope_type", "rope_theta", "partial_rotary_factor"):
        if name in older:
            settings[name] = older.pop(name)
    del settings["rope_type"]
    assert config_from_hf({**settings, "rope_scaling": older}) == config_from_hf({**settings, "rope_parameters": rope})


def test_a_part_of_a_head_is_rotated_only_where_transformers_does_it():
    settings = {**CASES["phi3"][1], "model_type": "phi3", "partial_rotary_factor": 0.5}
    config = config_from_hf(settings)
    assert config.rotary_dim == config.head_dim // 2
    with pytest.raises(UnsupportedError, match=r"partial_rotary_factor = 0\.5; supported is 1"):
        config_from_hf({**CASES["llama"][1], "model_type": "llama", "partial_rotary_factor": 0.5})


def test_gemma_3_has_a_base_for_each_kind_of_layer():
    config = config_from_hf({**CASES["gemma3_text"][1], "model_type": "gemma3_text"})
    assert (config.rope_theta, config.window_rope_theta, config.window_layers) == (5000.0, 100.0, (0, 1))
    older = {name: value for name, value in CASES["gemma3_text"][1].items() if not name.startswith(("rope", "layer"))}
    config = config_from_hf({**older, "model_type": "gemma3_text", "sliding_window_pattern": 2, "rope_local_base_freq": 7.0})
    assert (config.rope_theta, config.window_rope_theta, config.window_layers) == (1e6, 7.0, (0, 2))


def test_gemma_4_has_heads_of_two_widths():
    settings = {**CASES["gemma4_text"][1], "model_type": "gemma4_text"}
    config = config_from_hf(settings)
    assert config.full == FullAttention(kv_heads=1, head_dim=24, keys_are_values=True)
    assert (config.rope_scaling, config.rope_theta, config.window_rope_theta) == (Proportional(3), 1e6, 1e4)
    older = ("global_head_dim", "num_global_key_value_heads")  # newer files say it of each layer
    newer = {name: value for name, value in settings.items() if name not in older}
    newer["per_layer_config"] = {str(i): {"head_dim": 24, "num_key_value_heads": 1} for i in (2, 3)}
    assert config_from_hf(newer) == config
    for wrong in ({}, {"2": {"head_dim": 24}, "3": {"head_dim": 32}}, {"0": {"head_dim": 24}, "3": {"head_dim": 24}}):
        with pytest.raises(UnsupportedError, match="a per_layer_config of other layers than those with full attention"):
            config_from_hf({**newer, "per_layer_config": wrong})
    assert config_from_hf({**settings, "use_bidirectional_attention": "vision"}) == config
    with pytest.raises(
        UnsupportedError, match="use_bidirectional_attention = 'all'; supported is None or False or 'vision'"
    ):
        config_from_hf({**settings, "use_bidirectional_attention": "all"})
    with pytest.raises(QuantError, match=r"config\.json has enable_moe_block, but no num_experts"):
        config_from_hf({**settings, "enable_moe_block": True})
    with pytest.raises(QuantError, match=r"full\.head_dim is 16, must be another one than head_dim"):
        config_from_hf({**settings, "global_head_dim": 16})
    alike = config_from_hf({**settings, "global_head_dim": 16, "attention_k_eq_v": False})
    assert alike.full is None and alike.window_layers == (0, 1)


def test_small_models_of_gemma_4_share_keys_and_have_inputs_for_each_layer():
    config = config_from_hf({**CASES["gemma4_text-shared"][1], "model_type": "gemma4_text"})
    assert (config.shared_keys, config.per_layer) == (SharedKeys(2, hidden=80), PerLayerInputs(96, 12))
    found = shapes(config)
    assert found["layers/2/mlp/up"] == (40, 32) and found["layers/3/mlp/up"] == (80, 32)
    assert "layers/3/attn/k" not in found and found["per_layer_embed"] == (96, 60)


def test_experts():
    config = config_from_hf({**CASES["qwen2_moe"][1], "model_type": "qwen2_moe"})
    assert config.experts == Experts(4, 2, 24, normalized=False, layers=(0, 2), shared_hidden=20)
    stacked = config_from_hf(
        {**CASES["qwen3_moe"][1], "model_type": "qwen3_moe"}, ["model.layers.0.mlp.experts.gate_up_proj"]
    )
    assert stacked.experts == Experts(4, 2, 24, layout="joined")


def test_an_original_context_of_one_token_is_refused():
    settings = CASES["phi3-longrope"][1]
    rope = {**settings["rope_parameters"], "original_max_position_embeddings": 1}
    with pytest.raises(QuantError, match="an original context of 1 token, whose logarithm is no divisor"):
        config_from_hf({**settings, "model_type": "phi3", "original_max_position_embeddings": 1, "rope_parameters": rope})


DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    "vocab_size": 129280,
    "num_hidden_layers": 61,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 3,
    "moe_layer_freq": 1,
    "num_nextn_predict_layers": 1,
    "ep_size": 1,
    "max_position_embeddings": 163840,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "attention_bias": False,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}


def test_the_configuration_that_deepseek_published():
    config = config_from_hf(DEEPSEEK_V3)
    assert config.latent == LatentAttention(rank=512, value_dim=128, query_rank=1536)
    assert (config.head_dim, config.rotary_dim, config.rope, config.extra_layers) == (192, 64, "interleaved", 1)
    assert config.experts is not None and config.experts.layers == tuple(range(3, 61))
    assert (config.experts.groups, config.experts.active_groups, config.experts.scale) == (8, 4, 2.5)
    assert config.rope_scaling is not None and config.rope_scaling.gain == 1
    assert config.attention_scale == pytest.approx(0.1352337788)  # 192 ** -0.5 * (0.1 log(40) + 1) ** 2
    expected = shapes(config)
    assert expected["layers/0/attn/kv_a"] == (576, 7168) and expected["layers/0/attn/kv_b"] == (32768, 512)
    assert expected["layers/2/mlp/down"] == (7168, 18432) and expected["layers/3/mlp/experts/255/down"] == (7168, 2048)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scoring_func": "softmax"}, "scoring_func = 'softmax'; supported is None or 'sigmoid'"),
        ({"topk_method": "greedy"}, "topk_method = 'greedy'; supported is None or 'noaux_tc'"),
        ({"moe_layer_freq": 2}, "moe_layer_freq = 2; supported is 1"),
        ({"qk_head_dim": 128}, "qk_head_dim = 128; supported is None or 192"),
        ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor = 0\.5; supported is None or 1"),
        ({"model_type": "deepseek_v2", "scoring_func": None, "topk_method": "greedy"}, "norm_topk_prob = True; supported"),
    ],
    ids=["scores", "method", "step", "head", "rotary", "v2"],
)
def test_deepseek_refuses(change: dict[str, Any], message: str):
    settings = {name: value for name, value in {**DEEPSEEK_V3, **change}.items() if value is not None}
    if settings["model_type"] == "deepseek_v2":
        del settings["num_nextn_predict_layers"]
    with pytest.raises(UnsupportedError, match=message):
        config_from_hf(settings)


QWEN3_5 = {
    "model_type": "qwen3_5_text",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_output_gate": True,
    "dtype": "bfloat16",
    "eos_token_id": 248044,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "initializer_range": 0.02,
    "intermediate_size": 3584,
    "layer_types": [*["linear_attention"] * 3, "full_attention"] * 6,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "linear_value_head_dim": 128,
    "mamba_ssm_dtype": "float32",
    "max_position_embeddings": 262144,
    "mlp_only_layers": [],
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
    "num_attention_heads": 8,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
        "partial_rotary_factor": 0.25,
        "rope_theta": 10000000,
        "rope_type": "default",
    },
    "tie_word_embeddings": True,
    "use_cache": True,
    "vocab_size": 248320,
}
"""The text_config of Qwen3.5-0.8B."""


def test_the_configuration_that_qwen_published():
    config = config_from_hf(QWEN3_5)
    linear = tuple(i for i in range(24) if i % 4 != 3)
    assert config.linear == LinearAttention(linear, key_heads=16, value_heads=16, key_dim=128, value_dim=128)
    assert (config.attention_gate, config.norm_offset, config.qk_norm, config.rotary_dim) == (True, 1.0, "head", 64)
    sparse = {name: value for name, value in QWEN3_5.items() if name != "layer_types"}
    assert config_from_hf(sparse) == config == config_from_hf({**sparse, "output_gate_type": "swish"})
    found = shapes(config)
    assert found["layers/0/attn/qkv"] == (6144, 1024) and found["layers/0/attn/out"] == (1024, 2048)
    assert found["layers/3/attn/q"] == (4096, 1024) and found["layers/3/attn/o"] == (1024, 2048)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer_types": ["linear_attention"]}, "layer_types of 1 layers; expected num_hidden_layers, 24"),
        ({"layer_types": ["mamba"] * 24}, "layer_types = 'mamba'; supported is 'full_attention' or 'linear_attention'"),
        ({"output_gate_type": "sigmoid"}, "output_gate_type = 'sigmoid'; supported is None or 'swish' or 'silu'"),
        ({"hidden_act": "gelu_pytorch_tanh"}, "hidden_act = 'gelu_pytorch_tanh'; supported is 'silu'"),
        ({"mamba_ssm_dtype": "bfloat16"}, "mamba_ssm_dtype = 'bfloat16'; supported is None or 'float32'"),
        ({"mtp_use_dedicated_embeddings": True}, "mtp_use_dedicated_embeddings = True, which the decoder does not support"),
    ],
    ids=["count", "kind", "gate", "activation", "state", "mtp"],
)
def test_qwen3_5_refuses(change: dict[str, Any], message: str):
    with pytest.raises((QuantError, UnsupportedError), match=message):
        config_from_hf({**QWEN3_5, **change})


MINIMAX_M2 = {
    "model_type": "minimax_m2",
    "architectures": ["MiniMaxM2ForCausalLM"],
    "attn_type_list": [1] * 62,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 3072,
    "intermediate_size": 1536,
    "layernorm_full_attention_beta": 1.0,
    "layernorm_linear_attention_beta": 1.0,
    "layernorm_mlp_beta": 1.0,
    "max_position_embeddings": 196608,
    "mlp_intermediate_size": 8192,
    "mtp_transformer_layers": 1,
    "num_attention_heads": 48,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 62,
    "num_key_value_heads": 8,
    "num_local_experts": 256,
    "num_mtp_modules": 3,
    "qk_norm_type": "per_layer",
    "rms_norm_eps": 1e-6,
    "rope_theta": 5000000,
    "rotary_dim": 64,
    "scoring_func": "sigmoid",
    "shared_intermediate_size": 0,
    "shared_moe_mode": "sigmoid",
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_mtp": True,
    "use_qk_norm": True,
    "use_routing_bias": True,
    "vocab_size": 200064,
}


def test_internlm_3_has_one_setting_of_biases():
    form = {**CASES["internlm3"][1], "model_type": "internlm3"}
    older = {key: value for key, value in form.items() if key not in ("attention_bias", "mlp_bias")} | {
        "qkv_bias": True,
        "bias": True,
    }
    assert config_from_hf(older) == config_from_hf(form)
    with pytest.raises(UnsupportedError, match="bias = False; supported is True"):
        config_from_hf({**older, "bias": False})


def test_bases_of_rotary_embedding_of_granite_with_windows():
    form = {**CASES["granite_swa-bases"][1], "model_type": "granite_swa"}
    config = config_from_hf(form)
    assert (config.rope_theta, config.window_rope_theta, config.nope_layers) == (1000.0, 100.0, ())
    without = config_from_hf({**form, "layer_rope_theta": [500.0, 0, 500.0]})
    assert (without.rope_theta, without.window_rope_theta, without.nope_layers) == (500.0, 0.0, (1,))
    silent = config_from_hf({key: form[key] for key in form if key not in ("layer_rope_theta", "layer_types")})
    assert (silent.rope_theta, silent.window_layers) == (10_000.0, (1, 2))
    with pytest.raises(UnsupportedError, match=r"layer_rope_theta = \[100\.0, 1000\.0, 50\.0\]; one base is supported"):
        config_from_hf({**form, "layer_rope_theta": [100.0, 1000.0, 50.0]})
    with pytest.raises(QuantError, match="has 2 layer_rope_theta and 3 layer_types of 3 layers"):
        config_from_hf({**form, "layer_rope_theta": [100.0, 1000.0]})
    with pytest.raises(UnsupportedError, match="several layer_rope_theta has rope_type = 'linear'"):
        config_from_hf({**form, "rope_parameters": {"rope_type": "linear", "factor": 2.0}})


def test_hyperclova_x_may_have_no_output_norms_and_the_usual_scale():
    form = {**CASES["hyperclovax"][1], "model_type": "hyperclovax", "use_post_norm": False, "attention_multiplier": None}
    config = config_from_hf(form)
    assert (config.norms, config.attention_scale, config.logit_scale) == ("pre", 0.0, 0.5)


def test_mellum_has_experts_in_the_layers_that_say_so():
    form = {**CASES["mellum"][1], "model_type": "mellum", "num_nextn_predict_layers": 1}
    config = config_from_hf(form)
    assert config.experts is not None and config.experts.layers == (1, 2)
    assert config_from_hf({**form, "mlp_layer_types": ["dense"] * 3}).experts is None
    with pytest.raises(UnsupportedError, match="mlp_layer_types = 'moe'; supported is 'dense' or 'sparse'"):
        config_from_hf({**form, "mlp_layer_types": ["moe"] * 3})


def test_trinity_rotates_where_it_has_a_window():
    form = {**CASES["afmoe"][1], "model_type": "afmoe", "score_func": "sigmoid", "route_norm": True, "num_expert_groups": 1}
    config = config_from_hf(form)
    assert (config.nope_layers, config.window_layers, config.embed_scale) == ((3,), (0, 1, 2), 32**0.5)
    assert shapes(config)["layers/0/attn/gate"] == (64, 32)
    with pytest.raises(UnsupportedError, match="score_func = 'softmax'; supported is None or 'sigmoid'"):
        config_from_hf({**form, "score_func": "softmax"})


LLAMA_4_SCOUT = {
    "model_type": "llama4_text",
    "attention_bias": False,
    "attention_chunk_size": 8192,
    "attn_scale": 0.1,
    "attn_temperature_tuning": True,
    "floor_scale": 8192,
    "for_llm_compressor": False,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 5120,
    "interleave_moe_layer_step": 1,
    "intermediate_size": 8192,
    "intermediate_size_mlp": 16384,
    "max_position_embeddings": 10485760,
    "moe_layers": list(range(48)),
    "no_rope_layers": [1, 1, 1, 0] * 12,
    "num_attention_heads": 40,
    "num_experts_per_tok": 1,
    "num_hidden_layers": 48,
    "num_key_value_heads": 8,
    "num_local_experts": 16,
    "rms_norm_eps": 1e-5,
    "rope_scaling": {
        "factor": 16.0,
        "high_freq_factor": 1.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "use_qk_norm": True,
    "vocab_size": 202048,
}
"""The text_config of Llama 4 Scout, by memory."""


def test_the_configuration_of_llama_4_scout():
    config = config_from_hf(LLAMA_4_SCOUT)
    assert (config.window, config.window_is_chunk, config.nope_layers) == (8192, True, tuple(range(3, 48, 4)))
    assert config.window_layers == tuple(i for i in range(48) if i % 4 != 3)
    assert config.experts is not None and (config.experts.layers, config.experts.shared_hidden) == ((), 8192)
    dense = config_from_hf({**LLAMA_4_SCOUT, "moe_layers": [], "attn_temperature_tuning": False})
    assert (dense.experts, dense.hidden, dense.temperature_scale) == (None, 16384, 0.0)
    others = {"no_rope_layers": [], "moe_layers": None, "interleave_moe_layer_step": 2, "use_qk_norm": False}
    maverick = config_from_hf({**LLAMA_4_SCOUT, **others})
    assert (maverick.nope_layers, maverick.qk_norm) == (config.nope_layers, "none")
    assert maverick.experts is not None and maverick.experts.layers == tuple(range(1, 48, 2))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer_types": ["sliding_attention"] * 48}, "layer_types = 'sliding_attention'; supported is 'full_attention' or"),
        ({"attention_chunk_size": None}, "layers of type 'chunked_attention', but no attention_chunk_size"),
        ({"no_rope_layers": [1, 0]}, "has 2 no_rope_layers, 2 layer_types, and num_hidden_layers 48"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_llama_4_refuses(change: dict[str, Any], message: str):
    with pytest.raises((QuantError, UnsupportedError), match=message):
        config_from_hf({**LLAMA_4_SCOUT, **change})


def test_the_configuration_that_minimax_published():
    config = config_from_hf(MINIMAX_M2)
    assert (config.rotary_dim, config.qk_norm, config.extra_layers) == (64, "projection", 3)
    assert config.experts == Experts(256, 8, 1536, scores="sigmoid", shared_gate=False)
    assert shapes(config)["layers/61/attn/q_norm"] == (6144,)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attn_type_list": [0] * 62}, "attn_type_list = 0; supported is 1"),
        ({"qk_norm_type": "per_head"}, "qk_norm_type = 'per_head'; supported is 'per_layer'"),
        ({"layernorm_full_attention_beta": 3.5}, r"layernorm_full_attention_beta = 3\.5; supported is 1\.0"),
        ({"layernorm_mlp_beta": 3.5}, r"layernorm_mlp_beta = 3\.5; supported is 1\.0"),
        ({"use_routing_bias": False}, "use_routing_bias = False; supported is True"),
        ({"shared_intermediate_size": 64}, "shared_intermediate_size = 64, which the decoder does not support"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_minimax_refuses(change: dict[str, Any], message: str):
    with pytest.raises(UnsupportedError, match=message):
        config_from_hf({**MINIMAX_M2, **change})


def test_the_layers_of_exaone_by_their_pattern():
    def layers(**change: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Those with the window, and those without rotary embedding."""
        said = {name: value for name, value in CASES["exaone4"][1].items() if name != "layer_types"}
        config = config_from_hf({**said, "model_type": "exaone4", "num_hidden_layers": 6, **change})
        return config.window_layers, config.nope_layers

    assert layers(sliding_window_pattern="LLLG") == ((0, 1, 2, 4), (3, 5))  # the last one sees everything
    assert layers(sliding_window_pattern=3) == ((0, 1, 3, 4), (2, 5))
    assert layers() == ((0, 1, 2, 4, 5), (3,))
    assert layers(sliding_window=None) == ((), ())
    for pattern in ("", "LX", 0):
        with pytest.raises(QuantError, match="expected a number of layers, or letters L and G"):
            layers(sliding_window_pattern=pattern)


def test_the_first_gemma_names_another_gelu_than_it_means():
    form = {**CASES["gemma"][1], "model_type": "gemma"}
    assert config_from_hf({**form, "hidden_act": "gelu"}) == config_from_hf(form)
    with pytest.raises(UnsupportedError, match="hidden_act = 'silu'; supported is None or 'gelu' or"):
        config_from_hf({**form, "hidden_act": "silu"})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer_types": ["attention", "conv", "attention"]}, "layer_types = 'conv'; supported is 'mamba' or"),
        ({"layer_types": None}, r"mamba\.layers has 3 of 3 layers; one without is expected at least"),
        ({"normalization_function": "layernorm"}, "normalization_function = 'layernorm'"),
        ({"time_step_limit": [0.1, "Infinity"]}, r"time_step_limit = \[0\.1, 'Infinity'\]; supported is None or"),
        ({"num_local_experts": 4, "num_experts_per_tok": 0}, "num_local_experts 4 and num_experts_per_tok 0"),
        ({"mamba_d_head": 12}, "has 8 heads of 12 in state space layers, which mamba_expand makes 64 wide"),
        ({"mamba_d_head": "wide"}, "mamba_d_head = 'wide'; supported is 'auto' or None"),
    ],
    ids=["kinds", "default", "norms", "limit", "experts", "width", "head"],
)
def test_granite_4_refuses(change: dict[str, Any], message: str):
    with pytest.raises((QuantError, UnsupportedError), match=message):
        config_from_hf({**CASES["granitemoehybrid-mamba"][1], "model_type": "granitemoehybrid", **change})


LFM2 = {
    "architectures": ["Lfm2ForCausalLM"],
    "block_auto_adjust_ff_dim": True,
    "block_dim": 2048,
    "block_ff_dim": 12288,
    "block_ffn_dim_multiplier": 1.0,
    "block_mlp_init_scale": 1.0,
    "block_multiple_of": 256,
    "block_norm_eps": 1e-05,
    "block_out_init_scale": 1.0,
    "block_use_swiglu": True,
    "block_use_xavier_init": True,
    "conv_L_cache": 3,
    "conv_bias": False,
    "conv_dim": 2048,
    "conv_dim_out": 2048,
    "conv_use_xavier_init": True,
    "full_attn_idxs": [2, 5, 8, 10, 12, 14],
    "hidden_size": 2048,
    "max_position_embeddings": 128000,
    "model_type": "lfm2",
    "norm_eps": 1e-05,
    "num_attention_heads": 32,
    "num_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "rope_theta": 1000000.0,
    "use_cache": True,
    "use_pos_enc": True,
    "vocab_size": 65536,
}
"""The published config.json of LFM2-1.2B."""


def test_lfm2():
    config = config_from_hf(LFM2)
    assert config.short_conv == ShortConvolution((0, 1, 3, 4, 6, 7, 9, 11, 13, 15), channels=2048)
    assert (config.hidden, config.head_dim, config.tied, config.norm_eps) == (8192, 64, True, 1e-5)
    later = {"layer_types": ["conv", "full_attention"] * 8, "block_auto_adjust_ff_dim": False, "tie_embedding": False}
    config = config_from_hf({**LFM2, **later, "block_ff_dim": None, "intermediate_size": 10752})
    assert config.short_conv is not None and len(config.short_conv.layers) == 8
    assert (config.hidden, config.tied) == (10752, False)
    assert config_from_hf({**LFM2, "full_attn_idxs": None}).short_conv is None
    assert config_from_hf({**LFM2, "block_ffn_dim_multiplier": None, "block_ff_dim": 100}).hidden == 66
    with pytest.raises(
        UnsupportedError, match="layer_types = 'mamba'; supported is 'conv' or 'attention' or 'full_attention'"
    ):
        config_from_hf({**LFM2, "layer_types": ["mamba"] * 16})
    with pytest.raises(QuantError, match="15 layer_types and num_hidden_layers 16"):
        config_from_hf({**LFM2, "layer_types": ["conv"] * 15})


PYTHIA = {
    "model_type": "gpt_neox",
    "hidden_act": "gelu",
    "hidden_size": 512,
    "initializer_range": 0.02,
    "intermediate_size": 2048,
    "layer_norm_eps": 1e-5,
    "max_position_embeddings": 2048,
    "num_attention_heads": 8,
    "num_hidden_layers": 6,
    "rotary_emb_base": 10000,
    "rotary_pct": 0.25,
    "tie_word_embeddings": False,
    "use_parallel_residual": True,
    "vocab_size": 50304,
}
"""The config.json of Pythia 70M."""


def test_decoders_with_layer_norms():
    config = config_from_hf(PYTHIA)
    assert (config.rotary_dim, config.parallel, config.fused_by_head, config.kv_heads) == (16, "two_norms", True, 8)
    assert config_from_hf({**PYTHIA, "rotary_pct": 0.5, "rotary_emb_base": 500}).rope_theta == 500
    phi = {**CASES["phi"][1], "model_type": "phi"}
    assert config_from_hf({**phi, "partial_rotary_factor": 0.5}).rotary_dim == 4 and config_from_hf(phi).head_bias
    gpt2 = {**CASES["gpt2"][1], "model_type": "gpt2", "n_ctx": 64, "summary_type": "cls_index", "attn_pdrop": 0.1}
    assert (config_from_hf(gpt2).hidden, config_from_hf(gpt2).positions, config_from_hf(gpt2).context) == (128, 64, 64)
    opt = {**CASES["opt"][1], "model_type": "opt", "prefix": "</s>", "activation_dropout": 0.0}
    assert (config_from_hf(opt).positions, config_from_hf(opt).position_offset) == (66, 2)
    falcon = {**CASES["falcon"][1], "model_type": "falcon", "ff_factor": 4}
    assert (config_from_hf(falcon).kv_heads, config_from_hf(falcon).hidden) == (1, 128)
    assert config_from_hf({**falcon, "new_decoder_architecture": True}).parallel == "two_norms"
    starcoder = {**CASES["starcoder2"][1], "model_type": "starcoder2", "mlp_type": "default", "norm_type": "layer_norm"}
    assert config_from_hf(starcoder).activation == "gelu_tanh"
    published = {
        "order_of_interleaved_layers": "local_attn_first",
        "layer_switch": 4,
        "position_embedding_type": "rope_gptj",
    }
    cohere = {**CASES["cohere2"][1], "model_type": "cohere2", "layer_types": None, "num_hidden_layers": 8, **published}
    assert config_from_hf(cohere).nope_layers == (3, 7) and config_from_hf(cohere).window_layers == (0, 1, 2, 4, 5, 6)


@pytest.mark.parametrize(
    ("case", "change"),
    [
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
        ("opt", {"do_layer_norm_before": False}),
        ("opt", {"word_embed_proj_dim": 16}),
        ("falcon", {"alibi": True}),
        ("falcon", {"num_ln_in_parallel_attn": 2}),
        ("stablelm", {"qk_layernorm": True}),
        ("stablelm", {"rope_pct": 0.5}),
        ("nemotron", {"rope_percent": 0.25}),
        ("phi", {"qk_layernorm": True}),
        ("cohere", {"use_qk_norm": True}),
        ("cohere2", {"use_parallel_block": False}),
        ("lfm2_moe", {"use_expert_bias": False}),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else value,
)
def test_what_relatives_with_layer_norms_may_have_is_refused(case: str, change: dict[str, Any]):
    with pytest.raises(UnsupportedError, match=next(iter(change))):
        config_from_hf({**CASES[case][1], "model_type": case, **change})


def test_granite_4_has_both_names_of_kinds_of_layers():
    form = {**CASES["granitemoehybrid-experts"][1], "model_type": "granitemoehybrid"}
    config = config_from_hf(form)
    published = {
        "layer_types": ["mamba", "attention", "mamba"],
        "mamba_d_head": 8,
        "time_step_limit": [0.0, {"__float__": "Infinity"}],
        "time_step_min": 0.001,
    }
    assert config_from_hf({**form, **published}) == config
    assert config.mamba == Mamba2((0, 2), heads=8, head_dim=8, state_dim=10, groups=1)
    assert config.experts is not None
    assert (config.experts.hidden, config.experts.shared_hidden, config.experts.shared_gate) == (40, 24, False)


def test_layers_may_be_dense_or_sparse():
    form = {**CASES["glm4_moe_lite"][1], "model_type": "glm4_moe_lite"}
    config = config_from_hf({**form, "mlp_layer_types": ["dense", "dense", "sparse"]})
    assert config.experts is not None and config.experts.layers == (2,)
    config = config_from_hf({**form, "mlp_layer_types": ["sparse", "dense", "sparse"]})
    assert config.experts is not None and config.experts.layers == (0, 2)
    with pytest.raises(UnsupportedError, match="mlp_layer_types = 'wide'; supported is 'dense' or 'sparse'"):
        config_from_hf({**form, "mlp_layer_types": ["dense", "dense", "wide"]})
    with pytest.raises(QuantError, match="2 mlp_layer_types and num_hidden_layers 3"):
        config_from_hf({**form, "mlp_layer_types": ["dense", "sparse"]})


@pytest.mark.parametrize(
    ("case", "change", "message"),
    [
        ("hunyuan_v1_moe", {"moe_topk": [2, 1, 2]}, r"moe_topk = \[2, 1, 2\]; supported is 2 or \[2, 2, 2\]"),
        ("hunyuan_v1_moe", {"num_shared_expert": [2] * 3}, r"num_shared_expert = \[2, 2, 2\]; supported is 1"),
        ("hunyuan_v1_dense", {"use_cla": True}, "use_cla = True; supported is False"),
        ("ernie4_5_moe", {"use_bias": True}, "use_bias = True; supported is False"),
        ("solar_open", {"first_k_dense_replace": 1}, "first_k_dense_replace = 1; supported is 0"),
        ("nemotron_h", {"attention_bias": True}, "attention_bias = True; supported is False"),
        ("nemotron_h", {"mlp_bias": True}, "mlp_bias = True; supported is False"),
        ("nemotron_h", {"tie_word_embeddings": True}, "tie_word_embeddings = True; supported is False"),
        ("nemotron_h", {"time_step_limit": [0.0, 0.1]}, r"time_step_limit = \[0.0, 0.1\]"),
        ("nemotron_h", {"layers_block_type": ["conv"]}, "a layer of the kind 'conv'; supported is 'linear_attention'"),
        ("youtu", {"n_routed_experts": 4}, "n_routed_experts = 4; supported is 1"),
    ],
)
def test_what_newer_mixtures_lack_is_refused(case: str, change: dict[str, Any], message: str):
    form = {**CASES[case][1], "model_type": case}
    with pytest.raises(UnsupportedError, match=message):
        config_from_hf({**form, **change})


def test_older_files_of_nemotron_h_have_a_letter_for_each_layer():
    form = {**CASES["nemotron_h"][1], "model_type": "nemotron_h"}
    older = {**form, "layers_block_type": None, "hybrid_override_pattern": "M-*EME", "num_hidden_layers": 6}
    assert config_from_hf(older) == config_from_hf(form)
    with pytest.raises(QuantError, match="lacks 'layers_block_type', or the older 'hybrid_override_pattern'"):
        config_from_hf({**form, "layers_block_type": None})


def test_sizes_that_published_files_of_hunyuan_have_for_each_layer():
    form = {**CASES["hunyuan_v1_moe"][1], "model_type": "hunyuan_v1_moe"}
    by_layer = {"moe_topk": [2] * 3, "num_shared_expert": [1] * 3, "moe_intermediate_size": [40] * 3}
    assert config_from_hf({**form, **by_layer}) == config_from_hf(form)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_an_unknown_feature_is_refused_by_its_key(model_type: str):
    settings = {**CASES[model_type][1], "model_type": model_type}
    with pytest.raises(UnsupportedError, match=r"config\.json has attn_temperature = 0\.1, which the decoder does not"):
        config_from_hf({**settings, "attn_temperature": 0.1})
    assert config_from_hf({**settings, "attn_temperature": None}) == config_from_hf(settings)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "qwen4"}, "model_type is 'qwen4', which the decoder cannot run; did you mean 'qwen"),
        ({"hidden_act": "tanh"}, "hidden_act = 'tanh'; supported is 'silu' or 'swish'"),
        ({"sliding_window": 4096}, "sliding_window = 4096, which the decoder does not support"),
        ({"rope_scaling": {"rope_type": "mrope"}}, "rope_parameters has rope_type = 'mrope'; supported is 'default'"),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0, "alpha": 3}},
            "alpha = 3, which rotary embedding of type 'linear'",
        ),
        ({"model_type": "gemma2", "use_bidirectional_attention": True}, "use_bidirectional_attention = True"),
        ({"model_type": "qwen3", "layer_types": ["chunked_attention"] * 2}, "layer_types = 'chunked_attention'"),
    ],
    ids=["type", "activation", "window", "rope", "rope-parameter", "bidirectional", "layer"],
)
def test_refuses(change: dict[str, Any], message: str):
    with pytest.raises(UnsupportedError, match=message):
        config_from_hf({**HF_CONFIG, **change})


def test_missing_keys_are_named():
    with pytest.raises(QuantError, match=r"config\.json lacks the field 'hidden_size'"):
        config_from_hf({k: v for k, v in HF_CONFIG.items() if k != "hidden_size"})
    with pytest.raises(QuantError, match=r"rope_parameters lacks the field 'factor'"):
        config_from_hf({**HF_CONFIG, "rope_scaling": {"type": "linear"}})


@pytest.mark.parametrize(
    ("kind", "heads"),
    [
        *(("mistral", 8), ("mixtral", 8), ("gpt_oss", 8), ("gemma2", 4), ("gemma3_text", 4), ("smollm3", 4)),
        *(("qwen3_moe", 4), ("llama", 32)),
    ],
)
def test_heads_of_keys_that_are_not_given_are_those_of_transformers(kind, heads):
    form = {**CASES[kind][1], "model_type": kind, "num_attention_heads": 32, "num_key_value_heads": None, "head_dim": 8}
    assert config_from_hf(form).kv_heads == 32
    del form["num_key_value_heads"]
    assert config_from_hf(form).kv_heads == heads
