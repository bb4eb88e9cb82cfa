"""The FFI call of the int8 CPU GEMM."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from ....array.packing import Packing
from ....array.qarray import QArray
from ....array.quantize import scale_values
from ....formats.format import AbstractFormat
from ....formats.integer import Integer
from ...buffers import INTEGER_LEVELS, flat
from ..code_product import code_values
from ..integer_codes import shift
from ..matrix_view import contracted_axis

TARGET = "fewbit_integers"


def native_integers(
    x: QArray, q: QArray, *, contracts_cols: bool, dtype: DTypeLike, isa: str | None = None, sizes: jax.Array | None = None
) -> jax.Array:
    """`AbstractKernel.paired` for integers, with an instruction set (None: the best); with `sizes`, `grouped_pair`.

    x `[B, M, K]` has one code per byte and blocks along K only; if scales vary along K on both sides, block sizes are equal.
    Sums are exact within a block; blocks are added in float32.
    """
    at = contracted_axis(contracts_cols)
    bits, offset, codes, zeros = _unsigned(q, at)
    result = jax.ShapeDtypeStruct((x.shape[0], x.shape[1], q.shape[3 - at]), dtype)
    return jax.ffi.ffi_call(TARGET, result)(
        x.codes,
        scale_values(x),
        _zeros(x),
        codes,
        scale_values(q),
        zeros,
        flat(sizes, jnp.int32),
        contracts_cols=contracts_cols,
        bits=np.int64(bits),
        offset=np.int64(offset),
        tile=np.int64(x.tiles[2] or q.tiles[at] or q.shape[at]),
        output_tile=np.int64(q.tiles[3 - at] or q.shape[3 - at]),
        level=np.int64((None, *INTEGER_LEVELS).index(isa) - 1),
    )


def _unsigned(q: QArray, at: int) -> tuple[int, int, jax.Array, jax.Array]:
    """Bits, offset to unsigned, codes and zero points as C++ reads them.

    8-bit codes, and 4-bit codes packed along the contraction, are read in place; others are unpacked to bytes first.
    """
    fmt, scheme, tile = q.scheme.format, q.scheme, q.tiles[at]
    assert isinstance(fmt, Integer)
    is_paired = fmt.bits == 4 and scheme.pack_axis + 3 == at and scheme.packing == Packing()
    if fmt.bits == 8 or (is_paired and (tile is None or tile % 2 == 0)):
        return fmt.bits, 2 ** (fmt.bits - 1) if fmt.signed else 0, q.codes, _zeros(q)
    values = code_values(q, jnp.int8)
    return 8, 128, jax.lax.bitcast_convert_type(values, jnp.uint8), _zeros(q) - shift(scheme)


def _zeros(q: QArray) -> jax.Array:
    """The zero points of a stack, int32; empty if it has none."""
    if q.zero_point is None:
        return jnp.zeros((1, 0, 0), jnp.int32)
    assert isinstance(q.scheme.zero_point, AbstractFormat)
    return q.scheme.zero_point.decode(q.zero_point).astype(jnp.int32)
