"""Activations times packed weights on TPUs: bytes go to VMEM as they are stored, and are decoded there.

**What bounds it.** A decode step reads each weight once and does little with it, so the aim is HBM bandwidth: the packed bytes,
the stored scales, x and y, each moved once, and nothing else. `Cut` says which block each step of the grid needs;
`bytes_moved` counts from it, and a test holds the count to the packed size. Compiled by libtpu the call has no temporary
array at all, so no unpacked copy can stand in HBM. For many rows of x the matrix unit bounds it, and decoding is paid once a
block of `Config.m` rows.

**No shuffles.** fewbit packs along the axis that scales run along: byte i of a column holds its elements 2i (low bits) and
2i + 1 (high). Interleaving the two after cutting them apart would be a shuffle of sublanes or lanes for each byte.

*Whole numbers of 4 bits* need none. A register of bytes, bitcast, is one of twice as many rows of int4, in fewbit's very
order, and one conversion makes floats of them. Unsigned codes lose 8 by an exclusive or of the byte, and their zero points
too. In the schedules for v5e a block of 512 x 512 bytes in tiles of 64 takes 708 cycles so, where planes took 860, and 944
with zero points, where they took 1127; its bytes take 530 to arrive. On v6e it is as cheap; v4 converts int4 by so many
operations (3513 cycles) that it goes on by planes: `Config.halves`.

*All other codes* are cut apart: each *plane* (all low nibbles, all high ones) is a matrix of its own, and the product is a sum
of two with half of K:

    x @ w = x[:, 0::2] @ low + x[:, 1::2] @ high

x is cut apart once, before the kernel, and is small. Where the other axis is contracted (`x @ w.T`, and the gradient with
respect to x), the planes are two halves of the result, interleaved once after it. 2-bit codes have four planes, 1-bit ones
eight, bytes one. Codes in another order within a group (GGUF's, AWQ's) permute x, or the result, and nothing else.

**Codes that straddle bytes.** Four codes of 6 bits fill three bytes, eight of 3, 5 or 7 bits as many bytes. Such a group is a row
of as many planes as it has codes. Its bytes are widened into scratch, a word each, and read back with a stride: all first
bytes, all second ones. A code is put together from two of these. That moves every byte through VMEM once more.

**Two orientations, one kernel.** With bytes along sublanes (`[K/2, N]`), one scale serves 8, 16, 32 .. whole sublanes: repeating
it is a broadcast of registers. With bytes along lanes (`[N, K/2]`) it would be a shuffle of lanes for every register of
*numbers*. So such a block is transposed first, as *bytes*: four to a lane, and both planes at once. Scales are transposed
before the kernel; they are 1/8 to 1/128 of the bytes.

**Decoding** (`pallas_decode.py`) has no gather: masks for integers, a 32-bit constant for e2m1, a tree of 15 selects for NF4.
By the compiler's schedules for v5e it is what bounds most 4-bit weights at few rows: of the same block, whose bytes take 530 cycles
to arrive, mxfp4 takes 1600, and nf4 3490, which is slower than dense bfloat16; int8 is bound by memory, and int4 nearly so
(docs/kernels.md has the model). What helped: integers converted where they stand in the word, and bytes widened as signed
ones, which is one operation where unsigned takes two (int8 from 880 to 500 cycles).
Numbers are multiplied by their scale in float32 and rounded once to the dtype of the product, exactly as `dequantize` does.
Where one scale serves the whole contraction, the sums take it instead, which saves an operation a number and a rounding.

**Products** are bfloat16 where both operands are, else float32 at `Precision.HIGHEST`; sums are float32, in VMEM scratch, while
the grid runs over the contraction, its last axis.

**Any shape.** Blocks divide their axis where a multiple of 128 does. If not, the last block reaches beyond the array: what lies
there may be anything, NaN too, so the numbers beyond the contraction are replaced by zeros after decoding, and x is filled
with zeros. Beyond the other axes the results are dropped. Weights are never padded, since that would copy them.

**What was not kept.** Summing the product of each tile alone and scaling the sums, as `pallas_pairs.py` does: by itself it
takes 709 cycles for 16 rows of x where scaling the numbers takes 604, and 3949 for 256 where that takes 1782. Gathering scales along lanes
(`take_along_axis`): its lowering asks which TPU is there, so a CPU cannot lower it for one. `jnp.repeat` along lanes: 36 MiB
of VMEM for a block of 256 x 2048, on a chip with 16. Scales padded to full float32 before the kernel: up to four times their
bytes. A table of block sizes for each device: they are chosen by rule, since no TPU was at hand to measure on.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import ManualAxisType

from ...array import QArray
from .pallas_blocks import PLAIN, Block, Config, Cut
from .pallas_form import Form
from .pallas_step import beside_codes, joined, planes_of, summed, varying_axes


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
    how = {"result": result, "precision": precision, "halves": config.halves}
    form = Form.of(x, q, contracts_last=contracts_last, **how)
    cut = Cut.of(form, config)
    beside = beside_codes(form, q)
    call = _call(cut, config, {name: array.dtype for name, array in beside.items()}, interpret, varying_axes(x, q))
    arrays = (planes_of(cut, x.astype(form.dtype)), q.codes, *beside.values())
    if len(x) == 1:
        y = call(*(array[0] for array in arrays))[None]
    else:
        mapped = [None if array.shape[0] == 1 else 0 for array in arrays]
        alone = (array[0] if axis is None else array for array, axis in zip(arrays, mapped, strict=True))
        y = jax.vmap(call, mapped)(*alone)
    return joined(form, y)


def _call(cut: Cut, config: Config, beside: dict[str, np.dtype], interpret: bool, varying: ManualAxisType) -> Any:
    """The kernel as a function of one matrix's arrays."""
    *blocks, out = _blocks(cut, beside)
    return pl.pallas_call(
        functools.partial(_kernel, cut, config, tuple(beside)),
        grid=cut.grid,
        in_specs=[pl.BlockSpec(block.block, block.index) for block in blocks],
        out_specs=pl.BlockSpec(out.block, out.index),
        out_shape=jax.ShapeDtypeStruct(out.shape, out.dtype, manual_axis_type=varying),
        scratch_shapes=[pltpu.VMEM(out.block, jnp.float32), *(pltpu.VMEM(shape, jnp.int32) for shape in cut.stream())],
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
    beside = jax.eval_shape(functools.partial(beside_codes, cut.form), q)
    return _blocks(cut, {name: array.dtype for name, array in beside.items()})


def _blocks(cut: Cut, beside: dict[str, np.dtype]) -> list[Block]:
    return [cut.activations(), cut.codes(), *(cut.beside(name, dtype) for name, dtype in beside.items()), cut.result()]


def _kernel(cut: Cut, config: Config, names: tuple[str, ...], x: Any, codes: Any, *refs: Any) -> None:
    """One step of the grid."""
    beside, (y, *scratch) = refs[: len(names)], refs[len(names) :]

    def finish(sums: jax.Array) -> None:
        y[...] = sums.astype(y.dtype)

    summed(cut, config, names, x, codes, beside, tuple(scratch), finish)
