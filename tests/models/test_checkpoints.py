"""What a checkpoint says of itself becomes a configuration, and what we would compute otherwise is refused."""

from typing import Any

import pytest

from fewbit.errors import QuantError, UnsupportedError
from fewbit.models import LlamaConfig, config_from_gguf, config_from_glassllm, config_from_hf

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
HF_CONFIG = {
    "model_type": "llama",
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
    assert config_from_gguf(GGUF_FIELDS, ["token_embd.weight"]) == LlamaConfig(**EXPECTED, rope="interleaved", tied=True)
    untied = config_from_gguf({**GGUF_FIELDS, "tokenizer.ggml.tokens": ["a"] * 70}, ["output.weight"])
    assert (untied.tied, untied.vocab) == (False, 70)  # the tokens say how long the embedding is, the field may be absent
    wide = config_from_gguf({**GGUF_FIELDS, "llama.attention.key_length": 8, "llama.rope.dimension_count": 8}, [])
    assert wide.head_dim == 8


def test_hugging_face():
    assert config_from_hf(HF_CONFIG) == LlamaConfig(**EXPECTED, rope="half", tied=True)
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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"general.architecture": "gemma3"}, "architecture is 'gemma3'; supported architectures: llama"),
        ({"llama.rope.scaling.type": "yarn"}, r"llama\.rope\.scaling\.type = 'yarn'"),
        ({"llama.rope.dimension_count": 2}, r"llama\.rope\.dimension_count = 2; supported is 4"),
        ({"llama.expert_count": 8}, r"llama\.expert_count = 8"),
    ],
    ids=["architecture", "scaled", "partial", "experts"],
)
def test_gguf_refuses(change: dict[str, Any], message: str):
    with pytest.raises(UnsupportedError, match=message):
        config_from_gguf({**GGUF_FIELDS, **change}, [])


def test_gguf_refuses_frequencies_of_its_own():
    with pytest.raises(UnsupportedError, match=r"rope_freqs\.weight: scaled rotary embedding is not supported"):
        config_from_gguf(GGUF_FIELDS, ["rope_freqs.weight"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "qwen2"}, "model_type is 'qwen2'"),
        ({"attention_bias": True}, "attention_bias = True"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'; supported is 'silu' or 'swish'"),
        ({"sliding_window": 4096}, "sliding_window = 4096"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "rope_scaling = {'rope_type': 'llama3'}"),
        ({"rope_parameters": {"rope_type": "llama3"}}, "rope_parameters has rope_type = 'llama3'"),
    ],
    ids=["type", "bias", "activation", "window", "scaled", "scaled-newer"],
)
def test_hugging_face_refuses(change: dict[str, Any], message: str):
    with pytest.raises(UnsupportedError, match=message):
        config_from_hf({**HF_CONFIG, **change})


def test_missing_keys_are_named():
    with pytest.raises(QuantError, match=r"the GGUF metadata lacks the field 'llama\.block_count'"):
        config_from_gguf({k: v for k, v in GGUF_FIELDS.items() if k != "llama.block_count"}, [])
    with pytest.raises(QuantError, match=r"config\.json lacks the field 'hidden_size'"):
        config_from_hf({k: v for k, v in HF_CONFIG.items() if k != "hidden_size"})
    with pytest.raises(QuantError, match="__config__ lacks the field 'vocab_size'"):
        config_from_glassllm({})
