"""Looks through a stored model for what is wrong: changed bytes, parts that do not fit, numbers that are not finite."""

import dataclasses
import hashlib
import os
import pathlib
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from ..array import QArray, Scheme, unpack
from ..errors import QuantError, UnsupportedError
from ..formats import AbstractFormat
from ..kernels.quantize import dequantize
from .checkpoint import Checkpoint
from .manifest import MANIFEST, read_manifest
from .mapped import checked_path, mapped
from .read import read

_CHUNK = 1 << 26


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that `verify` found.

    Attributes:
        severity: "error" for what makes results wrong, "warning" for what may be meant.
        where: the file or the tensor.
        message: what is wrong.
    """

    severity: Literal["error", "warning"]
    where: str
    message: str

    def __str__(self) -> str:
        return f"{self.severity}: {self.where}: {self.message}"


def verify(path: str | os.PathLike[str]) -> list[Finding]:
    """Reads every byte of a stored model and says what is wrong with it.

    Of a fewbit directory every file and tensor is hashed and compared with the manifest. Of every container each tensor
    is
    loaded: the parts of a quantized one must fit its scheme; NaN and infinity in scales, offsets and plain tensors are
    errors, scales of zero (whose tiles are all zero) and files that the manifest does not know are warnings.

    Args:
        path: anything that `read` takes.

    Returns:
        The findings; none when all is well. A model that cannot be opened gives one.

    Raises:
        QuantError: when there is nothing at the path.

    >>> import os, tempfile
    >>> path = os.path.join(tempfile.mkdtemp(), "model.npz")
    >>> np.savez(path, weight=np.array([1.0, np.nan]))
    >>> [str(finding) for finding in verify(path)]
    ['error: weight: 1 of 2 elements are NaN or infinite']
    """
    path = checked_path(path)
    try:
        checkpoint = read(path)
    except (QuantError, UnsupportedError) as error:
        return [Finding("error", str(path), str(error))]
    findings = _file_findings(path) if checkpoint.kind == "fewbit" else []
    for name in checkpoint.tensors:
        findings += _loaded_findings(checkpoint, name)
    return findings


def _file_findings(path: pathlib.Path) -> list[Finding]:
    """What the manifest says of the files, and files that it does not know."""
    manifest = read_manifest(path)
    findings = []
    for name, entry in manifest.files.items():
        if _file_sha256(path / name) != entry.sha256:
            findings.append(Finding("error", str(path / name), "was changed since it was written (its SHA-256 differs)"))
    unknown = sorted(set(os.listdir(path)) - set(manifest.files) - {MANIFEST})
    return findings + [Finding("warning", str(path / name), "is not in the manifest") for name in unknown]


def _file_sha256(path: pathlib.Path) -> str:
    digest = hashlib.sha256()
    if path.stat().st_size:
        data = mapped(path)
        for start in range(0, data.size, _CHUNK):
            digest.update(data[start : start + _CHUNK].data)
    return digest.hexdigest()


def _loaded_findings(checkpoint: Checkpoint, name: str) -> list[Finding]:
    """What is wrong with one tensor."""
    try:
        value = checkpoint.tensors[name]
    except (QuantError, UnsupportedError) as error:
        return [Finding("error", name, str(error))]
    if isinstance(value, QArray):
        return _qarray_findings(value, name)
    return _number_findings(value, name, "elements")


def _qarray_findings(q: QArray, name: str) -> list[Finding]:
    """What is wrong with the parts of a quantized tensor."""
    findings = _code_findings(q, name)
    if isinstance(q.scale, QArray):
        findings += _qarray_findings(q.scale, f"{name}.scale")
    holder = np.dtype(np.float32) if isinstance(q.scheme.scale, Scheme) else q.scheme.scale
    scale = dequantize(q.scale) if isinstance(q.scale, QArray) else q.scale
    findings += _number_findings(_numbers(scale, holder), name, "scales", zero_matters=True)
    for part in ("zero_point", "tensor_scale"):
        value = getattr(q, part)
        if value is not None:
            own = q.scheme.zero_point if part == "zero_point" else np.dtype(np.float32)
            findings += _number_findings(
                _numbers(value, own), name, part.replace("_", " ") + "s", zero_matters=part != "zero_point"
            )
    return findings


def _numbers(stored: jax.Array, holder: Any) -> np.ndarray:
    """What stored scales or offsets stand for, in float64 where a format holds them."""
    values = np.asarray(stored)
    if not isinstance(holder, AbstractFormat):
        return values
    table = np.append(holder.values(), np.nan)  # a code beyond the table means no number
    return table[np.minimum(values.astype(np.intp), len(table) - 1)]


def _code_findings(q: QArray, name: str) -> list[Finding]:
    """Codes that mean no number: beyond the table of the format, or its NaN and infinity."""
    values = q.scheme.format.values()
    is_number = np.zeros(2**q.scheme.format.bits, bool)
    is_number[: len(values)] = np.isfinite(values)
    if is_number.all():
        return []
    codes = np.asarray(
        unpack(q.codes, q.scheme.format.bits, q.shape[q.scheme.pack_axis], q.scheme.packing, axis=q.scheme.pack_axis)
    )
    count = int(np.count_nonzero(~is_number[codes]))
    return [Finding("error", name, f"{count} of {codes.size} codes stand for no finite number")] if count else []


def _number_findings(values: np.ndarray, name: str, what: str, *, zero_matters: bool = False) -> list[Finding]:
    """NaN, infinities and, where they matter, zeros among numbers."""
    findings = []
    if jnp.issubdtype(values.dtype, jnp.inexact):
        count = int(values.size - np.count_nonzero(np.isfinite(values)))
        if count:
            findings.append(Finding("error", name, f"{count} of {values.size} {what} are NaN or infinite"))
    if zero_matters and (zeros := int(values.size - np.count_nonzero(values))):
        findings.append(Finding("warning", name, f"{zeros} of {values.size} {what} are zero, so their tiles are"))
    return findings
