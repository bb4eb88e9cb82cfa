"""Checks an output directory before writing.

It runs before any work, again under the output's lock, and again right before the rename.
"""

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
    ours = {MANIFEST, *read_manifest(directory).files}
    with os.scandir(directory) as entries:
        return sorted(e.name for e in entries if e.name not in ours or not e.is_file(follow_symlinks=False))


def check_output(
    path: str | os.PathLike[str],
    *,
    overwrite: bool,
    sources: Iterable[str | os.PathLike[str]] = (),
    foreign: Callable[[pathlib.Path], list[str]] = foreign_files,
) -> pathlib.Path:
    """The absolute path of an output directory that may be written.

    Args:
        path: the directory to create; missing parents are allowed.
        overwrite: whether a directory that fewbit wrote may be replaced: its manifest is ours and lists its every file.
        sources: the files and directories that the output is made from.
        foreign: gives the names in an existing directory that an overwrite must not remove; raises for another kind of directory.

    Returns:
        The path.

    Raises:
        QuantError: for an empty path, one below a file, one that exists (without `overwrite`) or has files that fewbit did not
            write (with it), and when a source is the output, inside it or around it, following symbolic links.

    >>> check_output("", overwrite=False)
    Traceback (most recent call last):
    ...
    fewbit.errors.QuantError: the output path is empty; name a directory
    """
    target = checked_target(path, sources)
    if os.path.lexists(target):
        _check_replaceable(target, overwrite, foreign)
    return target


def checked_target(path: str | os.PathLike[str], sources: Iterable[str | os.PathLike[str]]) -> pathlib.Path:
    """The absolute path of an output, which may exist.

    Args:
        path: the file or directory to write.
        sources: the files and directories that it is made from.

    Returns:
        The path.

    Raises:
        QuantError: for an empty path, one below a file, and when a source is the output, inside it or around it.
    """
    text = os.fspath(path)
    if not text:
        raise QuantError("the output path is empty; name a directory")
    if "\0" in text:
        raise QuantError(f"the output path {text!r} contains a zero byte")
    target = pathlib.Path(os.path.abspath(text))
    above = next((parent for parent in target.parents if os.path.lexists(parent)), target)
    if not above.is_dir():
        raise QuantError(f"{target} cannot be written: {above} is not a directory")
    for source in sources:
        _check_source(pathlib.Path(source), target)
    return target


def _check_source(source: pathlib.Path, target: pathlib.Path) -> None:
    """Refuses a target that is, is inside, or contains the source."""
    if not source.exists():
        return
    advice = "choose another output"
    if target.exists() and os.path.samefile(source, target):
        raise QuantError(f"{target} is the model itself; {advice}")
    if source.is_dir() and _is_within(target, source):
        raise QuantError(f"{target} is inside {source}, the model that is read; {advice}")
    for file in (source, *source.iterdir()) if source.is_dir() else (source,):
        if _is_within(file, target):
            raise QuantError(f"{target} contains {file}, which is read; {advice}")


def _is_within(path: pathlib.Path, directory: pathlib.Path) -> bool:
    """True if a path is a directory or inside it, following symbolic links."""
    if not directory.exists():
        return False
    real = pathlib.Path(os.path.realpath(path))
    return any(above.exists() and os.path.samefile(above, directory) for above in (real, *real.parents))


def _check_replaceable(target: pathlib.Path, overwrite: bool, foreign: Callable[[pathlib.Path], list[str]]) -> None:
    """Refuses an existing target that may not be replaced."""
    if not overwrite:
        raise QuantError(f"{target} exists; choose another output, or allow it to be replaced (overwrite=True, --overwrite)")
    if target.is_symlink() or not target.is_dir():
        kind = "a symbolic link" if target.is_symlink() else "a file"
        raise QuantError(f"{target} is {kind}, so it is not replaced; choose another output or remove it yourself")
    try:
        names = foreign(target)
    except UnsupportedError as error:
        raise QuantError(f"{target} is not replaced: {error}; or choose another output, or remove it yourself") from error
    except QuantError as error:
        raise QuantError(
            f"{target} was not written by fewbit, so it is not replaced; choose another output or remove it yourself ({error})"
        ) from error
    if names:
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        raise QuantError(
            f"{target} contains files that fewbit did not write ({', '.join(names[:3])}{more}), so it is not replaced; move them "
            "elsewhere, or choose another output"
        )
