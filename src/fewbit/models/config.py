"""The configuration of a decoder: sizes, and the features of its family."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias, get_args

from .._json import Positive, checked, form_of
from ..errors import QuantError
from .attention.rope_scaling import RopeScaling, Yarn, scaling_from_json, scaling_to_json
from .part_configs import (
    Experts,
    FullAttention,
    LatentAttention,
    LinearAttention,
    Mamba2,
    PerLayerInputs,
    SharedKeys,
    ShortConvolution,
    check_positive,
    check_size,
)

RopeLayout = Literal["interleaved", "half"]
"""The pairs of coordinates that rotate: `2i` and `2i + 1` (GGUF), or `i` and `i + rotary_dim / 2` (Hugging Face)."""

Activation = Literal["silu", "gelu", "gelu_tanh", "clamped_swiglu", "relu", "relu2", "xielu"]
"""What the gate passes through, or the up projection where there is no gate.

"clamped_swiglu" is gpt-oss's `clip(gate) sigmoid(1.702 clip(gate)) (clip(up) + 1)`, and "relu2" the square of a ReLU (BitNet).
"xielu" has parameters in each layer, see `layer.xielu` (Apertus).
"""

Norms = Literal["pre", "post", "sandwich"]
"""Where a block has RMSNorms: on its input, on its output (OLMo 2), or on both (Gemma 2)."""

NormKind = Literal["rms", "layer"]
"""The norm of the residual stream: RMSNorm, or LayerNorm, which subtracts the mean first."""

Parallel = Literal["none", "one_norm", "two_norms"]
"""Whether the feed-forward block reads what attention reads, not its result: through attention's norm (Phi-2), or its own (GPT-NeoX)."""

QKNorm = Literal["none", "head", "rotated_head", "without_gain", "projection"]
"""RMSNorm of queries and keys: over each head (Qwen3), each head after rotary embedding (Hunyuan), or the whole projection (OLMo 2).

"without_gain" is over each head after rotary embedding, without parameters, in the layers with rotary embedding alone (Llama 4).
"""

Recurrent: TypeAlias = LinearAttention | Mamba2 | ShortConvolution
"""A kind of layer that has a state in place of keys and values."""

