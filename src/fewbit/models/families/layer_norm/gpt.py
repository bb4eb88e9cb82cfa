"""GPT-2, OPT, GPT-NeoX (Pythia) and Falcon: LayerNorms, no gates, learned or partly rotary positions."""

from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from ...._json import Count, Positive
from ....errors import UnsupportedError
from ...config import DecoderConfig
from ...names import NameTable
from ..family import Common, Family, Number, decoder_config, read_config, refuse_unless, table


class _Gpt2(Common, kw_only=True):
    layers: Positive = msgspec.field(name="n_layer", default=12)
    width: Positive = msgspec.field(name="n_embd", default=768)
    heads: Positive = msgspec.field(name="n_head", default=12)
    hidden: Positive | None = msgspec.field(name="n_inner", default=None)
    context: Positive = msgspec.field(name="n_positions", default=1024)
    norm_eps: Number = msgspec.field(name="layer_norm_epsilon", default=1e-5)
    act: str | None = msgspec.field(name="activation_function", default="gelu_new")
    tied: bool = msgspec.field(name="tie_word_embeddings", default=True)
    is_scaled: bool = msgspec.field(name="scale_attn_weights", default=True)
    by_layer: bool = msgspec.field(name="scale_attn_by_inverse_layer_idx", default=False)


class _Opt(Common, kw_only=True):
    hidden: Positive = msgspec.field(name="ffn_dim")
    act: str | None = msgspec.field(name="activation_function", default="relu")
    tied: bool = msgspec.field(name="tie_word_embeddings", default=True)
    embed_width: Positive | None = msgspec.field(name="word_embed_proj_dim", default=None)
    bias: bool = msgspec.field(name="enable_bias", default=True)
    norm_first: bool = msgspec.field(name="do_layer_norm_before", default=True)
    has_gains: bool = msgspec.field(name="layer_norm_elementwise_affine", default=True)
    without_last: bool = msgspec.field(name="_remove_final_layer_norm", default=False)


class _NeoX(Common, kw_only=True):
    norm_eps: Number = msgspec.field(name="layer_norm_eps", default=1e-5)
    act: str | None = msgspec.field(name="hidden_act", default="gelu")
    is_parallel: bool = msgspec.field(name="use_parallel_residual", default=True)
    attention_bias: bool = True
    base: Number | None = msgspec.field(name="rotary_emb_base", default=None)
    rotary_part: Number | None = msgspec.field(name="rotary_pct", default=None)


class _Falcon(Common, kw_only=True):
    hidden: Positive | None = msgspec.field(name="ffn_hidden_size", default=None)
    context: Positive = msgspec.field(name="max_position_embeddings", default=2048)
    norm_eps: Number = msgspec.field(name="layer_norm_epsilon", default=1e-5)
    act: str | None = msgspec.field(name="activation", default="gelu")
    tied: bool = msgspec.field(name="tie_word_embeddings", default=True)
    kv_heads: Positive | None = msgspec.field(name="num_kv_heads", default=None)
    norms: Count | None = msgspec.field(name="num_ln_in_parallel_attn", default=None)
    alibi: bool = False
    is_new: bool = msgspec.field(name="new_decoder_architecture", default=False)
    multi_query: bool = True
    is_parallel: bool = msgspec.field(name="parallel_attn", default=True)
    bias: bool = False


_UNREAD = (
    *("n_ctx", "attn_pdrop", "reorder_and_upcast_attn"),
    *(f"summary_{key}" for key in ("type", "use_proj", "activation", "proj_to_labels", "first_dropout")),
)
"""Keys of GPT-2 that do not change the logits."""


def _gpt2(obj: Mapping[str, Any], names: Collection[str]) -> DecoderConfig:
    found = read_config(obj, _Gpt2, names, _UNREAD)
    refuse_unless(found.is_scaled, (True,), "scale_attn_weights")
    refuse_unless(found.by_layer, (False,), "scale_attn_by_inverse_layer_idx")
    return decoder_config(
        found,
        kv_heads=found.heads,
        hidden=found.hidden or 4 * found.width,
        nope_layers=tuple(range(found.layers)),
        positions=found.context,
        fused=True,
        **_shared_fields(True),
    )


def _opt(obj: Mapping[str, Any], names: Collection[str]) -> DecoderConfig:
    """OPT. Two rows of its embedding of positions come before the first position."""
    found = read_config(obj, _Opt, names, ("prefix",))
    refuse_unless(found.embed_width or found.width, (found.width,), "word_embed_proj_dim")
    refuse_unless(found.norm_first, (True,), "do_layer_norm_before")
    refuse_unless(found.has_gains, (True,), "layer_norm_elementwise_affine")
    refuse_unless(found.without_last, (False,), "_remove_final_layer_norm")
    return decoder_config(
        found,
        kv_heads=found.heads,
        norm_eps=1e-5,
        nope_layers=tuple(range(found.layers)),
        positions=found.context + _OPT_OFFSET,
        position_offset=_OPT_OFFSET,
        **_shared_fields(found.bias),
    )


_OPT_OFFSET = 2


def _gpt_neox(obj: Mapping[str, Any], names: Collection[str]) -> DecoderConfig:
    found = read_config(obj, _NeoX, names)
    found.rope_theta = found.rope_theta or found.base
    found.partial_rotary = found.partial_rotary or found.rotary_part or 0.25
    fields = _shared_fields(True) | {"qkv_bias": found.attention_bias, "o_bias": found.attention_bias}
    parallel = "two_norms" if found.is_parallel else "none"
    return decoder_config(
        found, rotates_part=True, kv_heads=found.heads, fused=True, fused_by_head=True, parallel=parallel, **fields
    )


