"""Opens directories of other programs, with quantized weights as QArrays."""

import collections
import dataclasses
import pathlib

import numpy as np

from ...errors import UnsupportedError
from ..checkpoint import Checkpoint, Tensors
from ..native.manifest import FORMAT, MANIFEST, read_manifest
from ..native.reader import checked_array, checked_files, stored_tensors
from .container import notes_on_floats
from .registry import CONTAINERS


def with_weights(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint with the quantized weights of its container as QArrays.

    `metadata` loses the section that describes them, and `notes` says which container it is. A directory without such a
    section comes back unchanged, but for a section that is null or empty, which `metadata` loses too.

    Args:
        checkpoint: a Hugging Face directory, its tensors as stored.

    Raises:
        QuantError: when the tensors of a weight do not fit together, or a file that fewbit wrote was changed.
        UnsupportedError: for a variant of the container that has no scheme, or codes that no section describes.
    """
    checkpoint = _with_hashes(checkpoint)
    if not checkpoint.metadata.get(_SECTION, True):
        stated = {key: value for key, value in checkpoint.metadata.items() if key != _SECTION}
        checkpoint = dataclasses.replace(checkpoint, metadata=stated)
    found = next((one for one in CONTAINERS if one.recognises(checkpoint.metadata, checkpoint.tensors)), None)
    if found is None:
        _check_no_codes(checkpoint)
        return checkpoint
    tensors = found.decoded(checkpoint.metadata, checkpoint.tensors, str(checkpoint.path))
    metadata = {key: value for key, value in checkpoint.metadata.items() if key not in found.config_keys}
    floats = notes_on_floats(checkpoint.tensors, tensors)
    notes = (*checkpoint.notes, f"{found.name}: {_counts(tensors)}", *floats)
    return dataclasses.replace(checkpoint, tensors=tensors, metadata=metadata, notes=notes)


_SECTION = "quantization_config"
_SCALES = ("scales", "weight_scale", "weight_scale_inv", "SCB", "weight.absmax")
"""The last part of a scale's name, in the containers of other programs."""
_CODES = ("int8", "uint8", "int32", "uint32", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")


def _check_no_codes(checkpoint: Checkpoint) -> None:
    """Refuses codes with scales of their own that no section describes; read as numbers they would be something else."""
    info = checkpoint.tensors.info
    if _SECTION in checkpoint.metadata:
        return  # a container that is not known; it can be inspected, and planning refuses it
    for name, entry in info.items():
        module, _, part = name.rpartition(".")
        if part not in ("weight", "qweight") or entry.dtype not in _CODES:
            continue
        scale = next((scale for part in _SCALES if (scale := f"{module}.{part}") in info), None)
        if scale is not None:
            raise UnsupportedError(
                f"{checkpoint.path} has quantized weights (the {entry.dtype} codes {name!r} with {scale!r}), but config.json has no "
                "'quantization_config' that says how to read them; put the contents of quant_config.json or "
                "quantize_config.json there, or start from the float checkpoint"
            )


def _counts(tensors: Tensors) -> str:
    """The number of weights in each scheme."""
    schemes = collections.Counter(info.scheme.name for info in tensors.info.values() if info.scheme is not None)
    if not schemes:
        return "no quantized weights"
    return ", ".join(f"{count} weights in {name}" for name, count in schemes.items())


def _with_hashes(checkpoint: Checkpoint) -> Checkpoint:
    """Checks a directory that fewbit wrote against its manifest. The bytes of each tensor are checked when it is loaded."""
    path = checkpoint.path
    if not _is_ours(path):
        return checkpoint
    manifest = read_manifest(path)
    checked_files(path, manifest)
    stored = stored_tensors(path, manifest)

    def load(name: str) -> np.ndarray:
        return checked_array(path, manifest, name, stored[name])

    tensors = Tensors(checkpoint.tensors.info, load, checkpoint.tensors.metadata)
    return dataclasses.replace(checkpoint, tensors=tensors, facts=dict(manifest.facts))


def _is_ours(path: pathlib.Path) -> bool:
    """Whether fewbit wrote the directory: its manifest has our format."""
    file = path / MANIFEST
    return file.is_file() and f'"format": "{FORMAT}"'.encode() in file.read_bytes()[:4096]
