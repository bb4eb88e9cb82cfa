"""The Typer application: errors and exit statuses."""

import os
import signal
import sys
from types import FrameType
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from ..errors import QuantError, UnsupportedError
from .compiled import keep_compiled_programs

FOUND = 1
"""The exit status of `verify` with errors, and of `plan --strict` with unknown roles."""
FAILED = 2
"""The exit status of a command that failed."""
INTERRUPTED = 130
"""The exit status after Ctrl-C."""
TERMINATED = 143
"""The exit status after SIGTERM."""


class Terminated(KeyboardInterrupt):
    """SIGTERM, as an exception that cleans up like Ctrl-C."""


class Commands(TyperGroup):
    """The commands, with errors turned into messages."""

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        """Parses the arguments."""
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
        except BrokenPipeError:  # the reader of our output, such as `head`, has exited
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is still buffered
            raise typer.Exit(FAILED) from None
        except OSError as error:
            message, status = _system_message(error), FAILED
        except KeyboardInterrupt as error:
            message, status = _interruption(error)
        typer.echo(f"error: {message}", err=True)
        raise typer.Exit(status)


def _interruption(error: KeyboardInterrupt) -> tuple[str, int]:
    """The message and the exit status of Ctrl-C or SIGTERM."""
    if isinstance(error, Terminated):
        return str(error) or "terminated", TERMINATED
    return str(error) or "interrupted", INTERRUPTED


def _system_message(error: OSError) -> str:
    """The system's message, with the file it is about."""
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
    """Quantizes neural networks to 1-8 bits: plans, quantizes, evaluates and runs checkpoints."""


def run() -> None:
    """Runs the command in `sys.argv`."""
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _terminate)
    # Plans look up module classes in transformers, which must not download anything.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    keep_compiled_programs()
    app()


def _terminate(number: int, frame: FrameType | None) -> NoReturn:
    """Ends the command as Ctrl-C does. A second SIGTERM does not interrupt the cleanup."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise Terminated
