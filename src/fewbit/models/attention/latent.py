"""Multi-head latent attention (MLA) of DeepSeek.

A token has a latent `c` that keys and values share, and a rotary key `r` that all heads share. Head `i` has the query `[q, s]`,
the key `[A_i c, r]` and the value `B_i c`, with `kv_b = [A_1; B_1; A_2; B_2; ...]`. A KV cache has `[c, r]` of each token, one
head for all, since

    q . A_i c + s . r = [A_i^T q, s] . [c, r]        weights . (B_i c) = B_i (weights . c)

so that `absorbed` attention multiplies queries by `A_i^T` and the mixed latents by `B_i`, and never the cache. GGUF files have
the stacks `k_b` of `A_i^T` and `v_b` of `B_i`, with the axis that these products contract last; so attention is always absorbed
for them. Dimension letters as in `decoder`; R is the width of `[c, r]`.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from ..config import DecoderConfig
from ..layer import Params, linear, plus_bias, rms_norm, scaled
from ..part_configs import LatentAttention
from .rope import Rotation, apply_rotary


def expanded_heads(
    y: Float[Array, "B T D"], attn: Params, rotation: Rotation, config: DecoderConfig, latent: LatentAttention
) -> tuple[Float[Array, "B H T h"], Float[Array, "B H T h"], Float[Array, "B H T h"]]:
    """The queries, keys and values of every head. Values are padded by zeros to the width of keys."""
    plain = config.head_dim - config.rotary_dim
    q = jnp.concatenate(_queries(y, attn, rotation, config, latent), axis=-1)
    c, r = _latent_and_rotary_key(y, attn, rotation, config, latent)
    k, v = jnp.split(_heads(linear(c, attn["kv_b"]), config), [plain], axis=-1)
    k = jnp.concatenate([k, jnp.broadcast_to(r[:, None], (*k.shape[:-1], config.rotary_dim))], axis=-1)
    if config.attention_scale:
        q = scaled(q, config.attention_scale * config.head_dim**0.5)
    return q, k, jnp.pad(v, ((0, 0), (0, 0), (0, 0), (0, config.head_dim - latent.value_dim)))


def absorbed_heads(
    y: Float[Array, "B T D"], attn: Params, rotation: Rotation, config: DecoderConfig, latent: LatentAttention
) -> tuple[Float[Array, "B H T R"], Float[Array, "B 1 T R"]]:
    """The queries of every head, and what is cached of new tokens.

    The queries are for cached tokens. What is cached also serves as values. Attention divides by `sqrt(R)`; queries are
    multiplied by what the scale differs from that.
    """
    q, s = _queries(y, attn, rotation, config, latent)
    if latent.split:
        q = _per_head(q, attn["k_b"].astype(y.dtype), over=2)
    else:
        q = _per_head(q, _by_head(attn, y.dtype, config, latent)[:, : q.shape[-1]], over=1)
    queries = jnp.concatenate([q, s], axis=-1)
    cached = jnp.concatenate(_latent_and_rotary_key(y, attn, rotation, config, latent), axis=-1)[:, None]
    scale = config.attention_scale or config.head_dim**-0.5
    return scaled(queries, scale * cached.shape[-1] ** 0.5), cached


def absorbed_values(
    mixed: Float[Array, "B H T R"], attn: Params, config: DecoderConfig, latent: LatentAttention
) -> Float[Array, "B H T v"]:
    """The values of every head from the mixed latents."""
    if latent.split:
        by_head = attn["v_b"].astype(mixed.dtype)
    else:
        by_head = _by_head(attn, mixed.dtype, config, latent)[:, -latent.value_dim :]  # [H, v, rank]
    return _per_head(mixed[..., : latent.rank], by_head, over=2)


def _queries(
    y: Array, attn: Params, rotation: Rotation, config: DecoderConfig, latent: LatentAttention
) -> tuple[Float[Array, "B H T n"], Float[Array, "B H T p"]]:
    """The queries of every head: their plain coordinates, and the rotary ones."""
    if latent.query_rank:
        low = plus_bias(linear(y, attn["q_a"]), attn, "q_a")
        flat = linear(rms_norm(low, attn["q_a_norm"], config, latent.norm_eps), attn["q_b"])
    else:
        flat = linear(y, attn["q"])
    q, s = jnp.split(_heads(flat, config), [config.head_dim - config.rotary_dim], axis=-1)
    return q, apply_rotary(s, rotation.cos, rotation.sin, config.rope)


def _latent_and_rotary_key(
    y: Array, attn: Params, rotation: Rotation, config: DecoderConfig, latent: LatentAttention
) -> tuple[Float[Array, "B T rank"], Float[Array, "B T p"]]:
    """`c`, after its norm, and `r`."""
    c, r = jnp.split(plus_bias(linear(y, attn["kv_a"]), attn, "kv_a"), [latent.rank], axis=-1)
    return rms_norm(c, attn["kv_a_norm"], config, latent.norm_eps), apply_rotary(
        r[:, None], rotation.cos, rotation.sin, config.rope
    )[:, 0]


def _heads(flat: Float[Array, "B T N"], config: DecoderConfig) -> Float[Array, "B H T n"]:
    """The heads of a projection."""
    B, T, _ = flat.shape
    return flat.reshape(B, T, config.heads, -1).swapaxes(1, 2)


def _by_head(attn: Params, dtype: Any, config: DecoderConfig, latent: LatentAttention) -> Float[Array, "H m rank"]:
    """`[A_i; B_i]` of each head."""
    return attn["kv_b"].astype(dtype).reshape(config.heads, -1, latent.rank)


def _per_head(x: Float[Array, "B H T a"], by_head: Float[Array, "H m n"], over: int) -> Float[Array, "B H T b"]:
    """The product with each head's matrix, in the dtype of `x`.

    It contracts axis `over` of the matrix, and accumulates in float32.
    """
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    numbers = (((3,), (over,)), ((1,), (0,)))
    product = lax.dot_general(x, by_head, numbers, precision=precision, preferred_element_type=jnp.float32)  # [H, B, T, b]
    return product.swapaxes(0, 1).astype(x.dtype)
