"""Linear attention by the gated delta rule (Gated DeltaNet) of Qwen3-Next and Qwen3.5.

Queries, keys and values pass a causal convolution and SiLU. A head of values has a state `S [n, m]` in place of a KV cache, which
maps keys to values; queries and keys have length 1, and queries are divided by `sqrt(n)`:

    S_t = exp(g_t) S_{t-1} + k_t (beta_t (v_t - exp(g_t) S_{t-1}^T k_t))^T        o_t = S_t^T q_t
    g_t = -exp(A_log) softplus(alpha_t + dt_bias)                                 beta_t = sigmoid(b_t)

`g_t` decays what the state remembers, and `beta_t` is how far the value of `k_t` is replaced. The output is normed in each head and
gated by `silu(z)`. Letters as in `decoder`; N key heads of width n, M value heads of width m, C channels of the convolution.

Reference: Yang et al., Gated Delta Networks, arXiv 2412.06464, whose section 3.3 has the form by chunks.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from ..config import DecoderConfig, Recurrent
from ..layer import Params, linear, plus_bias
from ..part_configs import LinearAttention

CHUNK = 64
"""Tokens whose products with each other are one matrix; states pass from one chunk to the next."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LinearState:
    """What a layer with linear attention, a state space or a short convolution remembers of the tokens before.

    A frozen pytree; in `lax.scan` with an axis of layers.

    Attributes:
        inputs: the last inputs of the convolution, r one less than its length.
        memory: the states of all heads; of a short convolution none.
    """

    inputs: Float[Array, "*L B r C"]
    memory: Float[Array, "*L B M n m"]


