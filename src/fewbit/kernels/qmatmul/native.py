"""The call of the compiled kernel: what a stack of codes is, told to C++ as arrays and numbers."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...array import QArray
from ...array.packing import codes_per_unit
from ...array.quantize import dequantize, scale_values
from ...array.scheme import Scheme
from ...formats import AbstractFormat, Integer

TARGET = "fewbit_qmatmul"

_TABLE, _SIGNED, _UNSIGNED, _E4M3, _E5M2 = range(5)
_NO_ZERO, _WHOLE, _OFFSET = range(3)
LEVELS = ("portable", "avx2", "avx512")


def native_product(
    x: jax.Array,
    q: QArray,
    picked: jax.Array | None,
    *,
    contracts_cols: bool,
    dtype: Any,
    isa: str | None = None,
    sizes: jax.Array | None = None,
) -> jax.Array:
    """`y[b] = x[b] @ w[b]` or `x[b] @ w[b].T`, for the matrices `w` that a stack of codes stands for.

    Args:
        x: `[B, M, K]`, float32, bfloat16 or float16.
        q: `[B, R, C]`.
        picked: the matrix of `q` that `x`, whose B is 1, is multiplied with; None: each meets its own.
        contracts_cols: whether K is C, or R.
        dtype: that of the result.
        isa: the instruction set to take, where the machine has it; None: the best.
        sizes: how many rows of `x`, whose B is 1, meet each matrix of `q`, int32; those beyond their sum give zeros.

    Returns:
        `[B, M, N]`, N being the other one of R and C. Sums are made in float32.
    """
    scheme, (_, rows, cols) = q.scheme, q.shape
    order = _stream_order(scheme)
    lengths = [rows, cols]
    if order.size:
        lengths[scheme.pack_axis + 2] = -(-lengths[scheme.pack_axis + 2] // order.size) * order.size
    kind, values, unit = code_values(scheme)
    scale, scale_table = held_scales(q)
    role, zero, zero_table = _held_zeros(q)
    tensor = jnp.zeros(0, jnp.float32) if q.tensor_scale is None else q.tensor_scale.reshape(-1)
    result = jax.ShapeDtypeStruct((x.shape[0], x.shape[1], rows if contracts_cols else cols), dtype)
    return jax.ffi.ffi_call(TARGET, result)(
        x,
        q.codes,
        scale,
        scale_table,
        zero,
        zero_table,
        tensor,
        jnp.asarray(values),
        jnp.zeros(0, jnp.int32) if picked is None else picked.reshape(1),
        jnp.zeros(0, jnp.int32) if sizes is None else sizes,
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
        level=np.int64(-1 if isa is None else LEVELS.index(isa)),
        order=order,
    )


def _stream_order(scheme: Scheme) -> np.ndarray:
    """The code at each place of a group of the bits in memory; empty where codes lie in order."""
    packing, bits = scheme.packing, scheme.format.bits
    if not packing.interleave and not packing.high_first:
        return np.zeros(0, np.int32)
    unit = codes_per_unit(bits, packing)
    group = packing.interleave or (0,)
    places = np.arange(unit)
    if packing.high_first:
        places = places.reshape(-1, 8 // bits)[:, ::-1].reshape(-1)
    return (places // len(group) * len(group) + np.asarray(group)[places % len(group)]).astype(np.int32)


def code_values(scheme: Scheme) -> tuple[int, np.ndarray, float]:
    """How codes become numbers: the kind, the table, and the number that all are multiplied by."""
    fmt = scheme.format
    if isinstance(fmt, Integer) and fmt.bits >= 4 and (fmt.step == 1 or scheme.zero_point is None):
        return (_SIGNED if fmt.signed else _UNSIGNED), _table(fmt) / np.float32(fmt.step), fmt.step
    if fmt.name in ("e4m3fn", "e5m2") and scheme.zero_point is None:
        kind, factor = (_E4M3, 2.0**8) if fmt.name == "e4m3fn" else (_E5M2, 1.0)
        return kind, _table(fmt) / np.float32(factor), factor
    return _TABLE, _table(fmt), 1.0


def _table(fmt: AbstractFormat) -> np.ndarray:
    """The numbers of a format by code, 256 of them: those of narrower codes repeat."""
    values = fmt.values().astype(np.float32)
    full = np.concatenate([values, np.repeat(values[-1:], 2**fmt.bits - len(values))])
    return np.tile(full, 256 // len(full))


def held_scales(q: QArray) -> tuple[jax.Array, jax.Array]:
    """The scales as they are stored, and the table of their numbers if they are stored as codes."""
    holder = q.scheme.scale
    if isinstance(holder, AbstractFormat):
        return q.scale, jnp.asarray(_table(holder))
    if not isinstance(holder, Scheme):
        return q.scale, _nothing()
    if holder.format.bits == 8 and q.scale.scale.size == 1 and q.scale.tensor_scale is None:
        codes = jnp.arange(256, dtype=jnp.uint8).reshape(1, 1, 256)
        every = QArray(codes, q.scale.scale, q.scale.zero_point, None, holder.with_tiles((None,) * 3, -1), q.scale.dtype)
        return q.scale.codes, dequantize(every, jnp.float32).reshape(256)
    return scale_values(q), _nothing()


def _held_zeros(q: QArray) -> tuple[int, jax.Array, jax.Array]:
    """What zero points are, their stored form, and the table of their numbers if they are stored as codes."""
    if q.zero_point is None:
        return _NO_ZERO, jnp.zeros((1, 1, 1), jnp.float32), _nothing()
    # One zero point may serve all tiles of an axis; the kernel reads one where it reads a scale.
    zero = jnp.broadcast_to(q.zero_point, (q.zero_point.shape[0], *q.scale.shape[1:]))
    if isinstance(q.scheme.zero_point, AbstractFormat):
        return _WHOLE, zero, jnp.asarray(_table(q.scheme.zero_point))
    return _OFFSET, zero, _nothing()


def _nothing() -> jax.Array:
    return jnp.zeros(0, jnp.float32)