def _falcon(obj: Mapping[str, Any], names: Collection[str]) -> DecoderConfig:
    """Falcon. The older models have one head of keys, or as many as of queries; the newer ones say how many."""
    found = read_config(obj, _Falcon, names, ("ff_factor",))  # ffn_hidden_size says the same
    refuse_unless(found.alibi, (False,), "alibi")
    if found.is_new and not found.is_parallel:
        raise UnsupportedError("config.json has new_decoder_architecture, but not parallel_attn")
    norms = found.norms or (2 if found.is_new else 1)
    refuse_unless(norms, (1, 2) if found.is_new else (1,), "num_ln_in_parallel_attn")
    kv_heads = (found.kv_heads or found.heads) if found.is_new else (1 if found.multi_query else found.heads)
    parallel = "two_norms" if norms == 2 else "one_norm"
    return decoder_config(
        found,
        kv_heads=kv_heads,
        hidden=found.hidden or 4 * found.width,
        fused=True,
        fused_by_head=True,
        parallel=parallel if found.is_parallel else "none",
        **_shared_fields(found.bias),
    )


def _shared_fields(bias: bool) -> dict[str, Any]:
    """The fields of LayerNorms, of feed-forward blocks without a gate, and of biases."""
    return {
        "norm_kind": "layer",
        "norm_bias": True,
        "gated": False,
        **dict.fromkeys(("qkv_bias", "o_bias", "mlp_bias"), bias),
    }


def _with_biases(parts: Mapping[str, str]) -> dict[str, str]:
    """The names of weights and of their biases."""
    weights = {path: f"{name}.weight" for path, name in parts.items()}
    return weights | {f"{path}_bias": f"{name}.bias" for path, name in parts.items()}


_GPT2_PARTS = {
    "attn/norm": "ln_1",
    "attn/q+k+v": "attn.c_attn",
    "attn/o": "attn.c_proj",
    "mlp/norm": "ln_2",
    "mlp/up": "mlp.c_fc",
    "mlp/down": "mlp.c_proj",
}
_GPT2 = table(
    "Hugging Face",
    {
        "embed": "transformer.wte.weight",
        "position_embed": "transformer.wpe.weight",
        **_with_biases({"norm": "transformer.ln_f"}),
        "head": "lm_head.weight",
    },
    "transformer.h.{}.",
    _with_biases(_GPT2_PARTS),
    transposed=frozenset(f"layers/{{}}/{path}" for path in ("attn/q+k+v", "attn/o", "mlp/up", "mlp/down")),
    derived=r"transformer\.h\.\d+\.attn\.(?:bias|masked_bias)",
)

_OPT = table(
    "Hugging Face",
    {
        "embed": "model.decoder.embed_tokens.weight",
        "position_embed": "model.decoder.embed_positions.weight",
        **_with_biases({"norm": "model.decoder.final_layer_norm"}),
        "head": "lm_head.weight",
    },
    "model.decoder.layers.{}.",
    _with_biases(
        {
            "attn/norm": "self_attn_layer_norm",
            **{f"attn/{name}": f"self_attn.{name}_proj" for name in ("q", "k", "v")},
            "attn/o": "self_attn.out_proj",
            "mlp/norm": "final_layer_norm",
            "mlp/up": "fc1",
            "mlp/down": "fc2",
        }
    ),
)
_NEOX_PARTS = {
    "attn/norm": "input_layernorm",
    "attn/q+k+v": "attention.query_key_value",
    "attn/o": "attention.dense",
    "mlp/norm": "post_attention_layernorm",
    "mlp/up": "mlp.dense_h_to_4h",
    "mlp/down": "mlp.dense_4h_to_h",
}
_NEOX = table(
    "Hugging Face",
    {
        "embed": "gpt_neox.embed_in.weight",
        **_with_biases({"norm": "gpt_neox.final_layer_norm"}),
        "head": "embed_out.weight",
    },
    "gpt_neox.layers.{}.",
    _with_biases(_NEOX_PARTS),
    derived=r"gpt_neox\.(?:layers\.\d+\.attention\.(?:bias|masked_bias|rotary_emb\.inv_freq)|rotary_emb\.inv_freq)",
)


def _falcon_table(norms: Mapping[str, str]) -> NameTable:
    """The names of Falcon's parameters, with those of its norms."""
    parts = {path: name.replace("attention.", "self_attention.") for path, name in _NEOX_PARTS.items()}
    return table(
        "Hugging Face",
        {
            "embed": "transformer.word_embeddings.weight",
            **_with_biases({"norm": "transformer.ln_f"}),
            "head": "lm_head.weight",
        },
        "transformer.h.{}.",
        _with_biases({**parts, **norms}),
        derived=r"transformer\.(?:h\.\d+\.self_attention\.)?rotary_emb\.inv_freq",
    )


_TWO_NORMS = _falcon_table({"attn/norm": "ln_attn", "mlp/norm": "ln_mlp"})

FAMILIES = (
    Family("gpt2", "GPT-2", _gpt2, _GPT2, gguf="gpt2"),
    Family("opt", "OPT", _opt, _OPT),
    Family("gpt_neox", "GPT-NeoX, Pythia", _gpt_neox, _NEOX, gguf="gptneox"),
    Family(
        "falcon",
        "Falcon",
        _falcon,
        _falcon_table({}),
        other_table=lambda config: _TWO_NORMS if config.parallel == "two_norms" else None,
    ),
)
