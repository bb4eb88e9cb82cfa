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

Cycle counts and attempts that did not pay: docs/design/kernels-accelerators.md.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike

from ....array.qarray import QArray, is_qarray
from ....array.quantize import dequantize
from ....array.scheme import Scheme
from ...pallas.decode import code_values, stored_values
from .blocks import LANES, PLAIN, Block, Config, Cut
from .kernel import AbstractProduct, Arrays, Part, Refs, nibbles, stacked
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
    """`AbstractKernel.stacked` for bfloat16 or float32 x, q and result.

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
    return stacked(DecodedProduct(Cut.of(form, config), config), x, q, interpret=interpret)


@dataclasses.dataclass(frozen=True)
class DecodedProduct(AbstractProduct):
    """Float activations times a packed weight: one part per plane of codes.

    Attributes:
        cut: the product in blocks.
        config: which values are approximated.
    """

    name: ClassVar[str] = "fewbit_qmatmul"
    cut: Cut
    config: Config = PLAIN

    @property
    def grid(self) -> tuple[int, int, int]:
        return self.cut.grid

    @property
    def sums(self) -> np.dtype:
        return np.dtype(np.float32)

    @property
    def precision(self) -> jax.lax.Precision | None:
        return self.cut.form.precision

    @property
    def scratch(self) -> Sequence[Any]:
        return [pltpu.VMEM(shape, jnp.int32) for shape in self.cut.stream()]

    def arrays(self, x: jax.Array, q: QArray) -> Arrays:
        planes = _planes_of(self.cut, x.astype(self.cut.form.dtype))
        return {"x": planes, "codes": q.codes, **_scale_arrays(self.cut.form, q)}

    def blocks(self, arrays: Mapping[str, jax.Array | jax.ShapeDtypeStruct]) -> list[Block]:
        read = (self.cut.scales(name, array.dtype) for name, array in arrays.items() if name not in ("x", "codes"))
        return [self.cut.activations(), self.cut.codes(), *read, self.cut.result()]

    def scales(self, inputs: Refs) -> Arrays:
        scheme = self.cut.form.scheme
        names = [name for name in inputs if name not in ("x", "codes")]
        return {name: stored_values(inputs[name][...], _stored_as(scheme, name)) for name in names}

    def parts(self, inputs: Refs, scales: Arrays, scratch: Sequence[jax.Ref], step: jax.Array) -> Iterator[Part]:
        cut, form = self.cut, self.cut.form
        packed = inputs["codes"][...]
        if form.is_transposed:
            packed = packed.T
        group = [packed]
        if scratch:
            group = _group(cut, packed, scratch)
        for plane in range(form.planes):
            values, own = _plane(form, group, plane, nf4_polynomial=self.config.nf4_polynomial)
            values = _within(cut, _scaled(cut, values, own, scales), step).astype(form.dtype)
            at_x, at_total, axis = (plane, 0, 0) if form.contracts_rows else (0, plane, 1)
            yield Part(inputs["x"][at_x], values, axis, at_total, lambda sums: sums)

    def finished(self, sums: jax.Array, scales: Arrays) -> jax.Array:
        if self.cut.form.scales_sums:
            return sums * _scale(scales)[None]
        return sums

    def joined(self, y: jax.Array) -> jax.Array:
        form = self.cut.form
        if form.contracts_rows:
            return y[:, 0]
        y = y.transpose(0, 2, 3, 1).reshape(len(y), form.m, -1)
        if order := form.scheme.packing.interleave:
            whole = y.shape[2] // len(order) * len(order)  # beyond the last run is padding
            y = _permuted(y[..., :whole], tuple(order.index(place) for place in range(len(order))))
        return y[..., : form.length]


# --- a block, decoded ---


def _group(cut: Cut, packed: jax.Array, stream: Sequence[jax.Ref]) -> list[jax.Array]:
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


# --- arrays as the kernel reads them ---


def _scale_arrays(form: Form, q: QArray) -> dict[str, jax.Array]:
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


def _planes_of(cut: Cut, x: jax.Array) -> jax.Array:
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
