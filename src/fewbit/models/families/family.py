"""A family of decoders: its config.json and its parameter names."""

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Annotated, Any, TypeVar

import msgspec

from ..._json import Count, Positive, converted
from ...errors import UnsupportedError
from ..config import DecoderConfig
from ..names import NameTable, check_layer_count
from .rope import rope_fields

MANY = 1 << 16
"""Layers that a configuration without its checkpoint may have."""

Number = Annotated[float, msgspec.Meta(gt=0, lt=1e30)]
"""A positive number of a configuration."""


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
    "attn/norm_bias": "input_layernorm.bias",
    "mlp/norm_bias": "post_attention_layernorm.bias",
}
"""The names of the parts of a layer in Hugging Face files that most families share."""

OUTPUT_NORMS = {
    "attn/post_norm": "post_attention_layernorm.weight",
    "mlp/post_norm": "post_feedforward_layernorm.weight",
}
"""The names of norms on the outputs of blocks."""


_INVERSE_FREQUENCIES = r"model\.(?:layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq"
_CACHE_RANGES = r"model\.layers\.\d+\.self_attn\.(?:(?:qkv?|[kv])_proj\.)?(?:[qkv]|kv|prob)_(?:scale|zero_point)"
"""Static ranges of a quantized KV cache, by compressed-tensors and ModelOpt. A cache of ours is not quantized, or by position."""


def hf_table(changed: Mapping[str, str] | None = None, outside: Mapping[str, str] | None = None) -> NameTable:
    """The table of a Hugging Face family.

    Args:
        changed: adds and replaces names of the parts of a layer.
        outside: adds names outside the layers.
    """
    common = {"embed": "model.embed_tokens.weight", "norm": "model.norm.weight", "norm_bias": "model.norm.bias"}
    common |= {"head": "lm_head.weight", "head_bias": "lm_head.bias"}
    return table(
        "Hugging Face",
        {**common, **(outside or {})},
        "model.layers.{}.",
        _with_changes(HF_PARTS, changed),
        derived=rf"{_INVERSE_FREQUENCIES}|{_CACHE_RANGES}",
    )


HUGGING_FACE = hf_table()
"""The names of a `LlamaForCausalLM` and its relatives, whose rotary embedding has the "half" layout."""

_GGUF_PROJECTIONS = {
    **{f"attn/{name}": f"attn_{name}" for name in ("q", "k", "v")},
    "attn/o": "attn_output",
    **{f"mlp/{name}": f"ffn_{name}" for name in ("gate", "up", "down")},
    **{f"mlp/experts/{name}": f"ffn_{name}_exps" for name in ("gate", "up", "down")},
    "mlp/experts/gate+up": "ffn_gate_up_exps",
    **{f"mlp/shared/{name}": f"ffn_{name}_shexp" for name in ("gate", "up", "down")},
    "mlp/router": "ffn_gate_inp",
}
GGUF_PARTS = {
    "attn/norm": "attn_norm.weight",
    "mlp/norm": "ffn_norm.weight",
    **{path: f"{name}.weight" for path, name in _GGUF_PROJECTIONS.items()},
    **{f"{path}_bias": f"{name}.bias" for path, name in _GGUF_PROJECTIONS.items()},
    "attn/norm_bias": "attn_norm.bias",
    "mlp/norm_bias": "ffn_norm.bias",
    "attn/q+k+v": "attn_qkv.weight",
    "attn/q+k+v_bias": "attn_qkv.bias",
    "attn/q_norm": "attn_q_norm.weight",
    "attn/k_norm": "attn_k_norm.weight",
    "attn/post_norm": "post_attention_norm.weight",
    "mlp/post_norm": "post_ffw_norm.weight",
    "attn/sinks": "attn_sinks.weight",
    "mlp/shared_expert_gate": "ffn_gate_inp_shexp.weight",
    "mlp/router_correction_bias": "exp_probs_b.bias",
}
"""The names of the parts of a layer in GGUF files that all architectures share."""


def gguf_table(changed: Mapping[str, str] | None = None, outside: Mapping[str, str] | None = None) -> NameTable:
    """The table of a GGUF architecture.

    Args:
        changed: adds and replaces names of the parts of a layer.
        outside: adds names outside the layers.
    """
    common = {"embed": "token_embd.weight", "position_embed": "position_embd.weight"}
    common |= {"norm": "output_norm.weight", "norm_bias": "output_norm.bias"}
    common |= {"head": "output.weight", "head_bias": "output.bias"}
    derived = r"rope_freqs\.weight|rope_factors_(?:long|short)\.weight"
    return table("GGUF", {**common, **(outside or {})}, "blk.{}.", _with_changes(GGUF_PARTS, changed), derived=derived)


GGUF = gguf_table()
"""The names of a GGUF file. The rows of q and k of a Llama are ordered for the "interleaved" rotary embedding."""


SECOND_NORM = gguf_table({"mlp/norm": "post_attention_norm.weight"})
"""The names of architectures whose norm before the feed-forward block is named after attention."""


