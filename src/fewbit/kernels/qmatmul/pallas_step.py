"""What one step of the TPU kernels' grid does, and the arrays as the kernels read and write them.

The grid's last axis runs over the contraction; its steps add to one block of sums.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import ManualAxisType

from ...array import QArray, Scheme, is_qarray
from ...array.quantize import dequantize
from .pallas_blocks import LANES, Config, Cut
from .pallas_decode import group_values, held_values, plane_values, unit
from .pallas_form import Form


def summed(
    cut: Cut,
    config: Config,
    names: tuple[str, ...],
    x: Any,
    codes: Any,
    beside: Any,
    scratch: tuple[Any, ...],
    finish: Any,
) -> None:
    """Adds the products of one step: the planes of a block of bytes, each multiplied with the activations that meet it.

    Args:
        cut: the product.
        config: what is approximated.
        names: of what lies beside the codes.
        x: the activations' block, `[planes, M, C]`.
        codes: the bytes.
        beside: scales, zero points and tensor scale.
        scratch: the sums, float32 of the shape of the result's block; and, of codes that straddle bytes, `Cut.stream`.
        finish: called with the sums, scaled, in the last step.
    """
    form, step = cut.form, pl.program_id(2)
    total, *stream = scratch

    @pl.when(step == 0)
    def _() -> None:
        total[...] = jnp.zeros_like(total)

    packed = codes[...].T if form.is_transposed else codes[...]
    held = {name: held_values(ref[...], _holder(form.scheme, name)) for name, ref in zip(names, beside, strict=True)}
    group = _group(cut, packed, stream) if stream else [packed]
    for plane in range(form.planes):
        values, own = _plane(form, group, plane, nf4_polynomial=config.nf4_polynomial)
        values = _within(cut, _scaled(cut, values, own, held), step).astype(form.dtype)
        at_x, at_total, axis = (plane, 0, 0) if form.contracts_rows else (0, plane, 1)
        total[at_total] += jax.lax.dot_general(
            x[at_x], values, (((1,), (axis,)), ((), ())), precision=form.precision, preferred_element_type=jnp.float32
        )

    @pl.when(step == cut.grid[2] - 1)
    def _() -> None:
        sums = total[...]
        finish(sums * _scale(held)[None] if form.scales_sums else sums)


def _group(cut: Cut, packed: jax.Array, stream: list[Any]) -> list[jax.Array]:
    """The first bytes of all rows, the second ones, and so on, each in a word."""
    for place, ref in enumerate(stream):
        part = packed[:, place * LANES : (place + 1) * LANES]
        ref[: part.shape[0], : part.shape[1]] = part.astype(jnp.int32)
    span = cut.form.span
    each = [[ref[pl.ds(byte, cut.rows, stride=span), :] for ref in stream] for byte in range(span)]
    return [jnp.concatenate(parts, axis=1)[:, : cut.columns] for parts in each]


def _plane(form: Form, group: list[jax.Array], plane: int, *, nf4_polynomial: bool) -> tuple[jax.Array, float]:
    """The numbers of one code of each row, and the unit that they come in."""
    fmt = form.scheme.format
    if form.is_split:
        return _split(group[0], is_signed=fmt.min < 0), getattr(fmt, "step", 1.0)
    if len(group) > 1:
        return group_values(fmt, group, plane), 1.0
    shift = fmt.bits * (form.planes - 1 - plane if form.scheme.packing.high_first else plane)
    return plane_values(fmt, group[0], shift, nf4_polynomial=nf4_polynomial), unit(fmt, shift)


def _split(packed: jax.Array, *, is_signed: bool) -> jax.Array:
    """The whole numbers of both halves of each byte, the low half's first, as float32; unsigned ones less 8."""
    packed = packed if is_signed else packed ^ jnp.uint8(0x88)
    return pltpu.bitcast(packed, jnp.int4).astype(jnp.float32)


def _holder(scheme: Scheme, name: str) -> Any:
    """What holds the scales, the zero points or the tensor scale."""
    if name == "zero_point":
        return scheme.zero_holder
    return np.dtype(np.float32) if name == "tensor_scale" or isinstance(scheme.scale, Scheme) else scheme.scale


def _scale(held: dict[str, jax.Array]) -> jax.Array:
    """The scales of a block, with the tensor scale in them."""
    return held["scale"] * held["tensor_scale"] if "tensor_scale" in held else held["scale"]


