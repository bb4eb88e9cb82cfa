"""Integrity check of a stored model.

Finds changed bytes, inconsistent components and numbers that are not finite.
"""

import dataclasses
import os
import pathlib
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from ...array.packing import unpack
from ...array.qarray import QArray
from ...errors import QuantError, UnsupportedError
from ...formats.format import AbstractFormat
from ...kernels.quantize.dispatch import dequantize
from ..checkpoint import Checkpoint
from ..files import checked_path, file_sha256
from ..read import read
from .manifest import MANIFEST, read_manifest


@dataclasses.dataclass(frozen=True)
class Finding:
    """One problem that `verify` found.

    Attributes:
        severity: "error" for wrong results, "warning" for what may be intended.
        where: the file or tensor.
        message: the problem.
    """

    severity: Literal["error", "warning"]
    where: str
    message: str

    def __str__(self) -> str:
        return f"{self.severity}: {self.where}: {self.message}"


def verify(path: str | os.PathLike[str]) -> list[Finding]:
    """Reads every byte of a stored model and reports problems.

    A fewbit directory is compared with the hashes of its manifest. Each tensor is loaded: components that do not match the scheme,
    NaN and infinity are errors; zero scales (whose tiles are all zero) and files that are not in the manifest are warnings.

    Args:
        path: anything that `read` takes.

    Returns:
        The findings, empty for a sound model. A model that cannot be opened gives one.

    Raises:
        QuantError: when the path does not exist.

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
    """Changed files, and files that are not in the manifest."""
    manifest = read_manifest(path)
    findings = []
    for name, entry in manifest.files.items():
        if file_sha256(path / name) != entry.sha256:
            findings.append(Finding("error", str(path / name), "was changed since it was written (its SHA-256 differs)"))
    unknown = sorted(set(os.listdir(path)) - set(manifest.files) - {MANIFEST})
    return findings + [Finding("warning", str(path / name), "is not in the manifest") for name in unknown]


def _loaded_findings(checkpoint: Checkpoint, name: str) -> list[Finding]:
    """The problems of one tensor."""
    try:
        value = checkpoint.tensors[name]
    except (QuantError, UnsupportedError) as error:
        return [Finding("error", name, str(error))]
    if isinstance(value, QArray):
        return _qarray_findings(value, name)
    return _number_findings(value, name, "elements")


def _qarray_findings(q: QArray, name: str) -> list[Finding]:
    """The problems of a quantized tensor's components."""
    findings, scale, scale_format = _code_findings(q, name), q.scale, q.scheme.scale
    if isinstance(scale, QArray):
        findings += _qarray_findings(scale, f"{name}.scale")
        scale = dequantize(scale)
    findings += _number_findings(_numbers(scale, scale_format), name, "scales", zero_matters=True)
    if q.zero_point is not None:
        findings += _number_findings(_numbers(q.zero_point, q.scheme.zero_point), name, "zero points")
    if q.tensor_scale is not None:
        findings += _number_findings(np.asarray(q.tensor_scale), name, "tensor scales", zero_matters=True)
    return findings


def _numbers(stored: jax.Array, code_format: object) -> np.ndarray:
    """Decodes stored scales or zero points to float64 if they are codes of a format."""
    values = np.asarray(stored)
    if not isinstance(code_format, AbstractFormat):
        return values
    table = np.append(code_format.values(), np.nan)  # codes beyond the table are invalid
    return table[np.minimum(values.astype(np.intp), len(table) - 1)]


def _code_findings(q: QArray, name: str) -> list[Finding]:
    """Invalid codes: beyond the format's table, NaN or infinity."""
    values = q.scheme.format.values()
    is_number = np.zeros(2**q.scheme.format.bits, bool)
    is_number[: len(values)] = np.isfinite(values)
    if is_number.all():
        return []
    codes = np.asarray(
        unpack(q.codes, q.scheme.format.bits, q.shape[q.scheme.pack_axis], q.scheme.packing, axis=q.scheme.pack_axis)
    )
    count = int(np.count_nonzero(~is_number[codes]))
    if not count:
        return []
    return [Finding("error", name, f"{count} of {codes.size} codes are invalid, NaN or infinite")]


def _number_findings(values: np.ndarray, name: str, what: str, *, zero_matters: bool = False) -> list[Finding]:
    """Counts NaN, infinity and, where they matter, zeros."""
    findings = []
    if jnp.issubdtype(values.dtype, jnp.inexact):
        count = int(values.size - np.count_nonzero(np.isfinite(values)))
        if count:
            findings.append(Finding("error", name, f"{count} of {values.size} {what} are NaN or infinite"))
    if zero_matters and (zeros := int(values.size - np.count_nonzero(values))):
        findings.append(Finding("warning", name, f"{zeros} of {values.size} {what} are zero, so their tiles are"))
    return findings
