"""Tables of parameter names: Hugging Face, GGUF, glassllm."""

from collections.abc import Mapping
from typing import Any

from ..names import NameTable


def table(title: str, outside: Mapping[str, str], layer: str, parts: Mapping[str, str], **options: Any) -> NameTable:
    """A table of the names outside the layers, and of the parts of a layer.

    Args:
        title: as in `NameTable`.
        outside: our path -> their name.
        layer: the prefix of a layer's names, with `{}` for its number.
        parts: the path within a layer -> the name within a layer.
        options: further fields of `NameTable`.
    """
    in_layers = {f"layers/{{}}/{ours}": layer + theirs for ours, theirs in parts.items()}
    return NameTable(title, {**outside, **in_layers}, **options)


def _with_changes(parts: Mapping[str, str], changed: Mapping[str, str] | None) -> dict[str, str]:
    """The names with changes; a changed name belongs to one path alone."""
    changed = changed or {}
    return {**{path: name for path, name in parts.items() if name not in changed.values()}, **changed}


_HF_PROJECTIONS = {
    **{f"attn/{name}": f"self_attn.{name}_proj" for name in ("q", "k", "v", "o")},
    **{f"mlp/{name}": f"mlp.{name}_proj" for name in ("gate", "up", "down")},
}
HF_PARTS = {
    "attn/norm": "input_layernorm.weight",
    "mlp/norm": "post_attention_layernorm.weight",
    **{path: f"{name}.weight" for path, name in _HF_PROJECTIONS.items()},
    **{f"{path}_bias": f"{name}.bias" for path, name in _HF_PROJECTIONS.items()},
    "attn/q_norm": "self_attn.q_norm.weight",
    "attn/k_norm": "self_attn.k_norm.weight",
}
"""The names of the parts of a layer in Hugging Face files that most families share."""


def hf_table(changed: Mapping[str, str] | None = None) -> NameTable:
    """The table of a Hugging Face family; `changed` adds and replaces names of the parts of a layer."""
    outside = {"embed": "model.embed_tokens.weight", "norm": "model.norm.weight", "head": "lm_head.weight"}
    return table(
        "Hugging Face",
        outside,
        "model.layers.{}.",
        _with_changes(HF_PARTS, changed),
        derived=r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq|model\.rotary_emb\.inv_freq",
    )


HUGGING_FACE = hf_table()
"""The names of a `LlamaForCausalLM` and its relatives, whose rotary embedding has the "half" layout."""

_GGUF_PROJECTIONS = {
    **{f"attn/{name}": f"attn_{name}" for name in ("q", "k", "v")},
    "attn/o": "attn_output",
    **{f"mlp/{name}": f"ffn_{name}" for name in ("gate", "up", "down")},
    **{f"mlp/experts/{name}": f"ffn_{name}_exps" for name in ("gate", "up", "down")},
    **{f"mlp/shared/{name}": f"ffn_{name}_shexp" for name in ("gate", "up", "down")},
    "mlp/router": "ffn_gate_inp",
}
GGUF_PARTS = {
    "attn/norm": "attn_norm.weight",
    "mlp/norm": "ffn_norm.weight",
    **{path: f"{name}.weight" for path, name in _GGUF_PROJECTIONS.items()},
    **{f"{path}_bias": f"{name}.bias" for path, name in _GGUF_PROJECTIONS.items()},
    "attn/q_norm": "attn_q_norm.weight",
    "attn/k_norm": "attn_k_norm.weight",
    "attn/post_norm": "post_attention_norm.weight",
    "mlp/post_norm": "post_ffw_norm.weight",
    "attn/sinks": "attn_sinks.weight",
    "mlp/shared_expert_gate": "ffn_gate_inp_shexp.weight",
}
"""The names of the parts of a layer in GGUF files that all architectures share."""


def gguf_table(changed: Mapping[str, str] | None = None) -> NameTable:
    """The table of a GGUF architecture; `changed` adds and replaces names of the parts of a layer."""
    outside = {"embed": "token_embd.weight", "norm": "output_norm.weight", "head": "output.weight"}
    derived = r"rope_freqs\.weight|rope_factors_(?:long|short)\.weight"
    return table("GGUF", outside, "blk.{}.", _with_changes(GGUF_PARTS, changed), derived=derived)


GGUF = gguf_table()
"""The names of a GGUF file. The rows of q and k of a Llama are ordered for the "interleaved" rotary embedding."""

_GLASSLLM_MATRICES = {
    **{f"attn/{name}": f"attn.W_{name.upper()}" for name in ("q", "k", "v", "o")},
    **{f"mlp/{name}": f"ffn.{theirs}" for name, theirs in (("gate", "W1"), ("up", "W3"), ("down", "W2"))},
}
GLASSLLM = table(
    "glassllm",
    {"embed": "E", "norm": "norm_f.gamma"},
    "blocks.{}.",
    {"attn/norm": "norm1.gamma", "mlp/norm": "norm2.gamma", **_GLASSLLM_MATRICES},
    transposed=frozenset(f"layers/{{}}/{part}" for part in _GLASSLLM_MATRICES),
    derived="__config__",
)
"""The names of a glassllm `.npz`: weights are `[in, out]`, rotary embedding is "interleaved"."""
