"""The architectures that llama.cpp runs: metadata fields and conversions, as a table.

Reference: llama.cpp, conversion/*.py and src/models/*.cpp (commit 0c1e570, 2026).
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, TypeAlias

from ..._hybrids import nemotron_h_kinds

Kind: TypeAlias = type[int] | type[float]
FieldRow: TypeAlias = tuple[str, Kind, tuple[str, ...]]
"""The key of a field without the architecture's name, its type, and the names in config.json, the first found counts."""

COMMON: tuple[FieldRow, ...] = (
    ("vocab_size", int, ("vocab_size",)),
    ("block_count", int, ("num_hidden_layers",)),
    ("context_length", int, ("max_position_embeddings",)),
    ("embedding_length", int, ("hidden_size",)),
    ("feed_forward_length", int, ("intermediate_size",)),
    ("attention.head_count", int, ("num_attention_heads",)),
    ("attention.head_count_kv", int, ("num_key_value_heads", "num_attention_heads")),
    ("attention.layer_norm_rms_epsilon", float, ("rms_norm_eps", "norm_eps")),
)
"""The required fields of every architecture; one with LayerNorms has `LAYER_NORM` in place of the last."""

LAYER_NORM: FieldRow = (
    "attention.layer_norm_epsilon",
    float,
    ("layer_norm_eps", "norm_epsilon", "norm_eps", "layer_norm_epsilon"),
)

