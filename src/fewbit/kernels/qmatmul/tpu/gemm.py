"""TPU kernel: activations times packed weights, decoded in VMEM.

**Bound.** A decode step reads each weight once and does little with it, so the aim is HBM bandwidth: the packed bytes, the stored
scales, x and y, each moved once, and nothing else. `Cut` has the index maps of the grid; `bytes_moved` counts from them, and
a test compares the count with the packed size. Compiled by libtpu the call has no temporary array, so no unpacked copy
can exist in HBM. For many rows of x the matrix unit is the bound, and a block of weights is decoded once per `Config.m` rows.

**No shuffles.** fewbit packs along the axis that tiles run along: byte i of a column has its elements 2i (low bits) and 2i + 1
(high). Interleaving the two after unpacking would be a shuffle of sublanes or lanes for each byte.

*4-bit integers* need none. A register of bytes, bitcast, is one of twice as many rows of int4 in fewbit's order, and one
conversion gives floats. Unsigned codes are shifted by 8 with an XOR of the byte, and so are their zero points. In the schedules
for v5e a block of 512 x 512 bytes in tiles of 64 takes 708 cycles this way, 860 in planes; with zero points 944 and 1127; its bytes
take 530 to load. On v6e it is as cheap; v4 converts int4 so slowly (3513 cycles) that it uses planes: `Config.halves`.

*All other codes* are unpacked into *planes* (all low nibbles, all high ones), each a matrix of its own, and the product is a
sum of two with half of K:

    x @ w = x[:, 0::2] @ low + x[:, 1::2] @ high

x is small and split once, before the kernel. If the other axis is contracted (`x @ w.T`, and the gradient with respect to x), the
planes are two halves of the result, interleaved once after it. 2-bit codes have four planes, 1-bit ones eight, bytes one. Codes in
another order within a group (GGUF's, AWQ's) permute x or the result, and nothing else.

**Codes that straddle bytes.** Four 6-bit codes fill three bytes, eight of 3, 5 or 7 bits as many bytes. Such a group is a row with
as many planes as codes. Its bytes are widened into scratch, one per word, and read back with a stride: all first bytes, all
second ones. A code is assembled from two of these. That moves every byte through VMEM once more.

**Two orientations, one kernel.** With bytes along sublanes (`[K/2, N]`), one scale covers 8, 16, 32 .. full sublanes: repeating
it is a broadcast of registers. With bytes along lanes (`[N, K/2]`) it would be a shuffle of lanes for every register of
*numbers*. So such a block is transposed first, as *bytes*: four to a lane, and both planes at once. Scales are transposed
before the kernel; they are 1/8 to 1/128 of the bytes.

**Decoding** (`pallas/decode.py`) has no gather: masks for integers, a 32-bit constant for e2m1, a tree of 15 selects for NF4.
By the compiler's schedules for v5e it is the bound of most 4-bit weights at few rows: for the same block, whose bytes take 530
cycles to load, mxfp4 takes 1600, and nf4 3490, which is slower than dense bfloat16; int8 is bound by memory, and int4 nearly so
(docs/kernels.md has the model). What helped: converting integers at their position in the word, and widening bytes as signed
ones, which is one operation instead of two (int8 from 880 to 500 cycles).
Numbers are multiplied by their scale in float32 and rounded once to the dtype of the product, exactly as `dequantize` does.
If one scale covers the whole contraction, the sums are scaled instead, which saves an operation per weight and a rounding.

**Products** are bfloat16 if both operands are, else float32 at `Precision.HIGHEST`; sums are float32 in VMEM scratch, while
the grid runs over the contraction, its last axis.

**Any shape.** Blocks divide their axis where a multiple of 128 does. If not, the last block extends past the array, where memory may
contain anything, even NaN: so decoded values past the contraction are replaced by zeros, and x is zero-padded. Past the
other axes the results are dropped. Weights are never padded, since that would copy them.

**Rejected.** Scaling the sums of each tile, as `int8_gemm.py` does: it takes 709 cycles for 16 rows of x where scaling the
weights takes 604, and 3949 for 256 instead of 1782. Gathering scales along lanes (`take_along_axis`): its lowering queries the
TPU, so a CPU cannot cross-compile it. `jnp.repeat` along lanes: 36 MiB of VMEM for a block of 256 x 2048, on a chip with 16.
Scales padded to full float32 before the kernel: up to four times their bytes. A table of block sizes per device: they are chosen
by rule, since there was no TPU to measure on.
"""

import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike

from ....array.qarray import QArray
from .blocks import PLAIN, Block, Config, Cut
from .kernel import joined, launched, over_stack, planes_of, scale_arrays, summed, varying_axes
from .problem import Form


def stacked_product(
    x: jax.Array,
    q: QArray,
    *,
    contracts_last: bool,
    result: DTypeLike,
    precision: object = None,
    config: Config = PLAIN,
    interpret: bool = False,
) -> jax.Array:
    """`AbstractStackKernel.stacked` for bfloat16 or float32 x, q and result.

    Args:
        x: `[B, M, K]`.
        q: `[B, R, C]`.
        contracts_last: whether K is C, or R.
        result: the dtype of the result.
        precision: as in `lax.dot_general`; None computes float32 products in full precision.
        config: block sizes.
        interpret: whether JAX interprets the kernel, on any device, instead of compiling it.
    """
    form = Form.of(x, q, contracts_last=contracts_last, result=result, precision=precision, halves=config.halves)
    cut = Cut.of(form, config)
    scales = scale_arrays(form, q)
    blocks = _blocks(cut, scales)
    call = launched(
        *(functools.partial(_kernel, cut, config, tuple(scales)), cut.grid, blocks),
        scratch=(pltpu.VMEM(blocks[-1].block, jnp.float32), *(pltpu.VMEM(shape, jnp.int32) for shape in cut.stream())),
        varying=varying_axes(x, q),
        interpret=interpret,
        name="fewbit_qmatmul",
    )
    arrays = (planes_of(cut, x.astype(form.dtype)), q.codes, *scales.values())
    return joined(form, over_stack(call, arrays, len(x)))


def blocks_of(cut: Cut, q: QArray) -> list[Block]:
    """The blocks of every input and the result; `q` may be shapes."""
    return _blocks(cut, jax.eval_shape(functools.partial(scale_arrays, cut.form), q))


def _blocks(cut: Cut, scales: Mapping[str, jax.Array | jax.ShapeDtypeStruct]) -> list[Block]:
    read = (cut.scales(name, array.dtype) for name, array in scales.items())
    return [cut.activations(), cut.codes(), *read, cut.result()]


def _kernel(cut: Cut, config: Config, names: tuple[str, ...], x: jax.Ref, codes: jax.Ref, *refs: jax.Ref) -> None:
    """One step of the grid."""
    scales, (y, *scratch) = refs[: len(names)], refs[len(names) :]

    def finish(sums: jax.Array) -> None:
        y[...] = sums.astype(y.dtype)

    summed(cut, config, names, x, codes, scales, tuple(scratch), finish)
