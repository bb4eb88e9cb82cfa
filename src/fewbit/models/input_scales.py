"""Folds scales of products' inputs into the parameters before them.

`W x = (W diag(s)) (x / s)`: the columns of every weight that reads an input are multiplied by `s`, and what produces the input is
divided by it, so that the function does not change. In a decoder these can be divided:

    input of                         divided by s
    q, k, v; gate, up, router; head  the gain of the norm before them (of their own each: dense block, router, experts of Gemma 4)
    q_b; kv_b                        the gain of the latent's norm
    o                                rows of v (of kv_b in latent attention); heads that share a value share its scales
    out of linear attention          the gain of the norm of its values, which all heads share
    out of a state space             the gain of the norm of its values
    out of a short convolution       rows of in
    down                             rows of up, where the activation is linear in them
    o, down of `config.sub_norms`    the gain of the norm before them
    o, down of `config.scaled_inputs`  the vector by which the decoder multiplies it, which is kept in the model

The input of a tied head cannot be scaled, since its rows are embeddings, too; nor that of a block without a norm before it; nor
those of k_b, v_b and o where `config.latent.split`, which have an axis of heads; nor that of o where values are normed, or projected
in another layer.
Dimension letters as in `decoder`; K elements of an input come from S channels of what produces it.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping

import numpy as np
from jaxtyping import Float

from .config import DecoderConfig
from .names import contraction_axis, shapes

_AFTER_NORM = {
    "attn": ("q", "k", "v", "q+k+v", "gate", "q_a", "kv_a", "qkv", "z", "beta", "alpha", "qkvz", "ba", "in"),
    "mlp": ("gate", "up", "gate+up", "router", "shared_expert_gate", "latent_in"),
}
_IN_BLOCK = ("gate", "up", "gate+up")


@dataclasses.dataclass(frozen=True)
class Channels:
    """Channels of a parameter, along one axis.

    Attributes:
        path: the parameter.
        axis: the axis, negative.
        places: their places, of consecutive channels of the input.
    """

    path: str
    axis: int
    places: range | tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class ScalableInput:
    """An input of products whose scales what produces it can absorb.

    Attributes:
        readers: every weight that reads it, with its contraction axis, negative.
        sources: what produces it: the channels of a norm's gain and bias, or of weights and biases. The first one names the input.
        channels: the channel of the sources that each of the input's elements comes from.
        is_norm: whether the source is a norm.
        groups: the number of experts in one stack, each of which has its own input and scales; 0: one input.
    """

    readers: tuple[Channels, ...]
    sources: tuple[Channels, ...]
    channels: tuple[int, ...]
    is_norm: bool
    groups: int = 0

    @property
    def name(self) -> str:
        """The path of the first source."""
        return self.sources[0].path

    @property
    def paths(self) -> tuple[str, ...]:
        """Every parameter that its scales change."""
        return tuple(part.path for part in (*self.sources, *self.readers))

    @property
    def size(self) -> int:
        """How many scales there are (S), for each expert."""
        return len(self.sources[0].places)


def scalable_inputs(config: DecoderConfig) -> tuple[ScalableInput, ...]:
    """The inputs of a decoder's products whose scales can be folded.

    Args:
        config: the configuration.

    Returns:
        The inputs, layer by layer; every weight reads one at most.

    >>> config = DecoderConfig(vocab=64, layers=1, width=16, heads=4, kv_heads=2, head_dim=4, hidden=24)
    >>> [(one.name, [part.path.rsplit("/", 1)[1] for part in one.readers]) for one in scalable_inputs(config)]
    [('layers/0/attn/norm', ['q', 'k', 'v']), ('layers/0/attn/v', ['o']), ('layers/0/mlp/norm', ['gate', 'up']), ('layers/0/mlp/up', ['down'])]
    """
    found = _Inputs(config, shapes(config))
    every = [
        one
        for i in range(config.layers)
        for one in (*found.attention(i), *found.mlp(f"layers/{i}/mlp"), *found.mlp(f"layers/{i}/moe"))
    ]
    if not config.tied:
        every += found.after_norm("norm", ["head"])
    return tuple(one for one in every if not any(_is_rotated_only(part.path, config) for part in one.readers))


def _is_rotated_only(path: str, config: DecoderConfig) -> bool:
    """Whether a rotation comes before a weight, through which no scale can be folded, and no scale after it."""
    return config.rotates_input_of(path) and not config.scales_input_of(path)


@dataclasses.dataclass(frozen=True)
class _Inputs:
    """The parameters of a decoder, and the inputs of its products."""

    config: DecoderConfig
    shapes: Mapping[str, tuple[int, ...]]

    def after_norm(self, norm: str, readers: Iterable[str]) -> Iterator[ScalableInput]:
        """The output of a norm, if there is one."""
        if norm in self.shapes:
            width = range(self.shapes[norm][0])
            found = tuple(self.reader(path) for path in readers if path in self.shapes)
            sources = tuple(Channels(path, -1, width) for path in (norm, f"{norm}_bias") if path in self.shapes)
            yield ScalableInput(found, sources, tuple(width), is_norm=True)

    def reader(self, path: str) -> Channels:
        """All columns of a weight."""
        axis = contraction_axis(path, self.config)
        return Channels(path, axis, range(self.shapes[path][axis]))

    def attention(self, layer: int) -> Iterator[ScalableInput]:
        """The inputs of a layer's attention."""
        at, config, latent = f"layers/{layer}/attn", self.config, self.config.latent
        if not config.has_attention(layer):
            return
        readers = [f"{at}/{name}" for name in _AFTER_NORM["attn"]]
        if config.parallel == "one_norm":
            readers += [f"layers/{layer}/mlp/{name}" for name in _AFTER_NORM["mlp"]]
        yield from self.after_norm(f"{at}/norm", readers)
        if latent is not None:
            yield from self.after_norm(f"{at}/q_a_norm", [f"{at}/q_b"])
            if not latent.split:
                yield from self.after_norm(f"{at}/kv_a_norm", [f"{at}/kv_b"])
        out = f"{at}/out" if f"{at}/out" in self.shapes else f"{at}/o"
        if config.scales_input_of(out):
            yield self.kept(out)
            return
        if out.endswith("/out") and config.short_conv is not None:
            rows = range(config.width, 2 * config.width)  # of the factor after the convolution
            sources = [Channels(f"{at}/in", -2, rows), Channels(f"{at}/in_bias", -1, rows)]
            yield self.before_product(out, sources, tuple(range(config.width)))
            return
        if out.endswith("/out"):
            if len(self.shapes[f"{out}_norm"]) == 1:
                yield self.after_linear_attention(out)
            return
        if config.sub_norms:
            yield from self.after_norm(f"{at}/sub_norm", [f"{at}/o"])
            return
        if latent is not None and latent.split:
            return
        if latent is not None:
            rows, keys = self.shapes[f"{at}/kv_b"][0] // config.heads, config.head_dim - config.rotary_dim
            values = tuple(head * rows + keys + i for head in range(config.heads) for i in range(latent.value_dim))
            yield self.before_product(f"{at}/o", [Channels(f"{at}/kv_b", -2, values)], tuple(range(len(values))))
            return
        name = next((name for name in ("v", "q+k+v") if f"{at}/{name}" in self.shapes), None)
        if config.value_norm or name is None:
            return
        config = config.kinds[config.kind_of(layer)]
        width, h = config.kv_heads * config.head_dim, config.head_dim
        first = 0 if name == "v" else config.heads * h + width
        places: range | tuple[int, ...] = range(first, first + width)
        if config.fused_by_head:
            period = (config.group + 2) * h
            places = tuple(head * period + period - h + i for head in range(config.kv_heads) for i in range(h))
        sources = [Channels(f"{at}/{name}", -2, places), Channels(f"{at}/{name}_bias", -1, places)]
        channels = tuple((head // config.group) * h + i for head in range(config.heads) for i in range(h))
        yield self.before_product(f"{at}/o", sources, channels)

    def after_linear_attention(self, reader: str) -> ScalableInput:
        """The input of the output projection of linear attention, or of a state space.

        The gain before it has no offset. In linear attention it belongs to every head.
        """
        gain = self.shapes[f"{reader}_norm"][0]
        channels = tuple(range(gain)) * (self.shapes[reader][1] // gain)
        return self.before_product(reader, [Channels(f"{reader}_norm", -1, range(gain))], channels)

    def mlp(self, at: str) -> Iterator[ScalableInput]:
        """The inputs of a feed-forward block or a mixture of experts."""
        experts = [
            path.rsplit("/", 1)[0] for path in self.shapes if path.startswith(f"{at}/experts/") and path.endswith("/down")
        ]
        blocks = [block for block in (at, f"{at}/shared") if f"{block}/down" in self.shapes]
        reads_stream = [f"{at}/shared"] if f"{at}/latent_in" in self.shapes else [f"{at}/shared", *experts]
        inner = [f"{block}/{name}" for block in reads_stream for name in _IN_BLOCK]
        own = [f"{at}/{name}" for name in _AFTER_NORM["mlp"] if f"{at}/{name}_norm" not in self.shapes]
        yield from self.after_norm(f"{at}/norm", [*own, *inner])
        yield from self.after_norm(f"{at}/router_norm", [f"{at}/router"])
        if self.config.scales_input_of(f"{at}/down"):
            yield from (self.kept(f"{block}/down") for block in (*blocks, *experts))
        elif self.config.sub_norms:
            yield from self.after_norm(f"{at}/sub_norm", [f"{at}/down"])
        elif self.is_linear_in_up:
            yield from map(self.hidden, (*blocks, *experts))

    @property
    def is_linear_in_up(self) -> bool:
        """Whether the input of down grows with a positive factor of up. gpt-oss adds 1 to up and clips it."""
        if self.config.gated:
            return self.config.activation != "clamped_swiglu"
        return self.config.activation == "relu"

    def hidden(self, at: str) -> ScalableInput:
        """The input of down, whose rows of up are divided."""
        name = "up" if f"{at}/up" in self.shapes else "gate+up"
        axis = -3 - contraction_axis(f"{at}/{name}", self.config)
        places = range(self.shapes[f"{at}/{name}"][axis])
        if name == "gate+up":
            experts = self.config.experts
            is_interleaved = axis == -1 and experts is not None and experts.layout == "interleaved"
            places = places[1::2] if is_interleaved else places[len(places) // 2 :]
        sources = [Channels(f"{at}/{name}", axis, places), Channels(f"{at}/{name}_bias", -1, places)]
        return self.before_product(f"{at}/down", sources, tuple(range(len(places))))

    def kept(self, reader: str) -> ScalableInput:
        """The input of one weight, which the decoder multiplies by a vector."""
        places = range(self.shapes[f"{reader}_input_scale"][-1])
        return self.before_product(reader, [Channels(f"{reader}_input_scale", -1, places)], tuple(places))

    def before_product(self, reader: str, sources: Iterable[Channels], channels: tuple[int, ...]) -> ScalableInput:
        """The input of one weight, or of a stack of experts, produced by other parameters."""
        found = tuple(part for part in sources if part.path in self.shapes)
        groups = self.shapes[reader][0] if len(self.shapes[reader]) == 3 else 0
        return ScalableInput((self.reader(reader),), found, channels, is_norm=False, groups=groups)


def why_not_scaled(path: str, config: DecoderConfig) -> str:
    """Why nothing can absorb the scales of a weight's input, where `scalable_inputs` has none.

    Args:
        path: the weight.
        config: the configuration.
    """
    if path == "embed":
        return "its rows are read as embeddings, too"
    if path == "position_embed":
        return "no product reads it"
    if config.rotates_input_of(path):
        return "a rotation comes before it"
    if config.latent is not None and config.latent.split and path.endswith(("/k_b", "/v_b", "/o")):
        return "the projection of the latent is stored in two parts, as in GGUF files"
    if path.endswith("/out"):
        return "the gain of the norm before it is stored by groups, as in GGUF files"
    if path.endswith("/o") and config.value_norm:
        return "values are normed after their projection"
    if path.endswith("/o") and config.shared_keys is not None:
        return "its values are projected in another layer"
    if path.endswith("/down"):
        return f"the activation {config.activation} is not linear in up"
    return "no norm comes before it"


Scales = Float[np.ndarray, "... _"]


@dataclasses.dataclass(frozen=True)
class FoldedScales:
    """The changes of a decoder's parameters that fold scales.

    Attributes:
        gains: the new gains of norms, by path; their biases are among the factors.
        factors: what else is multiplied, by path: the axis, and the factor of each of its elements.
    """

    gains: Mapping[str, np.ndarray]
    factors: Mapping[str, tuple[tuple[int, Scales], ...]]

    @classmethod
    def of(
        cls,
        inputs: Iterable[ScalableInput],
        scales: Mapping[str, Scales],
        config: DecoderConfig,
        load: Callable[[str], np.ndarray],
    ) -> "FoldedScales":
        """The changes for the scales of some inputs.

        A norm's new gain is rounded to its dtype first, and the weights are multiplied by the ratio of the old gain and the new
        one, so that the rounding costs nothing. With an offset `o` (Gemma) the gain becomes `(gain + o) / s - o`.

        Args:
            inputs: inputs of `scalable_inputs`.
            scales: the scales by the name of the input; an input that has none stays as it is.
            config: the configuration.
            load: gives a norm's gain by its path.

        Returns:
            The changes.
        """
        gains: dict[str, np.ndarray] = {}
        factors: dict[str, list[tuple[int, Scales]]] = {}
        all_shapes = shapes(config)
        for one in inputs:
            if one.name not in scales:
                continue
            s = np.asarray(scales[one.name], np.float64)
            if one.is_norm:
                gains[one.name], s = _divided_gain(load(one.name), s, config.norm_offset)
            for part in one.sources[one.is_norm :]:
                divisor = np.ones((*s.shape[:-1], all_shapes[part.path][part.axis]))
                divisor[..., list(part.places)] = s
                factors.setdefault(part.path, []).append((part.axis, 1 / divisor))
            for part in one.readers:
                factors.setdefault(part.path, []).append((part.axis, s[..., list(one.channels)]))
        return cls(gains, {path: tuple(every) for path, every in factors.items()})

    @property
    def paths(self) -> set[str]:
        """The parameters that change."""
        return {*self.gains, *self.factors}

    def applied(self, path: str, x: np.ndarray) -> np.ndarray:
        """A parameter with the scales folded.

        Args:
            path: its path.
            x: the parameter.

        Returns:
            A norm's new gain, in its dtype; another parameter in float64, since several scales may change it; `x` itself where
            none does.
        """
        if path in self.gains:
            return self.gains[path]
        for axis, factor in self.factors.get(path, ()):
            x = x.astype(np.float64) * _along(factor, axis, x.ndim)
        return x


def _divided_gain(gain: np.ndarray, s: Float[np.ndarray, " S"], offset: float) -> tuple[np.ndarray, Float[np.ndarray, " S"]]:
    """The gain divided by the scales, and the ratio of both gains.

    The new gain is rounded to the dtype of the old one. The ratio is the old gain by the new one.
    """
    old = gain.astype(np.float64) + offset
    new = (old / s - offset).astype(gain.dtype)
    rounded = new.astype(np.float64) + offset
    is_kept = (rounded == 0) | (old == 0) | ~np.isfinite(rounded)  # such as a gain that vanishes when it is rounded
    new = np.where(is_kept, gain, new)
    return new, np.where(is_kept, 1.0, old / np.where(is_kept, 1.0, rounded))


def _along(factor: Scales, axis: int, ndim: int) -> np.ndarray:
    """The factors `[*E, n]`, broadcast along an axis. The array is `[*E, ..]`, of which `axis` has the n elements."""
    shape = [1] * ndim
    shape[axis] = factor.shape[-1]
    if factor.ndim == 2:
        shape[0] = factor.shape[0]
    return factor.reshape(shape)