_HEAD = (("attention.key_length", int, ("head_dim",)), ("attention.value_length", int, ("head_dim",)))
_EXPERTS = (
    ("expert_count", int, ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")),
    ("expert_used_count", int, ("num_experts_per_tok", "moe_k", "moe_topk")),
)
_EXPERT_WIDTH = ("expert_feed_forward_length", int, ("moe_intermediate_size",))
_SHARED_WIDTH = ("expert_shared_feed_forward_length", int, ("shared_expert_intermediate_size",))
_SHARED_COUNT = ("expert_shared_count", int, ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"))
_WINDOW = ("attention.sliding_window", int, ("sliding_window",))
_FINAL_CAP = ("final_logit_softcapping", float, ("final_logit_softcapping",))


@dataclasses.dataclass(frozen=True)
class Architecture:
    """How llama.cpp runs one `model_type` of Hugging Face.

    Attributes:
        name: its name in GGUF.
        fields: the optional fields that it reads besides `COMMON`.
        is_permuted: whether rotary embedding rotates neighbours, so that the rows of q and k are permuted.
        norm_offset: what transformers adds to the gain of a norm, and GGUF stores.
        has_experts_in_out: whether fused experts are stored `[E, in, out]` (gpt-oss, Llama 4); else `[E, out, in]`.
        has_interleaved_experts: whether gate and up of fused experts alternate (gpt-oss); else gate comes before up.
        has_tensor_scales: whether llama.cpp applies the tensor scales of NVFP4 in all its products.
        has_rope_factors: whether it reads the factors of "llama3" rope scaling.
        window_pattern: n: every n-th layer has full attention, as llama.cpp has it built in; 0: it reads no windows.
        stores_windows: whether it reads which layers have a window; `window_pattern` is then what config.json may omit.
        has_sigmoid_scores: whether files say that routers have sigmoid scores.
        stores_normalization: whether files say that the weights of the active experts are divided by their sum.
        stores_shared_width: whether files have the width of all experts that every token passes.
        has_all_heads: whether it runs only with as many heads of keys as of queries.
        rotates_part: whether a part of each head may rotate.
        has_linear_attention: whether all but every n-th layer have linear attention.
        has_tiled_values: whether its heads of values are in the order that `layers/linear_attention.py` describes.
        has_kinds_of_layers: whether its layers have heads and blocks of several sizes, which `layers/gemma4.py` describes.
        has_state_spaces: whether layers may be state spaces, which `layers/state_space.py` describes; without them it has another name.
        has_short_convolutions: whether layers may be short convolutions, which `layers/short_conv.py` describes.
        has_single_blocks: whether layers have one block each, which `layers/nemotron_h.py` describes; with experts it has another name.
        has_layer_norms: whether norms are LayerNorms.
        is_transposed: whether checkpoints store weights `[in, out]`.
        is_fused_by_head: whether the fused projection has the rows of each head in turn; GGUF has all queries first.
        names: other names that config.json may have for keys, by the usual ones, which come first.
        defaults: values that config.json may omit.
        assumed: the values of config.json that llama.cpp has built in.
        large_layers: the number of layers with which it scales attention by `hidden_size / heads` instead of `head_dim`.
    """

    name: str
    fields: tuple[FieldRow, ...] = _HEAD
    is_permuted: bool = False
    norm_offset: float = 0.0
    has_experts_in_out: bool = False
    has_interleaved_experts: bool = False
    has_tensor_scales: bool = False
    has_rope_factors: bool = False
    window_pattern: int = 0
    stores_windows: bool = False
    has_sigmoid_scores: bool = False
    stores_normalization: bool = False
    stores_shared_width: bool = False
    has_all_heads: bool = False
    rotates_part: bool = False
    has_linear_attention: bool = False
    has_tiled_values: bool = False
    has_kinds_of_layers: bool = False
    has_state_spaces: bool = False
    has_short_convolutions: bool = False
    has_single_blocks: bool = False
    has_layer_norms: bool = False
    is_transposed: bool = False
    is_fused_by_head: bool = False
    names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    assumed: Mapping[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)
    large_layers: int | None = None

    def settings(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """The content of a config.json, with the values that it may omit."""
        renamed = {ours: config.get(theirs) for ours, theirs in self.names.items() if config.get(ours) is None}
        said = {**self.defaults, **config, **{key: value for key, value in renamed.items() if value is not None}}
        if self.name == "gpt2" and said.get("intermediate_size") is None:
            said["intermediate_size"] = 4 * said["hidden_size"]
        if self.name == "llama4":  # which has the width of an expert where others have that of dense layers
            said["moe_intermediate_size"], said["intermediate_size"] = (
                said["intermediate_size"],
                said["intermediate_size_mlp"],
            )
        if self.has_single_blocks:
            said["num_hidden_layers"] = len(nemotron_h_kinds(config))
        for key in _BY_LAYER:
            if isinstance(sizes := said.get(key), list) and sizes and sizes == sizes[:1] * len(sizes):
                said[key] = sizes[0]
        return said


_BY_LAYER = ("moe_topk", "num_shared_expert", "moe_intermediate_size")
"""Sizes that Hunyuan has for each layer, of which GGUF has one."""


_SILU = {"hidden_act": ("silu", "swish")}
_GELU = {"hidden_activation": ("gelu_pytorch_tanh",), "attention_bias": (False,)}
_NO_WINDOW = {"use_sliding_window": (False,)}
_EVERY_LAYER = {"decoder_sparse_step": (1,), "mlp_only_layers": ([], None)}
_TIED = {"tie_word_embeddings": True}
_GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 4096,
}

_ROUTED = (
    *_EXPERTS,
    _EXPERT_WIDTH,
    ("leading_dense_block_count", int, ("first_k_dense_replace",)),
    _SHARED_COUNT,
    ("expert_weights_scale", float, ("routed_scaling_factor",)),
)
_NO_GROUPS = {"n_group": (1, None), "topk_group": (1, None)}
_UNTIED = {"tie_word_embeddings": (False,)}

_LINEAR = (
    ("ssm.conv_kernel", int, ("linear_conv_kernel_dim",)),
    ("ssm.state_size", int, ("linear_key_head_dim",)),
    ("ssm.group_count", int, ("linear_num_key_heads",)),
    ("ssm.time_step_rank", int, ("linear_num_value_heads",)),
)
_QWEN3_5 = Architecture(
    "qwen35",
    (*_HEAD, *_LINEAR),
    norm_offset=1.0,
    has_tensor_scales=True,
    rotates_part=True,
    has_linear_attention=True,
    has_tiled_values=True,
    defaults={
        "num_key_value_heads": 4,
        "head_dim": 256,
        "rms_norm_eps": 1e-6,
        "partial_rotary_factor": 0.25,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "full_attention_interval": 4,
    },
    assumed={
        **_SILU,
        "rms_norm_eps": (1e-6,),  # llama.cpp's of the length of queries and keys, too, which transformers has fixed
        "attention_bias": (False,),
        "attn_output_gate": (True,),
        "output_gate_type": ("swish", "silu", None),
    },
)
_QWEN3_5_MOE = dataclasses.replace(
    _QWEN3_5,
    name="qwen35moe",
    fields=(*_QWEN3_5.fields, *_EXPERTS, _EXPERT_WIDTH, _SHARED_WIDTH),
    defaults={
        **_QWEN3_5.defaults,
        "num_key_value_heads": 2,
        "intermediate_size": 5632,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
    },
    assumed={**_QWEN3_5.assumed, **_EVERY_LAYER, "norm_topk_prob": (True,)},
)

_DEEPSEEK = Architecture(
    "deepseek2",
    (*_ROUTED, ("attention.kv_lora_rank", int, ("kv_lora_rank",))),
    # The norms of the latents have this epsilon in transformers, and that of all norms in llama.cpp.
    assumed={**_SILU, "rms_norm_eps": (1e-6,), "attention_bias": (False,), "moe_layer_freq": (1, None)},
)

_LLAMA = Architecture(
    "llama",
    (*_HEAD, *_EXPERTS),
    is_permuted=True,
    has_tensor_scales=True,
    has_rope_factors=True,
    defaults={"rms_norm_eps": 1e-6},
    assumed=_SILU,
)

_HUNYUAN = {**_SILU, "use_qk_norm": (True,), "use_cla": (False,)}
_GELU_TANH = {"hidden_act": ("gelu_pytorch_tanh", "gelu_new", "gelu_fast")}
_COHERE = Architecture(
    "command-r",
    (("logit_scale", float, ("logit_scale",)),),
    has_layer_norms=True,
    defaults={"layer_norm_eps": 1e-5, "logit_scale": 0.0625, "rope_theta": 5e5, **_TIED},
    assumed={**_SILU, "tie_word_embeddings": (True,), "attention_bias": (False,), "use_qk_norm": (False, None)},
)

_GLM_MOE = Architecture(
    "glm4moe",
    (*_HEAD, *_ROUTED),
    has_sigmoid_scores=True,
    stores_normalization=True,
    rotates_part=True,
    defaults={
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "partial_rotary_factor": 0.5,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.0,
        "norm_topk_prob": True,
    },
    assumed={**_SILU, **_NO_GROUPS},
)

_GRANITE = Architecture(
    "granite",
    (
        ("attention.scale", float, ("attention_multiplier",)),
        ("embedding_scale", float, ("embedding_multiplier",)),
        ("residual_scale", float, ("residual_multiplier",)),
        ("logit_scale", float, ("logits_scaling",)),
    ),
    is_permuted=True,
    defaults=dict.fromkeys(("attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling"), 1.0),
    assumed=_SILU,
)

_GRANITE_MOE = dataclasses.replace(
    _GRANITE,
    name="granitemoe",
    fields=(*_GRANITE.fields, *_EXPERTS),
    defaults={**_GRANITE.defaults, "rms_norm_eps": 1e-6, "num_local_experts": 8, "num_experts_per_tok": 2},
)

ARCHITECTURES = {
    "llama": _LLAMA,
    "internlm3": dataclasses.replace(
        _LLAMA, defaults={"rms_norm_eps": 1e-5, "num_key_value_heads": 2, "head_dim": 128}, assumed=_SILU
    ),
    "iquestcoder": dataclasses.replace(
        _LLAMA, defaults={"rms_norm_eps": 1e-5, "num_key_value_heads": 8, "head_dim": 128}, assumed=_SILU
    ),
    "mistral": dataclasses.replace(_LLAMA, defaults={"rms_norm_eps": 1e-6, "num_key_value_heads": 8}),
    "mixtral": dataclasses.replace(
        _LLAMA,
        defaults={
            "rms_norm_eps": 1e-5,
            "num_key_value_heads": 8,
            "rope_theta": 1e6,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
    ),
    "arcee": dataclasses.replace(
        _LLAMA,
        name="arcee",
        fields=_HEAD,
        has_tensor_scales=False,
        defaults={"rms_norm_eps": 1e-5, "hidden_act": "relu2"},
        assumed={"hidden_act": ("relu2",), "attention_bias": (False,), "mlp_bias": (False,)},
    ),
    "cohere": _COHERE,
    "cohere2": dataclasses.replace(
        _COHERE,
        name="cohere2",
        fields=(*_COHERE.fields, _WINDOW),
        window_pattern=4,
        defaults={**_COHERE.defaults, "rope_theta": 1e4, "sliding_window": 4096, "sliding_window_pattern": 4},
    ),
    "starcoder2": Architecture(
        "starcoder2",
        has_layer_norms=True,
        defaults={"num_key_value_heads": 2, "norm_epsilon": 1e-5, "hidden_act": "gelu_pytorch_tanh", **_TIED},
        assumed={**_GELU_TANH, "use_bias": (True,)},
    ),
    "stablelm": Architecture(
        "stablelm",
        has_layer_norms=True,
        rotates_part=True,
        defaults={"layer_norm_eps": 1e-5, "partial_rotary_factor": 0.25},
        assumed={**_SILU, **_UNTIED, "qk_layernorm": (False,)},
    ),
    "nemotron": Architecture(
        "nemotron",
        norm_offset=1.0,
        has_layer_norms=True,
        rotates_part=True,
        defaults={"norm_eps": 1e-5, "partial_rotary_factor": 0.5, "hidden_act": "relu2"},
        assumed={**_UNTIED, "hidden_act": ("relu2",)},
    ),
    "jais2": Architecture(
        "jais2",
        has_layer_norms=True,
        defaults={"layer_norm_eps": 1e-5, "hidden_act": "relu2", "attention_bias": True, "mlp_bias": True},
        assumed={"hidden_act": ("relu2",), "attention_bias": (True,), "mlp_bias": (True,)},
    ),
    "phi": Architecture(
        "phi2",
        has_layer_norms=True,
        rotates_part=True,
        defaults={"layer_norm_eps": 1e-5, "partial_rotary_factor": 0.5, "hidden_act": "gelu_new"},
        assumed={**_GELU_TANH, **_UNTIED, "qk_layernorm": (False,)},
    ),
    "gpt2": Architecture(
        "gpt2",
        (),
        has_layer_norms=True,
        is_transposed=True,
        names={
            "num_hidden_layers": "n_layer",
            "num_attention_heads": "n_head",
            "hidden_size": "n_embd",
            "intermediate_size": "n_inner",
            "max_position_embeddings": "n_positions",
        },
        defaults={
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "hidden_size": 768,
            "max_position_embeddings": 1024,
            "layer_norm_epsilon": 1e-5,
            "activation_function": "gelu_new",
            **_TIED,
        },
        assumed={
            "activation_function": _GELU_TANH["hidden_act"],
            "scale_attn_weights": (True,),
            "scale_attn_by_inverse_layer_idx": (False,),
        },
    ),
    "gpt_neox": Architecture(
        "gptneox",
        has_layer_norms=True,
        is_fused_by_head=True,
        rotates_part=True,
        names={"partial_rotary_factor": "rotary_pct", "rope_theta": "rotary_emb_base"},
        defaults={"layer_norm_eps": 1e-5, "partial_rotary_factor": 0.25, "hidden_act": "gelu"},
        # llama.cpp's GELU is the approximation by tanh.
        assumed={**_UNTIED, "hidden_act": ("gelu", *_GELU_TANH["hidden_act"]), "attention_bias": (True,)},
    ),
    "qwen2": Architecture("qwen2", assumed={**_SILU, **_NO_WINDOW}),
    "qwen3": Architecture(
        "qwen3",
        has_tensor_scales=True,
        defaults={"head_dim": 128},
        assumed={**_SILU, **_NO_WINDOW, "attention_bias": (False,)},
    ),
    "qwen2_moe": Architecture(
        "qwen2moe",
        (*_HEAD, *_EXPERTS, _EXPERT_WIDTH, _SHARED_WIDTH),
        defaults={"norm_topk_prob": False},
        assumed={**_SILU, **_NO_WINDOW, **_EVERY_LAYER, "norm_topk_prob": (False,)},
    ),
    "qwen3_moe": Architecture(
        "qwen3moe",
        (*_HEAD, *_EXPERTS, _EXPERT_WIDTH),
        has_tensor_scales=True,
        defaults={"norm_topk_prob": False},
        assumed={**_SILU, **_NO_WINDOW, **_EVERY_LAYER, "norm_topk_prob": (True,)},
    ),
    "qwen3_next": dataclasses.replace(_QWEN3_5_MOE, name="qwen3next", has_tiled_values=False, has_tensor_scales=False),
    "qwen3_5_text": _QWEN3_5,
    "qwen3_5_moe_text": _QWEN3_5_MOE,
    "gemma": Architecture(
        "gemma",
        norm_offset=1.0,
        defaults={"num_key_value_heads": 16, "head_dim": 256, "rms_norm_eps": 1e-6, **_TIED},
        assumed={
            "hidden_act": ("gelu_pytorch_tanh", "gelu"),
            "hidden_activation": ("gelu_pytorch_tanh", None),
            "attention_bias": (False,),
            "tie_word_embeddings": (True,),
            "use_bidirectional_attention": (False, None),
        },
    ),
    "gemma2": Architecture(
        "gemma2",
        (*_HEAD, ("attn_logit_softcapping", float, ("attn_logit_softcapping",)), _FINAL_CAP, _WINDOW),
        norm_offset=1.0,
        window_pattern=2,
        defaults={
            "head_dim": 256,
            "query_pre_attn_scalar": 256,
            "sliding_window": 4096,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
            **_TIED,
        },
        assumed={**_GELU, "tie_word_embeddings": (True,)},
        large_layers=46,
    ),
    "gemma3_text": Architecture(
        "gemma3",
        (*_HEAD, _FINAL_CAP, _WINDOW),
        norm_offset=1.0,
        window_pattern=6,
        defaults={
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "rms_norm_eps": 1e-6,
            "query_pre_attn_scalar": 256,
            "sliding_window": 4096,
            "sliding_window_pattern": 6,
            "max_position_embeddings": 131072,
            "rope_theta": 1e6,
            "rope_local_base_freq": 1e4,
            **_TIED,
        },
        assumed={**_GELU, "attn_logit_softcapping": (None,), "use_bidirectional_attention": (False, None)},
        large_layers=62,
    ),
    "gemma4_text": Architecture(
        "gemma4",
        (_WINDOW,),
        has_tensor_scales=True,
        has_kinds_of_layers=True,
        defaults={
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "rms_norm_eps": 1e-6,
            "sliding_window": 512,
            "max_position_embeddings": 131072,
            "hidden_size_per_layer_input": 256,
            "vocab_size_per_layer_input": 262144,
            "rope_parameters": {
                "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
            **_TIED,
        },
        assumed={**_GELU, "use_bidirectional_attention": (None, False, "vision")},
    ),
    "phi3": Architecture("phi3", (), rotates_part=True, defaults={"original_max_position_embeddings": 4096}, assumed=_SILU),
    "olmo2": Architecture("olmo2", (), assumed={**_SILU, **_UNTIED, "attention_bias": (False,)}),
    "olmo3": Architecture(
        "olmo2",
        (_WINDOW,),
        window_pattern=4,
        stores_windows=True,
        defaults={"rms_norm_eps": 1e-5, "sliding_window": 4096, "rope_theta": 5e5},
        assumed={**_SILU, **_UNTIED, "attention_bias": (False,)},
    ),
    "olmoe": Architecture(
        "olmoe",
        _EXPERTS,
        has_all_heads=True,
        defaults={"rms_norm_eps": 1e-5, "num_experts": 64, "num_experts_per_tok": 8, "norm_topk_prob": False},
        assumed={**_SILU, **_UNTIED, "attention_bias": (False,), "norm_topk_prob": (False,), "clip_qkv": (None,)},
    ),
    "seed_oss": Architecture(
        "seed_oss",
        defaults={"num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-6},
        assumed={**_SILU, "attention_out_bias": (False,), "mlp_bias": (False,)},
    ),
    "exaone4": Architecture(
        "exaone4",
        (*_HEAD, _WINDOW),
        window_pattern=4,
        stores_windows=True,
        has_rope_factors=True,
        defaults={"num_key_value_heads": 32, "rms_norm_eps": 1e-5, "sliding_window": 4096},
        assumed=_SILU,
    ),
    "ernie4_5": Architecture(
        "ernie4_5",
        defaults={"num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1e-5, "rope_theta": 5e5, **_TIED},
        assumed={**_SILU, "use_bias": (False,)},
    ),
    "ernie4_5_moe": Architecture(
        "ernie4_5-moe",
        (
            *(*_HEAD, *_EXPERTS, _EXPERT_WIDTH, _SHARED_COUNT),
            ("interleave_moe_layer_step", int, ("moe_layer_interval",)),
            ("leading_dense_block_count", int, ("moe_layer_start_index",)),
        ),
        stores_shared_width=True,
        defaults={
            "num_key_value_heads": 4,
            "rms_norm_eps": 1e-5,
            "rope_theta": 5e5,
            "moe_num_experts": 64,
            "moe_k": 6,
            "moe_intermediate_size": 1536,
            "moe_num_shared_experts": 2,
            "moe_layer_start_index": 1,
            "moe_layer_end_index": -1,
            "moe_layer_interval": 1,
            **_TIED,
        },
        # llama.cpp asks for experts in every layer from the first with them on.
        assumed={**_SILU, "use_bias": (False,), "moe_layer_interval": (1,)},
    ),
    "hunyuan_v1_dense": Architecture("hunyuan-dense", defaults={"rms_norm_eps": 1e-5}, assumed=_HUNYUAN),
    "hunyuan_v1_moe": Architecture(
        "hunyuan-moe",
        (
            *(*_HEAD, *_EXPERTS),
            ("expert_feed_forward_length", int, ("intermediate_size",)),
            ("expert_shared_feed_forward_length", int, ("intermediate_size",)),
        ),
        defaults={"rms_norm_eps": 1e-5, "num_experts": 1, "moe_topk": 1},
        assumed={**_HUNYUAN, "num_shared_expert": (1,)},
    ),
    "exaone_moe": Architecture(
        "exaone-moe",
        (*_HEAD, *_ROUTED, _WINDOW),
        window_pattern=4,
        stores_windows=True,
        has_sigmoid_scores=True,
        stores_normalization=True,
        stores_shared_width=True,
        defaults={
            "num_key_value_heads": 32,
            "rms_norm_eps": 1e-5,
            "sliding_window": 4096,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 1024,
            "num_shared_experts": 1,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 2.5,
            "norm_topk_prob": True,
        },
        assumed={**_SILU, **_NO_GROUPS},
    ),
    "glm4": Architecture(
        "glm4",
        rotates_part=True,
        defaults={"num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1.5625e-7, "partial_rotary_factor": 0.5},
        assumed=_SILU,
    ),
    "glm4_moe": _GLM_MOE,
    "solar_open": dataclasses.replace(
        _GLM_MOE,
        defaults={
            **_GLM_MOE.defaults,
            "intermediate_size": 1,  # of no layer
            "head_dim": 128,
            "rope_theta": 1e6,
            "partial_rotary_factor": 1.0,
            "n_routed_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 1280,
            "n_shared_experts": 1,
            "first_k_dense_replace": 0,
        },
        assumed={**_GLM_MOE.assumed, "first_k_dense_replace": (0,), "use_qk_norm": (False,)},
    ),
    "dots1": Architecture(
        "dots1",
        (*_HEAD, *_ROUTED),
        has_sigmoid_scores=True,
        stores_normalization=True,
        has_all_heads=True,
        defaults={
            "num_key_value_heads": 32,
            "rms_norm_eps": 1e-6,
            "first_k_dense_replace": 0,
            "routed_scaling_factor": 1.0,
            "norm_topk_prob": False,
        },
        assumed={
            **_SILU,
            **_UNTIED,
            **_NO_GROUPS,
            "attention_bias": (False,),
            "sliding_window": (None,),
            "moe_layer_freq": (1,),
        },
    ),
    "minimax_m2": Architecture(
        "minimax-m2",
        (*_HEAD, *_EXPERTS, ("expert_feed_forward_length", int, ("intermediate_size",))),
        has_sigmoid_scores=True,
        rotates_part=True,
        defaults={
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rms_norm_eps": 1e-6,
            "rope_theta": 5e6,
            "num_local_experts": 256,
            "num_experts_per_tok": 8,
        },
        assumed={
            **_SILU,
            **_UNTIED,
            "scoring_func": ("sigmoid",),
            "use_routing_bias": (True,),
            "use_qk_norm": (True,),
            "qk_norm_type": ("per_layer",),
        },
    ),
    "smollm3": Architecture(
        "smollm3",
        is_permuted=True,
        has_rope_factors=True,
        defaults={"num_key_value_heads": 4, "rope_theta": 2e6, "no_rope_layer_interval": 4, **_TIED},
        assumed={**_SILU, **_NO_WINDOW, "attention_bias": (False,), "mlp_bias": (False,)},
    ),
    "granite": _GRANITE,
    "granitemoe": _GRANITE_MOE,
    "granitemoeshared": dataclasses.replace(
        _GRANITE_MOE,
        fields=(*_GRANITE_MOE.fields, ("expert_shared_feed_forward_length", int, ("shared_intermediate_size",))),
        defaults={**_GRANITE_MOE.defaults, "shared_intermediate_size": 0},
    ),
    "granitemoehybrid": dataclasses.replace(
        _GRANITE,
        name="granitehybrid",
        has_state_spaces=True,
        defaults={
            **_GRANITE.defaults,
            "rms_norm_eps": 1e-6,
            "intermediate_size": 11008,
            "shared_intermediate_size": 1024,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "mamba_n_heads": 128,
            "mamba_n_groups": 1,
            "mamba_d_state": 256,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
        },
        assumed={
            **_SILU,
            "attention_bias": (False,),
            "position_embedding_type": ("rope", "nope", None),
            "normalization_function": ("rmsnorm",),
            "time_step_limit": (None, [0.0, {"__float__": "Infinity"}], [0.0, math.inf]),
        },
    ),
    "nemotron_h": Architecture(
        "nemotron_h",
        has_single_blocks=True,
        names={"rms_norm_eps": "layer_norm_epsilon"},
        defaults={
            "rms_norm_eps": 1e-5,
            "layer_norm_epsilon": 1e-5,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 4096,
            "intermediate_size": 21504,
            "mlp_hidden_act": "relu2",
            "mamba_num_heads": 128,
            "mamba_head_dim": 64,
            "mamba_hidden_act": "silu",
            "n_groups": 8,
            "ssm_state_size": 128,
            "conv_kernel": 4,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 7688,
            "moe_shared_expert_intermediate_size": 7688,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.0,
        },
        assumed={
            **_NO_GROUPS,
            "mlp_hidden_act": ("relu2",),
            "mamba_hidden_act": ("silu", "swish"),
            "attention_bias": (False,),
            "use_bias": (False,),
            "tie_word_embeddings": (False,),
            "time_step_limit": (None, [0.0, {"__float__": "Infinity"}], [0.0, math.inf]),
        },
    ),
    "lfm2_moe": Architecture(
        "lfm2moe",
        (*_HEAD, *_EXPERTS, _EXPERT_WIDTH, ("leading_dense_block_count", int, ("num_dense_layers",))),
        has_short_convolutions=True,
        has_sigmoid_scores=True,
        defaults={
            "intermediate_size": 7168,
            "num_key_value_heads": 8,
            "norm_eps": 1e-5,
            "rope_theta": 1e6,
            "block_auto_adjust_ff_dim": False,
            "block_ffn_dim_multiplier": None,
            "block_multiple_of": 256,
            "conv_L_cache": 3,
            "num_dense_layers": 2,
            "num_experts": 32,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1792,
            **_TIED,
        },
        assumed={
            "conv_bias": (False,),
            "use_expert_bias": (True,),
            "norm_topk_prob": (True,),
            "routed_scaling_factor": (1.0, 1),
        },
    ),
    "lfm2": Architecture(
        "lfm2",
        has_short_convolutions=True,
        defaults={
            "intermediate_size": 12288,
            "num_key_value_heads": 8,
            "norm_eps": 1e-5,
            "rope_theta": 1e6,
            "block_multiple_of": 256,
            "block_ffn_dim_multiplier": 1.0,
            "block_auto_adjust_ff_dim": True,
            "conv_L_cache": 3,
            **_TIED,
        },
        assumed={"conv_bias": (False,)},
    ),
    "llama4_text": Architecture(
        "llama4",
        (*_HEAD, *_EXPERTS, _EXPERT_WIDTH, ("interleave_moe_layer_step", int, ("interleave_moe_layer_step",))),
        has_rope_factors=True,
        has_experts_in_out=True,
        defaults={
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "intermediate_size": 8192,
            "intermediate_size_mlp": 16384,
            "num_local_experts": 16,
            "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 1,
            "no_rope_layer_interval": 4,
            "use_qk_norm": True,
        },
        assumed={
            **_SILU,
            "attention_bias": (False,),
            "attention_chunk_size": (8192,),
            "attn_temperature_tuning": (True, 4),
            "floor_scale": (8192,),
            "attn_scale": (0.1,),
        },
    ),
    "gpt_oss": Architecture(
        "gpt-oss",
        (*_HEAD, *_EXPERTS, ("expert_feed_forward_length", int, ("intermediate_size",)), _WINDOW),
        has_experts_in_out=True,
        has_interleaved_experts=True,
        window_pattern=2,
        defaults={"head_dim": 64, "sliding_window": 128, "rope_theta": 150000.0, "rope_parameters": _GPT_OSS_ROPE},
        assumed={"swiglu_limit": (7.0,), "swiglu_alpha": (1.702,)},
    ),
    "deepseek_v2": dataclasses.replace(
        _DEEPSEEK,
        defaults={"rms_norm_eps": 1e-6, "first_k_dense_replace": 0, "scoring_func": "softmax", "routed_scaling_factor": 1.0},
        assumed={
            **_DEEPSEEK.assumed,
            "scoring_func": ("softmax",),
            "topk_method": ("greedy", "group_limited_greedy", None),
            "norm_topk_prob": (False,),
        },
    ),
    "deepseek_v3": dataclasses.replace(
        _DEEPSEEK,
        defaults={
            "rms_norm_eps": 1e-6,
            "first_k_dense_replace": 3,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "routed_scaling_factor": 2.5,
            "norm_topk_prob": True,
        },
        assumed={
            **_DEEPSEEK.assumed,
            "scoring_func": ("sigmoid",),
            "topk_method": ("noaux_tc",),
            "rope_interleave": (True,),
        },
    ),
}
"""The architectures by `model_type` in config.json."""
