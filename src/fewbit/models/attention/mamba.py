"""State space layers of Mamba-2: linear attention with decay (Granite 4).

`x`, `b` and `c` pass a causal convolution and SiLU. A head has a state `S [n, m]`, which `b` writes to and `c` reads:

    S_t = exp(dt_t A) S_{t-1} + dt_t b_t x_t^T        o_t = S_t^T c_t + D x_t
    A = -exp(A_log)                                   dt_t = softplus(dt_t + dt_bias)

The heads of a group share `b` and `c`. The output is gated by `silu(z)`, and then normed over each group. Letters as in `decoder`; M heads
of width m in N groups, states of width n, C channels of the convolution.

Reference: Dao and Gu, Transformers are SSMs, arXiv 2405.21060, whose section 6 has the form by chunks.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from ..config import DecoderConfig
from ..layer import Params, linear, plus_bias
from ..part_configs import Mamba2
from .linear import LinearState, convolved, decays_between, empty_state, from_chunks, in_chunks, in_heads, product


def state_space_layer(
    y: Float[Array, "B T D"],
    attn: Params,
    config: DecoderConfig,
    part: Mamba2,
    state: LinearState | None = None,
    count: Int[Array, ""] | int | None = None,
) -> tuple[Float[Array, "B T w"], LinearState]:
    """A state space layer for normed tokens, before the output projection.

    Arguments and results are those of `linear_attention`; `part` is the `mamba` of the configuration.
    """
    if state is None:
        state = empty_state(part, batch=y.shape[0], dtype=y.dtype)
    T, shared = y.shape[1], part.groups * part.state_dim
    projected = plus_bias(linear(y, attn["in"]), attn, "in")
    z, xbc, dt = jnp.split(projected, [part.width, part.width + part.channels], axis=-1)
    xbc, inputs = convolved(xbc, attn, state.inputs, T if count is None else count)
    x, b, c = jnp.split(jax.nn.silu(xbc), [part.width, part.width + shared], axis=-1)
    x, b, c = in_heads(x, part.heads), in_heads(b, part.groups), in_heads(c, part.groups)
    step = jax.nn.softplus(in_heads(dt, part.heads)[..., 0] + _of_heads(attn, "dt_bias"))
    if count is not None:  # a token of padding neither decays nor changes the state
        step = jnp.where((jnp.arange(T, dtype=jnp.int32) < count)[None, None, :], step, 0.0)
    rate = _of_heads(attn, "A") if part.is_gguf else -jnp.exp(_of_heads(attn, "A_log"))
    values, memory = state_space(c, b, x * step[..., None], decay=rate * step, memory=state.memory)
    values = values + _of_heads(attn, "D")[..., None] * x
    flat = values.swapaxes(1, 2).reshape(*y.shape[:2], -1) * jax.nn.silu(z.astype(jnp.float32))
    return _normed(flat, attn["out_norm"], config, part.groups).astype(y.dtype), LinearState(inputs, memory)


def state_space(
    c: Float[Array, "B N T n"],
    b: Float[Array, "B N T n"],
    x: Float[Array, "B M T m"],
    *,
    decay: Float[Array, "B M T"],
    memory: Float[Array, "B M n m"],
) -> tuple[Float[Array, "B M T m"], Float[Array, "B M n m"]]:
    """The outputs of all tokens without `D x`, and the state after them, float32.

    Tokens are taken by chunks, whose products with each other are one matrix for each group.

    Args:
        c: what reads the states.
        b: what writes to them.
        x: what is written, times `dt`.
        decay: `dt A`, at most 0.
        memory: the state before the first token.
    """
    memory, out = lax.scan(_next_chunk, memory, in_chunks((c, b, x, decay)))
    return from_chunks(out, x.shape[2]), memory


@jax.named_scope("state_space")  # by which rules for products tell them from those of softmax attention
def _next_chunk(memory: Float[Array, "B M n m"], chunk: tuple[Array, ...]) -> tuple[Array, Float[Array, "B M C m"]]:
    """The state after a chunk, and its outputs."""
    c, b, x, decay = chunk
    M, N = x.shape[1], c.shape[1]
    total, faded = decays_between(decay)
    scores = jnp.repeat(product(c, b, transposed=True), M // N, axis=1) * faded
    read = _by_head(product(c, _by_group(memory, N)), M)
    out = product(scores, x) + read * jnp.exp(total)[..., None]
    left = x * jnp.exp(total[..., -1:] - total)[..., None]
    written = _by_head(product(b.swapaxes(-1, -2), _by_group(left, N)), M)
    return memory * jnp.exp(total[..., -1])[..., None, None] + written, out


def _by_group(x: Float[Array, "B M r m"], groups: int) -> Float[Array, "B N r w"]:
    """The heads of a group side by side, `w = m M / N`."""
    B, M, r, m = x.shape
    return x.reshape(B, groups, M // groups, r, m).swapaxes(2, 3).reshape(B, groups, r, -1)


def _by_head(x: Float[Array, "B N r w"], heads: int) -> Float[Array, "B M r m"]:
    """The inverse of `_by_group`."""
    B, N, r, _ = x.shape
    return x.reshape(B, N, r, heads // N, -1).swapaxes(2, 3).reshape(B, heads, r, -1)


def _of_heads(attn: Params, name: str) -> Float[Array, "1 M 1"]:
    """A parameter of each head."""
    return attn[name].astype(jnp.float32).reshape(1, -1, 1)


def _normed(x: Float[Array, "B T w"], gain: Array, config: DecoderConfig, groups: int) -> Float[Array, "B T w"]:
    """RMSNorm over each group, whose gain has no offset."""
    by_group = x.reshape(*x.shape[:2], groups, -1)
    inverse = lax.rsqrt(jnp.mean(by_group * by_group, axis=-1, keepdims=True) + config.norm_eps)
    return (by_group * inverse).reshape(x.shape) * gain.astype(jnp.float32).reshape(1, 1, -1)
