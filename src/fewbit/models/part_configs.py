"""The configurations of parts of a decoder: experts, kinds of attention, per-layer inputs."""

import dataclasses
from typing import Literal, get_args

from ..errors import QuantError

ExpertLayout = Literal["separate", "stacked", "joined", "joined_in_out", "interleaved"]
"""How a checkpoint stores experts, see `Experts`."""

RouterScores = Literal["softmax", "sigmoid", "corrected_softmax", "plain_sigmoid"]
"""The router's scores of experts; "sigmoid" is DeepSeek-V3's, "corrected_softmax" ERNIE's, and "plain_sigmoid" Llama 4's, see `Experts`."""

LinearLayout = Literal["separate", "by_key_head", "gguf", "gguf_tiled"]
"""How a checkpoint stores the projections of linear attention, see `LinearAttention`."""


@dataclasses.dataclass(frozen=True)
class Experts:
    """The mixture of experts in place of a dense feed-forward block.

    A token's active experts are those with the largest scores, and their weights the scores: softmax probabilities of the
    router's logits, or their sigmoids. With "sigmoid" and "corrected_softmax" the scores plus a correction of each expert decide
    which are the largest, but the correction is no part of the weights (DeepSeek-V3).

    Attributes:
        count: experts of a layer (E).
        active: experts of each token.
        hidden: width of an expert (F).
        normalized: whether the weights of the active experts are divided by their sum.
        layers: the layers that have experts; empty: all.
        scores: the scores; all but "softmax" and "plain_sigmoid" have a correction.
        correction_row: whether the correction is stored as one row `[1, E]` (ERNIE); else `[E]`.
        groups: groups of consecutive experts; divides `count`.
        active_groups: the groups that a token's experts are chosen from, those with the largest score, or with a correction
            the largest sum of two scores.
        scale: multiplies the weights.
        sum_eps: with other scores than "softmax", added to the sum that they are divided by.
        shared_hidden: width of an expert that every token passes; 0: none.
        shared_gate: whether a sigmoid gate scales the shared expert.
        latent: width of what the experts read and write, projected from the residual stream and back (Nemotron 3); 0: the stream's.
        bias: whether router and experts have biases.
        beside_dense: whether a layer has a dense feed-forward block and experts, whose outputs are normed and added. The router and
            the experts then have input norms of their own (Gemma 4).
        router_scale: with `beside_dense`, whether each expert's weight has a scale, `router_scale`. A GGUF file in NVFP4 has it in the
            tensor scales of the experts.
        scales_input: whether the weights multiply what the experts read, not what they give (Llama 4).
        layout: "separate": leaves `experts/3/gate [F, D]`; "stacked": `experts/gate [E, F, D]`; "joined": `experts/gate+up
            [E, 2 F, D]`; "joined_in_out": `experts/gate+up [E, D, 2 F]` and `experts/down [E, F, D]` (Llama 4); "interleaved":
            the same with the columns of gate and up in turn (gpt-oss).

    Raises:
        QuantError: for numbers that do not fit.
    """

    count: int
    active: int
    hidden: int
    normalized: bool = True
    layers: tuple[int, ...] = ()
    scores: RouterScores = "softmax"
    correction_row: bool = False
    groups: int = 1
    active_groups: int = 1
    scale: float = 1.0
    sum_eps: float = 1e-20
    shared_hidden: int = 0
    shared_gate: bool = True
    latent: int = 0
    bias: bool = False
    beside_dense: bool = False
    router_scale: bool = True
    scales_input: bool = False
    layout: ExpertLayout = "separate"

    def __post_init__(self) -> None:
        for name in ("count", "active", "hidden", "groups", "active_groups"):
            check_size(f"experts.{name}", getattr(self, name))
        if self.active > self.count:
            raise QuantError(f"experts.active is {self.active}, more than experts.count, {self.count}")
        if self.shared_hidden:
            check_size("experts.shared_hidden", self.shared_hidden)
        if self.latent:
            check_size("experts.latent", self.latent)
        if self.beside_dense and self.shared_hidden:
            raise QuantError("experts.beside_dense is true and shared_hidden not 0; every token passes one of the two")
        for name, kind in (("layout", ExpertLayout), ("scores", RouterScores)):
            if getattr(self, name) not in get_args(kind):
                raise QuantError(f"experts.{name} is {getattr(self, name)!r}, must be one of {', '.join(get_args(kind))}")
        check_positive("experts.scale", self.scale)
        check_positive("experts.sum_eps", self.sum_eps)
        self._check_groups()

    @property
    def has_correction(self) -> bool:
        """Whether a correction of each expert is added to the scores to find the largest ones."""
        return self.scores in ("sigmoid", "corrected_softmax")

    @property
    def is_in_out(self) -> bool:
        """Whether the matrices of an expert are `[in, out]`."""
        return self.layout in ("joined_in_out", "interleaved")

    @property
    def part(self) -> str:
        """The part of a layer that has their parameters."""
        return "moe" if self.beside_dense else "mlp"

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
        if self.groups > 1 and self.has_correction and size < 2:
            raise QuantError(
                "experts.groups have one expert each; the corrected scores of two are summed, so two are expected"
            )


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
            check_size(f"latent.{name}", getattr(self, name))
        if self.query_rank:
            check_size("latent.query_rank", self.query_rank)
        check_positive("latent.norm_eps", self.norm_eps)
        if not isinstance(self.split, bool):
            raise QuantError(f"latent.split is {self.split!r}, must be true or false")