def _scaled(cut: Cut, values: jax.Array, own: float, held: dict[str, jax.Array]) -> jax.Array:
    """The values of a plane, which come in units of `own`, as the array has them; without a scale that the sums get."""
    form = cut.form
    less = 8.0 if form.is_split and form.scheme.format.min == 0 else 0.0  # what the values of a plane lack
    if "zero_point" in held and not form.has_offsets:
        values = values - _spread(cut, held["zero_point"] / jnp.float32(own) - less)
    elif less:
        values = values + less
    if not form.scales_sums:
        values = values * _spread(cut, _scale(held) * jnp.float32(own))
    elif own != 1:
        values = values * jnp.float32(own)
    return values + _spread(cut, held["zero_point"]) if form.has_offsets else values


def _spread(cut: Cut, numbers: jax.Array) -> jax.Array:
    """One number a tile as one number a row; one for all rows as it is."""
    if cut.form.tile in (1, None) or numbers.shape[0] == 1 == cut.form.tiles:
        return numbers
    return jnp.repeat(numbers, cut.form.tile, axis=0)[: cut.rows]


def _within(cut: Cut, values: jax.Array, step: Any) -> jax.Array:
    """The values with zeros where a block reaches beyond the contraction: what lies there may be NaN."""
    if not cut.is_ragged:
        return values
    axis = 0 if cut.form.contracts_rows else 1
    place = jax.lax.broadcasted_iota(jnp.int32, values.shape, axis) + step * cut.contracted_block
    return jnp.where(place < cut.contracted, values, 0.0)


def beside_codes(form: Form, q: QArray) -> dict[str, jax.Array]:
    """Scales, zero points and tensor scale as the kernel reads them, with the stack's axis first."""
    scale = dequantize(q.scale, jnp.float32) if is_qarray(q.scale) else q.scale
    arrays = {"scale": _laid(form, scale)}
    if q.zero_point is not None:
        arrays["zero_point"] = _laid(form, q.zero_point)
    return arrays if q.tensor_scale is None else arrays | {"tensor_scale": q.tensor_scale}


def _laid(form: Form, array: jax.Array) -> jax.Array:
    """One element for each tile of rows and each column that has its own; float16, which TPUs lack, as its bits."""
    array = array.swapaxes(-1, -2) if form.is_transposed else array
    if array.shape[-1] > 1 and form.column_tile not in (1, None):
        array = jnp.repeat(array, form.column_tile, axis=-1)[..., : form.columns]
    array = jnp.broadcast_to(array, (array.shape[0], form.tiles, form.scale_columns))
    return jax.lax.bitcast_convert_type(array, jnp.uint16) if array.dtype == jnp.float16 else array


def planes_of(cut: Cut, x: jax.Array) -> jax.Array:
    """The activations as the planes meet them, `[B, planes, M, C]`, filled with zeros up to whole blocks."""
    planes, m, length = cut.activations().shape
    if cut.form.contracts_rows:
        x = _permuted(x, cut.form.scheme.packing.interleave)
    x = jnp.pad(x, ((0, 0), (0, 0), (0, planes * length - x.shape[2])))
    return x.reshape(-1, m, length, planes).transpose(0, 3, 1, 2)


def _permuted(x: jax.Array, order: tuple[int, ...]) -> jax.Array:
    """Each run of elements of the last axis in an order; the last run is filled with zeros."""
    if not order:
        return x
    x = jnp.pad(x, ((0, 0), (0, 0), (0, -x.shape[2] % len(order))))
    return x.reshape(*x.shape[:2], -1, len(order))[..., jnp.asarray(order)].reshape(x.shape)


def joined(form: Form, y: jax.Array) -> jax.Array:
    """The result as `[B, M, N]`, its planes interleaved."""
    if form.contracts_rows:
        return y[:, 0]
    y = y.transpose(0, 2, 3, 1).reshape(len(y), form.m, -1)
    order = form.scheme.packing.interleave
    if order:
        whole = y.shape[2] // len(order) * len(order)  # what a row holds beyond the last run stands for nothing
        y = _permuted(y[..., :whole], tuple(order.index(place) for place in range(len(order))))
    return y[..., : form.length]


def varying_axes(*operands: Any) -> ManualAxisType:
    """The mesh axes along which the operands, and so the product, differ within `jax.shard_map`."""
    held = (jax.typeof(leaf).manual_axis_type for leaf in jax.tree.leaves(operands))
    return ManualAxisType(varying=frozenset().union(*(axes.varying for axes in held)))
