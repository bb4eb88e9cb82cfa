"""The FFI call of int8 activations by weights in blocks."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from ....array.qarray import QArray
from ....array.quantize import scale_values
from ....formats.integer import Integer
from ...buffers import INTEGER_LEVELS, flat, scale_buffers, stored_zeros, stream_order
from ..blocks import block_numbers, of_blocks
from ..matrix_view import contracted_axis

TARGET = "fewbit_integer_blocks"


def native_blocks(
    x: QArray,
    q: QArray,
    picked: jax.Array | None = None,
    *,
    contracts_cols: bool = True,
    dtype: DTypeLike,
    isa: str | None = None,
    sizes: jax.Array | None = None,
) -> jax.Array:
    """`blocks.block_product`, with an instruction set (None: the best), in a result's dtype.

    Args:
        x: `[B, M, K]`.
        q: `[B or 1, N, K]` or `[B or 1, K, N]`; with `picked` a stack of any length.
        picked: the index of the one matrix of `q` to multiply with (B of `x` is 1).
        contracts_cols: whether `q` is `[B or 1, N, K]`.
        dtype: that of the result.
        isa: the instruction set to use, if the machine has it; None: the best.
        sizes: rows of `x` (whose B is 1) per matrix of `q`, int32; rows beyond their sum give zeros.
    """
    at = contracted_axis(contracts_cols)
    scheme, depth = q.scheme, q.shape[at]
    order = stream_order(scheme)
    if order.size:
        depth = -(-depth // order.size) * order.size
    tiles = [tile or length for tile, length in zip(q.tiles[1:], q.shape[1:], strict=True)]
    if tiles[at - 1] >= depth:  # one block, of whole vectors
        tiles[at - 1] = -(-depth // 32) * 32
    x_scale, block = scale_values(x), tiles[at - 1]
    if x_scale.shape[2] > 1:
        block = min(block, x.tiles[2] or depth)
        x_scale = of_blocks(x_scale, x.tiles[2] or depth, block, -(-depth // block))
    found = block_numbers(scheme.format)
    assert found is not None
    numbers, step = found
    is_byte = scheme.format.bits == 8
    scale, scale_table = scale_buffers(q)
    role, zero, zero_table = stored_zeros(q)
    result = jax.ShapeDtypeStruct((x.shape[0], x.shape[1], q.shape[3 - at]), dtype)
    return jax.ffi.ffi_call(TARGET, result)(
        x.codes,
        x_scale,
        q.codes,
        scale,
        scale_table,
        zero,
        zero_table,
        flat(q.tensor_scale, jnp.float32),
        jnp.asarray(numbers[:0] if is_byte else numbers, jnp.int8),
        flat(picked, jnp.int32),
        flat(sizes, jnp.int32),
        contracts_cols=contracts_cols,
        depth=np.int64(depth),
        bits=np.int64(scheme.format.bits),
        row_tile=np.int64(tiles[0]),
        col_tile=np.int64(tiles[1]),
        block=np.int64(block),
        role=np.int64(role),
        unit=np.float32(step),
        is_signed=isinstance(scheme.format, Integer) and scheme.format.signed,
        level=np.int64((None, *INTEGER_LEVELS).index(isa) - 1),
        order=order,
    )
