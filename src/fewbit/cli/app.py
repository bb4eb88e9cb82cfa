"""The application that the commands join, and how every failure ends: one message, and an exit status that says which."""

import os
import signal
import sys
from typing import Annotated, Any, NoReturn

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


class Commands(TyperGroup):
    """The commands, with what can go wrong turned into a message."""

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        """Reads the arguments."""
        try:
            return super().make_context(*args, **kwargs)
        except KeyboardInterrupt as error:
            message, status = _interruption(error)
            typer.echo(f"error: {message}", err=True)
            raise SystemExit(status) from None

    def invoke(self, ctx: Any) -> Any:
        """Runs a command."""
        try:
            return super().invoke(ctx)
        except (QuantError, UnsupportedError) as error:
            message, status = str(error), FAILED
        except OSError as error:
            message, status = _system_message(error), FAILED
        except KeyboardInterrupt as error:
            message, status = _interruption(error)
        typer.echo(f"error: {message}", err=True)
        raise typer.Exit(status)


def _interruption(error: KeyboardInterrupt) -> tuple[str, int]:
    """What to say of Ctrl-C or SIGTERM, and the exit status."""
    is_terminated = isinstance(error, Terminated)
    message = str(error) or ("terminated" if is_terminated else "interrupted")
    return message, TERMINATED if is_terminated else INTERRUPTED


def _system_message(error: OSError) -> str:
    """What the system said, with the file that it said it of."""
    return str(error) if error.filename is None else f"{error.filename}: {error.strerror}"


app = typer.Typer(
    name="fewbit",
    cls=Commands,
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
"""The application, for a runner such as `typer.testing.CliRunner`."""


def _show_version(asked: bool) -> bool:
    if asked:
        from .version import version_line

        typer.echo(version_line())
        raise typer.Exit
    return asked


@app.callback()
def fewbit(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and the kernels.")
    ] = False,
) -> None:
    """Makes neural networks few-bit: plans, quantizes, evaluates and runs checkpoints."""


def run() -> None:
    """Runs the command of the process's arguments."""
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
