"""A small random checkpoint of every family that the decoder runs, as transformers makes it."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from fewbit import workflows

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
WIDE = {name: value for name, value in SIZES.items() if name != "head_dim"}  # heads of 8
_OWN_SIZES = {name: value for name, value in WIDE.items() if name not in ("intermediate_size", "num_key_value_heads")}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention"]
_LINEAR = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
    "rms_norm_eps": 1e-3,  # the norm of values near zero amplifies rounding
}
_NTK = {"rope_theta": 1000.0, "factor": 4.0}

_DEEPSEEK: dict[str, Any] = {
    **WIDE,
    "num_key_value_heads": 4,
    "kv_lora_rank": 12,
    "q_lora_rank": 20,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "rms_norm_eps": 1e-3,
}

_ROUTED: dict[str, Any] = {
    **SIZES,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.0,
}

_NEMOTRON_H: dict[str, Any] = {
    **{name: value for name, value in SIZES.items() if name != "num_hidden_layers"},
    "layers_block_type": ["linear_attention", "mlp", "full_attention", "moe", "linear_attention", "moe"],
    "mamba_num_heads": 8,
    "mamba_head_dim": 8,
    "n_groups": 2,
    "ssm_state_size": 10,
    "chunk_size": 8,
    "time_step_min": 1e-9,  # which transformers applies to prompts alone
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 20,
    "routed_scaling_factor": 2.0,
    "layer_norm_epsilon": 1e-3,
}

_GEMMA_4: dict[str, Any] = {
    **SIZES,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "full_attention"],
    "sliding_window": 6,
    "global_head_dim": 24,
    "hidden_size_per_layer_input": 0,
}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {**SIZES, "attention_bias": True, "mlp_bias": True}),
    "llama-linear": ("LlamaForCausalLM", {**SIZES, "rope_parameters": {"rope_type": "linear", **_NTK}}),
    "llama-dynamic": (
        "LlamaForCausalLM",
        {**SIZES, "rope_parameters": {"rope_type": "dynamic", **_NTK}, "max_position_embeddings": 12},
    ),
    "llama-llama3": (
        "LlamaForCausalLM",
        {
            **SIZES,
            "rope_parameters": {
                "rope_type": "llama3",
                **_NTK,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        },
    ),
    "llama-yarn": (
        "LlamaForCausalLM",
        {**SIZES, "rope_parameters": {"rope_type": "yarn", **_NTK, "original_max_position_embeddings": 16}},
    ),
    "mistral": ("MistralForCausalLM", {**SIZES, "sliding_window": 7}),
    "mixtral": ("MixtralForCausalLM", {**SIZES, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2": ("Qwen2ForCausalLM", {**WIDE, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "qwen3": ("Qwen3ForCausalLM", {**SIZES, "tie_word_embeddings": True}),
    "qwen2_moe": (
        "Qwen2MoeForCausalLM",
        {**WIDE, **_EXPERTS, "shared_expert_intermediate_size": 20, "mlp_only_layers": [1]},
    ),
    "qwen3_moe": ("Qwen3MoeForCausalLM", {**SIZES, **_EXPERTS, "norm_topk_prob": True}),
    "qwen3_next": (
        "Qwen3NextForCausalLM",
        {**SIZES, **_EXPERTS, **_LINEAR, "shared_expert_intermediate_size": 20, "mlp_only_layers": [1]},
    ),
    "qwen3_5_text": ("Qwen3_5ForCausalLM", {**SIZES, **_LINEAR, "tie_word_embeddings": True}),
    "qwen3_5_moe_text": (
        "Qwen3_5MoeForCausalLM",
        {**SIZES, **_EXPERTS, **_LINEAR, "shared_expert_intermediate_size": 20, "linear_num_key_heads": 4},
    ),
    "gemma2": ("Gemma2ForCausalLM", {**SIZES, "sliding_window": 6, "query_pre_attn_scalar": 24}),
    "gemma3_text": (
        "Gemma3ForCausalLM",
        {
            **SIZES,
            "sliding_window": 6,
            "query_pre_attn_scalar": 24,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        },
    ),
    "gemma4_text": ("Gemma4ForCausalLM", {**_GEMMA_4, "attention_k_eq_v": True, "num_global_key_value_heads": 1}),
    "gemma4_text-experts": (
        "Gemma4ForCausalLM",
        {
            **_GEMMA_4,
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 24,
            "final_logit_softcapping": 2.0,
        },
    ),
    "gemma4_text-shared": (
        "Gemma4ForCausalLM",
        {
            **_GEMMA_4,
            "num_hidden_layers": 5,
            "layer_types": [
                "sliding_attention",
                "full_attention",
                "sliding_attention",
                "sliding_attention",
                "full_attention",
            ],
            "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
            "hidden_size_per_layer_input": 12,
            "vocab_size_per_layer_input": 96,
        },
    ),
    "phi3": ("Phi3ForCausalLM", {**WIDE, "sliding_window": 9}),
    "phi3-longrope": (
        "Phi3ForCausalLM",
        {
            **WIDE,
            "hidden_size": 64,
            "original_max_position_embeddings": 16,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 500.0,
                "partial_rotary_factor": 0.5,
                "short_factor": [1.0, 1.1, 1.2, 1.5],
                "long_factor": [1.0, 2.0, 3.0, 4.0],
            },
        },
    ),
    "olmo2": ("Olmo2ForCausalLM", WIDE),
    "smollm3": ("SmolLM3ForCausalLM", {**WIDE, "no_rope_layer_interval": 2}),
    "granite": (
        "GraniteForCausalLM",
        {
            **WIDE,
            "attention_bias": True,
            "embedding_multiplier": 3.0,
            "logits_scaling": 2.0,
            "residual_multiplier": 0.5,
            "attention_multiplier": 0.25,
        },
    ),
    "granitemoehybrid": (
        "GraniteMoeHybridForCausalLM",
        {
            **{name: value for name, value in WIDE.items() if name != "intermediate_size"},
            "shared_intermediate_size": 40,
            "num_local_experts": 0,
            "layer_types": ["attention"] * 3,
            "position_embedding_type": "rope",
            "embedding_multiplier": 3.0,
            "logits_scaling": 2.0,
            "residual_multiplier": 0.5,
            "attention_multiplier": 0.25,
            "mamba_n_heads": 4,
        },
    ),
    "granitemoehybrid-nope": (
        "GraniteMoeHybridForCausalLM",
        {**WIDE, "num_local_experts": 0, "layer_types": ["attention"] * 3, "mamba_n_heads": 4},
    ),
    "granitemoehybrid-mamba": (
        "GraniteMoeHybridForCausalLM",
        {
            **WIDE,
            "shared_intermediate_size": 40,
            "num_local_experts": 0,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.5,
            "attention_multiplier": 0.25,
            "mamba_n_heads": 8,
            "mamba_d_head": "auto",
            "mamba_expand": 2,
            "mamba_n_groups": 2,
            "mamba_d_state": 10,
            "mamba_chunk_size": 8,
            "mamba_proj_bias": True,
            "rms_norm_eps": 1e-3,
        },
    ),
    "granitemoehybrid-experts": (
        "GraniteMoeHybridForCausalLM",
        {
            **WIDE,
            "shared_intermediate_size": 24,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "logits_scaling": 2.0,
            "mamba_n_heads": 8,
            "mamba_d_state": 10,
            "rms_norm_eps": 1e-3,
        },
    ),
    "granitemoe": (
        "GraniteMoeForCausalLM",
        {
            **WIDE,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "embedding_multiplier": 3.0,
            "logits_scaling": 2.0,
            "residual_multiplier": 0.5,
            "attention_multiplier": 0.25,
        },
    ),
    "lfm2": (
        "Lfm2ForCausalLM",
        {
            **{name: value for name, value in WIDE.items() if name != "rms_norm_eps"},
            "layer_types": ["conv", "full_attention", "conv"],
            "block_multiple_of": 8,
            "block_ffn_dim_multiplier": 1.5,
            "conv_bias": True,
            "norm_eps": 1e-3,
        },
    ),
    "lfm2_moe": (
        "Lfm2MoeForCausalLM",
        {
            **{name: value for name, value in WIDE.items() if name != "rms_norm_eps"},
            "num_hidden_layers": 4,
            "layer_types": ["conv", "full_attention", "conv", "full_attention"],
            **_EXPERTS,
            "num_dense_layers": 1,
            "routed_scaling_factor": 1.5,
            "norm_eps": 1e-3,
        },
    ),
    "nemotron_h": ("NemotronHForCausalLM", {**_NEMOTRON_H, "moe_latent_size": 12, "n_group": 4, "topk_group": 2}),
    "nemotron_h-mlp": (
        "NemotronHForCausalLM",
        {
            **_NEMOTRON_H,
            "layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"],
            "mlp_bias": True,
            "use_bias": True,
        },
    ),
    "ministral": ("MinistralForCausalLM", {**SIZES, "sliding_window": 5, "layer_types": _ALTERNATING}),
    "ministral3": (
        "Ministral3ForCausalLM",
        {
            **SIZES,
            "rope_parameters": {
                "rope_type": "yarn",
                **_NTK,
                "original_max_position_embeddings": 8,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.5,
            },
        },
    ),
    "gemma": ("GemmaForCausalLM", SIZES),
    "olmo3": ("Olmo3ForCausalLM", {**WIDE, "sliding_window": 6, "layer_types": _ALTERNATING}),
    "olmo3-yarn": (
        "Olmo3ForCausalLM",
        {
            **WIDE,
            "sliding_window": 6,
            "layer_types": _ALTERNATING,
            "rope_parameters": {
                "full_attention": {"rope_type": "yarn", **_NTK, "original_max_position_embeddings": 16},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
            },
        },
    ),
    "olmoe": ("OlmoeForCausalLM", {**WIDE, "num_experts": 4, "num_experts_per_tok": 2}),
    "glm": ("GlmForCausalLM", SIZES),
    "glm4": ("Glm4ForCausalLM", SIZES),
    "glm4_moe": ("Glm4MoeForCausalLM", {**_ROUTED, "head_dim": 16, "attention_bias": True, "use_qk_norm": True}),
    "glm4_moe_lite": (
        "Glm4MoeLiteForCausalLM",
        {**_DEEPSEEK, "rms_norm_eps": 1e-5, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.8},
    ),
    "dots1": (
        "Dots1ForCausalLM",
        {**_ROUTED, "head_dim": 16, "norm_topk_prob": True, "sliding_window": 6, "max_window_layers": 2},
    ),
    "minimax_m2": (
        "MiniMaxM2ForCausalLM",
        {
            **SIZES,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 0.5},
        },
    ),
    "seed_oss": ("SeedOssForCausalLM", {**SIZES, "attention_out_bias": True, "mlp_bias": True}),
    "exaone4": ("Exaone4ForCausalLM", {**WIDE, "sliding_window": 6, "layer_types": _ALTERNATING}),
    "exaone4-full": ("Exaone4ForCausalLM", {**WIDE, "sliding_window": None, "layer_types": ["full_attention"] * 3}),
    "ernie4_5": ("Ernie4_5ForCausalLM", {**SIZES, "use_bias": True}),
    "ernie4_5_moe": (
        "Ernie4_5_MoeForCausalLM",
        {
            **WIDE,
            "num_hidden_layers": 4,
            "moe_num_experts": 4,
            "moe_k": 2,
            "moe_intermediate_size": 24,
            "moe_layer_interval": 2,
            "tie_word_embeddings": False,
        },
    ),
    "llama4_text": (
        "Llama4ForCausalLM",
        {
            **SIZES,
            "num_hidden_layers": 4,
            "intermediate_size_mlp": 48,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "interleave_moe_layer_step": 2,
            "attention_chunk_size": 5,
            "floor_scale": 4,
            "rope_parameters": {
                "rope_type": "llama3",
                **_NTK,
                "low_freq_factor": 1.0,
                "high_freq_factor": 1.0,
                "original_max_position_embeddings": 32,
            },
        },
    ),
    "llama4_text-without-norms": (
        "Llama4ForCausalLM",
        {
            **SIZES,
            "intermediate_size_mlp": 40,
            "num_local_experts": 4,
            "use_qk_norm": False,
            "no_rope_layers": [1, 1, 1],
            "layer_types": ["full_attention"] * 3,
            "attention_bias": True,
        },
    ),
    "internlm3": ("LlamaForCausalLM", {**SIZES, "attention_bias": True, "mlp_bias": True}),
    "iquestcoder": ("LlamaForCausalLM", SIZES),
    "hyperclovax": (
        "HyperCLOVAXForCausalLM",
        {
            **WIDE,
            "attention_bias": True,
            "embedding_multiplier": 3.0,
            "logits_scaling": 0.5,
            "residual_multiplier": 0.5,
            "attention_multiplier": 0.25,
        },
    ),
    "jais2": ("Jais2ForCausalLM", {**WIDE, "num_key_value_heads": 2}),
    "mellum": (
        "MellumForCausalLM",
        {
            **SIZES,
            **_EXPERTS,
            "sliding_window": 6,
            "layer_types": _ALTERNATING,
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "rope_parameters": {
                "full_attention": {"rope_type": "yarn", **_NTK, "original_max_position_embeddings": 16},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        },
    ),
    "granite_swa": (
        "GraniteSWAForCausalLM",
        {
            **WIDE,
            "sliding_window": 6,
            "layer_types": _ALTERNATING,
            "layer_rope_theta": [100.0, 0, 100.0],
            "embedding_multiplier": 3.0,
            "logits_scaling": 2.0,
            "attention_multiplier": 0.25,
        },
    ),
    "granite_swa-bases": (
        "GraniteSWAForCausalLM",
        {**WIDE, "sliding_window": 6, "layer_types": _ALTERNATING, "layer_rope_theta": [100.0, 1000.0, 100.0]},
    ),
    "bamba": (
        "BambaForCausalLM",
        {
            **WIDE,
            "attn_layer_indices": [1],
            "mamba_n_heads": 8,
            "mamba_n_groups": 2,
            "mamba_d_state": 10,
            "mamba_chunk_size": 8,
            "mamba_proj_bias": True,
            "mlp_bias": True,
            "rms_norm_eps": 1e-3,
        },
    ),
    "afmoe": (
        "AfmoeForCausalLM",
        {
            **SIZES,
            **_EXPERTS,
            "num_hidden_layers": 4,
            "num_shared_experts": 1,
            "route_scale": 2.0,
            "sliding_window": 6,
            "mup_enabled": True,
        },
    ),
    "apertus": ("ApertusForCausalLM", {**SIZES, "attention_bias": True}),
    "hunyuan_v1_dense": (
        "HunYuanDenseV1ForCausalLM",
        {
            **SIZES,
            "attention_bias": True,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 100.0, "alpha": 50.0, "factor": 1.0},
        },
    ),
    "hunyuan_v1_moe": (
        "HunYuanMoEV1ForCausalLM",
        {
            **SIZES,
            "num_experts": 4,
            "moe_topk": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
        },
    ),
    "hy_v3": (
        "HYV3ForCausalLM",
        {**SIZES, **_EXPERTS, "mlp_layer_types": ["sparse", "dense", "sparse"], "attention_bias": True},
    ),
    "exaone_moe": (
        "ExaoneMoeForCausalLM",
        {**SIZES, **_EXPERTS, "sliding_window": 6, "layer_types": _ALTERNATING, "n_group": 2, "topk_group": 1},
    ),
    "solar_open": (
        "SolarOpenForCausalLM",
        {**{name: value for name, value in _ROUTED.items() if name != "first_k_dense_replace"}, "head_dim": 16},
    ),
    "cwm": ("CwmForCausalLM", {**SIZES, "sliding_window": 6}),
    "flex_olmo": ("FlexOlmoForCausalLM", {**WIDE, "num_experts": 4, "num_experts_per_tok": 2, "attention_bias": True}),
    "granitemoeshared": (
        "GraniteMoeSharedForCausalLM",
        {
            **WIDE,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 24,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.5,
        },
    ),
    "granitemoeshared-none": (
        "GraniteMoeSharedForCausalLM",
        {**WIDE, "num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 0},
    ),
    "vaultgemma": ("VaultGemmaForCausalLM", {**SIZES, "sliding_window": 6, "query_pre_attn_scalar": 24}),
    "youtu": (
        "YoutuForCausalLM",
        {name: value for name, value in _DEEPSEEK.items() if name in WIDE or name.endswith(("_dim", "_rank", "_eps"))},
    ),
    "helium": ("HeliumForCausalLM", {**WIDE, "head_dim": 8, "attention_bias": True, "mlp_bias": True}),
    "bitnet": ("BitNetForCausalLM", WIDE),
    "arcee": ("ArceeForCausalLM", {**SIZES, "attention_bias": True, "mlp_bias": True}),
    "phi": ("PhiForCausalLM", WIDE),
    "starcoder2": ("Starcoder2ForCausalLM", {**WIDE, "sliding_window": 6}),
    "stablelm": ("StableLmForCausalLM", {**WIDE, "use_qkv_bias": True}),
    "stablelm-parallel": ("StableLmForCausalLM", {**WIDE, "use_parallel_residual": True, "tie_word_embeddings": True}),
    "nemotron": ("NemotronForCausalLM", {**SIZES, "attention_bias": True, "mlp_bias": True}),
    "cohere": ("CohereForCausalLM", {**WIDE, "logit_scale": 0.25, "attention_bias": True}),
    "cohere2": ("Cohere2ForCausalLM", {**WIDE, "sliding_window": 6, "layer_types": _ALTERNATING}),
    "gpt2": (
        "GPT2LMHeadModel",
        {
            "vocab_size": 96,
            "n_embd": 32,
            "n_layer": 3,
            "n_head": 4,
            "n_positions": 64,
            "bos_token_id": 1,
            "eos_token_id": None,
        },
    ),
    "opt": ("OPTForCausalLM", {**_OWN_SIZES, "ffn_dim": 40, "word_embed_proj_dim": 32}),
    "gpt_neox": ("GPTNeoXForCausalLM", {**_OWN_SIZES, "intermediate_size": 40}),
    "gpt_neox-sequential": (
        "GPTNeoXForCausalLM",
        {**_OWN_SIZES, "intermediate_size": 40, "use_parallel_residual": False, "attention_bias": False},
    ),
    "falcon": ("FalconForCausalLM", _OWN_SIZES),
    "falcon-new": (
        "FalconForCausalLM",
        {**_OWN_SIZES, "new_decoder_architecture": True, "num_kv_heads": 2, "bias": True, "ffn_hidden_size": 40},
    ),
    "falcon-heads": ("FalconForCausalLM", {**_OWN_SIZES, "multi_query": False, "parallel_attn": False}),
    "gpt_oss": (
        "GptOssForCausalLM",
        {
            **SIZES,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 6,
            "layer_types": _ALTERNATING,
            "swiglu_limit": 1.5,
        },
    ),
    "deepseek_v2": (
        "DeepseekV2ForCausalLM",
        {**_DEEPSEEK, "topk_method": "group_limited_greedy", "routed_scaling_factor": 4.0},
    ),
    "deepseek_v3": ("DeepseekV3ForCausalLM", {**_DEEPSEEK, "attention_bias": True, "num_nextn_predict_layers": 1}),
    "deepseek_v3-yarn": (
        "DeepseekV3ForCausalLM",
        {
            **_DEEPSEEK,
            "q_lora_rank": None,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": False,
            "rope_interleave": False,
            "rope_parameters": {
                "rope_type": "yarn",
                **_NTK,
                "original_max_position_embeddings": 16,
                "mscale": 0.7,
                "mscale_all_dim": 1.2,
            },
        },
    ),
}
"""For each case the class of transformers and its configuration."""


@functools.cache
def theirs(case: str) -> Any:
    """The model of a case in transformers, with random weights, norms, biases and router corrections; float32."""
    import transformers

    name, settings = CASES[case]
    cls = getattr(transformers, name)
    config = transformers.AutoConfig.for_model(case.split("-")[0], **settings, attn_implementation="eager")
    return with_random_weights(cls(config).eval())


def with_random_weights(model: Any) -> Any:
    """A model of transformers with random weights, norms, biases and router corrections; float32."""
    import torch

    draw = np.random.default_rng(0)
    with torch.no_grad():
        corrections = [
            (path, buffer) for path, buffer in model.named_buffers() if path.endswith(("correction_bias", "expert_bias"))
        ]
        for path, parameter in [*model.named_parameters(), *corrections]:
            shape = tuple(parameter.shape)
            if len(shape) > 1 and not path.endswith("bias"):
                values = draw.normal(size=shape) * shape[-1] ** -0.5
            else:
                values = parameter.numpy() + 0.3 * draw.normal(size=shape)
            parameter.copy_(torch.from_numpy(np.asarray(values, np.float32)))
    return model


def opener(theirs: Callable[[str], Any], directories: pytest.TempPathFactory) -> Callable[[str], workflows.Model]:
    """Opens the checkpoint of a case that transformers wrote, each once."""
    pytest.importorskip("transformers")

    @functools.cache
    def opened(case: str) -> workflows.Model:
        directory = directories.mktemp(case)
        theirs(case).save_pretrained(directory)
        return workflows.load(directory)

    return opened


def their_logits(model: Any, tokens: np.ndarray) -> np.ndarray:
    """The logits of transformers; one thread, since more of them spin on a shared machine."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.no_grad():
        logits = model(torch.from_numpy(np.asarray(tokens, np.int64))).logits.numpy()
    torch.set_num_threads(threads)
    return logits


def their_tokens(model: Any, prompt: np.ndarray, count: int) -> np.ndarray:
    """The tokens that transformers generates greedily, with its own KV cache."""
    import torch

    ids = torch.from_numpy(np.asarray(prompt, np.int64))
    written = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, min_new_tokens=count, do_sample=False
    )
    return written[:, prompt.shape[1] :].numpy()
