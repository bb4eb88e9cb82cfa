"""Hadamard matrices of any length, and rotations of products' operands by them."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, UInt32

from .._explicit_mesh import with_auto_axes
from ..errors import QuantError

_RADIX = 16
"""The largest power of two that is multiplied at once."""


def hadamard_transform(x: Float[Array, "..."], axis: int = -1) -> Float[Array, "..."]:
    """Multiplies vectors by an orthogonal matrix: `y = H^T x`.

    Where `H` is a Hadamard matrix, its entries have one magnitude (see `hadamard`). An outlier is spread over all elements,
    so that scales of few bits fit the rest. A product of two operands that are transformed along its contraction axis is
    unchanged: transform a weight once, before it is quantized, and its input in the model.

    It takes `n (f + 16 log16(n / f))` multiplications for a vector of length `n` with the factor `f` of `hadamard`.

    Args:
        x: the array; 16-bit floats are transformed in float32.
        axis: the axis of the vectors, of any length.

    Returns:
        The array in the dtype of `x`.

    Raises:
        QuantError: when the axis is empty.

    Reference: Ashkboos et al., QuaRot, arXiv 2404.00456.

    >>> x = jnp.array([[8.0, 0.0, 0.0, 0.0]])
    >>> hadamard_transform(x).tolist()
    [[4.0, 4.0, 4.0, 4.0]]
    >>> w = jnp.arange(12.0).reshape(4, 3)
    >>> bool(jnp.allclose(hadamard_transform(x) @ hadamard_transform(w, axis=0), x @ w))
    True
    """
    last = jnp.moveaxis(x, axis, -1)
    factors = _factors(last.shape[-1])
    wide = x.dtype if jnp.finfo(x.dtype).bits >= 32 else jnp.float32
    y = last.astype(wide).reshape(*last.shape[:-1], *factors)
    for i, factor in enumerate(factors):
        if factor == 1:
            continue
        place = y.ndim - len(factors) + i
        matrix = jnp.asarray(hadamard(factor), wide)
        y = jnp.moveaxis(jnp.tensordot(y, matrix, (place, 0), precision="highest"), -1, place)
    return jnp.moveaxis(y.reshape(last.shape), -1, axis).astype(x.dtype)


@functools.cache
def hadamard(rows: int) -> np.ndarray:
    """An orthogonal float32 matrix of `rows`.

    It is a Hadamard matrix divided by `sqrt(rows)`, where one is constructed here. For powers of two it is Sylvester's,
    symmetric. Other lengths are a product of a power of two and the smallest factor that has a construction of Paley's: 12,
    20, 28, 36, 44, 60 and so on. Where none has, the odd factor takes the Hartley matrix
    `cos(2 pi j k / f) + sin(2 pi j k / f)`, whose entries are at most `sqrt(2)` times their root mean square.

    Args:
        rows: the length, at least 1.

    Reference: Paley, On orthogonal matrices, J. Math. Phys. 12 (1933).
    """
    factor, *others = _factors(rows)
    matrix = _of_factor(factor)
    for other in others:
        matrix = np.kron(matrix, _sylvester(other))
    return (matrix / np.sqrt(rows)).astype(np.float32)


@functools.cache
def _factors(length: int) -> tuple[int, ...]:
    """A length as one factor and powers of two up to 16. The first is the factor that is no power of two, perhaps 1."""
    if length < 1:
        raise QuantError(f"vectors of length {length} cannot be rotated; they need one element or more")
    odd = length // (length & -length)
    factor = odd
    for power in (4, 8) if odd > 1 else ():
        if length % (odd * power) == 0 and _paley(odd * power) is not None:
            factor = odd * power
            break
    rest, powers = length // factor, []
    while rest > 1:
        powers.append(min(rest, _RADIX))
        rest //= powers[-1]
    return (factor, *powers)


def _of_factor(rows: int) -> np.ndarray:
    """The matrix of the factor, with rows of length `sqrt(rows)`."""
    if rows % 2:
        angles = 2 * np.pi * np.outer(np.arange(rows), np.arange(rows)) / rows
        return np.cos(angles) + np.sin(angles)
    matrix = _paley(rows)
    assert matrix is not None
    return matrix


def _sylvester(rows: int) -> np.ndarray:
    """The Hadamard matrix of a power of two."""
    matrix = np.ones((1, 1))
    while len(matrix) < rows:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix


def _paley(rows: int) -> np.ndarray | None:
    """A Hadamard matrix by Paley's construction, or None.

    It has `q + 1` rows for a prime `q = 3 (mod 4)`, or `2 (q + 1)` for a prime `q = 1 (mod 4)`.

    >>> [n for n in range(4, 62, 4) if _paley(n) is not None]
    [4, 8, 12, 20, 24, 28, 32, 36, 44, 48, 60]
    """
    if rows % 4 == 0 and _is_prime(rows - 1):
        return _bordered(rows - 1, -1) + np.eye(rows)
    if rows % 4 == 0 and _is_prime(rows // 2 - 1) and (rows // 2 - 1) % 4 == 1:
        conference = _bordered(rows // 2 - 1, 1)
        signs, diagonal = np.array([[1, 1], [1, -1]]), np.array([[1, -1], [-1, -1]])
        return np.kron(conference, signs) + np.kron(np.eye(rows // 2), diagonal)
    return None


def _bordered(prime: int, side: int) -> np.ndarray:
    """Jacobsthal's matrix of a prime, with a border.

    It is 1 for a difference that is a square, -1 for others. The border is a row of 1 and a column of `side`.
    """
    squares = {k * k % prime for k in range(1, prime)}
    values = np.array([0, *(1 if k in squares else -1 for k in range(1, prime))])
    matrix = np.zeros((prime + 1, prime + 1))
    matrix[0, 1:], matrix[1:, 0] = 1, side
    matrix[1:, 1:] = values[np.subtract.outer(np.arange(prime), np.arange(prime)) % prime]
    return matrix


def _is_prime(n: int) -> bool:
    return n > 1 and all(n % k for k in range(2, math.isqrt(n) + 1))


def rotated(
    a: Float[Array, "..."], b: Float[Array, "..."], a_axis: int, b_axis: int, rows: int, words: UInt32[Array, " w"]
) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
    """Rotates both arrays by random signs and a Hadamard matrix. It rotates blocks of `rows` elements along their axes.

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
    rotate = functools.partial(_rotated, rows=rows)
    along_a, along_b = functools.partial(rotate, axis=a_axis), functools.partial(rotate, axis=b_axis)
    return with_auto_axes(along_a, a, words), with_auto_axes(along_b, b, words)


def _rotated(x: Float[Array, "..."], words: UInt32[Array, " w"], *, rows: int, axis: int) -> Float[Array, "..."]:
    """Blocks of `rows` elements along an axis, multiplied by the random signs and the Hadamard matrix."""
    place = np.arange(rows)
    bits = (words[place // 32] >> (place % 32).astype(np.uint32)) & 1
    signs = 1 - 2 * bits.astype(jnp.float32)
    rotation = signs[:, None] * hadamard(rows)
    length, before, after = x.shape[axis], math.prod(x.shape[:axis]), math.prod(x.shape[axis:][1:])
    runs = x.astype(jnp.float32).reshape(before * length // rows, rows, after)  # [B, rows, N]
    if after == 1:
        product = jnp.matmul(runs[..., 0], rotation, precision=jax.lax.Precision.HIGHEST)
    else:  # a batched product needs no transpose of x
        repeated = jnp.broadcast_to(rotation.T, (len(runs), rows, rows))
        product = jnp.matmul(repeated, runs, precision=jax.lax.Precision.HIGHEST)
    return product.reshape(x.shape)
