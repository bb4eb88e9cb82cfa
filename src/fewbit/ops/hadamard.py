"""Random Hadamard rotations of two operands along their contraction axis."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, UInt32


def hadamard(rows: int) -> np.ndarray:
    """The orthogonal float32 Hadamard matrix of `rows` (a power of two); Sylvester's construction, divided by sqrt(rows)."""
    matrix = np.ones((1, 1), np.float32)
    while len(matrix) < rows:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix / np.float32(np.sqrt(rows))


def rotated(
    a: Float[Array, "..."], b: Float[Array, "..."], a_axis: int, b_axis: int, rows: int, words: UInt32[Array, " w"]
) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
    """Rotates both arrays in blocks of `rows` elements along their axes.

    Each block is multiplied by the same random signs and a Hadamard matrix. This spreads outliers over the block, so that
    low-bit codes lose less; a product that contracts the two axes is unchanged.

    Args:
        a: an array.
        b: another, of the same length along its axis.
        a_axis: the axis of `a`.
        b_axis: the axis of `b`.
        rows: the block length, a power of two that divides the axes.
        words: random words, whose bits are the signs: `rows / 32` or more.

    Returns:
        Both, in float32.

    Reference: Tseng et al., QuIP#, arXiv 2402.04396; NVIDIA, arXiv 2509.25149 (NVFP4 training), which takes 16 rows.
    """
    length = a.shape[a_axis]
    place = np.arange(rows)
    bits = (words[place // 32] >> (place % 32).astype(np.uint32)) & 1
    signs = 1 - 2 * bits.astype(jnp.float32)
    rotation = signs[:, None] * hadamard(rows)

    def rotate(x: jax.Array, axis: int) -> jax.Array:
        last = jnp.moveaxis(x.astype(jnp.float32), axis, -1)
        runs = last.reshape(*last.shape[:-1], length // rows, rows)  # [..., K/rows, rows]
        product = jnp.matmul(runs, rotation, precision=jax.lax.Precision.HIGHEST)
        return jnp.moveaxis(product.reshape(last.shape), -1, axis)

    return rotate(a, a_axis), rotate(b, b_axis)
