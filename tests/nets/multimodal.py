"""Small random multimodal checkpoints, as transformers makes them: a language model and a vision tower."""

import functools
from typing import Any

from tests.nets.families import CASES as FAMILIES
from tests.nets.families import SIZES, WIDE, with_random_weights

_VISION: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
_QWEN_VISION: dict[str, Any] = {"depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "patch_size": 14}


def _mrope(*sections: int, **more: Any) -> dict[str, Any]:
    """Rotary embedding of positions in images."""
    return {"rope_type": "default", "rope_theta": 1000.0, "mrope_section": list(sections), **more}


CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "gemma3": (
        "Gemma3ForConditionalGeneration",
        {
            # as llama.cpp has it built in, and with a vocabulary for its tokenizer
            "text_config": {**SIZES, "vocab_size": 300, "sliding_window": 6, "query_pre_attn_scalar": 16},
            "vision_config": {**_VISION, "model_type": "siglip_vision_model"},
        },
        {"mm_tokens_per_image": 4},
    ),
    "gemma4": (
        "Gemma4ForConditionalGeneration",
        {
            "text_config": FAMILIES["gemma4_text-shared"][1],
            "vision_config": {
                **{name: size for name, size in _VISION.items() if not name.startswith("image")},
                "num_key_value_heads": 2,
                "head_dim": 8,
                "position_embedding_size": 8,
            },
            "audio_config": None,
        },
        {},
    ),
    "llama4": (
        "Llama4ForConditionalGeneration",
        {
            "text_config": FAMILIES["llama4_text"][1],
            "vision_config": {
                **_VISION,
                "vision_output_dim": 16,
                "projector_input_dim": 16,
                "projector_output_dim": 16,
            },
        },
        {},
    ),
    "mistral3": (
        "Mistral3ForConditionalGeneration",
        {
            "text_config": {**SIZES, "model_type": "mistral", "sliding_window": None},
            "vision_config": {**_VISION, "model_type": "pixtral", "head_dim": 8},
        },
        {},
    ),
    "llava": (
        "LlavaForConditionalGeneration",
        {
            "text_config": {**SIZES, "model_type": "llama"},
            "vision_config": {**_VISION, "model_type": "clip_vision_model", "projection_dim": 16},
        },
        {},
    ),
    "smolvlm": (
        "SmolVLMForConditionalGeneration",
        {"text_config": {**SIZES, "model_type": "llama"}, "vision_config": _VISION},
        {},
    ),
    "internvl": (
        "InternVLForConditionalGeneration",
        {
            "text_config": {**SIZES, "model_type": "qwen2"},
            "vision_config": {**_VISION, "image_size": [28, 28], "patch_size": [14, 14]},
        },
        {},
    ),
    "qwen2_vl": (
        "Qwen2VLForConditionalGeneration",
        {
            "text_config": {**WIDE, "rope_parameters": _mrope(1, 1, 2)},
            "vision_config": {
                "depth": 1,
                "embed_dim": 16,
                "hidden_size": 32,
                "num_heads": 2,
                "mlp_ratio": 2,
                "patch_size": 14,
            },
        },
        {},
    ),
    "qwen2_5_vl": (
        "Qwen2_5_VLForConditionalGeneration",
        {
            "text_config": {**WIDE, "rope_parameters": _mrope(1, 1, 2)},
            "vision_config": {**_QWEN_VISION, "out_hidden_size": 32, "window_size": 28, "fullatt_block_indexes": [0]},
        },
        {},
    ),
    "qwen3_5": (
        "Qwen3_5ForConditionalGeneration",
        {
            "text_config": {
                **SIZES,
                "rms_norm_eps": 1e-3,
                "layer_types": ["linear_attention", "linear_attention", "full_attention"],
                "linear_num_key_heads": 2,
                "linear_num_value_heads": 4,
                "linear_key_head_dim": 8,
                "linear_value_head_dim": 8,
                "rope_parameters": _mrope(1, 1, 0, mrope_interleaved=True, partial_rotary_factor=0.25),
            },
            "vision_config": {**_QWEN_VISION, "out_hidden_size": 32, "num_position_embeddings": 16},
        },
        {},
    ),
    "qwen3_vl": (
        "Qwen3VLForConditionalGeneration",
        {
            "text_config": {**SIZES, "rope_parameters": _mrope(3, 3, 2, mrope_interleaved=True)},
            "vision_config": {
                **_QWEN_VISION,
                "out_hidden_size": 32,
                "deepstack_visual_indexes": [0],
                "num_position_embeddings": 16,
            },
        },
        {},
    ),
}
"""For each `model_type` the class of transformers, the configurations of its parts, and the rest."""


@functools.cache
def theirs(case: str) -> Any:
    """The model of a case in transformers, with random weights; float32."""
    import transformers

    name, parts, more = CASES[case]
    cls = getattr(transformers, name)
    return with_random_weights(cls(cls.config_class(**parts, **more)).eval())
