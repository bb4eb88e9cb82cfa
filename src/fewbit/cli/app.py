"""The application that the commands join, and how every failure ends: one message, and an exit status that says which."""

import os
import signal
import sys
from pathlib import Path
from typing import Any, NoReturn

import typer
from typer.core import TyperGroup

from ..errors import QuantError, UnsupportedError

FOUND = 1
"""The exit status of `verify` when it found errors, and of `plan --strict` when roles are unknown."""
FAILED = 2
"""The exit status when what was asked could not be done."""
INTERRUPTED = 130
"""The exit status after Ctrl-C."""
TERMINATED = 143
"""The exit status after SIGTERM."""


class Terminated(KeyboardInterrupt):
    """SIGTERM asked the process to end; what cleans up after Ctrl-C cleans up after it."""


def path_argument(text: str | os.PathLike[str]) -> Path:
    """The path of an argument; an empty one, which `Path` would take for the working directory, is refused."""
    if not os.fspath(text):
        raise typer.BadParameter("the path is empty")
    return Path(text)


class Commands(TyperGroup):
    """The commands, with what can go wrong turned into a message."""

    def invoke(self, ctx: Any) -> Any:
        """Runs a command."""
        try:
            return super().invoke(ctx)
        except (QuantError, UnsupportedError) as error:
            message, status = str(error), FAILED
        except OSError as error:
            message, status = _system_message(error), FAILED
        except KeyboardInterrupt as error:
            is_terminated = isinstance(error, Terminated)
            message = str(error) or ("terminated" if is_terminated else "interrupted")
            status = TERMINATED if is_terminated else INTERRUPTED
        typer.echo(f"error: {message}", err=True)
        raise typer.Exit(status)


def _system_message(error: OSError) -> str:
    """What the system said, with the file that it said it of."""
    return str(error) if error.filename is None else f"{error.filename}: {error.strerror}"


app = typer.Typer(
    name="fewbit",
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Makes neural networks few-bit: plans, quantizes, evaluates and runs checkpoints.",
)
"""The application, for a runner such as `typer.testing.CliRunner`."""


def main() -> None:
    """The console command `fewbit`."""
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _terminate)
    # transformers, which plans ask for module classes, fetches nothing from its hub.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        app()
    except BrokenPipeError:  # the reader of our output, such as `head`, has gone
        sys.stderr.close()
        sys.exit(FAILED)


def _terminate(number: int, frame: Any) -> NoReturn:
    """Ends the command as Ctrl-C does; a second SIGTERM does not cut the cleaning up short."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise Terminated
