"""TPU kernel: activations times packed weights, decoded in VMEM.

**Tiling.** The grid is (rows of x, free axis of the weight, K). A step loads a block of packed codes, their scales and a block
of x into VMEM, decodes the codes and adds the product to a float32 accumulator in VMEM scratch; the last step along K writes y.
Products are bfloat16 if both operands are, else float32 at `Precision.HIGHEST`.

**Bound.** For few rows of x the bound aimed at is HBM bandwidth: packed bytes, stored scales, x and y, each moved once
(`bytes_moved` counts them from the index maps of `Cut`), and no unpacked copy in HBM. For many rows the bound is the matrix
unit (MXU), and a block of weights is decoded once per `Config.m` rows.

**Unpacking.** Codes are packed along the axis that tiles run along: byte i of a column has its elements 2i (low bits) and 2i +
1 (high). Putting them in order after unpacking would shuffle sublanes or lanes for each byte. *4-bit integers* need no shuffle:
a register of bytes, bitcast, is one of twice as many rows of int4 in fewbit's order, and one conversion gives floats. Unsigned
codes and their zero points are shifted by 8 (XOR). *All other codes* are unpacked into *planes* (all low nibbles, all high
nibbles), and the product is a sum of one product per plane, each with its part of K; x is split once, before the kernel:

    x @ w = x[:, 0::2] @ low + x[:, 1::2] @ high

For `x @ w.T`, and the gradient with respect to x, the planes are parts of the result, interleaved after the kernel. 2-bit codes
have four planes, 1-bit codes eight, bytes one. Codes in another order within a group (GGUF, AWQ) permute x or the result.
*Codes that straddle bytes* (3, 5, 6 and 7 bits): the bytes of a group of codes are widened to words in scratch and read back
with a stride, and a code is assembled from two words.

**Scales** are multiplied with the decoded weights in float32, rounded once to the dtype of the product, as `dequantize` does.
If one scale covers K, the sums are scaled instead, which saves an operation per weight and a rounding. With bytes along
sublanes (`[K/2, N]`) one scale covers whole sublanes, and repeating it is a broadcast of registers. A block with bytes along
lanes (`[N, K/2]`) is transposed first, as packed bytes; its scales are transposed before the kernel.

**Any shape.** The last block may extend past the array, where memory may be NaN. Past K decoded values are replaced by zeros
and x is zero-padded; past the other axes results are dropped. Weights are never padded, which would copy them.

Cycle counts, attempts that did not pay, and why `int8_gemm.py` is another kernel: docs/design/kernels-accelerators.md.
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
