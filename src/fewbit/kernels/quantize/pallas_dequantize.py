"""Decoding on TPUs: codes, scales and zero points in one read, numbers in one write.

**Layout.** The blocks are those of `pallas_tpu.py`: the tiles' axis along sublanes, bytes of the other order transposed as bytes,
the numbers transposed back. The codes of a byte, or of a group of bytes, are decoded plane by plane as in
`qmatmul.pallas_decode`, and written to scratch with a stride, which puts them in order. Then each tile meets its scale.

**What bounds it**: the numbers, 4 or 2 bytes an element, written once. XLA's own program unpacks to an array of codes first.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ...array import Scheme
from ...formats import AbstractFormat
from ...formats.format import settled
from ..qmatmul.pallas_decode import group_values, held_values, plane_values, unit
from .pallas_tpu import Blocks


def decoded_tiles(
    codes: jax.Array,
    held: dict[str, jax.Array],
    scheme: Scheme,
    length: int,
    tile: int,
    dtype: Any,
    *,
    is_last: bool,
    interpret: bool = False,
) -> jax.Array:
    """The numbers of matrices of codes.

    Args:
        codes: `[B, N, K]` with tiles along its last axis, or `[B, K, N]`, K in bytes.
        held: "scale", and "zero_point" where there are such, `[B, tiles, N]`; "tensor_scale", `[1, 1]`, likewise.
        scheme: how they are quantized; `PallasTPUDequantizer.unsupported` says which can be.
        length: K in elements.
        tile: how many elements share a scale; the last tile may be short.
        dtype: of the result, float32 or bfloat16.
        is_last: whether tiles lie along the last axis.
        interpret: whether JAX evaluates the kernel step by step, on any device, instead of compiling it.

    Returns:
        An array of the shape of `codes` with K in elements.
    """
    batch, others = len(codes), codes.shape[1 if is_last else 2]
    cut = Blocks.of(length, others, tile, scheme.format.bits, is_last=is_last)
    beside = [
        pl.BlockSpec((1, 1), lambda b, n, k: (0, 0)) if name == "tensor_scale" else cut.spec(cut.in_tiles, is_last=False)
        for name in held
    ]
    groups = cut.filled // cut.group
    bytes_of_codes = [] if 8 % cut.bits == 0 else [pltpu.VMEM((groups * cut.group * cut.bits // 8, cut.columns), jnp.int32)]
    return pl.pallas_call(
        functools.partial(_kernel, cut, scheme, tuple(held)),
        grid=(batch, *cut.grid),
        in_specs=[cut.spec(cut.in_bytes[1], is_last=is_last), *beside],
        out_specs=cut.spec(cut.rows, is_last=is_last),
        out_shape=jax.ShapeDtypeStruct((batch, others, length) if is_last else (batch, length, others), dtype),
        scratch_shapes=[pltpu.VMEM((cut.filled, cut.columns), jnp.float32), *bytes_of_codes],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",) * 3, vmem_limit_bytes=64 << 20),
        interpret=interpret,
        name="fewbit_dequantize",
    )(codes, *held.values())


def _kernel(cut: Blocks, scheme: Scheme, names: tuple[str, ...], codes: Any, *refs: Any) -> None:
    """Decodes one block."""
    beside, (y, numbers, *stream) = dict(zip(names, refs, strict=False)), refs[len(names) :]
    packed = codes[...].T if cut.is_last else codes[...]
    if stream:
        _put_groups(cut, scheme.format, packed, stream[0], numbers)
    else:
        _put_planes(cut, scheme.format, packed, numbers)
    tiles = numbers[...].reshape(-1, cut.tile, cut.columns)
    held = {name: held_values(ref[...], _holder(scheme, name))[:, None] for name, ref in beside.items()}
    values = _scaled(tiles, scheme, held).reshape(cut.filled, cut.columns)[: cut.rows]
    y[...] = (values.T if cut.is_last else values).astype(y.dtype)


def _holder(scheme: Scheme, name: str) -> Any:
    """What holds the scales, the zero points or the tensor scale."""
    if name == "zero_point":
        return scheme.zero_holder
    return np.dtype(np.float32) if name == "tensor_scale" else scheme.scale


def _scaled(tiles: jax.Array, scheme: Scheme, held: dict[str, jax.Array]) -> jax.Array:
    """The numbers of tiles from those of their codes."""
    scale = held["scale"] * held["tensor_scale"] if "tensor_scale" in held else held["scale"]
    if scheme.zero_point is None:
        return tiles * scale
    if isinstance(scheme.zero_point, AbstractFormat):
        return (tiles - held["zero_point"]) * scale
    return settled(tiles * scale) + held["zero_point"]


def _put_planes(cut: Blocks, fmt: AbstractFormat, packed: jax.Array, numbers: Any) -> None:
    """Writes what the codes of each byte stand for, in order."""
    if cut.group == 1:
        numbers[: packed.shape[0], :] = plane_values(fmt, packed, 0) * jnp.float32(unit(fmt, 0))
        return
    for plane in range(cut.group):
        shift = plane * cut.bits
        values = plane_values(fmt, packed, shift) * jnp.float32(unit(fmt, shift))
        numbers[pl.ds(plane, packed.shape[0], stride=cut.group), :] = values


def _put_groups(cut: Blocks, fmt: AbstractFormat, packed: jax.Array, stream: Any, numbers: Any) -> None:
    """The same for codes that straddle bytes."""
    stream[: packed.shape[0], :] = packed.astype(jnp.int32)
    count, size = cut.filled // cut.group, cut.group * cut.bits // 8
    part = [stream[pl.ds(i, count, stride=size), :] for i in range(size)]
    for plane in range(cut.group):
        numbers[pl.ds(plane, count, stride=cut.group), :] = group_values(fmt, part, plane)
