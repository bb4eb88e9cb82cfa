"""Tiny random checkpoints of the families that become GGUF files, written by transformers."""

import json
from pathlib import Path
from typing import Any

COMMON: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
    "initializer_range": 0.2,
}

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
_ALPHA = {"rope_type": "dynamic", "rope_theta": 100.0, "alpha": 20.0, "factor": 1.0}
_LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "long_factor": [2.0 + 0.3 * i for i in range(8)],
    "original_max_position_embeddings": 256,
}
_GEMMA3_ROPE = {
    "full_attention": {"rope_type": "default", "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}

_GEMMA4: dict[str, Any] = {
    "num_hidden_layers": 3,
    "head_dim": 32,
    "global_head_dim": 64,
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "hidden_size_per_layer_input": 0,
    "tie_word_embeddings": True,
}

_HYBRID: dict[str, Any] = {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "shared_intermediate_size": 64,
    "attention_multiplier": 0.25,
    "mamba_n_heads": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
}

_NEMOTRON_H: dict[str, Any] = {
    "num_hidden_layers": None,
    "head_dim": 32,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "ssm_state_size": 16,
    "time_step_min": 1e-9,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 64,
    "routed_scaling_factor": 2.0,
}

_DEEPSEEK: dict[str, Any] = {
    "num_key_value_heads": 4,
    "num_hidden_layers": 3,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 24,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.0,
    "rms_norm_eps": 1e-6,
}

_ROUTED: dict[str, Any] = {
    "num_hidden_layers": 3,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "n_shared_experts": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.0,
}

_LINEAR: dict[str, Any] = {
    "num_hidden_layers": 4,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "rms_norm_eps": 1e-6,
}
_QWEN_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 64,
}

_WITHOUT_KEY_HEADS = {"hidden_act": "gelu", "num_key_value_heads": None}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"attention_bias": True}),
    "llama-3.1": ("llama", {"rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": True}),
    "llama-yarn": ("llama", {"rope_parameters": YARN}),
    "llama-linear": ("llama", {"rope_parameters": LINEAR}),
    "llama4": (
        "llama4_text",
        {
            "num_hidden_layers": 4,
            "head_dim": 16,
            "intermediate_size_mlp": 96,
            "intermediate_size": 32,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "interleave_moe_layer_step": 2,
            "rope_parameters": LLAMA3_ROPE | {"high_freq_factor": 1.0},
        },
    ),
    "internlm3": ("internlm3", {"head_dim": 16, "attention_bias": True, "mlp_bias": True}),
    "iquest-coder": ("iquestcoder", {"head_dim": 16}),
    "jais2": ("jais2", {"hidden_act": "relu2"}),
    "mistral": ("mistral", {"head_dim": 32, "sliding_window": None}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "qwen2-moe": (
        "qwen2_moe",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64},
    ),
    "qwen3-moe": (
        "qwen3_moe",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16, "norm_topk_prob": True},
    ),
    "qwen3-next": ("qwen3_next", {**_LINEAR, **_QWEN_EXPERTS}),
    "qwen3.5": ("qwen3_5_text", _LINEAR),
    "qwen3.5-one-key-head-each": ("qwen3_5_text", {**_LINEAR, "linear_num_key_heads": 4, "full_attention_interval": 2}),
    "qwen3.5-moe": ("qwen3_5_moe_text", {**_LINEAR, **_QWEN_EXPERTS}),
    "gemma2": (
        "gemma2",
        {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 8, "tie_word_embeddings": True},
    ),
    "gemma3": (
        "gemma3_text",
        {
            "head_dim": 32,
            "query_pre_attn_scalar": 32,
            "sliding_window": 8,
            "num_hidden_layers": 7,
            "rope_parameters": _GEMMA3_ROPE,
            "tie_word_embeddings": True,
        },
    ),
    "gemma4": ("gemma4_text", {**_GEMMA4, "attention_k_eq_v": True, "num_global_key_value_heads": 1}),
    "gemma4-experts": (
        "gemma4_text",
        {
            **_GEMMA4,
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 32,
            "final_logit_softcapping": 4.0,
        },
    ),
    "gemma4-shared": (
        "gemma4_text",
        {
            **_GEMMA4,
            "num_hidden_layers": 6,
            "layer_types": [*_GEMMA4["layer_types"], *_GEMMA4["layer_types"]],
            "num_kv_shared_layers": 3,
            "use_double_wide_mlp": True,
            "hidden_size_per_layer_input": 32,
            "vocab_size_per_layer_input": 300,
        },
    ),
    "phi3": ("phi3", {"sliding_window": None}),
    "phi3-long": (
        "phi3",
        {"rope_parameters": _LONG, "original_max_position_embeddings": 256, "max_position_embeddings": 1024},
    ),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo3", {"num_hidden_layers": 5, "sliding_window": 8}),
    "olmo3-yarn": (
        "olmo3",
        {
            "num_hidden_layers": 3,
            "sliding_window": 8,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "rope_parameters": {
                "full_attention": YARN,
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
    ),
    "olmoe": ("olmoe", {"num_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 4}),
    "gemma": ("gemma", {"head_dim": 32, "tie_word_embeddings": True, "hidden_act": "gelu_pytorch_tanh"}),
    "seed-oss": ("seed_oss", {"head_dim": 32}),
    "exaone4": ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 2, "rope_parameters": LLAMA3_ROPE}),
    "exaone4-64": ("exaone4", {"sliding_window": 8, "num_hidden_layers": 64, "hidden_size": 32, "intermediate_size": 32}),
    "ernie4-5": ("ernie4_5", {"head_dim": 32}),
    "ernie4-5-moe": (
        "ernie4_5_moe",
        {"num_hidden_layers": 3, "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32},
    ),
    "hunyuan": ("hunyuan_v1_dense", {"head_dim": 32, "rope_parameters": _ALPHA}),
    "hunyuan-moe": ("hunyuan_v1_moe", {"num_experts": 4, "moe_topk": 2, "head_dim": 16}),
    "exaone-moe": (
        "exaone_moe",
        {
            "num_hidden_layers": 5,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "num_shared_experts": 2,
            "sliding_window": 8,
        },
    ),
    "solar-open": (
        "solar_open",
        {
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "head_dim": 32,
            "routed_scaling_factor": 2.0,
        },
    ),
    "glm4": ("glm4", {"head_dim": 32}),
    "glm4-moe": ("glm4_moe", {**_ROUTED, "head_dim": 32, "attention_bias": True, "use_qk_norm": True}),
    "glm4-moe-plain": ("glm4_moe", {**_ROUTED, "head_dim": 32, "norm_topk_prob": False}),
    "dots1": (
        "dots1",
        {**_ROUTED, "num_key_value_heads": 4, "head_dim": 32, "norm_topk_prob": True, "sliding_window": None},
    ),
    "minimax-m2": (
        "minimax_m2",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "head_dim": 32,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        },
    ),
    "granite-moe": (
        "granitemoe",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "attention_multiplier": 0.2,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.5,
            "logits_scaling": 4.0,
        },
    ),
    "granite-moe-shared": (
        "granitemoeshared",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 64,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.5,
        },
    ),
    "granite-hybrid": ("granitemoehybrid", {**_HYBRID, "num_local_experts": 0}),
    "granite-hybrid-moe": (
        "granitemoehybrid",
        {
            **_HYBRID,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "position_embedding_type": "rope",
            "logits_scaling": 4.0,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.5,
        },
    ),
    "granite-4": (
        "granitemoehybrid",
        {
            **_HYBRID,
            "layer_types": ["attention"] * 3,
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "residual_multiplier": 0.5,
        },
    ),
    "granite-4-moe": (
        "granitemoehybrid",
        {
            **_HYBRID,
            "layer_types": ["attention"] * 3,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "position_embedding_type": "rope",
            "logits_scaling": 4.0,
        },
    ),
    "nemotron-h": ("nemotron_h", {**_NEMOTRON_H, "layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"]}),
    "nemotron-h-moe": (
        "nemotron_h",
        {**_NEMOTRON_H, "layers_block_type": ["linear_attention", "moe", "full_attention", "moe", "linear_attention"]},
    ),
    "nemotron-h-latent": (
        "nemotron_h",
        {**_NEMOTRON_H, "layers_block_type": ["linear_attention", "moe", "full_attention"], "moe_latent_size": 32},
    ),
    "lfm2": (
        "lfm2",
        {
            "num_hidden_layers": 3,
            "layer_types": ["conv", "full_attention", "conv"],
            "block_multiple_of": 32,
            "block_ffn_dim_multiplier": 1.3,
            "norm_eps": 1e-3,
            "rms_norm_eps": None,
            "tie_word_embeddings": True,
        },
    ),
    "lfm2-moe": (
        "lfm2_moe",
        {
            "num_hidden_layers": 3,
            "layer_types": ["conv", "full_attention", "conv"],
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "num_dense_layers": 1,
            "norm_eps": 1e-3,
            "rms_norm_eps": None,
            "tie_word_embeddings": True,
        },
    ),
    "arcee": ("arcee", {"hidden_act": "relu2", "rope_parameters": LLAMA3_ROPE}),
    "command-r": ("cohere", {"logit_scale": 0.25, "tie_word_embeddings": True}),
    "cohere2": ("cohere2", {"num_hidden_layers": 5, "sliding_window": 8, "tie_word_embeddings": True}),
    "starcoder2": ("starcoder2", {"hidden_act": "gelu_pytorch_tanh", "sliding_window": None, "tie_word_embeddings": True}),
    "stablelm": ("stablelm", {"use_qkv_bias": True}),
    "stablelm-parallel": ("stablelm", {"use_parallel_residual": True}),
    "nemotron": ("nemotron", {"hidden_act": "relu2", "head_dim": 16}),
    "phi2": ("phi", {"hidden_act": "gelu_new", "num_key_value_heads": 4}),
    "gpt2": ("gpt2", {"num_key_value_heads": None, "intermediate_size": None, "n_inner": 96, "tie_word_embeddings": True}),
    "gptneox": ("gpt_neox", _WITHOUT_KEY_HEADS),
    "gptneox-sequential": ("gpt_neox", {**_WITHOUT_KEY_HEADS, "use_parallel_residual": False}),
    "smollm3": ("smollm3", {"num_hidden_layers": 5, "tie_word_embeddings": True}),
    "granite": (
        "granite",
        {"attention_multiplier": 0.2, "embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 4.0},
    ),
    "gpt-oss": (
        "gpt_oss",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "head_dim": 16,
            "sliding_window": 8,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "deepseek-v2": (
        "deepseek_v2",
        {
            **_DEEPSEEK,
            "n_routed_experts": 4,
            "q_lora_rank": None,
            "topk_method": "greedy",
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": False,
        }
        | {"rope_parameters": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707}},
    ),
    "deepseek-v3": ("deepseek_v3", {**_DEEPSEEK, "q_lora_rank": 64, "n_group": 4, "topk_group": 2}),
    "deepseek-v3-yarn": (
        "deepseek_v3",
        {**_DEEPSEEK, "q_lora_rank": None, "n_group": 1, "topk_group": 1, "norm_topk_prob": False}
        | {"rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 16.0}},
    ),
}
"""The `model_type` of each case, and what differs from `COMMON`."""

TEXT = (
    "The quick brown fox, 42 years old, jumps over the lazy dog. What then? Nothing! It's 2025, and they've gone.\n\n  Yes."
    * 3
)


def save_tokenizer(directory: Path, vocab: int = 300) -> None:
    """A byte-level BPE with Qwen 2's rule of splitting."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    from fewbit._pretokenizers import SPLITS

    rule = next(rules[0] for rules, name in SPLITS.items() if name == "qwen2")
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(rule), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        initial_alphabet=alphabet,
        special_tokens=[AddedToken("<|end|>", special=True)],
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "tokenizer.json").write_text(tokenizer.to_str())
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|end|>",
        "bos_token": "<|end|>",
        "add_bos_token": False,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))


def save_family(name: str, directory: Path, **further: Any) -> Any:
    """Writes the random float32 checkpoint of a case, with further changes; returns transformers' model."""
    import torch
    import transformers

    kind, changed = FAMILIES[name]
    save_tokenizer(directory)
    vocab = 320 if name == "qwen2" else 300  # more rows than tokens
    config = transformers.AutoConfig.for_model(kind, **{**COMMON, "vocab_size": vocab, **changed, **further})
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for path, parameter in [*model.named_parameters(), *model.named_buffers()]:
            if any(part in path for part in ("norm", "bias", "sinks", "layer_scalar", "router.scale", "expert_scale")):
                parameter.add_(0.3 * torch.randn_like(parameter))
            if path.endswith(
                "A_log"
            ):  # a state that is forgotten at once has values near zero, whose norm amplifies rounding
                parameter.fill_(-4)
            if kind == "gemma4_text" and path.endswith("q_norm.weight"):  # whose products with keys nothing else scales
                parameter.mul_(0.1)
    model.save_pretrained(directory)
    return model
