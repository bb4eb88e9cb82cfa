"""One grid step of the TPU kernels, and the layout of their arrays.

The grid's last axis runs over the contraction; its steps accumulate into one block of sums.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import ManualAxisType

from ....array.qarray import QArray, is_qarray
from ....array.quantize import dequantize
from ....array.scheme import Scheme
from ...pallas.decode import code_values, stored_values
from .blocks import LANES, Block, Config, Cut
from .problem import Form


def summed(
    cut: Cut,
    config: Config,
    names: tuple[str, ...],
    x: jax.Ref,
    codes: jax.Ref,
    scales: Sequence[jax.Ref],
    scratch: tuple[jax.Ref, ...],
    finish: Callable[[jax.Array], None],
) -> None:
    """Accumulates one step: each plane of a block of bytes, multiplied with its activations.

    Args:
        cut: the product.
        config: which values are approximated.
        names: of `scales`.
        x: the activations' block, `[planes, M, C]`.
        codes: the bytes.
        scales: scales, zero points and tensor scale.
        scratch: the sums, float32 of the shape of the result's block; then `Cut.stream` for codes that straddle bytes.
        finish: called with the scaled sums in the last step.
    """
    form, step = cut.form, pl.program_id(2)
    total, *stream = scratch

    @pl.when(step == 0)
    def _() -> None:
        total[...] = jnp.zeros(total.shape, total.dtype)

    packed = codes[...].T if form.is_transposed else codes[...]
    decoded = {name: stored_values(ref[...], _stored_as(form.scheme, name)) for name, ref in zip(names, scales, strict=True)}
    group = [packed]
    if stream:
        group = _group(cut, packed, stream)
    for plane in range(form.planes):
        values, own = _plane(form, group, plane, nf4_polynomial=config.nf4_polynomial)
        values = _within(cut, _scaled(cut, values, own, decoded), step).astype(form.dtype)
        at_x, at_total, axis = (plane, 0, 0) if form.contracts_rows else (0, plane, 1)
        total[at_total] += jax.lax.dot_general(
            x[at_x], values, (((1,), (axis,)), ((), ())), precision=form.precision, preferred_element_type=jnp.float32
        )

    @pl.when(step == cut.grid[2] - 1)
    def _() -> None:
        sums = total[...]
        if form.scales_sums:
            sums = sums * _scale(decoded)[None]
        finish(sums)


def _group(cut: Cut, packed: jax.Array, stream: list[jax.Ref]) -> list[jax.Array]:
    """The first byte of every row, the second, and so on, one per 32-bit word."""
    for place, ref in enumerate(stream):
        part = packed[:, place * LANES : (place + 1) * LANES]
        ref[: part.shape[0], : part.shape[1]] = part.astype(jnp.int32)
    span = cut.form.span
    each = [[ref[pl.ds(byte, cut.rows, stride=span), :] for ref in stream] for byte in range(span)]
    return [jnp.concatenate(parts, axis=1)[:, : cut.columns] for parts in each]


def _plane(form: Form, group: list[jax.Array], plane: int, *, nf4_polynomial: bool) -> tuple[jax.Array, float]:
    """One decoded code of each row, and the unit of the values."""
    fmt = form.scheme.format
    if form.is_split:
        return nibbles(group[0], is_signed=fmt.min < 0).astype(jnp.float32), getattr(fmt, "step", 1.0)
    if len(group) == 1 and form.scheme.packing.high_first:
        plane = form.planes - 1 - plane
    return code_values(fmt, group, plane, nf4_polynomial=nf4_polynomial)


def nibbles(packed: jax.Array, *, is_signed: bool) -> jax.Array:
    """Both 4-bit integers of each byte, `[2 rows, columns]` int4; unsigned ones minus 8."""
    if not is_signed:
        packed = packed ^ jnp.uint8(0x88)
    return pltpu.bitcast(packed, jnp.int4)


def _stored_as(scheme: Scheme, name: str) -> Any:
    """The format or dtype that stores the scales, the zero points or the tensor scale."""
    if name == "zero_point":
        return scheme.zero_holder
    if name == "tensor_scale" or isinstance(scheme.scale, Scheme):
        return np.dtype(np.float32)
    return scheme.scale


def _scale(scales: dict[str, jax.Array]) -> jax.Array:
    """The scales of a block, multiplied by the tensor scale."""
    if "tensor_scale" in scales:
        return scales["scale"] * scales["tensor_scale"]
    return scales["scale"]


def _scaled(cut: Cut, values: jax.Array, own: float, scales: dict[str, jax.Array]) -> jax.Array:
    """Applies zero point and scale to a plane's values, in units of `own`."""
    form, offset = cut.form, 0.0
    if form.is_split and form.scheme.format.min == 0:
        offset = 8.0  # `nibbles` subtracted it
    if "zero_point" in scales and not form.has_offsets:
        values = values - _spread(cut, scales["zero_point"] / jnp.float32(own) - offset)
    elif offset:
        values = values + offset
    if not form.scales_sums:
        values = values * _spread(cut, _scale(scales) * jnp.float32(own))
    elif own != 1:
        values = values * jnp.float32(own)
    if form.has_offsets:
        values = values + _spread(cut, scales["zero_point"])
    return values


