"""Attention by the fastest backend that can, or by the one that is named."""

from collections.abc import Sequence

from jaxtyping import Array, Float

from ..insist import insisted
from ..select import select
from .problem import AttentionProblem, Block
from .reference import BACKENDS


def attention(q: Float[Array, "B H T h"], blocks: Sequence[Block], *, backend: str | None = None) -> Float[Array, "B H T h"]:
    """`softmax(q k^T / sqrt(h)) v` over the positions of all blocks together; heads in groups share a key head.

    Products accumulate in float32 and softmax is float32. The reference rounds the softmax weights to the dtype of `q` before
    they meet the values, with the values' scales already in them, relative to the largest of these, so that float16 holds
    them; the kernel on CPUs rounds the result alone. Derivatives are the reference's.

    Args:
        q: the queries, `G = H / K` of them for each key head.
        blocks: the positions to attend to. A token that sees none of them gets NaN.
        backend: the name of a backend to insist on ("reference", "cpu"); it is never replaced. None chooses: the kernel for a
            layer of a cache, plain JAX for keys and values at hand, whose products recipes may have rules for.

    Returns:
        The mixed values, in the dtype of `q`.

    Raises:
        QuantError: when the key heads do not divide the heads, or the shapes of queries, keys, values and `seen` do not go
            together.
        UnsupportedError: when the named backend cannot, or not on the platform that the program is compiled for.

    >>> k = jnp.ones((1, 1, 2, 4))
    >>> v = jnp.arange(8.0).reshape(1, 1, 2, 4)
    >>> from fewbit.kernels.attention import Block, seen_positions
    >>> attention(jnp.ones((1, 1, 2, 4)), [Block(k, v, seen_positions(0, 2))])[0, 0].tolist()
    [[0.0, 1.0, 2.0, 3.0], [2.0, 3.0, 4.0, 5.0]]
    """
    problem = AttentionProblem.of(q, blocks)
    chosen = select(BACKENDS, problem, backend).backend
    return chosen.run(problem, q if backend is None else insisted(q, chosen, BACKENDS.kind), blocks)
