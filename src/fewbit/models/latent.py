"""Multi-head latent attention (MLA) of DeepSeek.

A token has a latent `c` that keys and values share, and a rotary key `r` that all heads share. Head `i` has the query
`[q_i, rotated]`, the key `[A_i c, r]` and the value `B_i c`, with `kv_b = [A_1; B_1; A_2; B_2; ...]`.

Dimension letters as in `decoder`.
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from .config import DecoderConfig, LatentAttention
from .layer import Params, linear, plus_bias, rms_norm, scaled
from .rope import apply_rotary


def latent_queries_keys_values(
    y: Float[Array, "B T D"], attn: Params, rotations: tuple[Any, Any], config: DecoderConfig, latent: LatentAttention
) -> tuple[Float[Array, "B H T h"], Float[Array, "B H T h"], Float[Array, "B H T h"]]:
    """The heads of normed tokens: as `queries_keys_values`, with values padded by zeros to the width of keys."""
    plain = config.head_dim - config.rotary_dim
    q = _heads(_queries(y, attn, config, latent), config)
    q = jnp.concatenate([q[..., :plain], apply_rotary(q[..., plain:], *rotations, config.rope)], axis=-1)
    if config.attention_scale:
        q = scaled(q, config.attention_scale * config.head_dim**0.5)
    both = plus_bias(linear(y, attn["kv_a"]), attn, "kv_a")
    shared = apply_rotary(both[:, None, :, latent.rank :], *rotations, config.rope)  # [B, 1, T, rotary_dim]
    keys_values = linear(rms_norm(both[..., : latent.rank], attn["kv_a_norm"], config, latent.norm_eps), attn["kv_b"])
    k, v = jnp.split(_heads(keys_values, config), [plain], axis=-1)
    k = jnp.concatenate([k, jnp.broadcast_to(shared, (*k.shape[:-1], config.rotary_dim))], axis=-1)
    return q, k, jnp.pad(v, ((0, 0), (0, 0), (0, 0), (0, config.head_dim - latent.value_dim)))


def _queries(y: Array, attn: Params, config: DecoderConfig, latent: LatentAttention) -> Float[Array, "B T N"]:
    """The queries of all heads, through their latent if they have one."""
    if not latent.query_rank:
        return linear(y, attn["q"])
    low = plus_bias(linear(y, attn["q_a"]), attn, "q_a")
    return linear(rms_norm(low, attn["q_a_norm"], config, latent.norm_eps), attn["q_b"])


def _heads(flat: Float[Array, "B T N"], config: DecoderConfig) -> Float[Array, "B H T n"]:
    """The heads of a projection."""
    B, T, _ = flat.shape
    return flat.reshape(B, T, config.heads, -1).swapaxes(1, 2)
