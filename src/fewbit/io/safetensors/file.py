"""Reader and writer of one safetensors file.

The file is eight bytes with the length of a JSON header, the header with each tensor's dtype, shape and offsets, then the data. It
needs no framework here, and every dtype of ml_dtypes that the format names is read as it is.

Reference: safetensors format (Hugging Face, safetensors README).
"""

import dataclasses
import json
import math
import pathlib
import struct
from collections.abc import Mapping
from typing import Annotated, Any

import ml_dtypes
import msgspec
import numpy as np

from ..._json import Count, converted, parsed_object
from ...errors import QuantError
from ..files import FilePart, check_spans, file_size, mapped

_MAX_HEADER = 100_000_000
_ALIGNMENT = 8

DTYPES: dict[str, np.dtype] = {
    name: np.dtype(dtype)
    for name, dtype in {
        "BOOL": np.bool_,
        "U8": np.uint8,
        "I8": np.int8,
        "U16": np.uint16,
        "I16": np.int16,
        "U32": np.uint32,
        "I32": np.int32,
        "U64": np.uint64,
        "I64": np.int64,
        "F16": np.float16,
        "BF16": ml_dtypes.bfloat16,
        "F32": np.float32,
        "F64": np.float64,
        "C64": np.complex64,
        "F8_E4M3": ml_dtypes.float8_e4m3fn,
        "F8_E5M2": ml_dtypes.float8_e5m2,
        "F8_E8M0": ml_dtypes.float8_e8m0fnu,
        "F8_E4M3FNUZ": ml_dtypes.float8_e4m3fnuz,
        "F8_E5M2FNUZ": ml_dtypes.float8_e5m2fnuz,
    }.items()
}
"""The format's dtypes that numpy and ml_dtypes have, by the format's names."""

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class _Entry(msgspec.Struct, forbid_unknown_fields=True):
    """JSON schema of a tensor in the header."""

    dtype: str
    shape: Annotated[list[Count], msgspec.Meta(max_length=32)]
    data_offsets: tuple[Count, Count]


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """One tensor of a file.

    Attributes:
        dtype: the format's name of the dtype.
        shape: the shape.
        part: where its bytes are.
    """

    dtype: str
    shape: tuple[int, ...]
    part: FilePart

    def array(self) -> np.ndarray:
        """The array, a read-only view of the file."""
        return self.part.read().view(DTYPES[self.dtype]).reshape(self.shape)


def dtype_name(dtype: np.dtype, where: str) -> str:
    """The format's name of a dtype.

    Raises:
        QuantError: for a dtype that safetensors lacks.
    """
    if dtype not in _NAMES:
        raise QuantError(f"{where} has dtype {dtype}; safetensors files store {', '.join(d.name for d in _NAMES)}")
    return _NAMES[dtype]


def read_file(path: pathlib.Path) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """The tensors of a safetensors file, which are not read yet, and its `__metadata__`.

    Raises:
        QuantError: for a header that is truncated, not JSON, names a tensor twice, or leaves gaps or overlaps between tensors;
            and for a dtype that numpy does not have.
    """
    size = file_size(path)
    header, start = _header(path, size)
    metadata = converted(header.pop("__metadata__", {}), dict[str, str], f"{path}: __metadata__ of the header")
    places = {name: _place(name, form, path) for name, form in header.items()}
    spans = sorted(((name, begin, end) for name, (_, _, begin, end) in places.items()), key=lambda span: span[1:])
    check_spans(spans, size - start, str(path))
    tensors = {}
    for name, (dtype, shape, begin, end) in places.items():
        tensors[name] = StoredTensor(dtype, shape, FilePart(path, start + begin, end - begin))
    return tensors, metadata


def file_header(tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> bytes:
    """The header of a file with these arrays in this order.

    The order must keep arrays aligned: see `ordered`.
    """
    form: dict[str, Any] = {}
    if metadata:
        form["__metadata__"] = dict(metadata)
    end = 0
    for name, array in tensors.items():
        begin, end = end, end + array.nbytes
        dtype = dtype_name(array.dtype, f"tensor {name!r}")
        form[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [begin, end]}
    text = json.dumps(form, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    text += b" " * (-len(text) % _ALIGNMENT)
    return struct.pack("<Q", len(text)) + text


def array_bytes(array: np.ndarray) -> memoryview:
    """The bytes of a contiguous array, without a copy."""
    return array.reshape(-1).view(np.uint8).data


def ordered(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Sorts arrays by item size, widest first, so that each is aligned."""
    return dict(sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize))


def _header(path: pathlib.Path, size: int) -> tuple[dict[str, Any], int]:
    """The JSON header of a file, and the offset of the data. `size` is the bytes of the file."""
    if size < 8:
        raise QuantError(f"{path} is not a safetensors file: it has {size} bytes, and the header length alone takes 8")
    (length,) = struct.unpack("<Q", mapped(path, 0, 8).tobytes())
    if length > _MAX_HEADER or length > size - 8:
        raise QuantError(
            f"{path} is not a safetensors file, or is cut off: its first 8 bytes announce a header of {length} bytes, "
            f"and {size - 8} follow"
        )
    return parsed_object(mapped(path, 8, length).tobytes(), f"the header of {path}"), 8 + length


def _place(name: str, form: object, path: pathlib.Path) -> tuple[str, tuple[int, ...], int, int]:
    """Dtype, shape, begin and end of a tensor, checked for consistency."""
    where = f"{path}: tensor {name!r}"
    entry = converted(form, _Entry, where)
    dtype, shape, offsets = entry.dtype, entry.shape, entry.data_offsets
    if dtype not in DTYPES:
        raise QuantError(f"{where} has dtype {dtype!r:.40}; fewbit reads {', '.join(DTYPES)}")
    needed, found = math.prod(shape) * DTYPES[dtype].itemsize, offsets[1] - offsets[0]
    if needed != found:
        raise QuantError(f"{where}: {dtype} of shape {tuple(shape)} takes {needed} bytes, but its data_offsets span {found}")
    return dtype, tuple(shape), offsets[0], offsets[1]
