"""The configuration of a decoder: sizes, and the features of its family."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, get_args

from .._json import Positive, checked, form_of
from ..errors import QuantError
from .rope_scaling import RopeScaling, Yarn, scaling_from_json, scaling_to_json

RopeLayout = Literal["interleaved", "half"]
"""The pairs of coordinates that rotate: `2i` and `2i + 1` (GGUF), or `i` and `i + rotary_dim / 2` (Hugging Face)."""

Activation = Literal["silu", "gelu_tanh", "clamped_swiglu", "relu2"]
"""What the gate passes through.

"clamped_swiglu" is gpt-oss's `clip(gate) sigmoid(1.702 clip(gate)) (clip(up) + 1)`, and "relu2" the square of a ReLU (BitNet).
"""

Norms = Literal["pre", "post", "sandwich"]
"""Where a block has RMSNorms: on its input, on its output (OLMo 2), or on both (Gemma 2)."""

QKNorm = Literal["none", "head", "projection"]
"""RMSNorm of queries and keys: over each head (Qwen3), or over the whole projection (OLMo 2)."""

ExpertLayout = Literal["separate", "stacked", "joined", "interleaved"]
"""How a checkpoint stores experts, see `Experts`."""

ChangedInput = Literal["o", "down"]
"""A product whose input the decoder itself can rotate or scale: after attention, and after the activation."""

RouterScores = Literal["softmax", "sigmoid"]
"""The router's scores of experts; "sigmoid" is DeepSeek-V3's, see `Experts`."""


@dataclasses.dataclass(frozen=True)
class Experts:
    """The mixture of experts in place of a dense feed-forward block.

    A token's active experts are those with the largest scores, and their weights the scores: softmax probabilities of the
    router's logits, or their sigmoids. Sigmoids plus a correction of each expert decide which are the largest, but the
    correction is no part of the weights (DeepSeek-V3).

    Attributes:
        count: experts of a layer (E).
        active: experts of each token.
        hidden: width of an expert (F).
        normalized: whether the weights of the active experts are divided by their sum.
        layers: the layers that have experts; empty: all.
        scores: the scores; "sigmoid" has a correction.
        groups: groups of consecutive experts; divides `count`.
        active_groups: the groups that a token's experts are chosen from, those with the largest score, or with "sigmoid"
            the largest sum of two scores.
        scale: multiplies the weights.
        shared_hidden: width of an expert that every token passes; 0: none.
        shared_gate: whether a sigmoid gate scales the shared expert.
        bias: whether router and experts have biases.
        layout: "separate": leaves `experts/3/gate [F, D]`; "stacked": `experts/gate [E, F, D]`; "joined": `experts/gate+up
            [E, 2 F, D]`; "interleaved": `experts/gate+up [E, D, 2 F]`, gate and up in turn, and `experts/down [E, F, D]`
            (gpt-oss).

    Raises:
        QuantError: for numbers that do not fit.
    """

    count: int
    active: int
    hidden: int
    normalized: bool = True
    layers: tuple[int, ...] = ()
    scores: RouterScores = "softmax"
    groups: int = 1
    active_groups: int = 1
    scale: float = 1.0
    shared_hidden: int = 0
    shared_gate: bool = True
    bias: bool = False
    layout: ExpertLayout = "separate"

    def __post_init__(self) -> None:
        for name in ("count", "active", "hidden", "groups", "active_groups"):
            _check_size(f"experts.{name}", getattr(self, name))
        if self.active > self.count:
            raise QuantError(f"experts.active is {self.active}, more than experts.count, {self.count}")
        if self.shared_hidden:
            _check_size("experts.shared_hidden", self.shared_hidden)
        for name, kind in (("layout", ExpertLayout), ("scores", RouterScores)):
            if getattr(self, name) not in get_args(kind):
                raise QuantError(f"experts.{name} is {getattr(self, name)!r}, must be one of {', '.join(get_args(kind))}")
        _check_positive("experts.scale", self.scale)
        self._check_groups()

    def _check_groups(self) -> None:
        """Refuses groups without enough experts."""
        if self.count % self.groups:
            raise QuantError(f"experts.groups is {self.groups}, must divide experts.count, {self.count}")
        if self.active_groups > self.groups:
            raise QuantError(f"experts.active_groups is {self.active_groups}, more than experts.groups, {self.groups}")
        size = self.count // self.groups
        if self.active > self.active_groups * size:
            raise QuantError(
                f"experts.active is {self.active}, more than {self.active_groups} groups of {size} experts have"
            )
        if self.groups > 1 and self.scores == "sigmoid" and size < 2:
            raise QuantError("experts.groups have one expert each; sigmoid scores of two are summed, so two are expected")


@dataclasses.dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention (MLA) of DeepSeek. Keys and values are projected from a latent vector of each token.

    The keys of all heads share their rotary coordinates, which come from the token itself. The rotary coordinates of queries
    and keys are the last `rotary_dim` of a head's `head_dim`.

    Attributes:
        rank: width of the latent that keys and values share.
        value_dim: width of a head's value, at most `head_dim`.
        query_rank: width of the latent of queries; 0: they are projected from the token itself.
        norm_eps: `norm_eps` of the RMSNorms of the latents.
        split: whether the projection of the latent is stored in two parts, as in GGUF files: leaves `k_b [H, rank, n]` and
            `v_b [H, v, rank]` in place of `kv_b [H (n + v), rank]`.

    Raises:
        QuantError: for numbers that do not fit.
    """

    rank: int
    value_dim: int
    query_rank: int = 0
    norm_eps: float = 1e-6
    split: bool = False

    def __post_init__(self) -> None:
        for name in ("rank", "value_dim"):
            _check_size(f"latent.{name}", getattr(self, name))
        if self.query_rank:
            _check_size("latent.query_rank", self.query_rank)
        _check_positive("latent.norm_eps", self.norm_eps)
        if not isinstance(self.split, bool):
            raise QuantError(f"latent.split is {self.split!r}, must be true or false")


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """A decoder: RMSNorm, rotary embedding, grouped-query attention, a gated feed-forward block or experts.

    The defaults are Llama's.

    Attributes:
        vocab: vocabulary size (V).
        layers: number of layers (L).
        width: width of the residual stream (D).
        heads: query heads (H).
        kv_heads: key and value heads (K); divides `heads`.
        head_dim: width of a head (h), even.
        hidden: width of the feed-forward block (F).
        norm_eps: added to the mean square before its root.
        rope_theta: base of the rotary frequencies, `rope_theta ** (-2 i / rotary_dim)`.
        rope: the layout of the rotary pairs, which depends on the weights' container.
        tied: whether the embedding is also the output head.
        context: the max sequence length, in tokens.
        rope_scaling: how the rotary frequencies are scaled for long contexts.
        rotary_dim: the coordinates of a head that rotate, the first ones; 0: all.
        nope_layers: the layers without rotary embedding (SmolLM3).
        window: the positions that a layer of `window_layers` attends to, the token's own included; 0: no such layers.
        window_layers: the layers with the sliding window; empty: all, if there is a window.
        window_rope_theta: `rope_theta` of the layers with the window, without scaling (Gemma 3); 0: as the others.
        qkv_bias: whether q, k and v have biases.
        o_bias: whether the attention output has a bias.
        mlp_bias: whether the feed-forward block has biases.
        qk_norm: the RMSNorm of queries and keys.
        norms: where a block has RMSNorms.
        sub_norms: whether the output projection of attention and the down projection have RMSNorms on their inputs (BitNet).
        norm_offset: added to the gain of every RMSNorm (1 in Gemma).
        sinks: whether each head's softmax has one more logit, without a value (gpt-oss).
        activation: the activation of the gate.
        activation_limit: the limit of "clamped_swiglu".
        attention_scale: multiplies the products of queries and keys; 0: `head_dim ** -0.5`.
        temperature_scale: b; queries of position p are multiplied by `1 + b log(1 + floor(p / temperature_length))` (Ministral 3).
        temperature_length: the positions whose queries are multiplied by 1.
        attention_cap: soft cap of attention logits, `cap tanh(x / cap)`; 0: none.
        logit_cap: soft cap of the output logits; 0: none.
        embed_scale: multiplies the embeddings.
        residual_scale: multiplies the output of each block before it is added (Granite).
        logit_scale: multiplies the output logits.
        fused: whether the checkpoint has one leaf for q, k and v, and one for gate and up (Phi-3).
        fused_mlp: whether it has one leaf for gate and up alone (GLM-4).
        experts: the mixture of experts; None: every layer is dense.
        latent: multi-head latent attention; None: grouped-query attention.
        extra_layers: layers of the checkpoint after the last, for multi-token prediction; the decoder does not run them.
        rotated_inputs: the products whose inputs are rotated ("down" of experts, too).
        rotated_outputs: whether the outputs of attention and of the feed-forward block are rotated, after their norms: where the
            residual stream is (`rotate_residual`), but no weight can be.
        scaled_inputs: the products whose inputs are multiplied, channel by channel, by the parameter `o_input_scale` or
            `down_input_scale`, after the rotation if both are asked for.

    Raises:
        QuantError: when a number is out of range, or sizes do not divide as they must.

    >>> DecoderConfig(vocab=64, layers=2, width=16, heads=4, kv_heads=2, head_dim=4, hidden=24).group
    2
    """

    vocab: int
    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    norm_eps: float = 1e-5
    rope_theta: float = 10_000.0
    rope: RopeLayout = "half"
    tied: bool = True
    context: int = 2048
    rope_scaling: RopeScaling | None = None
    rotary_dim: int = 0
    nope_layers: tuple[int, ...] = ()
    window: int = 0
    window_layers: tuple[int, ...] = ()
    window_rope_theta: float = 0.0
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: QKNorm = "none"
    norms: Norms = "pre"
    sub_norms: bool = False
    norm_offset: float = 0.0
    sinks: bool = False
    activation: Activation = "silu"
    activation_limit: float = 7.0
    attention_scale: float = 0.0
    temperature_scale: float = 0.0
    temperature_length: int = 8192
    attention_cap: float = 0.0
    logit_cap: float = 0.0
    embed_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    fused: bool = False
    fused_mlp: bool = False
    experts: Experts | None = None
    latent: LatentAttention | None = None
    extra_layers: int = 0
    rotated_inputs: tuple[ChangedInput, ...] = ()
    rotated_outputs: bool = False
    scaled_inputs: tuple[ChangedInput, ...] = ()

    def __post_init__(self) -> None:
        for name in (*_SIZES, "temperature_length"):
            _check_size(name, getattr(self, name))
        for name in ("norm_eps", "rope_theta", "activation_limit", "embed_scale", "residual_scale", "logit_scale"):
            _check_positive(name, getattr(self, name))
        for name in _POSITIVE_OR_NONE:
            value = getattr(self, name)
            if not isinstance(value, int | float) or not value >= 0:
                raise QuantError(f"{name} is {value!r}, must be a positive number, or 0 for none")
        for name in (
            "tied",
            "qkv_bias",
            "o_bias",
            "mlp_bias",
            "sinks",
            "fused",
            "fused_mlp",
            "sub_norms",
            "rotated_outputs",
        ):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise QuantError(f"{name} is {value!r}, must be true or false")
        for name, kind in _CHOICES.items():
            if getattr(self, name) not in get_args(kind):
                raise QuantError(f"{name} is {getattr(self, name)!r}, must be one of {', '.join(get_args(kind))}")
        for field in ("rotated_inputs", "scaled_inputs"):
            names = getattr(self, field)
            for name in names:
                if name not in get_args(ChangedInput) or names.count(name) > 1:
                    raise QuantError(f"{field} has {name!r}, must be some of {', '.join(get_args(ChangedInput))}, each once")
        if self.heads % self.kv_heads:
            raise QuantError(f"kv_heads is {self.kv_heads}, must divide heads, which is {self.heads}")
        if self.head_dim % 2 or self.rotary_dim % 2 or self.rotary_dim > self.head_dim:
            name = "rotary_dim" if self.rotary_dim else "head_dim"
            raise QuantError(
                f"{name} is {getattr(self, name)}, must be even and no larger than the head: rotary embedding rotates pairs "
                "of coordinates"
            )
        if (self.fused or self.fused_mlp) and self.mlp_bias:
            raise QuantError("fused and mlp_bias are true: biases of fused gate and up projections are not supported")
        if isinstance(self.rope_scaling, Yarn) and self.rope_theta == 1:
            raise QuantError("rope_theta is 1, whose logarithm YaRN divides by; expected another base")
        if self.sub_norms and self.experts is not None:
            raise QuantError("sub_norms is true, but experts have no norms on the inputs of their down projections")
        if self.latent is not None:
            self._check_latent(self.latent)
        if self.window_layers and not self.window:
            raise QuantError("window_layers is given, but window is 0")
        of_experts = () if self.experts is None else self.experts.layers
        for name, listed in (
            ("window_layers", self.window_layers),
            ("nope_layers", self.nope_layers),
            ("experts.layers", of_experts),
        ):
            if any(not 0 <= layer < self.layers for layer in listed):
                raise QuantError(f"{name} is {listed}, must be layers from 0 to {self.layers - 1}")

    def _check_latent(self, latent: LatentAttention) -> None:
        """Refuses what multi-head latent attention does not have."""
        if self.kv_heads != self.heads:
            raise QuantError(f"kv_heads is {self.kv_heads}, must be heads, {self.heads}: each head has its own keys")
        if not 0 < self.rotary_dim < self.head_dim:
            raise QuantError(f"rotary_dim is {self.rotary_dim}, must be between 0 and head_dim, {self.head_dim}")
        if latent.value_dim > self.head_dim:
            raise QuantError(f"latent.value_dim is {latent.value_dim}, more than head_dim, {self.head_dim}")
        if self.fused or self.qk_norm != "none":
            raise QuantError("latent attention has neither fused projections nor norms of queries and keys")

    @property
    def value_dim(self) -> int:
        """The width of a head's value."""
        return self.head_dim if self.latent is None else self.latent.value_dim

    @property
    def cached_heads(self) -> int:
        """The heads of a KV cache. Latent attention caches one vector of each token."""
        return self.kv_heads if self.latent is None else 1

    @property
    def cached_dim(self) -> int:
        """The width of a head in a KV cache. With latent attention it is that of the latent and the rotary key."""
        return self.head_dim if self.latent is None else self.latent.rank + self.rotary_dim

    @property
    def group(self) -> int:
        """The query heads per key head (G)."""
        return self.heads // self.kv_heads

    @property
    def rotated(self) -> int:
        """The coordinates of a head that rotate."""
        return self.rotary_dim or self.head_dim

    def window_of(self, layer: int) -> int:
        """The sliding window of a layer; 0: it attends to all positions."""
        if self.window_layers and layer not in self.window_layers:
            return 0
        return self.window

    def experts_of(self, layer: int) -> Experts | None:
        """The mixture of experts of a layer; None: it is dense."""
        if self.experts is None or (self.experts.layers and layer not in self.experts.layers):
            return None
        return self.experts

    def rotates_input_of(self, path: str) -> bool:
        """Whether the decoder rotates the input of a weight: layers/3/attn/o, layers/3/mlp/experts/0/down."""
        return path.rsplit("/", 1)[-1] in self.rotated_inputs

    def scales_input_of(self, path: str) -> bool:
        """Whether the decoder scales the input of a weight."""
        return path.rsplit("/", 1)[-1] in self.scaled_inputs

    def to_json(self) -> dict[str, Any]:
        """The fields that differ from their default as a JSON object, for `from_json`."""
        form: dict[str, Any] = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.default is dataclasses.MISSING or field.name in _ALWAYS or value != field.default:
                form[field.name] = value
        for name in _TUPLES:
            if name in form:
                form[name] = list(form[name])
        if self.experts is not None:
            form["experts"] = {**dataclasses.asdict(self.experts), "layers": list(self.experts.layers)}
        if self.latent is not None:
            form["latent"] = dataclasses.asdict(self.latent)
        if self.rope_scaling is not None:
            form["rope_scaling"] = scaling_to_json(self.rope_scaling)
        return form

    @classmethod
    def from_json(cls, obj: Mapping[str, Any]) -> "DecoderConfig":
        """Reads the JSON object of `to_json`.

        Raises:
            QuantError: for an unknown or missing field.
        """
        form = checked(obj, _CONFIG, "a decoder configuration")
        for name in _TUPLES:
            if name in form:
                form[name] = tuple(form[name])
        if form.get("experts") is not None:
            experts = checked(form["experts"], _EXPERTS, "a decoder configuration: experts")
            form["experts"] = Experts(**{**experts, "layers": tuple(experts.get("layers", ()))})
        if form.get("latent") is not None:
            form["latent"] = LatentAttention(**checked(form["latent"], _LATENT, "a decoder configuration: latent"))
        if form.get("rope_scaling") is not None:
            form["rope_scaling"] = scaling_from_json(form["rope_scaling"], "a decoder configuration: rope_scaling")
        return cls(**form)


