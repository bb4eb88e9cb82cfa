"""The parts of a decoder layer: projections, norms, feed-forward block.

Dimension letters as in `decoder`.
"""

from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from ..ops.hadamard import hadamard_transform
from .attention.rope import Rotation, apply_rotary
from .config import DecoderConfig
from .joined import JOINED, products

Params: TypeAlias = dict[str, Any]


def queries_keys_values(
    y: Float[Array, "B T D"], attn: Params, rotation: Rotation, config: DecoderConfig
) -> tuple[Float[Array, "B H T h"], Float[Array, "B K T h"], Float[Array, "B K T h"], Float[Array, "B T w"] | None]:
    """The heads of normed tokens, with their norms and rotary embedding, and the gate of attention's output (w = H h) if it has one.

    Attention divides by `sqrt(h)`; queries are multiplied by what `config.attention_scale` differs from that. Without a leaf `v` values
    are the projected keys.
    """
    counts, names = (config.heads, config.kv_heads), JOINED["attn"][:2]
    flat = _projected_by_head(y, attn, config) if config.fused_by_head else _projected(y, attn, config)
    B, T, _ = y.shape
    gate = None
    if config.separate_gate:
        gate = linear(y, attn["gate"])
    elif config.attention_gate:
        q, gate = jnp.split(flat[0].reshape(B, T, config.heads, -1), 2, axis=-1)
        flat[0], gate = q.reshape(B, T, -1), gate.reshape(B, T, -1)
    q, k = (
        _rotated_heads(part, name, count, attn, rotation, config)
        for part, name, count in zip(flat[:2], names, counts, strict=True)
    )
    v = flat[2].reshape(B, T, config.kv_heads, -1)
    if config.value_norm:
        v = rms_norm(v, None, config)
    return q, k, v.swapaxes(1, 2), gate


def _projected(y: Array, attn: Params, config: DecoderConfig) -> list[Array]:
    """The projections of queries, keys and values `[B, T, w]`."""
    names = JOINED["attn"] if has_values(attn) else JOINED["attn"][:2]
    keys = config.kv_heads * config.head_dim
    widths = (config.query_width, keys, keys)[: len(names)]
    if "q+k+v_bias" in attn:
        joined = plus_bias(linear(y, attn["q+k+v"]), attn, "q+k+v")
        return jnp.split(joined, [widths[0], widths[0] + keys], axis=-1)
    flat = products(attn, names, widths, partial(linear, y))
    flat = [plus_bias(part, attn, name) for part, name in zip(flat, names, strict=True)]
    return flat if has_values(attn) else [*flat, flat[1]]


def _projected_by_head(y: Array, attn: Params, config: DecoderConfig) -> list[Array]:
    """The same of one weight with the rows of each head of keys in turn."""
    joined = plus_bias(linear(y, attn["q+k+v"]), attn, "q+k+v")
    of_heads = joined.reshape(*y.shape[:2], config.kv_heads, config.group + 2, config.head_dim)  # [B, T, K, G + 2, h]
    parts = jnp.split(of_heads, [config.group, config.group + 1], axis=3)
    return [part.reshape(*y.shape[:2], -1) for part in parts]


def queries(y: Float[Array, "B T D"], attn: Params, rotation: Rotation, config: DecoderConfig) -> Float[Array, "B H T h"]:
    """The heads of queries as in `queries_keys_values`, of a layer without keys of its own."""
    flat = plus_bias(linear(y, attn["q"]), attn, "q")
    return _rotated_heads(flat, "q", config.heads, attn, rotation, config)


def _rotated_heads(flat: Array, name: str, count: int, attn: Params, rotation: Rotation, config: DecoderConfig) -> Array:
    """Heads of queries or keys with their norm, rotary embedding, and the scale of queries."""
    if config.qk_norm == "projection":
        flat = rms_norm(flat, attn[f"{name}_norm"], config)
    heads = flat.reshape(*flat.shape[:2], count, -1)
    if config.qk_norm == "head":
        heads = rms_norm(heads, attn[f"{name}_norm"], config)
    heads = apply_rotary(heads.swapaxes(1, 2), rotation.cos, rotation.sin, config.rope)
    if config.qk_norm == "rotated_head":
        heads = rms_norm(heads, attn[f"{name}_norm"], config)
    if config.qk_norm == "without_gain":
        heads = jnp.where(rotation.is_rotary, rms_norm(heads, None, config), heads)
    if name == "q" and config.attention_scale:
        heads = scaled(heads, config.attention_scale * config.head_dim**0.5)
    return heads


def has_values(attn: Params) -> bool:
    """Whether softmax attention has a projection of values."""
    return "v" in attn or "q+k+v" in attn


def feed_forward(y: Float[Array, "B T D"], mlp: Params, config: DecoderConfig) -> Float[Array, "B T D"]:
    """The feed-forward block of normed tokens: `down (act(gate y) * up y)`, or `down act(up y)` without a gate.

    `down` has a norm before it if the configuration says so.
    """
    if config.gated:
        gate, up = products(mlp, JOINED["mlp"], [mlp_width(mlp)] * 2, partial(linear, y))
        hidden = gated(plus_bias(gate, mlp, "gate"), plus_bias(up, mlp, "up"), config)
    else:
        up = plus_bias(linear(y, mlp["up"]), mlp, "up")
        hidden = xielu(up, mlp) if config.activation == "xielu" else activated(up, config)
    hidden = sub_norm(hidden, mlp, config)
    return plus_bias(linear(changed_input(hidden, mlp, "down", config), mlp["down"]), mlp, "down")


