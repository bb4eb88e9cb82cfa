"""Reader of `.npz` files; never unpickles.

The JSON text of an entry `__config__` becomes the metadata.
"""

import io
import lzma
import math
import pathlib
import struct
import zipfile
import zlib
from typing import Any

import numpy as np

from .._json import parsed_object
from ..errors import QuantError
from .checkpoint import Checkpoint, TensorInfo, Tensors
from .files import file_size, mapped

_CONFIG = "__config__"
_SUFFIX = ".npy"
# Deflate cannot compress more than this, so a larger announced size is a damaged or hostile file.
_MAX_DEFLATE_RATIO = 1032
# All that zipfile raises on damaged archives: it passes its parsers' errors on.
ZIP_ERRORS = (zipfile.BadZipFile, zlib.error, lzma.LZMAError, struct.error, EOFError, OSError, RuntimeError, ValueError)


def read_npz(path: pathlib.Path) -> Checkpoint:
    """Reads an `.npz` file at once and checks the archive's checksums.

    Raises:
        QuantError: when the archive is damaged, names an array twice, or contains anything but plain arrays.
    """
    arrays = {name: _array(member, name, path) for name, member in _members(path).items()}
    config = arrays.pop(_CONFIG, None)
    metadata = {} if config is None else _metadata(config, path)
    for name, array in arrays.items():
        if array.dtype.kind not in "fiubc" or array.dtype.itemsize > 16:
            raise QuantError(f"{path}: array {name!r} has dtype {array.dtype}; expected numbers")
    info = {n: TensorInfo(a.shape, a.dtype.name, a.dtype.str, a.nbytes) for n, a in arrays.items()}
    return Checkpoint(path, "npz", Tensors(info, arrays.__getitem__), metadata)


def _members(path: pathlib.Path) -> dict[str, bytes]:
    """The content of every member, by the name without its suffix."""
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
            _check_count(len(entries), len(archive.comment), path)
            for entry in entries:
                _check_entry(entry, path)
            names = [entry.filename.removesuffix(_SUFFIX) for entry in entries]
            if len(set(names)) < len(names):
                twice = next(name for name in names if names.count(name) > 1)
                raise QuantError(f"{path}: the array {twice!r} appears twice")
            members = {name: archive.read(entry) for name, entry in zip(names, entries, strict=True)}
    except QuantError:
        raise
    except ZIP_ERRORS as error:
        raise QuantError(f"{path} is a damaged .npz file: {error or type(error).__name__}") from error
    for name, entry in zip(names, entries, strict=True):
        if len(members[name]) != entry.file_size:
            raise QuantError(
                f"{path} is a damaged .npz file: {name!r} has {len(members[name])} bytes, not {entry.file_size}"
            )
    return members


def _check_count(found: int, comment: int, path: pathlib.Path) -> None:
    """Checks the number of members in the archive's last record; zipfile does not."""
    mark, announced = struct.unpack("<4s6xH10x", mapped(path, file_size(path) - 22 - comment, 22).tobytes())
    if mark != b"PK\x05\x06" or announced != min(found, 0xFFFF):
        raise QuantError(f"{path} is a damaged .npz file: {found} members are found, {announced} are announced")


def _check_entry(entry: zipfile.ZipInfo, path: pathlib.Path) -> None:
    """Refuses entries that numpy does not write, before unpacking."""
    if not entry.filename.endswith(_SUFFIX):
        raise QuantError(
            f"{path} is a zip archive, but not an .npz file: it contains {entry.filename!r}. fewbit reads no "
            "pickles (.pt, .pth, .bin); save the weights as safetensors"
        )
    if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise QuantError(f"{path}: {entry.filename!r} is compressed by method {entry.compress_type}; numpy writes 0 and 8")
    ratio = {zipfile.ZIP_STORED: 1}.get(entry.compress_type, _MAX_DEFLATE_RATIO)
    if entry.file_size > ratio * entry.compress_size or entry.compress_size > path.stat().st_size:
        raise QuantError(
            f"{path} is a damaged .npz file: {entry.filename!r} announces an impossible size of {entry.file_size} bytes"
        )


def _array(data: bytes, name: str, path: pathlib.Path) -> np.ndarray:
    """Parses an .npy member; checks its shape against its size first."""
    file = io.BytesIO(data)
    try:
        version = np.lib.format.read_magic(file)
        readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
        if version not in readers:
            raise QuantError(f"{path}: array {name!r} has .npy version {version}; 1.0 and 2.0 are read")
        shape, is_fortran, dtype = readers[version](file)
    except QuantError:
        raise
    except (ValueError, TypeError, EOFError) as error:
        raise QuantError(f"{path}: array {name!r} has a damaged header: {error}") from error
    if dtype.hasobject:
        raise QuantError(f"{path}: array {name!r} is a pickle of Python objects, which fewbit does not read")
    body = memoryview(data)[file.tell() :]
    if len(body) != math.prod(shape) * dtype.itemsize or dtype.itemsize == 0:
        raise QuantError(f"{path}: array {name!r} of {dtype} and shape {shape} has {len(body)} bytes of data")
    array = np.frombuffer(body, dtype).reshape(shape, order="F" if is_fortran else "C")
    return array.astype(dtype.newbyteorder("="), copy=False)


def _metadata(config: np.ndarray, path: pathlib.Path) -> dict[str, Any]:
    where = f"{path}: array {_CONFIG!r}"
    if config.dtype.kind not in "US" or config.size != 1:
        raise QuantError(f"{where} is {config.dtype}{list(config.shape)}; expected one JSON text")
    text = config.reshape(-1)[0]
    if config.dtype.kind == "S":
        return parsed_object(bytes(text), where)
    return parsed_object(str(text).encode("utf-8", "surrogatepass"), where)