def _check_size(name: str, value: object) -> None:
    """Refuses what is no positive integer."""
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 1 << 40:
        raise QuantError(f"{name} is {value!r}, must be a positive integer below 2**40")


def _check_positive(name: str, value: object) -> None:
    """Refuses what is no positive number."""
    if not isinstance(value, int | float) or not value > 0:
        raise QuantError(f"{name} is {value!r}, must be a positive number")


_SIZES = ("vocab", "layers", "width", "heads", "kv_heads", "head_dim", "hidden", "context")
_ALWAYS = (*_SIZES, "norm_eps", "rope_theta", "rope", "tied")
_POSITIVE_OR_NONE = (
    "attention_scale",
    "temperature_scale",
    "attention_cap",
    "logit_cap",
    "window_rope_theta",
    "window",
    "rotary_dim",
    "extra_layers",
)
_CHOICES = {"rope": RopeLayout, "activation": Activation, "norms": Norms, "qk_norm": QKNorm}
_TUPLES: dict[str, Any] = {
    "nope_layers": list[int],
    "window_layers": list[int],
    "rotated_inputs": list[str],
    "scaled_inputs": list[str],
}
_OBJECTS = dict.fromkeys(("rope_scaling", "experts", "latent"), dict[str, Any] | None)
_CONFIG = form_of(DecoderConfig, **dict.fromkeys(_SIZES, Positive), **_TUPLES, **_OBJECTS)
_EXPERTS = form_of(Experts, layers=list[int])
_LATENT = form_of(LatentAttention)