def sub_norm(x: Float[Array, "B T K"], part: Params, config: DecoderConfig) -> Float[Array, "B T K"]:
    """The input of the last projection of attention or the feed-forward block, with its norm if it has one."""
    if not config.sub_norms:
        return x
    return rms_norm(x, part["sub_norm"], config)


def changed_input(
    x: Float[Array, "*B K"], tree: Params, name: str, config: DecoderConfig, row: Array | None = None
) -> Float[Array, "*B K"]:
    """The input of a weight, rotated by a Hadamard matrix and scaled where the configuration says so.

    Scales are those of the block `tree`, `[K]`, or with `row`, the expert of each row of `x`, `[E, K]`.
    """
    if config.rotates_input_of(name):
        x = hadamard_transform(x)
    if config.scales_input_of(name):
        scale = tree[f"{name}_input_scale"].astype(jnp.float32)
        scale = scale.reshape((1,) * (x.ndim - 1) + (-1,)) if row is None else jnp.take(scale, row, axis=0)
        x = (x.astype(jnp.float32) * scale).astype(x.dtype)
    return x


def mlp_width(mlp: Params) -> int:
    """The hidden width of a feed-forward block (F)."""
    return mlp["down"].shape[-1]


def gated(gate: Array, up: Array, config: DecoderConfig) -> Array:
    """The activation of the gate times the up projection."""
    if config.activation == "clamped_swiglu":
        limit = config.activation_limit
        gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
        return gate * jax.nn.sigmoid(1.702 * gate) * (up + 1)
    return activated(gate, config) * up


def activated(x: Array, config: DecoderConfig) -> Array:
    """The activation, of one input."""
    match config.activation:
        case "gelu":
            return jax.nn.gelu(x, approximate=False)
        case "gelu_tanh":
            return jax.nn.gelu(x, approximate=True)
        case "relu":
            return jax.nn.relu(x)
        case "relu2":
            return jnp.square(jax.nn.relu(x))
        case _:
            return jax.nn.silu(x)


def xielu(x: Float[Array, "B T F"], mlp: Params) -> Float[Array, "B T F"]:
    """`a x^2 + beta x` where x is positive, else `c (exp(min(x, eps)) - 1 - x) + beta x`, computed in float32.

    `a = softplus(alpha_p)` and `c = beta + softplus(alpha_n)`; `mlp` has the parameters. Huang and Schlag, arXiv 2411.13010.
    """
    wide = x.astype(jnp.float32)
    alpha_p, alpha_n, beta, eps = (
        mlp[name].astype(jnp.float32).reshape(1, 1, 1) for name in ("alpha_p", "alpha_n", "beta", "eps")
    )
    positive = jax.nn.softplus(alpha_p) * wide * wide
    negative = (beta + jax.nn.softplus(alpha_n)) * (jnp.expm1(jnp.minimum(wide, eps)) - wide)
    return (jnp.where(wide > 0, positive, negative) + beta * wide).astype(x.dtype)


def stream_norm(x: Float[Array, "*B D"], part: Params, config: DecoderConfig) -> Float[Array, "*B D"]:
    """The norm of the residual stream before a block or the output head, with the gain `norm` of `part`, and its bias."""
    if config.norm_kind == "layer":
        return plus_bias(layer_norm(x, part["norm"], config), part, "norm")
    return rms_norm(x, part["norm"], config)


def layer_norm(x: Float[Array, "*B n"], gain: Any, config: DecoderConfig) -> Float[Array, "*B n"]:
    """LayerNorm: `(x - mean(x)) / sqrt(var(x) + eps) * (gain + norm_offset)`, computed in float32, in the dtype of `x`."""
    wide = x.astype(jnp.float32)
    return rms_norm(wide - jnp.mean(wide, axis=-1, keepdims=True), gain, config).astype(x.dtype)


def rms_norm(x: Float[Array, "*B n"], gain: Any, config: DecoderConfig, eps: float | None = None) -> Float[Array, "*B n"]:
    """RMSNorm: `x / sqrt(mean(x ** 2) + eps) * (gain + norm_offset)`; without a gain (None) the last factor is 1.

    It is computed in float32, and returned in the dtype of `x`. `eps` is that of the configuration, unless another is given.
    """
    if eps is None:
        eps = config.norm_eps
    wide = x.astype(jnp.float32)
    inverse = lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    if gain is None:
        return (wide * inverse).astype(x.dtype)
    factor = gain.astype(jnp.float32)
    if config.norm_offset:
        factor = factor + config.norm_offset
    return (wide * inverse * factor.reshape((1,) * (x.ndim - 1) + (-1,))).astype(x.dtype)


def linear(x: Float[Array, "B T K"], weight: Any, dtype: DTypeLike | None = None) -> Float[Array, "B T N"]:
    """`x weight^T`, accumulated in float32.

    It multiplies `[B, T, in]` and `[out, in]`; the result is in `dtype`, or that of `x`.
    """
    # Accelerators round float32 operands by default.
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    numbers = (((2,), (1,)), ((), ()))
    y = lax.dot_general(x, weight.astype(x.dtype), numbers, precision=precision, preferred_element_type=jnp.float32)
    return y.astype(x.dtype if dtype is None else dtype)  # [B, T, out]


def plus_bias(y: Float[Array, "B T N"], tree: Params, name: str) -> Float[Array, "B T N"]:
    """`y` plus the bias of a projection, if it has one."""
    bias = tree.get(f"{name}_bias")
    if bias is None:
        return y
    return (y.astype(jnp.float32) + bias.astype(jnp.float32)[None, None, :]).astype(y.dtype)


def scaled(x: Array, factor: float) -> Array:
    """`x` times a constant, computed in float32; `x` itself for 1."""
    if factor == 1:
        return x
    return (x.astype(jnp.float32) * factor).astype(x.dtype)
