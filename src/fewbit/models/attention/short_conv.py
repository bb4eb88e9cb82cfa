"""Gated short convolutions of LFM2.

One projection of a token gives `b`, `c` and `x`; the output is `c * conv(b * x)`, with a causal convolution of each channel over the last
few tokens. Letters as in `decoder`; C channels, as many as the residual stream has.

Reference: Liquid AI, LFM2 Technical Report, arXiv 2511.23404, section 2.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ..layer import Params, linear, plus_bias
from ..part_configs import ShortConvolution
from .linear import LinearState, convolved, empty_state


def short_convolution(
    y: Float[Array, "B T D"],
    attn: Params,
    part: ShortConvolution,
    state: LinearState | None = None,
    count: Int[Array, ""] | int | None = None,
) -> tuple[Float[Array, "B T D"], LinearState]:
    """A gated short convolution of normed tokens, before the output projection.

    Arguments and results are those of `linear_attention`; `part` is the `short_conv` of the configuration. Of the state only `inputs` has
    elements.
    """
    if state is None:
        state = empty_state(part, batch=y.shape[0], dtype=y.dtype)
    b, c, x = jnp.split(plus_bias(linear(y, attn["in"]), attn, "in"), 3, axis=-1)
    mixed, inputs = convolved(b * x, attn, state.inputs, y.shape[1] if count is None else count)
    return (c.astype(jnp.float32) * mixed).astype(y.dtype), LinearState(inputs, state.memory)
