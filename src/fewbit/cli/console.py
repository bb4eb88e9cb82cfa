"""Results go to stdout, progress and log to stderr."""

import contextlib
import ctypes
import dataclasses
import json
import math
import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import typer

from .._table import output_width, wrapped


def say(text: str = "", *, wrap: bool = False) -> None:
    """Prints a line of a result. `wrap` wraps it at the width of a terminal."""
    if wrap and sys.stdout is not None and sys.stdout.isatty():
        text = wrapped(text, output_width())
    typer.echo(text)


def say_part(text: str) -> None:
    """Prints a part of a line at once."""
    typer.echo(text, nl=False)


def note(text: str) -> None:
    """Prints a sentence to stderr."""
    typer.echo(text, err=True)


def emit_json(value: object) -> None:
    """Prints one JSON object."""
    typer.echo(json.dumps(plain(value), ensure_ascii=False, allow_nan=False))


def plain(value: Any) -> Any:
    """The value as JSON types; NaN and infinity become null.

    >>> from pathlib import PurePosixPath
    >>> plain({"sqnr_db": math.inf, "path": PurePosixPath("a/b"), "shape": (2, 3)})
    {'sqnr_db': None, 'path': 'a/b', 'shape': [2, 3]}
    """
    if hasattr(value, "to_json"):
        return plain(value.to_json())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if value is None or isinstance(value, str | int | float):
        return value
    return str(value)


def block_lines(blocks: Mapping[str, float]) -> list[str]:
    """The relative error of each block's output, a line each."""
    if not blocks:
        return []
    return ["  relative error of each block's output:", *(f"    {error:9.3e}  {name}" for name, error in blocks.items())]


def worst_weight_lines(sqnr_db: Mapping[str, float]) -> list[str]:
    """The weights of lowest SQNR, a line each."""
    if not sqnr_db:
        return []
    lowest = sorted(sqnr_db.items(), key=lambda item: item[1])[:5]
    return [
        "  lowest signal-to-noise ratio of the weights:",
        *(f"    {decibel_text(value)}  {path}" for path, value in lowest),
    ]


def decibel_text(value: float) -> str:
    """A number of decibels; infinity is "exact"."""
    return " exact   " if value == math.inf else f"{value:6.2f} dB"


@contextlib.contextmanager
def results_only() -> Iterator[None]:
    """Keeps what libraries in C print off stdout, where only results belong; it goes to stderr."""
    flush = ctypes.CDLL("msvcrt" if os.name == "nt" else None).fflush
    sys.stdout.flush()
    flush(None)
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        flush(None)
        os.dup2(stdout, 1)
        os.close(stdout)
