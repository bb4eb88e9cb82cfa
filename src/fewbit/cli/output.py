"""Where output goes: results to stdout, as text or as one JSON object; progress and the log to stderr."""

import contextlib
import dataclasses
import json
import math
import pathlib
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

from .._table import FILE_WIDTH, output_width, wrapped


def console(*, stderr: bool = False) -> Console:
    """A console that prints what it is given, without markup; in a file or a pipe, wide enough for tables."""
    result = Console(stderr=stderr, markup=False, highlight=False, emoji=False, soft_wrap=False)
    return (
        result
        if result.is_terminal
        else Console(stderr=stderr, markup=False, highlight=False, emoji=False, width=FILE_WIDTH)
    )


def say(text: str = "", *, wrap: bool = False) -> None:
    """Prints a line of a result; `wrap` breaks it between words where a terminal is narrower."""
    typer.echo(wrapped(text, output_width()) if wrap and sys.stdout.isatty() else text)


def note(text: str) -> None:
    """Prints a sentence beside the result, which a program that reads stdout does not see."""
    typer.echo(text, err=True)


def emit_json(value: Any) -> None:
    """Prints one JSON object."""
    typer.echo(json.dumps(plain(value), ensure_ascii=False, allow_nan=False))


def plain(value: Any) -> Any:
    """A record as JSON holds it; numbers that JSON does not have (NaN, infinity) become null.

    >>> plain({"sqnr_db": math.inf, "path": pathlib.PurePosixPath("a/b"), "shape": (2, 3)})
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
    return value if isinstance(value, str | int | float) or value is None else str(value)


class _PeakMemory(ProgressColumn):
    """The most memory that was held."""

    def render(self, task: Task) -> Text:
        """The column's text."""
        from ..jobs.memory import peak_memory

        peak = peak_memory()
        return Text("" if peak is None else f"peak {peak / 1e9:.2f} GB")


@dataclasses.dataclass(frozen=True)
class Bar:
    """A bar of a progress display.

    Attributes:
        advance: called with how far the work is, of the bar's total, and a text beside the bar.
        log: prints a line above the bar.
    """

    advance: Callable[[float, str], None]
    log: Callable[[str], None]

    def windows(self, done: int, total: int) -> None:
        """Shows how many windows of a text are done, one batch after another, on a bar that is 1 long."""
        self.advance(done / total, f"{done}/{total} windows")


@contextlib.contextmanager
def progress_bar(title: str, total: float) -> Iterator[Bar]:
    """A bar on stderr with the time left and the peak memory; lines only, when stderr is no terminal.

    Args:
        title: what is being done.
        total: how far the work goes, in any unit.
    """
    err = console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[beside]}"),
        TimeRemainingColumn(),
        _PeakMemory(),
    )
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as progress:
        task = progress.add_task(title, total=total, beside="")

        def advance(done: float, beside: str) -> None:
            progress.update(task, completed=done, beside=beside)

        yield Bar(advance, lambda line: progress.console.print(line, soft_wrap=True))


@contextlib.contextmanager
def log_lines(file: pathlib.Path | None, bar: Bar) -> Iterator[Callable[[str], None]]:
    """A function that writes a line of the log: to the file when there is one, else to stderr above the bar."""
    if file is None:
        yield bar.log
        return
    with file.open("w", encoding="utf-8") as stream:
        yield lambda line: print(line, file=stream, flush=True)
