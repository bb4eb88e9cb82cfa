"""The source of a quantized model: its path here, and its manifest entry.

A manifest has the source's name and the hashes of its files, but not its path: the same inputs give the same bytes in every
folder and on every machine. The path is in a file of its own next to the output, `.<name>.fewbit-source`.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...errors import QuantError
from ..load import INSTALLED, is_installed_name, load
from ..model import Model
from ..plan import KEEP
from .provenance import file_hashes

_ADVICE = "pass the source: --against SOURCE"


def record_source(output: str | os.PathLike[str], source: str | os.PathLike[str] | None) -> None:
    """Records next to an output where its source is. An earlier record is replaced.

    Args:
        output: the directory or file that was written.
        source: the source's path, or the name of an installed model; None removes an earlier record. A path in the output's
            directory is recorded relative to it, so that both can be moved together.

    Raises:
        QuantError: when the record cannot be written.
    """
    record = _record_path(output)
    try:
        if source is None:
            record.unlink(missing_ok=True)
            return
        text = os.fspath(source)
        if not is_installed_name(source):
            text = os.path.realpath(source)
            if Path(text).is_relative_to(record.parent):
                text = f"./{os.path.relpath(text, record.parent)}"  # a name of an installed model has no slash
        record.write_bytes(os.fsencode(text))
    except OSError as error:
        raise QuantError(
            f"{output} is complete, but {record}, the record of its source, cannot be written: {error.strerror}"
        ) from error


def recorded_source(output: str | os.PathLike[str]) -> str | None:
    """The recorded source of a model: an absolute path or the name of an installed model. None without a record."""
    record = _record_path(output)
    if not record.is_file():
        return None
    text = os.fsdecode(record.read_bytes())
    return str(record.parent / text) if "/" in text else text


def source_of(models: Sequence[Model]) -> Model:
    """The model that these were quantized from, by their records.

    Args:
        models: quantized models of one source.

    Returns:
        The source.

    Raises:
        QuantError: when a model has no record, two have different sources, or the source is gone or has other bytes than the
            manifest of a model says.
    """
    found = {str(model.path): recorded_source(model.path) for model in models}
    for path, source in found.items():
        if source is None:
            raise QuantError(
                f"{path} has no record of its source, which `fewbit quantize` leaves next to its output; {_ADVICE}"
            )
        if source not in INSTALLED and not Path(source).exists():
            raise QuantError(f"{source}, from which {path} was quantized, does not exist; {_ADVICE}")
    sources = {source for source in found.values() if source is not None}
    if len(sources) > 1:
        listed = ", ".join(f"{path} from {source}" for path, source in found.items())
        raise QuantError(f"these models were quantized from different sources: {listed}; {_ADVICE} of all")
    name = sources.pop()
    source = load(INSTALLED[name]() if name in INSTALLED else name)
    hashes = file_hashes(source)
    for model in models:
        said = origin(model.facts).get("source")
        if isinstance(said, Mapping) and said.get("sha256", hashes) != hashes:
            raise QuantError(f"{source.path} is not what {model.path} was quantized from: its bytes have changed; {_ADVICE}")
    return source


def origin(facts: Mapping[str, Any]) -> Mapping[str, Any]:
    """The facts of the model that was quantized, where it was only copied since.

    Args:
        facts: those of a manifest.
    """
    source = facts.get("source")
    while facts.get("recipe") == KEEP and isinstance(source, Mapping) and isinstance(source.get("facts"), Mapping):
        facts = source["facts"]
        source = facts.get("source")
    return facts


def _record_path(output: str | os.PathLike[str]) -> Path:
    path = Path(os.path.realpath(output))
    return path.with_name(f".{path.name}.fewbit-source")