ChangedInput = Literal["o", "down"]
"""A product whose input the decoder itself can rotate or scale: after attention (`out` of linear attention, too), and after the
activation."""


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """A decoder: norms, rotary embedding, grouped-query attention, a feed-forward block or experts.

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
        window_is_chunk: whether the window does not slide: positions are cut into chunks of its length, and a token attends to those of
            its own chunk alone (Llama 4).
        window_rope_theta: `rope_theta` of the layers with the window, without scaling (Gemma 3); 0: as the others.
        full: the heads of the layers without the window, if they are others; `head_dim` and `kv_heads` are then those of the layers
            with it.
        shared_keys: the layers without keys and values of their own; None: there are none.
        per_layer: the embedding of each token for every layer; None: there is none.
        layer_scale: whether each layer multiplies the residual stream at its end by a parameter (Gemma 4).
        qkv_bias: whether q, k and v have biases.
        o_bias: whether the attention output has a bias.
        mlp_bias: whether the feed-forward block has biases.
        qk_norm: the RMSNorm of queries and keys.
        value_norm: whether values have an RMSNorm over each head, without a gain (Gemma 4).
        norms: where a block has norms.
        norm_kind: the kind of the norms of the residual stream.
        norm_bias: whether these norms have biases, which a LayerNorm may have.
        sub_norms: whether the output projection of attention and the down projection have RMSNorms on their inputs (BitNet).
        norm_offset: added to the gain of every RMSNorm (1 in Gemma).
        sinks: whether each head's softmax has one more logit, without a value (gpt-oss).
        mlp_layers: the layers with a feed-forward block alone; where there are any, the others have attention alone (Nemotron-H).
            Empty: every layer has both.
        gated: whether the feed-forward block has a gate; else it is `down act(up x)`.
        activation: the activation of the gate, or of the up projection.
        activation_limit: the limit of "clamped_swiglu".
        attention_scale: multiplies the products of queries and keys; 0: `head_dim ** -0.5`.
        temperature_scale: b; queries of position p are multiplied by `1 + b log(1 + floor(p / temperature_length))` (Ministral 3).
        temperature_length: the positions whose queries are multiplied by 1.
        temperature_nope: whether queries are multiplied in the layers without rotary embedding alone, and positions count from 1
            (Llama 4).
        attention_cap: soft cap of attention logits, `cap tanh(x / cap)`; 0: none.
        logit_cap: soft cap of the output logits; 0: none.
        embed_scale: multiplies the embeddings.
        residual_scale: multiplies the output of each block before it is added (Granite).
        parallel: whether attention and the feed-forward block are parallel.
        positions: rows of a learned embedding of positions, which is added to that of tokens (OPT); 0: there is none.
        position_offset: the row of the first position (OPT).
        logit_scale: multiplies the output logits.
        head_bias: whether the output head has a bias (Phi-2).
        fused: whether the checkpoint has one leaf for q, k and v, and one for gate and up (Phi-3).
        fused_by_head: with `fused`, whether it has the rows of the queries, the key and the value of each head of keys in turn
            (GPT-NeoX, Falcon); else all queries come first.
        fused_mlp: whether it has one leaf for gate and up alone (GLM-4), those of a shared expert, too (Granite 4).
        experts: the mixture of experts; None: every layer is dense.
        latent: multi-head latent attention; None: grouped-query attention.
        linear: linear attention in some layers; None: in none.
        mamba: state space layers of Mamba-2 in place of attention; None: there are none.
        short_conv: gated short convolutions in place of attention (LFM2); None: there are none.
        attention_gate: whether the output of attention is multiplied by the sigmoid of a gate, whose rows are in q after those
            of each head (Qwen3.5); not in linear attention, which has its own.
        separate_gate: whether the rows of that gate are a leaf of their own, `gate` (Trinity).
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
    window_is_chunk: bool = False
    window_rope_theta: float = 0.0
    full: FullAttention | None = None
    shared_keys: SharedKeys | None = None
    per_layer: PerLayerInputs | None = None
    layer_scale: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: QKNorm = "none"
    value_norm: bool = False
    norms: Norms = "pre"
    norm_kind: NormKind = "rms"
    norm_bias: bool = False
    sub_norms: bool = False
    norm_offset: float = 0.0
    sinks: bool = False
    mlp_layers: tuple[int, ...] = ()
    gated: bool = True
    activation: Activation = "silu"
    activation_limit: float = 7.0
    attention_scale: float = 0.0
    temperature_scale: float = 0.0
    temperature_length: int = 8192
    temperature_nope: bool = False
    attention_cap: float = 0.0
    logit_cap: float = 0.0
    embed_scale: float = 1.0
    residual_scale: float = 1.0
    parallel: Parallel = "none"
    positions: int = 0
    position_offset: int = 0
    logit_scale: float = 1.0
    head_bias: bool = False
    fused: bool = False
    fused_by_head: bool = False
    fused_mlp: bool = False
    experts: Experts | None = None
    latent: LatentAttention | None = None
    linear: LinearAttention | None = None
    mamba: Mamba2 | None = None
    short_conv: ShortConvolution | None = None
    attention_gate: bool = False
    separate_gate: bool = False
    extra_layers: int = 0
    rotated_inputs: tuple[ChangedInput, ...] = ()
    rotated_outputs: bool = False
    scaled_inputs: tuple[ChangedInput, ...] = ()

    def __post_init__(self) -> None:
        for name in (*_SIZES, "temperature_length"):
            check_size(name, getattr(self, name))
        for name in ("norm_eps", "rope_theta", "activation_limit", "embed_scale", "residual_scale", "logit_scale"):
            check_positive(name, getattr(self, name))
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
            "value_norm",
            "layer_scale",
            "attention_gate",
            "separate_gate",
            "rotated_outputs",
            "norm_bias",
            "gated",
            "head_bias",
            "fused_by_head",
            "window_is_chunk",
            "temperature_nope",
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
        if (self.fused or self.fused_mlp) and self.mlp_bias and self.gated:
            raise QuantError("fused and mlp_bias are true: biases of fused gate and up projections are not supported")
        self._check_block()
        if isinstance(self.rope_scaling, Yarn) and self.rope_theta == 1:
            raise QuantError("rope_theta is 1, whose logarithm YaRN divides by; expected another base")
        if self.sub_norms and self.experts is not None:
            raise QuantError("sub_norms is true, but experts have no norms on the inputs of their down projections")
        if self.mlp_layers:
            self._check_single_blocks()
        if self.latent is not None:
            self._check_latent(self.latent)
        if self.recurrent is not None:
            self._check_recurrent(self.recurrent)
        if self.window_layers and not self.window:
            raise QuantError("window_layers is given, but window is 0")
        for name, needed in (("window_is_chunk", "window"), ("temperature_nope", "temperature_scale")):
            if getattr(self, name) and not getattr(self, needed):
                raise QuantError(f"{name} is true, but {needed} is 0")
        if self.separate_gate and not self.attention_gate:
            raise QuantError("separate_gate is true, but attention_gate is not")
        if self.full is not None:
            self._check_full(self.full)
        if self.shared_keys is not None:
            self._check_shared(self.shared_keys)
        if self.per_layer is not None and self.norms == "pre":
            raise QuantError("per_layer is given, and norms is 'pre': a norm on what its projection adds is expected")
        of_experts = () if self.experts is None else self.experts.layers
        of_recurrent = () if self.recurrent is None else self.recurrent.layers
        for name, listed in (
            ("window_layers", self.window_layers),
            ("nope_layers", self.nope_layers),
            ("mlp_layers", self.mlp_layers),
            ("experts.layers", of_experts),
            (f"{self._recurrent_name}.layers", of_recurrent),
        ):
            if any(not 0 <= layer < self.layers for layer in listed):
                raise QuantError(f"{name} is {listed}, must be layers from 0 to {self.layers - 1}")

    def _check_block(self) -> None:
        """Refuses forms of a block, and of what is around the blocks, that no decoder has together."""
        if self.norm_bias and self.norm_kind == "rms":
            raise QuantError("norm_bias is true, but norm_kind is 'rms': an RMSNorm has no bias")
        if self.norm_kind == "layer" and (self.norms != "pre" or self.recurrent is not None or self.latent is not None):
            raise QuantError("norm_kind is 'layer', with norms on outputs, latent attention or layers with a state")
        if not self.gated and (self.fused_mlp or self.activation == "clamped_swiglu"):
            raise QuantError("gated is false, with a fused gate or an activation of two inputs")
        if not self.gated and self.experts is not None and self.experts.layout not in ("separate", "stacked"):
            raise QuantError(f"gated is false, and experts.layout is {self.experts.layout!r}, which joins gate and up")
        if self.activation == "xielu" and (self.gated or self.experts is not None):
            raise QuantError("activation is 'xielu', with a gate or experts")
        if self.parallel != "none" and (self.norms != "pre" or self.per_layer is not None):
            raise QuantError(f"parallel is {self.parallel!r}, with norms on outputs or inputs per layer")
        if self.positions and self.positions - self.position_offset < self.context:
            raise QuantError(
                f"positions is {self.positions}, which from row {self.position_offset} are fewer than context, {self.context}"
            )
        if self.fused_by_head and not self.fused:
            raise QuantError("fused_by_head is true, but fused is not")

    def _check_single_blocks(self) -> None:
        """Refuses what layers with one block do not have."""
        if self.norms != "pre" or self.parallel != "none" or self.full is not None or self.shared_keys is not None:
            raise QuantError("mlp_layers is given, with norms on outputs, parallel blocks, full or shared_keys")
        if not any(self.has_attention(i) and self.recurrent_of(i) is None for i in range(self.layers)):
            raise QuantError("mlp_layers is given, and no layer has softmax attention; one is expected at least")
        of_experts = () if self.experts is None else self.experts.layers or range(self.layers)
        of_recurrent = () if self.recurrent is None else self.recurrent.layers
        if set(of_recurrent) & set(self.mlp_layers) or set(of_experts) - set(self.mlp_layers):
            raise QuantError(
                f"mlp_layers is {self.mlp_layers}, must have the layers with experts and none of {self._recurrent_name}"
            )

    def _check_latent(self, latent: LatentAttention) -> None:
        """Refuses what multi-head latent attention does not have."""
        if self.kv_heads != self.heads:
            raise QuantError(f"kv_heads is {self.kv_heads}, must be heads, {self.heads}: each head has its own keys")
        if not 0 < self.rotary_dim < self.head_dim:
            raise QuantError(f"rotary_dim is {self.rotary_dim}, must be between 0 and head_dim, {self.head_dim}")
        if latent.value_dim > self.head_dim:
            raise QuantError(f"latent.value_dim is {latent.value_dim}, more than head_dim, {self.head_dim}")
        if self.fused or self.attention_gate or self.qk_norm != "none":
            raise QuantError("latent attention has neither fused projections, nor a gate, nor norms of queries and keys")

    def _check_recurrent(self, part: Recurrent) -> None:
        """Refuses what a decoder with layers that have a state in place of keys and values does not have."""
        name = self._recurrent_name
        given = [name for name in _RECURRENT if getattr(self, name) is not None]
        if len(given) > 1:
            raise QuantError(f"{' and '.join(given)} are given; expected one of them")
        if isinstance(part, ShortConvolution) and part.channels != self.width:
            raise QuantError(f"short_conv.channels is {part.channels}, must be width, {self.width}")
        if len(part.layers) >= self.layers:
            raise QuantError(
                f"{name}.layers has {len(part.layers)} of {self.layers} layers; one without is expected at least"
            )
        if self.sub_norms:
            raise QuantError(f"sub_norms is true, but layers of {name} have a norm of their own")

    def _check_full(self, full: FullAttention) -> None:
        """Refuses equal head widths, and features that are not supported with two head widths."""
        if not self.window_layers:
            raise QuantError("full is given, but window_layers is empty: no layer, or every one, has the window")
        if full.head_dim == self.head_dim:
            raise QuantError(f"full.head_dim is {full.head_dim}, must be another one than head_dim")
        if self.latent is not None or self.recurrent is not None or self.fused or self.attention_gate or self.sub_norms:
            raise QuantError(
                "full is given, with latent or linear attention, mamba, short_conv, fused projections, a gate or sub_norms"
            )
        _ = self.kinds  # whose sizes are checked, too

    def _check_shared(self, shared: SharedKeys) -> None:
        """Refuses layers without keys where no layer before them has any of their kind."""
        own = self.layers - shared.layers
        if {self.kind_of(i) for i in range(own, self.layers)} - {self.kind_of(i) for i in range(own)}:
            raise QuantError(
                f"shared_keys.layers is {shared.layers}, but the other layers of {self.layers} have not every kind of attention"
            )
        if self.window_layers and self.full is None:
            raise QuantError("shared_keys is given with layers with a window and without; full is expected, too")
        if self.latent is not None or self.recurrent is not None or self.fused or self.attention_gate:
            raise QuantError(
                "shared_keys is given, with latent or linear attention, mamba, short_conv, fused projections or a gate"
            )

    @property
    def query_width(self) -> int:
        """The rows of the projection of queries, with those of their gates."""
        return self.heads * self.head_dim * (2 if self.attention_gate and not self.separate_gate else 1)

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

    @property
    def kinds(self) -> tuple["DecoderConfig", ...]:
        """The configuration of each kind of softmax attention: with the window and without it if `full` is given, else one."""
        if self.full is None:
            return (self,)
        same: dict[str, Any] = {"full": None, "window_layers": (), "window_rope_theta": 0.0}
        of_window = dataclasses.replace(self, **same)
        if self.window_rope_theta:
            of_window = dataclasses.replace(of_window, rope_theta=self.window_rope_theta, rope_scaling=None)
        full = {"window": 0, "kv_heads": self.full.kv_heads, "head_dim": self.full.head_dim}
        return of_window, dataclasses.replace(self, **same, **full)

    def kind_of(self, layer: int) -> int:
        """Which of `kinds` a layer has."""
        return int(self.full is not None and not self.window_of(layer))

    def has_attention(self, layer: int) -> bool:
        """Whether a layer has attention, or a state in its place."""
        return layer not in self.mlp_layers

    def has_mlp(self, layer: int) -> bool:
        """Whether a layer has a feed-forward block or experts."""
        return not self.mlp_layers or layer in self.mlp_layers

    def has_keys(self, layer: int) -> bool:
        """Whether a layer has keys and values of its own."""
        return self.has_attention(layer) and (self.shared_keys is None or layer < self.layers - self.shared_keys.layers)

    def hidden_of(self, layer: int) -> int:
        """The width of a layer's dense feed-forward block."""
        if self.shared_keys is None or self.has_keys(layer):
            return self.hidden
        return self.shared_keys.hidden or self.hidden

    @property
    def recurrent(self) -> Recurrent | None:
        """The kind of layer that has a state in place of keys and values."""
        return getattr(self, self._recurrent_name)

    @property
    def _recurrent_name(self) -> str:
        """The field of `recurrent`; any of them where there is none."""
        return next((name for name in _RECURRENT if getattr(self, name) is not None), _RECURRENT[0])

    def recurrent_of(self, layer: int) -> Recurrent | None:
        """The linear attention, state space or short convolution of a layer; None: it has softmax attention."""
        if self.recurrent is None or layer not in self.recurrent.layers:
            return None
        return self.recurrent

    def place_of(self, layer: int) -> int:
        """The number of a layer among those with its kind of attention, by which a KV cache has it.

        A layer without keys and values of its own has the number of the layer whose it attends to. That of a layer without attention
        means nothing.
        """
        alike = [i for i in range(self.layers) if self._cache_of(i) == self._cache_of(layer) and self.has_keys(i)]
        return alike.index(layer) if self.has_keys(layer) else len(alike) - 1

    def _cache_of(self, layer: int) -> tuple[bool, int]:
        """What part of a cache has a layer: states, or keys and values of one width."""
        return self.recurrent_of(layer) is not None, self.kind_of(layer)

    def cached_layers(self, kind: int = 0) -> int:
        """The layers that have keys and values in a KV cache.

        Args:
            kind: of which of `kinds`.
        """
        return sum(self._cache_of(i) == (False, kind) and self.has_keys(i) for i in range(self.layers))

    def experts_of(self, layer: int) -> Experts | None:
        """The mixture of experts of a layer; None: it is dense."""
        if self.experts is None or (self.experts.layers and layer not in self.experts.layers):
            return None
        return self.experts

    def rotates_input_of(self, path: str) -> bool:
        """Whether the decoder rotates the input of a weight: layers/3/attn/o, layers/3/mlp/experts/0/down."""
        return _changed_input(path) in self.rotated_inputs

    def scales_input_of(self, path: str) -> bool:
        """Whether the decoder scales the input of a weight."""
        return _changed_input(path) in self.scaled_inputs

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
        for name in _PARTS:
            if (part := getattr(self, name)) is not None:
                values = dataclasses.asdict(part)
                form[name] = {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}
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
        for name, (part, part_form) in _PARTS.items():
            if form.get(name) is not None:
                values = checked(form[name], part_form, f"a decoder configuration: {name}")
                form[name] = part(
                    **{key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}
                )
        if form.get("rope_scaling") is not None:
            form["rope_scaling"] = scaling_from_json(form["rope_scaling"], "a decoder configuration: rope_scaling")
        return cls(**form)