@dataclasses.dataclass(frozen=True)
class Family:
    """One `model_type` of Hugging Face that the decoder can run.

    Attributes:
        model_type: the `model_type` of config.json.
        title: the family's name in the documentation.
        config: the configuration of a config.json, given the names of the checkpoint's tensors.
        table: the names of its parameters in Hugging Face files.
        gguf: the architecture's name in GGUF files.
        gguf_table: the names of its parameters in GGUF files.
        permutes: whether llama.cpp's converter orders the rows of q and k for the "interleaved" rotary embedding.
        other_table: `table` of a configuration whose names differ; None for the others.
        other_gguf_table: `gguf_table` of such a configuration.
    """

    model_type: str
    title: str
    config: Callable[[Mapping[str, Any], Collection[str]], DecoderConfig]
    table: NameTable = HUGGING_FACE
    gguf: str = ""
    gguf_table: NameTable = GGUF
    permutes: bool = False
    other_table: Callable[[DecoderConfig], NameTable | None] = lambda _: None
    other_gguf_table: Callable[[DecoderConfig], NameTable | None] = lambda _: None

    def table_of(self, config: DecoderConfig) -> NameTable:
        """The names of the parameters of a configuration in Hugging Face files."""
        return self.other_table(config) or self.table

    def gguf_table_of(self, config: DecoderConfig) -> NameTable:
        """The names of the parameters of a configuration in GGUF files."""
        return self.other_gguf_table(config) or self.gguf_table


class Common(msgspec.Struct, kw_only=True):
    """The schema of what every config.json has; families add fields and change defaults."""

    model_type: str
    vocab: Positive = msgspec.field(name="vocab_size")
    layers: Positive = msgspec.field(name="num_hidden_layers")
    width: Positive = msgspec.field(name="hidden_size")
    heads: Positive = msgspec.field(name="num_attention_heads")
    hidden: Positive = msgspec.field(name="intermediate_size")
    context: Positive = msgspec.field(name="max_position_embeddings")
    kv_heads: Positive | None = msgspec.field(name="num_key_value_heads", default=None)
    head_dim: Positive | None = None
    norm_eps: Number = msgspec.field(name="rms_norm_eps", default=1e-6)
    act: str | None = msgspec.field(name="hidden_act", default=None)
    tied: bool = msgspec.field(name="tie_word_embeddings", default=False)
    rope_theta: Number | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    partial_rotary: Number | None = msgspec.field(name="partial_rotary_factor", default=None)


Fields = TypeVar("Fields", bound=Common)


class Windowed(Common, kw_only=True):
    """The schema of families with sliding windows."""

    window: Count | None = msgspec.field(name="sliding_window", default=None)
    layer_types: list[str] | None = None


def read_config(
    obj: Mapping[str, Any], schema: type[Fields], names: Collection[str], unread: Collection[str] = ()
) -> Fields:
    """Reads a config.json by its family's schema.

    A key that the schema does not have is ignored if it does not concern the architecture, or is null, false, 0 or empty.

    Args:
        obj: the JSON object.
        schema: the schema.
        names: the names of the checkpoint's tensors.
        unread: further keys that published configurations of the family have and transformers does not read.

    Raises:
        UnsupportedError: for any other unknown key.
        QuantError: for a missing field, one of another type, or more layers than tensors.
    """
    found = converted(obj, schema, "config.json")
    check_layer_count(found.layers, len(names), MANY)
    known = {field.encode_name for field in msgspec.structs.fields(schema)}
    refuse_unknown(obj, known | _NO_ARCHITECTURE | set(unread), "config.json")
    return found


def refuse_unknown(obj: Mapping[str, Any], known: Collection[str], where: str) -> None:
    """Raises UnsupportedError for an unknown key that is set. It may be a feature that the decoder lacks."""
    for key, value in obj.items():
        if (
            key not in known
            and not key.startswith("_")
            and not key.endswith("_token_id")
            and value not in (None, False, 0, "", [], {})
        ):
            raise UnsupportedError(f"{where} has {key} = {value!r:.80}, which the decoder does not support")


def refuse_unless(value: object, allowed: Sequence[object], key: str, where: str = "config.json") -> None:
    """Raises UnsupportedError unless the value of a key is one of those allowed."""
    if value not in allowed:
        wanted = " or ".join(repr(a) for a in allowed)
        raise UnsupportedError(f"{where} has {key} = {value!r:.80}; supported is {wanted}")


