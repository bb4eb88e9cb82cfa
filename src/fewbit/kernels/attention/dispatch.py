"""Attention: selects the backend and calls it."""

from collections.abc import Sequence

from jaxtyping import Array, Float

from ..backend import AbstractBackend, select
from ..lowering import computed
from .cpu.backend import Cpu
from .problem import AttentionProblem, Block, Queries
from .reference import Reference

BACKENDS = (Cpu(), Reference())
"""The backends of attention, in the order in which they are asked."""


def attention(
    q: Queries,
    blocks: Sequence[Block],
    *,
    sinks: Float[Array, " H"] | None = None,
    soft_cap: float = 0.0,
    backend: str | AbstractBackend[AttentionProblem] | None = None,
) -> Float[Array, "B H T h"]:
    """Grouped-query attention: `softmax(q k^T / sqrt(h)) v` over the positions of all blocks.

    Products accumulate in float32 and softmax is float32. The reference multiplies the softmax weights by the values'
    scales, relative to the largest of them so that float16 does not overflow, and rounds them to the dtype of `q`; the C++
    kernel rounds only the result. Derivatives are the reference's.

    Queries that are quantized by `QUERIES` multiply int8 keys in integers, with exact sums. The softmax weights, times the
    values' scales, are then rounded to int8 as well, with one scale for each 64 positions (those of a multiple of 64 on), and
    multiply int8 values in integers. Blocks of floats take the dequantized queries. There is no derivative.

    Args:
        q: the queries, `G = H / K` of them for each key head: floats, or `fb.quantize(q, QUERIES)`.
        blocks: the positions to attend to. A token that attends to none of them gets NaN.
        sinks: for each head one more logit of its softmax, whose value is 0 (gpt-oss).
        soft_cap: replaces logits by `soft_cap tanh(logits / soft_cap)` (Gemma 2); 0: none.
        backend: the only backend to use, or its name ("reference", "cpu"). None chooses: the C++ kernel for a layer of a KV
            cache, plain JAX for other keys and values, for whose products a recipe may have rules.

    Returns:
        The attention output, in the dtype of `q`.

    Raises:
        QuantError: when the key heads do not divide the heads, the shapes of the operands do not match, or quantized queries
            have another scheme, or the keys or values are quantized to anything but int8 (from -127 to 127).
        UnsupportedError: when the named backend does not support the operands or the platform.

    >>> k = jnp.ones((1, 1, 2, 4))
    >>> v = jnp.arange(8.0).reshape(1, 1, 2, 4)
    >>> from fewbit.kernels.attention import Block, seen_positions
    >>> attention(jnp.ones((1, 1, 2, 4)), [Block(k, v, seen_positions(0, 2))])[0, 0].tolist()
    [[0.0, 1.0, 2.0, 3.0], [2.0, 3.0, 4.0, 5.0]]
    """
    problem = AttentionProblem.of(q, blocks, sinks, soft_cap)
    choice = select(BACKENDS, problem, backend)
    y: Float[Array, "B H T h"] = computed(
        choice, problem, q, list(blocks), sinks, reference=BACKENDS[-1], is_named=backend is not None
    )
    return y
