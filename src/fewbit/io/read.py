"""Opens any supported container, recognised by its content."""

import dataclasses
import os
import pathlib

from ..errors import QuantError
from .checkpoint import Checkpoint
from .containers.reader import with_weights
from .files import checked_path, file_size, mapped
from .gguf.reader import read_gguf
from .native.reader import is_fewbit_directory, read_directory
from .npz import read_npz
from .orbax import is_orbax_directory, read_orbax
from .safetensors.reader import INDEX, read_safetensors_directory, read_safetensors_file

_MAGICS = {b"GGUF": read_gguf, b"PK\x03\x04": read_npz, b"PK\x05\x06": read_npz}
_SUFFIXES = {".gguf": read_gguf, ".npz": read_npz, ".safetensors": read_safetensors_file}


def read(path: str | os.PathLike[str]) -> Checkpoint:
    """Opens a GGUF, safetensors or `.npz` file, or a model directory.

    Tensors are loaded one by one when they are indexed; only `.npz` and Orbax checkpoints are read at once.

    Args:
        path: the file or directory.

    Returns:
        The checkpoint.

    Raises:
        QuantError: when the path does not exist, is not a model, or is damaged; the message names the file.
        UnsupportedError: for a tensor type or layout version that fewbit lacks.

    >>> import os, tempfile
    >>> path = os.path.join(tempfile.mkdtemp(), "model.npz")
    >>> np.savez(path, weight=np.ones((4, 3), np.float16))
    >>> checkpoint = read(path)
    >>> checkpoint.kind, checkpoint.tensors.info["weight"].shape, checkpoint.tensors["weight"].dtype.name
    ('npz', (4, 3), 'float16')
    """
    given = checked_path(path)
    path = given.absolute()  # tensors are read later, perhaps from another working directory
    return dataclasses.replace(_read_directory(path) if path.is_dir() else _read_file(path), path=given)


def _read_file(path: pathlib.Path) -> Checkpoint:
    start = mapped(path, 0, min(9, file_size(path))).tobytes()
    reader = _MAGICS.get(start[:4]) or _SUFFIXES.get(path.suffix)
    if reader is None and start[8:9] == b"{":
        reader = read_safetensors_file
    if reader is None:
        raise QuantError(
            f"{path} is not a model that fewbit reads: it begins with {start[:4]!r}. Expected a GGUF, safetensors or "
            ".npz file; pickles (.pt, .bin) are never read, save the weights as safetensors"
        )
    return reader(path)


def _read_directory(path: pathlib.Path) -> Checkpoint:
    if is_fewbit_directory(path):
        return read_directory(path)
    if (path / INDEX).is_file() or any(path.glob("*.safetensors")):
        return with_weights(read_safetensors_directory(path))
    if is_orbax_directory(path):
        return read_orbax(path)
    others = sorted(one.name for one in path.iterdir() if one.suffix in _SUFFIXES or is_orbax_directory(one))
    hint = f"; pass one of its files or checkpoints: {', '.join(others)}" if others else ""
    raise QuantError(
        f"{path} is not a model directory: it has neither a fewbit manifest, safetensors files nor an Orbax tree{hint}"
    )
