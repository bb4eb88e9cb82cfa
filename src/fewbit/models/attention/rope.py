"""Rotary position embedding (RoPE) in both layouts."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from ..config import DecoderConfig, RopeLayout
from .rope_scaling import RopeScaling


def rotary_tables(config: DecoderConfig, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Cosines and sines of the rotary angles, by position.

    Positions are 0 to `length - 1`; each table is `[length, rotary_dim / 2]`. The angle is
    `position * rope_theta ** (-2 i / rotary_dim)`, in float64, rounded once to float32: a float32 angle would be off by 5e-4
    at position 8,000. They are constants of the trace. Scaled frequencies are those of a sequence of `length` tokens.

    >>> cos, sin = rotary_tables(DecoderConfig(vocab=8, layers=1, width=4, heads=1, kv_heads=1, head_dim=4, hidden=8), 2)
    >>> cos.shape, float(sin[1, 0])
    ((2, 2), 0.8414709568023682)
    """
    return _tables(_frequencies(config, config.rope_theta, config.rope_scaling, length), length, config.rope_scaling)


class Rotation(NamedTuple):
    """The rotary embedding of one layer, for T tokens, and the gains of their queries.

    Attributes:
        cos: the cosines `[T, rotary_dim / 2]`.
        sin: the sines, likewise.
        is_rotary: whether the layer has rotary embedding; traced in a scan over layers with it and without.
        gains: the factors `[T]` of the queries; None: all are 1.
    """

    cos: Any
    sin: Any
    is_rotary: Any
    gains: Any

    def tempered(self, q: Float[Array, "B H T h"]) -> Float[Array, "B H T h"]:
        """The queries, multiplied by the gain of their position."""
        if self.gains is None:
            return q
        return (q.astype(jnp.float32) * self.gains[None, None, :, None]).astype(q.dtype)


class LayerRotations:
    """The rotary tables of every layer, for T tokens from a position on.

    Layers share tables: those of `rope_theta`, of `window_rope_theta`, and the identity of layers without rotary embedding.
    """

    def __init__(
        self,
        config: DecoderConfig,
        start: Int[Array, ""] | int,
        tokens: int,
        max_length: int,
        count: Int[Array, ""] | None = None,
    ):
        """The tables.

        Args:
            config: the configuration.
            start: the position of the first token; traced in a KV cache.
            tokens: how many tokens there are (T).
            max_length: the largest number of positions in the sequence.
            count: how many of the tokens count, before padding; None: all.
        """
        self.indices = tuple(_table_index(config, layer) for layer in range(config.layers))
        used = sorted(set(self.indices))
        self.indices = tuple(used.index(index) for index in self.indices)
        self.tables = [_placed(config, index, start, tokens, max_length, count) for index in used]
        self.gains = _query_gains(config, start, tokens)
        self.is_rotary = [layer not in config.nope_layers for layer in range(config.layers)]
        self.temperature_nope = config.temperature_nope

    def of_layer(self, layer: Int[Array, ""] | int) -> Rotation:
        """The rotary embedding of a layer, which `lax.scan` traces."""
        is_rotary = self._is_rotary(layer)
        return Rotation(*self._tables_of(layer), is_rotary, self._gains_of(is_rotary))

    def _tables_of(self, layer: Array | int) -> tuple[Any, Any]:
        if len(self.tables) == 1:
            return self.tables[0]
        if isinstance(layer, int):
            return self.tables[self.indices[layer]]
        index = jnp.asarray(self.indices, jnp.int32)[layer]
        cos, sin = (jnp.stack(list(map(jnp.asarray, tables))) for tables in zip(*self.tables, strict=True))
        return cos[index], sin[index]

    def _is_rotary(self, layer: Array | int) -> Array | bool:
        if len(set(self.is_rotary)) == 1:
            return self.is_rotary[0]
        if isinstance(layer, int):
            return self.is_rotary[layer]
        return jnp.asarray(self.is_rotary)[layer]

    def _gains_of(self, is_rotary: Array | bool) -> Array | None:
        if self.gains is None or not self.temperature_nope:
            return self.gains
        if isinstance(is_rotary, bool):
            return None if is_rotary else self.gains
        return jnp.where(is_rotary, 1.0, self.gains)