@dataclasses.dataclass(frozen=True)
class LinearAttention:
    """Linear attention by the gated delta rule (Gated DeltaNet) of Qwen3-Next and Qwen3.5, see `attention.linear`.

    Attributes:
        layers: the layers that have it in place of softmax attention, in order; not all.
        key_heads: heads of queries and keys (N).
        value_heads: heads of values (M), each with a state of its own; consecutive ones share a head of keys.
        key_dim: width of a head of queries or keys (n).
        value_dim: width of a head of values (m).
        kernel: the length of the causal convolution.
        layout: "separate": leaves `qkv [2 N n + M m, D]`, `z [M m, D]`, `beta` and `alpha [M, D]` (Qwen3.5); "by_key_head":
            leaves `qkvz` and `ba`, with the rows of all of them for each head of keys in turn (Qwen3-Next). In GGUF files
            `A = -exp(A_log)` in place of `A_log`, and for Qwen3-Next ("gguf") `qkv`, `z` and `ba`; for Qwen3.5 ("gguf_tiled") the
            leaves of "separate", where head j of values shares head `j mod N` of keys.

    Raises:
        QuantError: for numbers that do not fit.
    """

    layers: tuple[int, ...]
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int = 4
    layout: LinearLayout = "separate"

    def __post_init__(self) -> None:
        for name in ("key_heads", "value_heads", "key_dim", "value_dim", "kernel"):
            check_size(f"linear.{name}", getattr(self, name))
        if self.value_heads % self.key_heads:
            raise QuantError(f"linear.key_heads is {self.key_heads}, must divide linear.value_heads, {self.value_heads}")
        if self.layout not in get_args(LinearLayout):
            raise QuantError(f"linear.layout is {self.layout!r}, must be one of {', '.join(get_args(LinearLayout))}")
        check_layers("linear.layers", self.layers)

    @property
    def keys_width(self) -> int:
        """The width of all heads of keys, which queries have, too."""
        return self.key_heads * self.key_dim

    @property
    def values_width(self) -> int:
        """The width of all heads of values."""
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """The channels of the convolution: queries, keys and values (C)."""
        return 2 * self.keys_width + self.values_width

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """The shape of the states of a sequence."""
        return self.value_heads, self.key_dim, self.value_dim

    @property
    def is_gguf(self) -> bool:
        """Whether the leaves are those of a GGUF file."""
        return self.layout in ("gguf", "gguf_tiled")


@dataclasses.dataclass(frozen=True)
class Mamba2:
    """State space layers of Mamba-2 (Granite 4, Nemotron-H), see `attention.mamba`.

    Attributes:
        layers: the layers that have them in place of softmax attention, in order; not all.
        heads: heads (M), with a state `[n, m]` each.
        head_dim: width of a head (m).
        state_dim: width of a state (n).
        groups: groups of consecutive heads (N), whose heads share what writes to their states and reads from them.
        kernel: the length of the causal convolution.
        conv_bias: whether the convolution has a bias.
        bias: whether the projections have biases.
        is_gguf: whether the leaves are those of a GGUF file: `conv1d [C, K]`, `A = -exp(A_log) [M, 1]`, `D [M, 1]`, and the gain of the
            norm `[N, w / N]`.

    Raises:
        QuantError: for numbers that do not fit.
    """

    layers: tuple[int, ...]
    heads: int
    head_dim: int
    state_dim: int
    groups: int = 1
    kernel: int = 4
    conv_bias: bool = True
    bias: bool = False
    is_gguf: bool = False

    def __post_init__(self) -> None:
        for name in ("heads", "head_dim", "state_dim", "groups", "kernel"):
            check_size(f"mamba.{name}", getattr(self, name))
        if self.heads % self.groups:
            raise QuantError(f"mamba.groups is {self.groups}, must divide mamba.heads, {self.heads}")
        for name in ("conv_bias", "bias", "is_gguf"):
            if not isinstance(getattr(self, name), bool):
                raise QuantError(f"mamba.{name} is {getattr(self, name)!r}, must be true or false")
        check_layers("mamba.layers", self.layers)

    @property
    def width(self) -> int:
        """The width of all heads."""
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """The channels of the convolution: heads, and what writes and reads the states of each group (C)."""
        return self.width + 2 * self.groups * self.state_dim

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """The shape of the states of a sequence."""
        return self.heads, self.state_dim, self.head_dim


