"""Checks the path of an output before writing.

It runs before any work, again under the output's lock, and again right before the rename.
"""

import dataclasses
import os
import pathlib
from collections.abc import Callable, Iterable

from ..errors import QuantError, UnsupportedError
from .native.manifest import MANIFEST, read_manifest


def foreign_files(directory: pathlib.Path) -> list[str]:
    """The sorted names in a fewbit directory that are not files of its manifest.

    Raises:
        QuantError: without a readable manifest of fewbit.
        UnsupportedError: when another version of fewbit wrote it.
    """
    if not (directory / MANIFEST).is_file():
        raise QuantError(f"it has no {MANIFEST}")
    ours = {MANIFEST, *read_manifest(directory).files}
    with os.scandir(directory) as entries:
        return sorted(e.name for e in entries if e.name not in ours or not e.is_file(follow_symlinks=False))


@dataclasses.dataclass(frozen=True)
class OutputKind:
    """A kind of output: a directory or a file. It says which earlier output an overwrite may replace.

    Attributes:
        foreign_files: gives the names in an existing directory that an overwrite must not remove, none for a file; raises QuantError
            for an output that may not be replaced at all.
        file_name: the usual name of such a file, for messages; empty for a directory.
        refusal: why an output for which `foreign_files` raises is not replaced, in words.
        makes_parents: whether the writer creates missing parents.
    """

    foreign_files: Callable[[pathlib.Path], list[str]]
    file_name: str = ""
    refusal: str = "was not written by fewbit"
    makes_parents: bool = True


DIRECTORY = OutputKind(foreign_files, refusal="was not written by fewbit as safetensors files")
"""A directory with a manifest that lists its every file."""


def check_output(
    path: str | os.PathLike[str],
    *,
    overwrite: bool,
    sources: Iterable[str | os.PathLike[str]] = (),
    kind: OutputKind = DIRECTORY,
) -> pathlib.Path:
    """The absolute path of an output that may be written.

    Args:
        path: the directory or file to create; missing parents are allowed if the kind's writer makes them.
        overwrite: whether an earlier output of the same kind may be replaced. A directory's manifest must be ours and list its
            every file.
        sources: the files and directories that the output is made from.
        kind: what is written; by default a directory of fewbit.

    Returns:
        The path.

    Raises:
        QuantError: for an empty path, one below a file, one that exists (without `overwrite`), is of another kind or has files that
            fewbit did not write (with it), and when a source is the output, inside it or around it, following symbolic links.

    >>> check_output("", overwrite=False)
    Traceback (most recent call last):
    ...
    fewbit.errors.QuantError: the output path is empty; name a directory
    """
    target = _checked_target(path, kind)
    for source in sources:
        _check_source(pathlib.Path(source), target)
    if os.path.lexists(target):
        _check_replaceable(target, overwrite, kind)
    return target


def _checked_target(path: str | os.PathLike[str], kind: OutputKind) -> pathlib.Path:
    """The absolute path, whose parents are directories or can be made."""
    text = os.fspath(path)
    if not text:
        wanted = "a directory"
        if kind.file_name:
            wanted = f"a file, such as {kind.file_name}"
        raise QuantError(f"the output path is empty; name {wanted}")
    if "\0" in text:
        raise QuantError(f"the output path {text!r} contains a zero byte")
    target = pathlib.Path(os.path.abspath(text))
    above = next((parent for parent in target.parents if os.path.lexists(parent)), target)
    if not above.is_dir():
        raise QuantError(f"{target} cannot be written: {above} is not a directory")
    if not kind.makes_parents and not target.parent.is_dir():
        raise QuantError(f"{target} cannot be written: the directory {target.parent} does not exist")
    return target


def _check_source(source: pathlib.Path, target: pathlib.Path) -> None:
    """Refuses a target that is, is inside, or contains the source."""
    if not source.exists():
        return
    advice = "choose another output"
    if target.exists() and os.path.samefile(source, target):
        raise QuantError(f"{target} is the model itself; {advice}")
    if source.is_dir() and _is_within(target, source):
        relation = "inside"
        if target.is_file():
            relation = "a file of"
        raise QuantError(f"{target} is {relation} {source}, the model that is read; {advice}")
    for file in (source, *source.iterdir()) if source.is_dir() else (source,):
        if _is_within(file, target):
            raise QuantError(f"{target} contains {file}, which is read; {advice}")


def _is_within(path: pathlib.Path, directory: pathlib.Path) -> bool:
    """True if a path is a directory or inside it, following symbolic links."""
    if not directory.exists():
        return False
    real = pathlib.Path(os.path.realpath(path))
    return any(above.exists() and os.path.samefile(above, directory) for above in (real, *real.parents))


def _check_replaceable(target: pathlib.Path, overwrite: bool, kind: OutputKind) -> None:
    """Refuses an existing target that may not be replaced."""
    advice, found, wanted = "choose another output or remove it yourself", _file_type(target), "a directory"
    if kind.file_name:
        wanted = "a file"
    if found != wanted:
        if found == "a directory":
            advice = f"name a file, such as {target / kind.file_name}"
        raise QuantError(f"{target} is {found}, so it is not replaced; {advice}")
    if not overwrite:
        raise QuantError(f"{target} exists; choose another output, or allow it to be replaced (overwrite=True, --overwrite)")
    try:
        names = kind.foreign_files(target)
    except UnsupportedError as error:
        raise QuantError(f"{target} is not replaced: {error}; or choose another output, or remove it yourself") from error
    except QuantError as error:
        raise QuantError(f"{target} {kind.refusal}, so it is not replaced; {advice} ({error})") from error
    if names:
        listed = ", ".join(names[:3])
        if len(names) > 3:
            listed += f" and {len(names) - 3} more"
        raise QuantError(
            f"{target} contains files that fewbit did not write ({listed}), so it is not replaced; move them elsewhere, or choose "
            "another output"
        )


def _file_type(path: pathlib.Path) -> str:
    """The type of what exists at a path, in words."""
    if path.is_symlink():
        return "a symbolic link"
    if path.is_dir():
        return "a directory"
    if path.is_file():
        return "a file"
    return "no regular file"