def _query_gains(config: DecoderConfig, start: Array | int, tokens: int) -> Array | None:
    """The factors of the queries of T tokens from `start` on. None if all are 1."""
    if not config.temperature_scale:
        return None
    positions = start + int(config.temperature_nope) + jnp.arange(tokens, dtype=jnp.int32)
    periods = (positions // config.temperature_length).astype(jnp.float32)
    return 1 + config.temperature_scale * jnp.log1p(periods)


_MAIN, _WINDOW, _NONE = 0, 1, 2


def _table_index(config: DecoderConfig, layer: int) -> int:
    """Which rotary table a layer has."""
    if layer in config.nope_layers:
        return _NONE
    if config.window_rope_theta and config.window_of(layer):
        return _WINDOW
    return _MAIN


def _placed(
    config: DecoderConfig, index: int, start: Array | int, tokens: int, max_length: int, count: Array | None
) -> tuple[Any, Any]:
    """The tables of T tokens from `start` on."""
    if index == _NONE:
        shape = (tokens, config.rotated // 2)
        return np.ones(shape, np.float32), np.zeros(shape, np.float32)
    theta, scaling = config.rope_theta, config.rope_scaling
    if index == _WINDOW:
        theta, scaling = config.window_rope_theta, None
    if isinstance(start, int):
        cos, sin = _tables(_frequencies(config, theta, scaling, start + tokens), start + tokens, scaling)
        return cos[start:], sin[start:]
    if scaling is not None and scaling.grows:
        return _tables_by_length(config, scaling, start, tokens, max_length, tokens if count is None else count)
    every = _tables(_frequencies(config, theta, scaling, max_length), max_length, scaling)
    cos, sin = (lax.dynamic_slice_in_dim(jnp.asarray(table), start, tokens) for table in every)
    return cos, sin


def _tables_by_length(
    config: DecoderConfig, scaling: RopeScaling, start: Array, tokens: int, max_length: int, count: Array | int
) -> tuple[Array, Array]:
    """The tables for frequencies that depend on the traced length. Angles are float32, as in transformers."""
    rows = np.stack([_frequencies(config, config.rope_theta, scaling, length) for length in range(max_length + 1)])
    frequencies = jnp.asarray(rows.astype(np.float32))[jnp.minimum(start + count, max_length)]
    positions = (start + jnp.arange(tokens, dtype=jnp.int32)).astype(jnp.float32)
    angle = positions[:, None] * frequencies[None, :]
    return jnp.cos(angle) * scaling.gain, jnp.sin(angle) * scaling.gain


def _frequencies(config: DecoderConfig, theta: float, scaling: RopeScaling | None, length: int) -> np.ndarray:
    """The rotary frequencies of a sequence, float64."""
    pair = np.arange(config.rotated // 2, dtype=np.float64)
    plain = float(theta) ** (-2 * pair / config.rotated)
    if scaling is None:
        return plain
    return scaling.frequencies(plain, float(theta), length)


def _tables(frequencies: np.ndarray, length: int, scaling: RopeScaling | None) -> tuple[np.ndarray, np.ndarray]:
    """Cosines and sines of positions 0 to `length - 1`, float32."""
    angle = np.arange(length, dtype=np.float64)[:, None] * frequencies[None, :]
    cos, sin = np.cos(angle), np.sin(angle)
    if scaling is not None:
        cos, sin = cos * scaling.gain, sin * scaling.gain
    return cos.astype(np.float32), sin.astype(np.float32)


def apply_rotary(
    x: Float[Array, "B n T h"], cos: Float[Any, "T p"], sin: Float[Any, "T p"], layout: RopeLayout
) -> Float[Array, "B n T h"]:
    """Applies rotary embedding to each pair of coordinates. `(a, b)` becomes `(a cos - b sin, a sin + b cos)`.

    Args:
        x: queries or keys, of any floating dtype; computed in float32.
        cos: the cosine for each position and pair; coordinates after the first `2 p` stay as they are.
        sin: the sine for each position and pair.
        layout: "interleaved" pairs coordinates `2i` and `2i + 1`, "half" pairs `i` and `i + p`.

    Returns:
        The rotated heads, in the dtype of `x`.
    """
    rotated = 2 * cos.shape[-1]
    if rotated < x.shape[-1]:
        first = apply_rotary(x[..., :rotated], cos, sin, layout)
        return jnp.concatenate([first, x[..., rotated:]], axis=-1)
    cos, sin = (jnp.asarray(t)[None, None, :, :] for t in (cos, sin))  # [1, 1, T, h / 2]
    wide = x.astype(jnp.float32)
    if layout == "half":
        a, b = jnp.split(wide, 2, axis=-1)
        return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1).astype(x.dtype)
    a, b = wide[..., 0::2], wide[..., 1::2]
    return jnp.stack([a * cos - b * sin, a * sin + b * cos], axis=-1).reshape(x.shape).astype(x.dtype)
