"""Activations times packed weights on TPUs: bytes go to VMEM as they are stored, and are decoded there.

**What bounds it.** A decode step reads each weight once and does little with it, so the aim is HBM bandwidth: the packed bytes,
the stored scales, x and y, each moved once, and nothing else. `Cut` says which block each step of the grid needs;
`bytes_moved` counts from it, and a test holds the count to the packed size. Compiled by libtpu the call has no temporary
array at all, so no unpacked copy can stand in HBM. For many rows of x the matrix unit bounds it, and decoding is paid once a
block of `Config.m` rows.

**No shuffles.** fewbit packs along the axis that scales run along: byte i of a column holds its elements 2i (low bits) and
2i + 1 (high). Interleaving the two after cutting them apart would be a shuffle of sublanes or lanes for each byte. Instead
each *plane* (all low nibbles, all high ones) is a matrix of its own, and the product is a sum of two with half of K:

    x @ w = x[:, 0::2] @ low + x[:, 1::2] @ high

x is cut apart once, before the kernel, and is small. Where the other axis is contracted (`x @ w.T`, and the gradient with
respect to x), the planes are two halves of the result, interleaved once after it. 2-bit codes have four planes, 1-bit ones
eight, bytes one. Codes of 3, 5, 6 and 7 bits straddle bytes and stay with the reference.

**Two orientations, one kernel.** With bytes along sublanes (`[K/2, N]`), one scale serves 8, 16, 32 .. whole sublanes: repeating
it is a broadcast of registers. With bytes along lanes (`[N, K/2]`) it would be a shuffle of lanes for every register of
*numbers*. So such a block is transposed first, as *bytes*: four to a lane, and both planes at once. Scales are transposed
before the kernel; they are 1/8 to 1/128 of the bytes.

**Decoding** (`pallas_decode.py`) has no gather: masks for integers, a 32-bit constant for e2m1, a tree of 15 selects for NF4.
By the compiler's schedules for v5e it is what bounds 4-bit weights at few rows: a block of 512 x 512 bytes of int4 in tiles of 64
takes 860 cycles, and its bytes 530 to arrive; int8 is bound by memory, mxfp4 takes 1600 cycles, nf4 3490, and is slower than
dense bfloat16 (docs/kernels.md has the model). What helped: integers converted where they stand in the word, and bytes widened
as signed ones, which is one operation where unsigned takes two (int8 from 880 to 500 cycles, int4 from 936 to 858).
Numbers are multiplied by their scale in float32 and rounded once to the dtype of the product, exactly as `dequantize` does.
Where one scale serves the whole contraction, the sums take it instead, which saves an operation a number and a rounding.

**Products** are bfloat16 where both operands are, else float32 at `Precision.HIGHEST`; sums are float32, in VMEM scratch, while
the grid runs over the contraction, its last axis.

**Any shape.** Blocks divide their axis where a multiple of 128 does. If not, the last block reaches beyond the array: what lies
there may be anything, NaN too, so the numbers beyond the contraction are replaced by zeros after decoding, and x is filled
with zeros. Beyond the other axes the results are dropped. Weights are never padded, since that would copy them.

**What was not kept.** Gathering scales along lanes (`take_along_axis`): its lowering asks which TPU is there, so a CPU cannot
lower it for one. `jnp.repeat` along lanes: 36 MiB of VMEM for a block of 256 x 2048, on a chip with 16. Scales padded to full
float32 before the kernel: up to four times their bytes. A table of block sizes for each device: they are chosen by rule, since
no TPU was at hand to measure on.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import ManualAxisType

from ...array import QArray, Scheme, dequantize, is_qarray
from .pallas_blocks import PLAIN, Block, Config, Cut
from .pallas_decode import held_values, plane_values, unit
from .pallas_form import Form


def stacked_product(
    x: jax.Array,
    q: QArray,
    *,
    contracts_last: bool,
    result: Any,
    precision: Any = None,
    config: Config = PLAIN,
    interpret: bool = False,
) -> jax.Array:
    """`y[b] = x[b] @ w[b]` or `x[b] @ w[b].T`, for the matrices `w` that a stack of codes stands for.

    Args:
        x: `[B, M, K]`, bfloat16 or float32.
        q: `[B, R, C]`, likewise.
        contracts_last: whether K is C, or R.
        result: the dtype of the result, likewise.
        precision: as in `lax.dot_general`; None computes float32 products in full precision.
        config: the sizes of blocks.
        interpret: whether JAX evaluates the kernel step by step, on any device, instead of compiling it.

    Returns:
        `[B, M, N]`, N being the other one of R and C. Sums are made in float32.
    """
    form = Form.of(x, q, contracts_last=contracts_last, result=result, precision=precision)
    cut = Cut.of(form, config)
    beside = _beside(form, q)
    call = _call(cut, config, {name: array.dtype for name, array in beside.items()}, interpret, _varying(x, q))
    arrays = (_planes(cut, x.astype(form.dtype)), q.codes, *beside.values())
    if len(x) == 1:
        y = call(*(array[0] for array in arrays))[None]
    else:
        mapped = [None if array.shape[0] == 1 else 0 for array in arrays]
        alone = (array[0] if axis is None else array for array, axis in zip(arrays, mapped, strict=True))
        y = jax.vmap(call, mapped)(*alone)
    return _joined(form, y)


def _call(cut: Cut, config: Config, beside: dict[str, np.dtype], interpret: bool, varying: ManualAxisType) -> Any:
    """The kernel as a function of one matrix's arrays."""
    *blocks, out = _blocks(cut, beside)
    return pl.pallas_call(
        functools.partial(_kernel, cut, config, tuple(beside)),
        grid=cut.grid,
        in_specs=[pl.BlockSpec(block.block, block.index) for block in blocks],
        out_specs=pl.BlockSpec(out.block, out.index),
        out_shape=jax.ShapeDtypeStruct(out.shape, out.dtype, manual_axis_type=varying),
        scratch_shapes=[pltpu.VMEM(out.block, jnp.float32)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        interpret=interpret,
        name="fewbit_qmatmul",
    )


def blocks_of(cut: Cut, q: QArray) -> list[Block]:
    """Every array of a product as it is cut: activations, codes, what lies beside them, and the result.

    Args:
        cut: the product.
        q: the stack of codes, or its shapes.
    """
    beside = jax.eval_shape(functools.partial(_beside, cut.form), q)
    return _blocks(cut, {name: array.dtype for name, array in beside.items()})


def _blocks(cut: Cut, beside: dict[str, np.dtype]) -> list[Block]:
    return [cut.activations(), cut.codes(), *(cut.beside(name, dtype) for name, dtype in beside.items()), cut.result()]


def _varying(*operands: Any) -> ManualAxisType:
    """The mesh axes along which the operands, and so the product, differ within `jax.shard_map`."""
    held = (jax.typeof(leaf).manual_axis_type for leaf in jax.tree.leaves(operands))
    return ManualAxisType(varying=frozenset().union(*(axes.varying for axes in held)))


def _kernel(cut: Cut, config: Config, names: tuple[str, ...], x: Any, codes: Any, *refs: Any) -> None:
    """One step of the grid: the planes of a block of bytes, each multiplied with the activations that meet it."""
    form, (*beside, y, total), step = cut.form, refs, pl.program_id(2)

    @pl.when(step == 0)
    def _() -> None:
        total[...] = jnp.zeros_like(total)

    packed = codes[...].T if form.is_transposed else codes[...]
    held = {name: held_values(ref[...], _holder(form.scheme, name)) for name, ref in zip(names, beside, strict=True)}
    fmt, high_first = form.scheme.format, form.scheme.packing.high_first
    for plane in range(form.planes):
        shift = fmt.bits * (form.planes - 1 - plane if high_first else plane)
        values = plane_values(fmt, packed, shift, nf4_polynomial=config.nf4_polynomial)
        values = _within(cut, _scaled(cut, values, unit(fmt, shift), held), step).astype(form.dtype)
        at_x, at_total, axis = (plane, 0, 0) if form.contracts_rows else (0, plane, 1)
        total[at_total] += jax.lax.dot_general(
            x[at_x], values, (((1,), (axis,)), ((), ())), precision=form.precision, preferred_element_type=jnp.float32
        )

    @pl.when(step == cut.grid[2] - 1)
    def _() -> None:
        sums = total[...]
        y[...] = (sums * _scale(held)[None] if form.scales_sums else sums).astype(y.dtype)


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
    if "zero_point" in held and not form.has_offsets:
        values = values - _spread(cut, held["zero_point"] / jnp.float32(own))
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


def _beside(form: Form, q: QArray) -> dict[str, jax.Array]:
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


def _planes(cut: Cut, x: jax.Array) -> jax.Array:
    """The activations as the planes meet them, `[B, planes, M, C]`, filled with zeros up to whole blocks."""
    planes, m, length = cut.activations().shape
    x = jnp.pad(x, ((0, 0), (0, 0), (0, planes * length - x.shape[2])))
    return x.reshape(-1, m, length, planes).transpose(0, 3, 1, 2)


def _joined(form: Form, y: jax.Array) -> jax.Array:
    """The result as `[B, M, N]`, its planes interleaved."""
    if form.contracts_rows:
        return y[:, 0]
    return y.transpose(0, 2, 3, 1).reshape(len(y), form.m, -1)[..., : form.length]
