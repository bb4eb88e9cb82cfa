"""Arrays of quantized weights, as several containers store them."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from ..._tiles import tile_counts
from ...array.packing import Packing, code_capacity, pack, unpack
from ...array.qarray import QArray
from ...array.scheme import Scheme
from ...errors import QuantError
from ..checkpoint import TensorInfo, Tensors
from .container import Weight

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
FLOATS = {dtype.name: dtype for dtype in map(np.dtype, (np.float32, np.float16, ml_dtypes.bfloat16))}
"""The dtypes of scales and of dequantized values, by their names."""
NAN_SCALE = 255
"""The byte of NaN in E8M0."""


def config_dtype(config: Mapping[str, Any], default: str) -> np.dtype:
    """The dtype of a model's values: `dtype` or `torch_dtype` of its `config.json`, else the default."""
    for section in (config, config.get("text_config")):
        for key in ("dtype", "torch_dtype"):
            if isinstance(section, Mapping) and isinstance(section.get(key), str):
                name = section[key].removeprefix("torch.")
                if name in FLOATS:
                    return FLOATS[name]
    return FLOATS[default]


def why_not_matrix(weight: Weight) -> str | None:
    """Why a weight is not a matrix of a module, `[out, in]`, with its codes packed along the last axis."""
    if not weight.name.endswith(".weight"):
        return "it stores weights of modules, whose names end in .weight"
    if len(weight.shape) != 2:
        return f"it stores matrices, and the weight has {len(weight.shape)} axes"
    if weight.scheme.pack_axis != -1:
        return f"codes are packed along the last axis there, and along axis {weight.scheme.pack_axis} here"
    return None


def packed_codes(q: QArray) -> np.ndarray:
    """The packed codes in the default order, code 0 in the lowest bits of byte 0."""
    if q.scheme.packing == Packing():
        return np.asarray(q.codes)
    bits, axis = q.scheme.format.bits, q.scheme.pack_axis
    codes = unpack(q.codes, bits, q.shape[axis], q.scheme.packing, axis=axis)
    return np.asarray(pack(codes, bits, axis=axis))


def unpacked_codes(q: QArray) -> np.ndarray:
    """The codes, one per byte."""
    axis = q.scheme.pack_axis
    return np.asarray(unpack(q.codes, q.scheme.format.bits, q.shape[axis], q.scheme.packing, axis=axis))


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
    zero = None if zero_point is None else jnp.asarray(zero_point)
    tensor = None if tensor_scale is None else jnp.asarray(tensor_scale)
    slack = code_capacity(codes.shape[scheme.pack_axis], scheme.format.bits) - length
    return QArray(jnp.asarray(codes), jnp.asarray(scale), zero, tensor, scheme, dtype, slack)


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
    if ndim is not None and len(info.shape) != ndim:
        raise QuantError(f"{where}: tensor {name!r} has shape {info.shape}, expected {ndim} axes")
    return info