@dataclasses.dataclass(frozen=True)
class ShortConvolution:
    """Gated short convolutions (LFM2), see `attention.short_conv`.

    Attributes:
        layers: the layers that have them in place of softmax attention, in order; not all.
        channels: the channels of the convolution (C): the width of the residual stream.
        kernel: the length of the causal convolution.
        bias: whether the convolution and the projections have biases.
        is_gguf: whether the leaves are those of a GGUF file: `conv1d [C, K]` in place of `[C, 1, K]`.

    Raises:
        QuantError: for numbers that do not fit.
    """

    layers: tuple[int, ...]
    channels: int
    kernel: int = 3
    bias: bool = False
    is_gguf: bool = False

    def __post_init__(self) -> None:
        for name in ("channels", "kernel"):
            check_size(f"short_conv.{name}", getattr(self, name))
        for name in ("bias", "is_gguf"):
            if not isinstance(getattr(self, name), bool):
                raise QuantError(f"short_conv.{name} is {getattr(self, name)!r}, must be true or false")
        check_layers("short_conv.layers", self.layers)

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """The shape of the states of a sequence, which has none but the last inputs of the convolution."""
        return 0, 0, 0


@dataclasses.dataclass(frozen=True)
class FullAttention:
    """The heads of the layers without a sliding window, where they are others than those of the layers with one (Gemma 4).

    Attributes:
        kv_heads: as `DecoderConfig.kv_heads`.
        head_dim: as `DecoderConfig.head_dim`, and another one, by which the parameters of a layer tell its kind.
        keys_are_values: whether values are the projected keys, before their norm and rotary embedding; then there is no leaf `v`.

    Raises:
        QuantError: for numbers that do not fit.
    """

    kv_heads: int
    head_dim: int
    keys_are_values: bool = False

    def __post_init__(self) -> None:
        for name in ("kv_heads", "head_dim"):
            check_size(f"full.{name}", getattr(self, name))
        if not isinstance(self.keys_are_values, bool):
            raise QuantError(f"full.keys_are_values is {self.keys_are_values!r}, must be true or false")


@dataclasses.dataclass(frozen=True)
class SharedKeys:
    """Layers without keys and values of their own (Gemma 3n and 4).

    They attend to those of the last layer before them that has its own, and has a sliding window if they have one.

    Attributes:
        layers: how many layers, the last ones.
        hidden: width of their feed-forward blocks; 0: as in the other layers.

    Raises:
        QuantError: for numbers that do not fit.
    """

    layers: int
    hidden: int = 0

    def __post_init__(self) -> None:
        check_size("shared_keys.layers", self.layers)
        if self.hidden:
            check_size("shared_keys.hidden", self.hidden)


@dataclasses.dataclass(frozen=True)
class PerLayerInputs:
    """An embedding of each token for every layer (Gemma 3n and 4).

    To it a projection of the token's own embedding is added, see `decoder.per_layer_inputs`. At its end a layer multiplies a gate of
    the residual stream by it, and adds the projected product.

    Attributes:
        vocab: vocabulary size of the embedding.
        width: its width in each layer (P).

    Raises:
        QuantError: for numbers that do not fit.
    """

    vocab: int
    width: int

    def __post_init__(self) -> None:
        for name in ("vocab", "width"):
            check_size(f"per_layer.{name}", getattr(self, name))


def check_size(name: str, value: object) -> None:
    """Refuses what is no positive integer."""
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 1 << 40:
        raise QuantError(f"{name} is {value!r}, must be a positive integer below 2**40")


def check_layers(name: str, layers: tuple[int, ...]) -> None:
    """Refuses numbers of layers out of order."""
    if not layers or list(layers) != sorted(set(layers)):
        raise QuantError(f"{name} is {layers}, must be layers in ascending order, at least one")


def check_positive(name: str, value: object) -> None:
    """Refuses what is no positive number."""
    if not isinstance(value, int | float) or not value > 0:
        raise QuantError(f"{name} is {value!r}, must be a positive number")
