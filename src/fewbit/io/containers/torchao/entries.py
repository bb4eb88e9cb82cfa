"""Which class of torchao stores a scheme, with its arrays and attributes."""

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np

from ....array.qarray import QArray
from ....array.scheme import SCHEMES, Scheme
from ....errors import QuantError
from ....formats.e8m0 import E8M0
from ....formats.format import AbstractFormat
from ....formats.integer import Integer
from ..container import Weight
from ..encodings.stored import E4M3, packed_codes, per_tile, unpacked_codes

E8M0_DTYPE = np.dtype(ml_dtypes.float8_e8m0fnu)
E5M2 = np.dtype(ml_dtypes.float8_e5m2)
FLOAT8 = {"e4m3fn": E4M3, "e5m2": E5M2}
"""The dtypes of 8-bit floats, by format."""
MX = {
    "float8_e4m3fn": "mxfp8",
    "float8_e5m2": "mxfp8_e5m2",
    "fp6_e2m3": "mxfp6",
    "fp6_e3m2": "mxfp6_e3m2",
    "float4_e2m1fn_x2": "mxfp4",
}
"""The scheme of each element dtype of MXTensor."""


def class_of(scheme: Scheme) -> str | None:
    """The class for a scheme; None if there is none."""
    fmt, scale = scheme.format, scheme.scale
    if _mx_element(scheme) is not None:
        return "MXTensor"
    if _is_nvfp4(scheme):
        return "NVFP4Tensor"
    if isinstance(scale, AbstractFormat | Scheme):
        return None
    if isinstance(fmt, Integer) and fmt.signed and fmt.step == 1 and scheme.zero_point in (None, fmt):
        return "Int8Tensor" if fmt.bits == 8 else "IntxUnpackedToInt8Tensor"
    if fmt.name in FLOAT8 and scheme.zero_point is None:
        return "Float8Tensor"
    return None


def _mx_element(scheme: Scheme) -> str | None:
    """torchao's name of the element dtype of an MX scheme."""
    if not isinstance(scheme.scale, E8M0) or scheme.zero_point is not None:
        return None
    return next((name for name, preset in MX.items() if SCHEMES[preset].format == scheme.format), None)


def _is_nvfp4(scheme: Scheme) -> bool:
    preset = SCHEMES["nvfp4"]
    fields = ("format", "scale", "tensor_scale", "zero_point")
    return all(getattr(scheme, field) == getattr(preset, field) for field in fields)


def why_not_tiled(weight: Weight, kind: str) -> str | None:
    """Why the tiles of a weight are not those of a class."""
    tiles = weight.scheme.tiles(len(weight.shape))
    block = {"MXTensor": 32, "NVFP4Tensor": 16}.get(kind)
    if block is not None and tiles != (*[1] * (len(tiles) - 1), block):
        return f"its blocks are {block} elements of a row"
    if kind == "IntxUnpackedToInt8Tensor" and any(t != 1 for t in tiles[:-1]):
        return "integers below 8 bits have scales per row or group there"
    for n, tile in zip(weight.shape, tiles, strict=True):
        if tile is not None and n % tile:
            return f"an axis of {n} elements is no multiple of {tile}"
    return None


def _block_size(shape: Sequence[int], scheme: Scheme) -> list[int]:
    tiles = scheme.tiles(len(shape))
    return [n if tile is None else tile for n, tile in zip(shape, tiles, strict=True)]


def parts_of(q: QArray) -> dict[str, np.ndarray]:
    """The arrays of a weight by torchao's attribute."""
    kind, scale = class_of(q.scheme), per_tile(q.scale, q)
    fmt = q.scheme.format
    if kind == "MXTensor":
        element = _mx_element(q.scheme)
        codes = unpacked_codes(q) if fmt.bits == 6 else packed_codes(q)
        return {
            "qdata": codes.view(FLOAT8[fmt.name]) if element in ("float8_e4m3fn", "float8_e5m2") else codes,
            "scale": scale.view(E8M0_DTYPE),
        }
    if kind == "NVFP4Tensor":
        factor = np.asarray(q.tensor_scale)
        if factor.size != 1:
            raise QuantError(f"a tensor scale of shape {factor.shape} is not one number")
        return {"qdata": packed_codes(q), "scale": scale.view(E4M3), "per_tensor_scale": factor.reshape(())}
    if kind == "Float8Tensor":
        return {"qdata": packed_codes(q).view(FLOAT8[fmt.name]), "scale": scale}
    parts = {"qdata": _signed(unpacked_codes(q), fmt.bits), "scale": scale}
    if q.zero_point is not None:
        parts["zero_point"] = _signed(per_tile(q.zero_point, q), fmt.bits)
    elif kind == "IntxUnpackedToInt8Tensor":
        parts["zero_point"] = np.zeros(scale.shape, np.int8)
    return parts


def _signed(codes: np.ndarray, bits: int) -> np.ndarray:
    """Two's complement codes as int8."""
    half = np.uint8(2 ** (bits - 1))
    return ((codes ^ half) - half).view(np.int8)


def _dtype(name: str) -> dict[str, str]:
    return {"_type": "torch.dtype", "_data": name}


def entry_of(weight: Weight) -> dict[str, Any]:
    """The class and attributes of a weight."""
    scheme, kind = weight.scheme, class_of(weight.scheme)
    names = ["qdata", "scale"]
    data: dict[str, Any]
    if kind == "MXTensor":
        element = _mx_element(scheme)
        assert element is not None
        data = {
            "elem_dtype": element if element.startswith("fp6") else _dtype(element),
            "block_size": 32,
            "orig_dtype": _dtype(weight.dtype),
            "kernel_preference": {"_type": "KernelPreference", "_data": "EMULATED"},
            "act_quant_kwargs": None,
            "is_swizzled_scales": False,
        }
    elif kind == "NVFP4Tensor":
        names = ["per_tensor_scale", *names]
        data = {"is_swizzled_scales": False, "use_triton_kernel": False, "act_quant_kwargs": None, "block_size": 16}
        data["orig_dtype"] = _dtype(weight.dtype)
    else:
        data = {"block_size": _block_size(weight.shape, scheme), "dtype": _dtype(weight.dtype)}
        if kind == "Int8Tensor":
            data |= {"act_quant_kwargs": None, "reduce_range": False}
        elif kind == "Float8Tensor":
            data |= {"mm_config": None, "act_quant_kwargs": None}
            data["kernel_preference"] = {"_type": "KernelPreference", "_data": "AUTO"}
        else:
            data |= {"target_dtype": _dtype(f"int{scheme.format.bits}"), "activation_quantization": None}
        if kind == "IntxUnpackedToInt8Tensor":
            names = [*names, "zero_point"]
        elif scheme.zero_point is not None:
            names = ["zero_point", *names]
    return {"_type": kind, "_data": data, "_tensor_data_names": names}
