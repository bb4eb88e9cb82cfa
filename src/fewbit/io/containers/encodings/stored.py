"""Arrays of quantized weights, as several containers store them."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from ...._tiles import FrozenTileMap, Tile, tile_counts, tile_map
from ....array.packing import Packing, code_capacity, pack, unpack
from ....array.qarray import QArray
from ....array.scheme import Scheme
from ....errors import QuantError
from ....formats.format import FORMATS
from ...checkpoint import TensorInfo, Tensors
from .packed_bits import unpacked_bits

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
FLOATS = {dtype.name: dtype for dtype in map(np.dtype, (np.float32, np.float16, ml_dtypes.bfloat16))}
"""The dtypes of scales and of dequantized values, by their names."""
NAN_SCALE = 255
"""The byte of NaN in E8M0."""


def config_dtype(config: Mapping[str, Any], default: str) -> np.dtype:
    """The dtype of a model's values: `dtype` or `torch_dtype` of its `config.json`, else the default."""
    named = named_dtype(config)
    return FLOATS[default] if named is None else named


def named_dtype(config: Mapping[str, Any]) -> np.dtype | None:
    """The dtype that a `config.json` names. None without one."""
    for section in (config, config.get("text_config")):
        for key in ("dtype", "torch_dtype"):
            if isinstance(section, Mapping) and isinstance(section.get(key), str):
                name = section[key].removeprefix("torch.")
                if name in FLOATS:
                    return FLOATS[name]
    return None


def stored_integers(bits: int, tiles: Sequence[Tile], scale: str, *, has_zero: bool) -> Scheme:
    """Signed integers, or unsigned ones with a zero point of the same format for each scale."""
    if not has_zero:
        return Scheme(FORMATS[f"int{bits}"], named_tiles(tiles), scale=scale)
    fmt = FORMATS[f"uint{bits}"]
    return Scheme(fmt, named_tiles(tiles), scale=scale, zero_point=fmt)


def packed_codes(q: QArray) -> np.ndarray:
    """The packed codes in the default order, code 0 in the lowest bits of byte 0."""
    if q.scheme.packing == Packing():
        return np.asarray(q.codes)
    bits, axis = q.scheme.format.bits, q.scheme.pack_axis
    codes = unpack(jnp.asarray(q.codes), bits, q.shape[axis], q.scheme.packing, axis=axis)
    return np.asarray(pack(codes, bits, axis=axis))


def unpacked_codes(q: QArray) -> np.ndarray:
    """The codes of an array that is packed along its last axis, one per byte."""
    packed = packed_codes(q)
    rows = packed.reshape(-1, packed.shape[-1])
    return unpacked_bits(rows, q.shape[-1], q.scheme.format.bits).reshape(q.shape)


def per_tile(leaf: Any, q: QArray) -> np.ndarray:
    """A scale or zero point with one element for each tile of the scheme."""
    counts = tile_counts(q.shape, q.scheme.tiles(q.ndim))
    host = np.asarray(leaf)
    if host.ndim != len(counts) or any(n not in (1, m) for n, m in zip(host.shape, counts, strict=True)):
        raise QuantError(f"a QArray of shape {q.shape} has scales of shape {host.shape}; its scheme has tiles {counts}")
    return np.ascontiguousarray(np.broadcast_to(host, counts))


def built(
    codes: np.ndarray,
    scale: np.ndarray,
    scheme: Scheme,
    length: int,
    dtype: np.dtype,
    zero_point: np.ndarray | None = None,
    tensor_scale: np.ndarray | None = None,
) -> QArray:
    """The QArray of packed codes, of which `length` lie along the packed axis."""
    slack = code_capacity(codes.shape[scheme.pack_axis], scheme.format.bits) - length
    # device_put, unlike jnp.asarray, compiles nothing for a new shape
    leaves: Any = jax.device_put((codes, scale, zero_point, tensor_scale))
    placed, scales, zero, tensor = leaves
    return QArray(placed, scales, zero, tensor, scheme, dtype, slack)


def described(
    tensors: Tensors, parts: Sequence[str], shape: tuple[int, ...], dtype: np.dtype, stored: str, scheme: Scheme
) -> TensorInfo:
    """The description of a weight that is stored in these parts."""
    nbytes = sum(tensors.info[part].nbytes for part in parts)
    return TensorInfo(shape, dtype.name, stored, nbytes, scheme)


def checked_info(tensors: Tensors, name: str, where: str, dtypes: Sequence[str], ndim: int | None = None) -> TensorInfo:
    """The description of a stored array. QuantError if it is missing, or has another dtype or number of axes."""
    info = tensors.info.get(name)
    if info is None:
        raise QuantError(f"{where}: tensor {name!r} is missing")
    if info.dtype not in dtypes:
        raise QuantError(f"{where}: tensor {name!r} is {info.dtype}, expected {' or '.join(dtypes)}")
    if 0 in info.shape:
        raise QuantError(f"{where}: tensor {name!r} has shape {info.shape}, which has no elements")
    if ndim is not None and len(info.shape) != ndim:
        raise QuantError(f"{where}: tensor {name!r} has shape {info.shape}, expected {ndim} axes")
    return info


def named_tiles(tiles: Sequence[Tile]) -> FrozenTileMap:
    """The tiles of each axis, written as the presets are."""
    return tile_map(tiles, None if set(tiles) == {None} else 1)