def decoder_config(found: Common, *, theta: float = 10_000.0, rotates_part: bool = False, **settings: Any) -> DecoderConfig:
    """The configuration of the common fields; `settings` adds and replaces fields.

    Args:
        found: the fields of config.json.
        theta: the family's default of `rope_theta`.
        rotates_part: as for `rope_fields`.
        settings: further fields of `DecoderConfig`.
    """
    if "activation" not in settings:
        settings["activation"] = activation(found.act or "silu", "hidden_act")
    head_dim = found.head_dim or found.width // found.heads
    fields: dict[str, Any] = {
        "vocab": found.vocab,
        "layers": found.layers,
        "width": found.width,
        "heads": found.heads,
        "kv_heads": found.kv_heads or found.heads,
        "head_dim": head_dim,
        "hidden": found.hidden,
        "norm_eps": found.norm_eps,
        "tied": found.tied,
        "context": found.context,
    }
    if "rope_theta" not in settings:
        rope = found.rope_scaling or found.rope_parameters or {}
        plain = {"rope_theta": found.rope_theta or theta, "partial_rotary_factor": found.partial_rotary or 1.0}
        original = getattr(found, "original_context", None)
        lengths = {"context": found.context, "original_context": original}
        fields |= rope_fields(rope, plain, head_dim=head_dim, rotates_part=rotates_part, **lengths)
    return DecoderConfig(**{**fields, **settings})


def rope_by_kind(found: Common, *, theta: float, window_theta: float, head_dim: int | None = None) -> dict[str, Any]:
    """The fields of rotary embedding where layers with a window have another one, which is not scaled.

    Args:
        found: the fields of config.json. Its `rope_parameters` may be two objects, "full_attention" and "sliding_attention".
        theta: the base in layers without a window, if the objects have none.
        window_theta: the base in layers with one, likewise.
        head_dim: the width of a head in layers without a window; None: as in the others.
    """
    given = found.rope_parameters or {}
    full, local = given.get("full_attention") or {}, given.get("sliding_attention") or {}
    if given and not (full or local):
        full = given
    refuse_unless(local.get("rope_type", "default"), ("default",), "rope_parameters.sliding_attention.rope_type")
    plain = {"rope_theta": theta, "partial_rotary_factor": 1.0}
    head_dim = head_dim or found.head_dim or found.width // found.heads
    fields = rope_fields({**full, **(found.rope_scaling or {})}, plain, head_dim=head_dim, context=found.context)
    return {**fields, "window_rope_theta": local.get("rope_theta") or window_theta}


def activation(name: str, key: str) -> str:
    """Our name of an activation of Hugging Face."""
    refuse_unless(name, tuple(_ACTIVATIONS), key)
    return _ACTIVATIONS[name]


_ACTIVATIONS = {
    **dict.fromkeys(("silu", "swish"), "silu"),
    **dict.fromkeys(("gelu_pytorch_tanh", "gelu_new", "gelu_fast"), "gelu_tanh"),
    **{name: name for name in ("gelu", "relu", "relu2")},
}


def every_nth_full(layers: int, n: int, *, from_first: bool = False) -> list[str]:
    """The `layer_types` of a decoder whose every n-th layer attends to all positions, and the others in a window.

    `from_first` counts from the first layer, which is then among them.
    """
    return ["sliding_attention" if (i + (not from_first)) % n else "full_attention" for i in range(layers)]


def window_fields(layer_types: Sequence[str], window: int | None) -> dict[str, Any]:
    """The fields of the layers with a sliding window.

    Args:
        layer_types: "sliding_attention" or "full_attention" for each layer.
        window: the positions of the window; None or 0: there is none.
    """
    for kind in layer_types:
        refuse_unless(kind, ("full_attention", "sliding_attention"), "layer_types")
    sliding = tuple(i for i, kind in enumerate(layer_types) if kind == "sliding_attention")
    if not sliding:
        return {}
    if not window:
        raise UnsupportedError("config.json has layers of type 'sliding_attention', but no sliding_window")
    return {"window": window, "window_layers": sliding if len(sliding) < len(layer_types) else ()}


_NO_ARCHITECTURE = frozenset(
    (
        "architectures",
        "auto_map",
        "torch_dtype",
        "dtype",
        "transformers_version",
        "use_cache",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "unk_token_id",
        "sep_token_id",
        "decoder_start_token_id",
        "initializer_range",
        "attention_dropout",
        "hidden_dropout",
        "resid_pdrop",
        "residual_dropout",
        "embedding_dropout",
        "dropout",
        "layerdrop",
        "init_std",
        "embd_pdrop",
        "output_router_logits",
        "router_aux_loss_coef",
        "router_jitter_noise",
        "pretraining_tp",
        "quantization_config",
        "task_specific_params",
        "id2label",
        "label2id",
        "is_encoder_decoder",
        "is_decoder",
        "cache_implementation",
        "attn_implementation",
        "chunk_size_feed_forward",
        "output_attentions",
        "output_hidden_states",
        "return_dict",
        "problem_type",
        "tokenizer_class",
        "tie_encoder_decoder",
        "finetuning_task",
        "unsloth_version",
        "unsloth_fixed",
        "name_or_path",
        "max_length",
        "min_length",
        "do_sample",
        "num_return_sequences",
        "generation_config",
        "quantization",
        "is_llama_config",
        "transformers.js_config",
        "model_max_length",
        "tokenizer_model_max_length",
        "max_sequence_length",
        "pad_token",
        "bos_token",
        "eos_token",
        "hidden_dropout_prob",
        "classifier_dropout",
    )
)
"""Keys of config.json that do not change what the decoder computes."""
