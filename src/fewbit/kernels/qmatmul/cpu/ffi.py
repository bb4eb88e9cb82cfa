"""The FFI call of the dequantizing CPU GEMM."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from ....array.qarray import QArray
from ...buffers import FLOAT_LEVELS, code_values, flat, scale_buffers, stored_zeros, stream_order
from ..matrix_view import contracted_axis

TARGET = "fewbit_qmatmul"


def native_product(
    x: jax.Array,
    q: QArray,
    picked: jax.Array | None,
    *,
    contracts_cols: bool,
    dtype: DTypeLike,
    isa: str | None = None,
    sizes: jax.Array | None = None,
) -> jax.Array:
    """`y[b] = x[b] @ w[b]` or `x[b] @ w[b].T`, as `AbstractKernel.stacked`; x may be float16.

    Args:
        x: `[B, M, K]`.
        q: `[B, R, C]`.
        picked: the index of the one matrix of `q` to multiply with (B of `x` is 1); None: matrix b with `x[b]`.
        contracts_cols: whether K is C, or R.
        dtype: that of the result.
        isa: the instruction set to use, if the machine has it; None: the best.
        sizes: rows of `x` (whose B is 1) per matrix of `q`, int32; rows beyond their sum give zeros.
    """
    scheme, lengths = q.scheme, list(q.shape[1:])
    order = stream_order(scheme)
    if order.size:
        lengths[scheme.pack_axis + 2] = -(-lengths[scheme.pack_axis + 2] // order.size) * order.size
    kind, values, unit = code_values(scheme)
    scale, scale_table = scale_buffers(q)
    role, zero, zero_table = stored_zeros(q)
    result = jax.ShapeDtypeStruct((x.shape[0], x.shape[1], q.shape[3 - contracted_axis(contracts_cols)]), dtype)
    return jax.ffi.ffi_call(TARGET, result)(
        x,
        q.codes,
        scale,
        scale_table,
        zero,
        zero_table,
        flat(q.tensor_scale, jnp.float32),
        jnp.asarray(values),
        flat(picked, jnp.int32),
        flat(sizes, jnp.int32),
        contracts_cols=contracts_cols,
        packed_cols=scheme.pack_axis == -1,
        rows=np.int64(lengths[0]),
        cols=np.int64(lengths[1]),
        bits=np.int64(scheme.format.bits),
        row_tile=np.int64(q.tiles[1] or lengths[0]),
        col_tile=np.int64(q.tiles[2] or lengths[1]),
        codes=np.int64(kind),
        role=np.int64(role),
        unit=np.float32(unit),
        level=np.int64((None, *FLOAT_LEVELS).index(isa) - 1),
        order=order,
    )