def _spread(cut: Cut, scales: jax.Array) -> jax.Array:
    """Repeats one scale per tile to one per row; a single one stays."""
    if cut.form.tile in (1, None) or scales.shape[0] == 1 == cut.form.tiles:
        return scales
    return jnp.repeat(scales, cut.form.tile, axis=0)[: cut.rows]


def _within(cut: Cut, values: jax.Array, step: jax.Array) -> jax.Array:
    """The values, zero past the end of the contraction, where memory may be NaN."""
    if not cut.is_ragged:
        return values
    axis = int(not cut.form.contracts_rows)
    place = jax.lax.broadcasted_iota(jnp.int32, values.shape, axis) + step * cut.contracted_block
    return jnp.where(place < cut.contracted, values, 0.0)


def scale_arrays(form: Form, q: QArray) -> dict[str, jax.Array]:
    """Scales, zero points and tensor scale as the kernel reads them."""
    scale = q.scale
    if is_qarray(scale):
        scale = dequantize(scale, jnp.float32)
    arrays = {"scale": _laid(form, scale)}
    if q.zero_point is not None:
        arrays["zero_point"] = _laid(form, q.zero_point)
    if q.tensor_scale is not None:
        arrays["tensor_scale"] = q.tensor_scale
    return arrays


def _laid(form: Form, array: jax.Array) -> jax.Array:
    """`[B, tiles, columns or 1]`; float16, which TPUs do not support, as its bits."""
    if form.is_transposed:
        array = array.swapaxes(-1, -2)
    if array.shape[-1] > 1 and form.column_tile not in (1, None):
        array = jnp.repeat(array, form.column_tile, axis=-1)[..., : form.columns]
    array = jnp.broadcast_to(array, (array.shape[0], form.tiles, form.scale_columns))
    if array.dtype == jnp.float16:
        return jax.lax.bitcast_convert_type(array, jnp.uint16)
    return array


def planes_of(cut: Cut, x: jax.Array) -> jax.Array:
    """The activations of each plane, `[B, planes, M, C]`, zero-padded to full blocks."""
    planes, m, length = cut.activations().shape
    if cut.form.contracts_rows:
        x = _permuted(x, cut.form.scheme.packing.interleave)
    x = jnp.pad(x, ((0, 0), (0, 0), (0, planes * length - x.shape[2])))
    return x.reshape(-1, m, length, planes).transpose(0, 3, 1, 2)


def _permuted(x: jax.Array, order: tuple[int, ...]) -> jax.Array:
    """Permutes each run of the last axis; the last run is zero-padded."""
    if not order:
        return x
    x = jnp.pad(x, ((0, 0), (0, 0), (0, -x.shape[2] % len(order))))
    return x.reshape(*x.shape[:2], -1, len(order))[..., jnp.asarray(order)].reshape(x.shape)


def joined(form: Form, y: jax.Array) -> jax.Array:
    """The result as `[B, M, N]`, its planes interleaved."""
    if form.contracts_rows:
        return y[:, 0]
    y = y.transpose(0, 2, 3, 1).reshape(len(y), form.m, -1)
    if order := form.scheme.packing.interleave:
        whole = y.shape[2] // len(order) * len(order)  # beyond the last run is padding
        y = _permuted(y[..., :whole], tuple(order.index(place) for place in range(len(order))))
    return y[..., : form.length]


def launched(
    kernel: Callable[..., None],
    grid: tuple[int, ...],
    blocks: Sequence[Block],
    scratch: Sequence[Any],
    *,
    varying: ManualAxisType,
    interpret: bool,
    name: str,
    vmem_limit_bytes: int | None = None,
) -> Callable[..., jax.Array]:
    """A kernel as a function of one matrix's arrays. The last block is the result, the last grid axis the contraction."""
    *read, out = blocks
    return pl.pallas_call(
        kernel,
        grid=grid,
        in_specs=[pl.BlockSpec(block.block, block.index) for block in read],
        out_specs=pl.BlockSpec(out.block, out.index),
        out_shape=jax.ShapeDtypeStruct(out.shape, out.dtype, manual_axis_type=varying),
        scratch_shapes=list(scratch),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=vmem_limit_bytes
        ),
        interpret=interpret,
        name=name,
    )


def varying_axes(*operands: jax.Array | QArray) -> ManualAxisType:
    """The mesh axes along which the operands vary within `jax.shard_map`."""
    types = (jax.typeof(leaf).manual_axis_type for leaf in jax.tree.leaves(operands))
    return ManualAxisType(varying=frozenset().union(*(axes.varying for axes in types)))


def over_stack(call: Callable[..., jax.Array], arrays: Sequence[jax.Array], batch: int) -> jax.Array:
    """Maps a kernel over the first axis; arrays of length one are shared."""
    if batch == 1:
        return call(*(array[0] for array in arrays))[None]
    mapped = [None if len(array) == 1 else 0 for array in arrays]
    shared = (array[0] if axis is None else array for array, axis in zip(arrays, mapped, strict=True))
    return jax.vmap(call, mapped)(*shared)
