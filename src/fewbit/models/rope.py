"""Rotary position embedding (RoPE) in both layouts."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from .config import LlamaConfig, RopeLayout


def rotary_tables(config: LlamaConfig, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Cosines and sines of the rotary angles, each `[length, head_dim / 2]`.

    The angle is `position * rope_theta ** (-2 i / head_dim)`, in float64, rounded once to float32: a float32 angle would be
    off by 5e-4 at position 8,000. They are constants of the trace.

    >>> cos, sin = rotary_tables(LlamaConfig(vocab=8, layers=1, width=4, heads=1, kv_heads=1, head_dim=4, hidden=8), 2)
    >>> cos.shape, float(sin[1, 0])
    ((2, 2), 0.8414709568023682)
    """
    pair = np.arange(config.head_dim // 2, dtype=np.float64)
    frequency = float(config.rope_theta) ** (-2 * pair / config.head_dim)
    angle = np.arange(length, dtype=np.float64)[:, None] * frequency[None, :]
    return np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)


def apply_rotary(
    x: Float[Array, "B n T h"], cos: Float[Any, "T p"], sin: Float[Any, "T p"], layout: RopeLayout
) -> Float[Array, "B n T h"]:
    """Applies rotary embedding: each pair `(a, b)` becomes `(a cos - b sin, a sin + b cos)`.

    Args:
        x: queries or keys, of any floating dtype; computed in float32.
        cos: the cosine for each position and pair.
        sin: the sine for each position and pair.
        layout: "interleaved" pairs coordinates `2i` and `2i + 1`, "half" pairs `i` and `i + h / 2`.

    Returns:
        The rotated heads, in the dtype of `x`.
    """
    cos, sin = (jnp.asarray(t)[None, None, :, :] for t in (cos, sin))  # [1, 1, T, h / 2]
    wide = x.astype(jnp.float32)
    if layout == "half":
        a, b = jnp.split(wide, 2, axis=-1)
        return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1).astype(x.dtype)
    a, b = wide[..., 0::2], wide[..., 1::2]
    return jnp.stack([a * cos - b * sin, a * sin + b * cos], axis=-1).reshape(x.shape).astype(x.dtype)
