"""The files, names and options that docs/design/call-paths.md names exist, in the file that it names them with."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
import typer

import fewbit as fb
from fewbit.cli.commands import app

ROOT = Path(__file__).parent.parent
SOURCES = ROOT / "src" / "fewbit"
PAGE = (ROOT / "docs" / "design" / "call-paths.md").read_text()
CODE = re.compile(r"`([^`]+)`")
FILE = re.compile(r"[\w/]+(\.(py|cc)|/)")
NAME = re.compile(r"[A-Za-z_][\w.]*")
OPTION = re.compile(r"(?<![\w-])--?[a-z][\w-]*")
WORDS = ("x @ q", "[B, R, C]", "q[...]", "src/fewbit")
"""What is in the page's code font and is neither a file, a name nor a command."""


def files_of(path: str) -> list[Path]:
    """The files of src/fewbit with that path, or whose paths end with it; a folder ends with a slash."""
    return [found for found in SOURCES.rglob(Path(path).name) if found.as_posix().endswith(f"/{path.rstrip('/')}")]


def defines(text: str, name: str) -> bool:
    """Whether a source defines a function, class or constant; for `Class.method` both."""
    return all(re.search(rf"^\s*(def|class) {one}\b|^{one}\b.* = ", text, re.MULTILINE) for one in name.split("."))


def exists(name: str) -> bool:
    """Whether a name of the page is one of `fb`, JAX, a QArray, or of a source."""
    space, _, rest = name.partition(".")
    owners = {"fb": fb, "jnp": jnp, "q": fb.QArray}
    if rest and space in owners:
        return hasattr(owners[space], rest)
    sources = (path.read_text() for path in SOURCES.rglob("*.py"))
    return (SOURCES / name).is_dir() or hasattr(jax, name) or any(defines(text, name) for text in sources)


SPANS = sorted(set(CODE.findall(PAGE)))
COMMANDS = [span for span in SPANS if span.startswith("fewbit ")]
FILES = [span for span in SPANS if FILE.fullmatch(span)]
OPTIONS = [span for span in SPANS if OPTION.fullmatch(span)]
NAMES = [span for span in SPANS if NAME.fullmatch(span) and span not in FILES]


@pytest.mark.once
def test_every_word_in_code_font_is_checked() -> None:
    assert set(SPANS) - {*COMMANDS, *FILES, *OPTIONS, *NAMES} == set(WORDS)


@pytest.mark.once
def test_every_file_exists() -> None:
    assert len(FILES) > 40
    assert not [path for path in FILES if not files_of(path)]


@pytest.mark.once
def test_every_name_exists() -> None:
    assert not [name for name in NAMES if not exists(name)]


@pytest.mark.once
def test_a_name_is_defined_in_the_file_before_it() -> None:
    pairs = re.findall(r"`([\w/]+\.py)`, `(?!fb\.)([\w.]+)`", PAGE) + [
        (path, name) for name, path in re.findall(r"`(\w+)` \(`([\w/]+\.py)`\)", PAGE)
    ]
    assert len(pairs) > 15
    assert not [(path, name) for path, name in pairs if not any(defines(file.read_text(), name) for file in files_of(path))]


@pytest.mark.once
def test_every_command_and_option_exists() -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    assert COMMANDS
    for text in COMMANDS:
        known = [option for parameter in commands[text.split()[1]].params for option in parameter.opts]
        assert not set(OPTION.findall(text)) - set(known), text
    everywhere = [option for command in commands.values() for parameter in command.params for option in parameter.opts]
    assert not set(OPTIONS) - set(everywhere)
