"""Progress bars on stderr, with the peak memory."""

import contextlib
import dataclasses
import datetime
import pathlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

from .._table import FILE_WIDTH
from ..errors import QuantError
from ..io.output import OutputKind, check_output


def _console() -> Console:
    """stderr without markup; in a file or a pipe, wide enough for tables."""
    result = Console(stderr=True, markup=False, highlight=False, emoji=False, soft_wrap=False)
    if not result.is_terminal:
        result = Console(stderr=True, markup=False, highlight=False, emoji=False, width=FILE_WIDTH)
    return result


class _PeakMemory(ProgressColumn):
    """The peak memory of the process."""

    def render(self, task: Task) -> Text:
        """The column's text."""
        peak = peak_memory()
        return Text("" if peak is None else f"peak {peak / 1e9:.2f} GB")


@dataclasses.dataclass(frozen=True)
class Bar:
    """A progress bar.

    Attributes:
        advance: sets the amount done, of the bar's total, and the text at the bar's end.
        log: prints a line above the bar.
    """

    advance: Callable[[float, str], None]
    log: Callable[[str], None]

    def windows(self, done: int, total: int) -> None:
        """Shows the number of windows done, on a bar of total 1."""
        self.advance(done / total, f"{done}/{total} windows")

    def examples(self, done: int, total: int) -> None:
        """Shows the number of examples done, on a bar of total 1."""
        self.advance(done / total, f"{done}/{total} examples")


LINE_SECONDS = 30.0
"""How often a line tells the progress where stderr is no terminal."""


@contextlib.contextmanager
def progress_bar(title: str, total: float) -> Iterator[Bar]:
    """A progress bar on stderr with remaining time and peak memory.

    If stderr is no terminal, a line every `LINE_SECONDS` has the remaining time.

    Args:
        title: the task.
        total: the amount of work, in any unit.
    """
    err = _console()
    title_column, detail_column = TextColumn("{task.description}"), TextColumn("{task.fields[detail]}")
    columns = (title_column, BarColumn(), detail_column, TimeRemainingColumn(), _PeakMemory())
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as progress:
        task = progress.add_task(title, total=total, detail="")
        last, start = time.monotonic(), None

        def advance(done: float, detail: str) -> None:
            nonlocal last, start
            progress.update(task, completed=done, detail=detail)
            now = time.monotonic()
            start = start or (now, done)  # what an earlier run finished took no time
            since, before = start
            if not err.is_terminal and now - last >= LINE_SECONDS and before < done < total:
                last = now
                left = datetime.timedelta(seconds=round((now - since) * (total - done) / (done - before)))
                err.print(f"{title}: {100 * done / total:.0f} %, {left} left, {detail}", soft_wrap=True)

        yield Bar(advance, lambda line: progress.console.print(line, soft_wrap=True))


def check_log_path(
    path: pathlib.Path,
    sources: Iterable[pathlib.Path],
    outputs: Iterable[pathlib.Path],
    read: Iterable[pathlib.Path | str | None] = (),
) -> None:
    """Checks early where log lines are to be written. A device, such as /dev/null, is one such place.

    Args:
        path: the log.
        sources: the models that are read.
        outputs: what is written.
        read: other files that are read, such as a plan; names that are no files do no harm.

    Raises:
        QuantError: for a file that is read, one that is or lies in an output, one that is not text, and one in a directory that
            does not exist.
    """
    real = path.resolve()
    if real in [pathlib.Path(file).resolve() for file in read if file is not None]:
        raise QuantError(f"log {path} would be written over {path}, which is read; name another file")
    for output in outputs:
        if output.resolve() in (real, *real.parents):
            raise QuantError(f"log {path} would be written over {output}, which is an output; name another file")
    if real.exists() and not real.is_file() and not real.is_dir():
        return
    kind = OutputKind(_not_text, "run.log", "is not a text file", makes_parents=False)
    check_output(real, overwrite=True, sources=sources if real.exists() else (), kind=kind)


def _not_text(file: pathlib.Path) -> list[str]:
    """Refuses a file whose first bytes are not text."""
    with file.open("rb") as stream:
        if b"\0" in stream.read(1024):
            raise QuantError("it contains zero bytes")
    return []


@contextlib.contextmanager
def log_lines(file: pathlib.Path | None, bar: Bar) -> Iterator[Callable[[str], None]]:
    """A function that writes a log line. It writes to the file if given, else to stderr above the bar."""
    if file is None:
        yield bar.log
        return
    with file.open("w", encoding="utf-8") as stream:

        def write(line: str) -> None:
            try:
                print(line, file=stream, flush=True)
            except OSError as error:
                raise OSError(error.errno, error.strerror, str(file)) from error

        yield write


def peak_memory() -> int | None:
    """The peak resident set size in bytes. None where the system does not report it (Windows)."""
    try:
        import resource
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if sys.platform != "darwin":  # macOS counts bytes, all others KiB
        peak *= 1024
    return peak
