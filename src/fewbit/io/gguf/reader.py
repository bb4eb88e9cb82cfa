"""Reader of GGUF files.

The simple block types become QArrays without loss; the other quantized types decode to float32.
"""

import dataclasses
import enum
import math
import pathlib
from types import ModuleType

import numpy as np

from ...array.qarray import QArray
from ...array.scheme import SCHEMES
from ...errors import QuantError, UnsupportedError
from ..checkpoint import Checkpoint, TensorInfo, Tensors
from ..files import FilePart, check_spans, file_size, mapped
from .blocks import LAYOUTS, is_lossless, qarray_from_blocks
from .header import TensorEntry, read_header
from .stored import PLAIN


def read_gguf(path: pathlib.Path) -> Checkpoint:
    """Opens a GGUF file (version 2 or 3, little-endian, not split).

    Tensors of the types of `LAYOUTS` (Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, IQ4_NL, MXFP4, NVFP4, TQ1_0, TQ2_0) load as QArrays with the
    dequantized values of ggml; F64, F32, F16, BF16 and integers unchanged; all other types as the float32 array that the gguf
    package decodes. The tensor scale of an NVFP4 tensor, a tensor `.scale` in the file, is part of the QArray. `metadata` has
    every field, and `notes` names the decoded tensors.

    Args:
        path: the file.

    Raises:
        QuantError: when the file is damaged, or the gguf package is not installed.
        UnsupportedError: for a tensor type that the gguf package cannot decode.

    Reference: GGUF specification (ggml, docs/gguf.md).
    """
    package = gguf_package(f"reading {path}")
    header = read_header(mapped(path), str(path))
    kinds = {entry.name: _kind(entry, package, path) for entry in header.entries}
    sizes = {entry.name: _byte_count(entry, kinds[entry.name], package, path) for entry in header.entries}
    spans = ((e.name, e.offset, e.offset + sizes[e.name]) for e in header.entries)
    check_spans(spans, file_size(path) - header.data_start, str(path), alignment=header.alignment)
    parts = header.metadata.get("split.count", 1)
    if parts not in (0, 1):
        raise QuantError(f"{path} is one of {parts} parts of a split GGUF file; merge them first (llama-gguf-split --merge)")
    stored = {e.name: FilePart(path, header.data_start + e.offset, sizes[e.name]) for e in header.entries}
    info = {e.name: _info(stored[e.name], kinds[e.name].name, e.shape) for e in header.entries}
    _check_decodable(kinds, package, path)
    scales = _tensor_scales(info)
    for name in scales:
        scale = info.pop(scale_name(name))
        info[name] = dataclasses.replace(info[name], nbytes=info[name].nbytes + scale.nbytes)

    def load(name: str) -> np.ndarray | QArray:
        scale = stored[scales[name]].read().view(np.float32) if name in scales else None
        return _loaded(stored[name].read(), kinds[name], info[name], package, scale)

    return Checkpoint(path, "gguf", Tensors(info, load), header.metadata, notes=_notes(info))


def gguf_package(what: str) -> ModuleType:
    """The gguf package.

    Args:
        what: what needs it, for the message.
    """
    try:
        import gguf
    except ImportError as error:
        raise QuantError(f"{what} needs the gguf package: pip install fewbit[io]") from error
    return gguf


def scale_name(name: str) -> str:
    """The name of the tensor with the scale of an NVFP4 tensor.

    >>> scale_name("blk.0.ffn_up.weight")
    'blk.0.ffn_up.scale'
    """
    return name.removesuffix(".weight") + ".scale"


def _kind(entry: TensorEntry, package: ModuleType, path: pathlib.Path) -> enum.IntEnum:
    """The gguf package's member of a tensor's type."""
    try:
        return package.GGMLQuantizationType(entry.type_id)
    except ValueError as error:
        raise QuantError(
            f"{path}: tensor {entry.name!r} has ggml type {entry.type_id}, which the installed gguf package does not "
            "know; the file is damaged, or needs a newer gguf"
        ) from error


def _byte_count(entry: TensorEntry, kind: enum.IntEnum, package: ModuleType, path: pathlib.Path) -> int:
    """The size of a tensor in bytes, from its type and shape."""
    block, size = package.GGML_QUANT_SIZES[kind]
    (row,) = entry.shape[-1:] or (1,)
    if row % block:
        raise QuantError(
            f"{path}: tensor {entry.name!r} of shape {entry.shape} has type {kind.name}, whose blocks of {block} do "
            f"not divide rows of {row}; the file is damaged"
        )
    return math.prod(entry.shape) // block * size


def _check_decodable(kinds: dict[str, enum.IntEnum], package: ModuleType, path: pathlib.Path) -> None:
    """Refuses a file with a tensor type that cannot be decoded."""
    for kind in {kind for kind in kinds.values() if kind.name not in PLAIN and kind.name not in LAYOUTS}:
        _, size = package.GGML_QUANT_SIZES[kind]
        try:
            package.quants.dequantize(np.zeros((1, size), np.uint8), kind)
        except NotImplementedError as error:
            name = next(name for name, other in kinds.items() if other == kind)
            raise UnsupportedError(f"{path}: tensor {name!r} has type {kind.name}", {"gguf": str(error)}) from error


def _info(part: FilePart, type_name: str, shape: tuple[int, ...]) -> TensorInfo:
    if type_name in LAYOUTS and shape and is_lossless(part.read(), type_name):
        return TensorInfo(shape, "float32", type_name, part.nbytes, SCHEMES[LAYOUTS[type_name].scheme])
    return TensorInfo(shape, np.dtype(PLAIN.get(type_name, np.float32)).name, type_name, part.nbytes)


def _tensor_scales(info: dict[str, TensorInfo]) -> dict[str, str]:
    """The tensor with the scale of each NVFP4 tensor.

    A scale is one number, or one for each expert. Tensors without one are left out.
    """
    found: dict[str, str] = {}
    for name, entry in info.items():
        scale = info.get(scale_name(name))
        if entry.stored != "NVFP4" or entry.scheme is None or scale is None or scale.stored != "F32":
            continue
        if scale.shape == (1,) or (len(entry.shape) == 3 and scale.shape == entry.shape[:1]):
            found[name] = scale_name(name)
    return found


def _loaded(
    data: np.ndarray, kind: enum.IntEnum, info: TensorInfo, package: ModuleType, tensor_scale: np.ndarray | None
) -> np.ndarray | QArray:
    shape = info.shape
    if info.scheme is not None:
        return qarray_from_blocks(data, kind.name, shape, tensor_scale)
    if kind.name in PLAIN:
        return data.view(PLAIN[kind.name]).reshape(shape)
    block, size = package.GGML_QUANT_SIZES[kind]
    # An infinite scale times code 0 is NaN, as in ggml: `verify` reports it, numpy must not warn.
    with np.errstate(all="ignore"):
        decoded = package.quants.dequantize(data.reshape(*shape[:-1], shape[-1] // block * size), kind)
    return decoded.astype(np.float32, copy=False).reshape(shape)


def _notes(info: dict[str, TensorInfo]) -> tuple[str, ...]:
    """One sentence for each decoded type."""
    decoded: dict[str, list[str]] = {}
    for name, entry in info.items():
        if entry.scheme is None and entry.stored not in PLAIN:
            decoded.setdefault(entry.stored, []).append(name)
    return tuple(
        f"{len(names)} tensors of type {t} are decoded to float32: {', '.join(names)}" for t, names in decoded.items()
    )