def _changed_input(path: str) -> str:
    """The name of a weight as in `ChangedInput`."""
    name = path.rsplit("/", 1)[-1]
    return "o" if name == "out" else name


_SIZES = ("vocab", "layers", "width", "heads", "kv_heads", "head_dim", "hidden", "context")
_RECURRENT = ("linear", "mamba", "short_conv")
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
    "positions",
    "position_offset",
)
_CHOICES = {
    "rope": RopeLayout,
    "activation": Activation,
    "norms": Norms,
    "norm_kind": NormKind,
    "qk_norm": QKNorm,
    "parallel": Parallel,
}
_TUPLES: dict[str, Any] = {
    "nope_layers": list[int],
    "mlp_layers": list[int],
    "window_layers": list[int],
    "rotated_inputs": list[str],
    "scaled_inputs": list[str],
}
_PARTS: dict[str, tuple[type[Any], Any]] = {
    "experts": (Experts, form_of(Experts, layers=list[int])),
    "latent": (LatentAttention, form_of(LatentAttention)),
    "linear": (LinearAttention, form_of(LinearAttention, layers=list[int])),
    "mamba": (Mamba2, form_of(Mamba2, layers=list[int])),
    "short_conv": (ShortConvolution, form_of(ShortConvolution, layers=list[int])),
    "full": (FullAttention, form_of(FullAttention)),
    "shared_keys": (SharedKeys, form_of(SharedKeys)),
    "per_layer": (PerLayerInputs, form_of(PerLayerInputs)),
}
"""The fields that are objects of their own: their class, and the schema of their JSON."""
_OBJECTS: dict[str, Any] = dict.fromkeys(("rope_scaling", *_PARTS), dict[str, Any] | None)
_CONFIG = form_of(DecoderConfig, **dict.fromkeys(_SIZES, Positive), **_TUPLES, **_OBJECTS)