def linear_attention(
    y: Float[Array, "B T D"],
    attn: Params,
    config: DecoderConfig,
    part: LinearAttention,
    state: LinearState | None = None,
    count: Int[Array, ""] | int | None = None,
) -> tuple[Float[Array, "B T w"], LinearState]:
    """Linear attention of normed tokens, before the output projection.

    Args:
        y: the tokens.
        attn: the parameters.
        config: the configuration.
        part: its `linear`.
        state: what is remembered of the tokens before; None: there are none.
        count: how many of the tokens count, before padding; None: all.

    Returns:
        The values of all heads, `w = M m`, and what is remembered of the tokens up to the last that counts.
    """
    if state is None:
        state = empty_state(part, batch=y.shape[0], dtype=y.dtype)
    T = y.shape[1]
    qkv, z, b, alpha = _projections(y, attn, part)
    qkv, inputs = convolved(qkv, attn, state.inputs, T if count is None else count)
    q, k, v = jnp.split(jax.nn.silu(qkv), [part.keys_width, 2 * part.keys_width], axis=-1)
    q, k = (_unit(in_heads(x, part.key_heads)) for x in (q, k))
    if part.layout == "gguf_tiled":
        q, k = (jnp.tile(x, (1, part.value_heads // part.key_heads, 1, 1)) for x in (q, k))
    else:
        q, k = (jnp.repeat(x, part.value_heads // part.key_heads, axis=1) for x in (q, k))
    beta, decay = jax.nn.sigmoid(in_heads(b, part.value_heads)[..., 0]), _decays(alpha, attn, part)
    if count is not None:  # a token of padding neither decays nor changes the state
        counts = (jnp.arange(T, dtype=jnp.int32) < count)[None, None, :]
        beta, decay = jnp.where(counts, beta, 0.0), jnp.where(counts, decay, 0.0)
    values, memory = gated_delta_rule(
        q * part.key_dim**-0.5, k, in_heads(v, part.value_heads), decay=decay, beta=beta, memory=state.memory
    )
    values = _normed(values, attn["out_norm"], config) * jax.nn.silu(in_heads(z, part.value_heads))
    return values.swapaxes(1, 2).reshape(*y.shape[:2], -1).astype(y.dtype), LinearState(inputs, memory)


def empty_state(part: Recurrent, *, batch: int, dtype: jax.typing.DTypeLike) -> LinearState:
    """What is remembered before the first token.

    Args:
        part: the configuration.
        batch: the number of sequences (B).
        dtype: the dtype of the inputs of the convolution. States are float32.
    """
    inputs = jnp.zeros((batch, part.kernel - 1, part.channels), dtype)
    return LinearState(inputs, jnp.zeros((batch, *part.state_shape), jnp.float32))


def gated_delta_rule(
    q: Float[Array, "B M T n"],
    k: Float[Array, "B M T n"],
    v: Float[Array, "B M T m"],
    *,
    decay: Float[Array, "B M T"],
    beta: Float[Array, "B M T"],
    memory: Float[Array, "B M n m"],
) -> tuple[Float[Array, "B M T m"], Float[Array, "B M n m"]]:
    """The outputs of all tokens and the state after them, float32.

    Tokens are taken by chunks. In a chunk, with `G_t` the sum of `g` up to `t`, the values that are written solve a triangular
    system: `w_t = beta_t (v_t - exp(G_t) S^T k_t - sum_{s<t} exp(G_t - G_s) (k_t . k_s) w_s)`, for the state `S` before the chunk.

    Args:
        q: queries, scaled.
        k: keys, of length 1.
        v: values.
        decay: `g`, at most 0.
        beta: how far the value of a key is replaced, from 0 to 1.
        memory: the state before the first token.
    """
    T = q.shape[2]
    memory, out = lax.scan(_next_chunk, memory, in_chunks((q, k, v, decay, beta)))
    return from_chunks(out, T), memory


def in_chunks(arrays: tuple[Array, ...]) -> tuple[Array, ...]:
    """Arrays `[B, M, T, ...]` with the tokens in chunks `[chunks, B, M, size, ...]`, the last one filled up by zeros."""
    T = arrays[0].shape[2]
    return jax.tree.map(partial(_chunked, size=min(CHUNK, 1 << (T - 1).bit_length())), arrays)


def from_chunks(out: Float[Array, "chunks B M C m"], T: int) -> Float[Array, "B M T m"]:
    """The outputs of all tokens, without those that filled up the last chunk."""
    out = jnp.moveaxis(out, 0, 2)
    return out.reshape(*out.shape[:2], -1, out.shape[-1])[:, :, :T]


def _chunked(x: Float[Array, "B M T *n"], size: int) -> Float[Array, "chunks B M size *n"]:
    """The tokens in chunks, the last one filled up by zeros, which leave states alone."""
    T, rest = x.shape[2], x.shape[3:]
    x = jnp.pad(x, ((0, 0), (0, 0), (0, -T % size), *((0, 0) for _ in rest)))
    return jnp.moveaxis(x.reshape(*x.shape[:2], -1, size, *rest), 2, 0)


@jax.named_scope("gated_delta_rule")  # by which rules for products tell them from those of softmax attention
def _next_chunk(memory: Float[Array, "B M n m"], chunk: tuple[Array, ...]) -> tuple[Array, Float[Array, "B M C m"]]:
    """The state after a chunk, and its outputs."""
    q, k, v, decay, beta = chunk
    total, faded = decays_between(decay)
    replaced = k * beta[..., None]
    written = v * beta[..., None] - product(replaced * jnp.exp(total)[..., None], memory)
    written = product(_unit_lower_inverse(product(replaced, k, transposed=True) * faded), written)
    out = product(q * jnp.exp(total)[..., None], memory)
    out = out + product(product(q, k, transposed=True) * faded, written)
    left = jnp.exp(total[..., -1:] - total)[..., None]
    memory = memory * jnp.exp(total[..., -1])[..., None, None] + product((k * left).swapaxes(-1, -2), written)
    return memory, out


def decays_between(decay: Float[Array, "B M C"]) -> tuple[Float[Array, "B M C"], Float[Array, "B M C C"]]:
    """The sum of the decays of a chunk up to each token, and what is left at each token of each one before it, or itself."""
    total = jnp.cumsum(decay, axis=-1)
    since = total[..., :, None] - total[..., None, :]
    is_before = jnp.tril(jnp.ones(since.shape[-2:], bool))[None, None]
    return total, jnp.exp(jnp.where(is_before, since, -jnp.inf))


def _unit_lower_inverse(system: Float[Array, "B M C C"]) -> Float[Array, "B M C C"]:
    """The inverse of a lower triangular matrix whose diagonal is taken for 1; C is a power of two.

    Blocks of 1, 2, 4, ... of the diagonal are inverted: `[[a, 0], [b, c]]` has the inverse `[[a', 0], [-c' b a', c']]`. (The
    triangular solve of jaxlib 0.10 divides a batch over XLA's threads and waits on one of them: two solves at once, one on each of
    two threads, wait forever.)
    """
    B, M, C, _ = system.shape
    inverse = jnp.ones((B, M, C, 1, 1), jnp.float32)
    for size in (1 << i for i in range(C.bit_length() - 1)):
        count = C // (2 * size)
        below = system.reshape(B, M, count, 2, size, count, 2, size)[:, :, :, 1, :, :, 0]
        b = jnp.moveaxis(jnp.diagonal(below, axis1=2, axis2=4), -1, 2)  # [B, M, count, size, size], as a' and c'
        a, c = inverse[:, :, 0::2], inverse[:, :, 1::2]
        top = jnp.concatenate([a, jnp.zeros_like(a)], axis=-1)
        inverse = jnp.concatenate([top, jnp.concatenate([-product(product(c, b), a), c], axis=-1)], axis=-2)
    return inverse[:, :, 0]


def product(a: Float[Array, "*B r s"], b: Float[Array, "*B u v"], transposed: bool = False) -> Float[Array, "*B r t"]:
    """`a b` of each head, or `a b^T`, in float32."""
    last, batch = a.ndim - 1, tuple(range(a.ndim - 2))
    numbers = (((last,), (last if transposed else last - 1,)), (batch, batch))
    return lax.dot_general(a, b, numbers, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


def _projections(y: Array, attn: Params, part: LinearAttention) -> tuple[Array, Array, Array, Array]:
    """The projections qkv `[B, T, C]`, z `[B, T, M m]`, b and alpha `[B, T, M]` of normed tokens."""

    def by_key_head(name: str, *widths: int) -> list[Array]:
        """The parts of a projection that has those of each head of keys in turn."""
        x = linear(y, attn[name]).reshape(*y.shape[:2], part.key_heads, -1)
        ends = [sum(widths[:i]) for i in range(1, len(widths))]
        return [one.reshape(*y.shape[:2], -1) for one in jnp.split(x, ends, axis=-1)]

    shared = part.value_heads // part.key_heads
    if "qkvz" in attn:
        n, m = part.key_dim, shared * part.value_dim
        q, k, v, z = by_key_head("qkvz", n, n, m, m)
        qkv = jnp.concatenate([q, k, v], axis=-1)
    else:
        qkv, z = linear(y, attn["qkv"]), linear(y, attn["z"])
    b, alpha = by_key_head("ba", shared, shared) if "ba" in attn else [linear(y, attn[name]) for name in ("beta", "alpha")]
    return qkv, z, b, alpha


def convolved(
    x: Float[Array, "B T C"], attn: Params, before: Float[Array, "B r C"], count: Array | int
) -> tuple[Float[Array, "B T C"], Float[Array, "B r C"]]:
    """Each channel's causal convolution, float32, and the last inputs of the tokens that count.

    Args:
        x: the tokens.
        attn: parameters with `conv1d [C, *one, K]`, and `conv1d_bias` if it has one.
        before: the tokens before.
        count: how many tokens count.
    """
    T, taps = x.shape[1], attn["conv1d"].astype(jnp.float32).reshape(x.shape[-1], -1)
    x = jnp.concatenate([before.astype(x.dtype), x], axis=1)
    shifted = (x[:, i : i + T].astype(jnp.float32) * taps[None, None, :, i] for i in range(taps.shape[1]))
    last = lax.dynamic_slice_in_dim(x, count, taps.shape[1] - 1, axis=1)
    return plus_bias(sum(shifted, jnp.zeros((), jnp.float32)), attn, "conv1d"), last.astype(before.dtype)


def _decays(alpha: Float[Array, "B T M"], attn: Params, part: LinearAttention) -> Float[Array, "B M T"]:
    """`g`, the logarithm of what is left of a state."""
    dt = jax.nn.softplus(in_heads(alpha, part.value_heads)[..., 0] + attn["dt_bias"].astype(jnp.float32)[None, :, None])
    rate = attn["A"].astype(jnp.float32) if part.is_gguf else -jnp.exp(attn["A_log"].astype(jnp.float32))
    return rate[None, :, None] * dt


def in_heads(x: Float[Array, "B T w"], heads: int) -> Float[Array, "B heads T width"]:
    """The heads of a projection, in float32."""
    return x.reshape(*x.shape[:2], heads, -1).swapaxes(1, 2).astype(jnp.float32)


def _unit(x: Float[Array, "*B n"]) -> Float[Array, "*B n"]:
    """Vectors of length 1; shorter ones than about 1e-3 stay shorter."""
    return x * lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)


def _normed(x: Float[Array, "B M T m"], gain: Array, config: DecoderConfig) -> Float[Array, "B M T m"]:
    """RMSNorm of each head, whose gain has no offset."""
    inverse = lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + config.norm_eps)
    return x * inverse * gain.astype(jnp.float32)[None, None, None, :]
