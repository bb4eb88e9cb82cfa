"""`einsum` on operands that may be quantized."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from ..array import QArray
from ..errors import QuantError
from .transparent import transparent


def einsum(
    subscripts: str,
    *operands: ArrayLike | QArray,
    precision: Any = None,
    preferred_element_type: DTypeLike | None = None,
) -> jax.Array:
    """`jnp.einsum` for any number of operands, any of which may be a QArray.

    Each pair of operands is contracted by `fb.dot_general`, in the order that `jnp.einsum` chooses; quantized operands keep
    their codes through its transposes. An operand whose indices are summed or repeated on their own is decoded first.

    Args:
        subscripts: as in `jnp.einsum`, such as `"bld,fd->blf"`.
        operands: arrays or QArrays.
        precision: as in `jnp.einsum`.
        preferred_element_type: as in `jnp.einsum`.

    Returns:
        The contraction.

    >>> from fewbit.array import quantize
    >>> einsum("bi,oi->bo", jnp.ones((2, 4)), quantize(jnp.eye(4), "int8")).shape
    (2, 4)
    """
    if not isinstance(subscripts, str):
        raise QuantError(f"subscripts is {type(subscripts).__name__}; pass a string such as 'bi,oi->bo'")

    def contract(*arrays: Any) -> jax.Array:
        return jnp.einsum(subscripts, *arrays, precision=precision, preferred_element_type=preferred_element_type)

    return transparent(contract, fallback="dequantize")(*operands)
