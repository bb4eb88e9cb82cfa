"""The dequantize kernel for TPUs: one read, one write.

**Layout.** The blocks are those of `quantize.py`: the tiled axis along sublanes; if it is the last axis, the packed bytes
and the result are transposed in VMEM. The codes of a byte, or of a group of bytes, are decoded plane by plane as in
`pallas/decode.py` and written to scratch with a stride, which puts them in order. Then each tile is multiplied by its
scale.

**Bound**: the output, 4 or 2 bytes an element, written once. XLA's own program writes an array of unpacked codes first.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike

from ....array.scheme import Scheme
from ....formats.format import AbstractFormat, settled
from ...pallas.decode import code_values, stored_values
from .quantize import Blocks


def decoded_tiles(
    codes: jax.Array,
    scales: dict[str, jax.Array],
    scheme: Scheme,
    length: int,
    tile: int,
    dtype: DTypeLike,
    *,
    is_last: bool,
    interpret: bool = False,
) -> jax.Array:
    """Dequantizes matrices.

    Args:
        codes: `[B, N, K]` with tiles along its last axis, or `[B, K, N]`, K in bytes.
        scales: "scale" and, if the scheme has them, "zero_point" `[B, tiles, N]` and "tensor_scale" `[1, 1]`.
        scheme: a scheme that `PallasTPUDequantizer.unsupported` accepts.
        length: K in elements.
        tile: the tile (block) size; the last tile may be short.
        dtype: of the result, float32 or bfloat16.
        is_last: whether tiles run along the last axis.
        interpret: whether to interpret the kernel, on any device, instead of compiling it.

    Returns:
        An array of the shape of `codes` with K in elements.
    """
    batch, others = len(codes), codes.shape[1 if is_last else 2]
    cut = Blocks.of(length, others, tile, scheme.format.bits, is_last=is_last)
    specs = dict.fromkeys(scales, cut.spec(cut.in_tiles, is_last=False))
    if "tensor_scale" in specs:
        specs["tensor_scale"] = pl.BlockSpec((1, 1), lambda b, n, k: (0, 0))
    scratch = [pltpu.VMEM((cut.filled, cut.columns), jnp.float32)]
    if 8 % cut.bits:  # codes that straddle bytes
        scratch.append(pltpu.VMEM((cut.filled * cut.bits // 8, cut.columns), jnp.int32))
    return pl.pallas_call(
        functools.partial(_kernel, cut, scheme, tuple(scales)),
        grid=(batch, *cut.grid),
        in_specs=[cut.spec(cut.in_bytes[1], is_last=is_last), *specs.values()],
        out_specs=cut.spec(cut.rows, is_last=is_last),
        out_shape=jax.ShapeDtypeStruct(cut.shape(batch, length, is_last=is_last), dtype),
        scratch_shapes=scratch,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",) * 3, vmem_limit_bytes=64 << 20),
        interpret=interpret,
        name="fewbit_dequantize",
    )(codes, *scales.values())


def _kernel(cut: Blocks, scheme: Scheme, names: tuple[str, ...], codes: Any, *refs: Any) -> None:
    """Dequantizes one block."""
    scale_refs, (y, numbers, *stream) = refs[: len(names)], refs[len(names) :]
    group = [cut.turned(codes[...])]
    if stream:
        group = _bytes_of_groups(cut, group[0], stream[0])
    _put_values(cut, scheme.format, group, numbers)
    tiles = numbers[...].reshape(-1, cut.tile, cut.columns)  # [tiles, K, columns]
    holders: dict[str, Any] = {
        "scale": scheme.scale,
        "zero_point": scheme.zero_holder,
        "tensor_scale": np.dtype(np.float32),
    }
    scales = {name: stored_values(ref[...], holders[name])[:, None] for name, ref in zip(names, scale_refs, strict=True)}
    values = _scaled(tiles, scheme, scales).reshape(cut.filled, cut.columns)[: cut.rows]
    y[...] = cut.turned(values).astype(y.dtype)


def _scaled(tiles: jax.Array, scheme: Scheme, scales: dict[str, jax.Array]) -> jax.Array:
    """Decoded codes, scaled."""
    scale = scales["scale"]
    if "tensor_scale" in scales:
        scale = scale * scales["tensor_scale"]
    if scheme.zero_point is None:
        return tiles * scale
    if isinstance(scheme.zero_point, AbstractFormat):
        return (tiles - scales["zero_point"]) * scale
    return settled(tiles * scale) + scales["zero_point"]


def _put_values(cut: Blocks, fmt: AbstractFormat, group: list[jax.Array], numbers: Any) -> None:
    """Writes the decoded codes of each byte or group of bytes, in order."""
    count = group[0].shape[0]
    for plane in range(cut.group):
        values, own = code_values(fmt, group, plane)
        if own != 1:
            values = values * jnp.float32(own)
        if cut.group == 1:
            numbers[:count, :] = values
        else:
            numbers[pl.ds(plane, count, stride=cut.group), :] = values


def _bytes_of_groups(cut: Blocks, packed: jax.Array, stream: Any) -> list[jax.Array]:
    """The first byte of every group, the second, and so on, for codes that straddle bytes."""
    stream[: packed.shape[0], :] = packed.astype(jnp.int32)
    count, size = cut.filled // cut.group, cut.group * cut.bits // 8
    return [stream[pl.ds(i, count, stride=size), :] for i in range(size)]
