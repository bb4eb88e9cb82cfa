"""Prints `fewbit --version`: the version and the built C++ kernels."""

import importlib.machinery
import importlib.metadata
import importlib.util
from pathlib import Path

KERNELS = Path(__file__).parent.parent / "kernels"
"""The folder of the compiled extensions, each next to its source."""


def version_line(kernels: Path = KERNELS) -> str:
    """The version and the kernels, in one line, without importing JAX.

    Args:
        kernels: the folder with the sources and extensions of all kernels.

    Returns:
        The line; it names extensions that are missing or older than their sources, and what to do.
    """
    version = f"fewbit {importlib.metadata.version('fewbit')}"
    found = {source: _instruction_set(source, kernels) for source in sorted(kernels.glob("*/cpu/*.cc"))}
    missing = [source.stem for source, isa in found.items() if isa is None]
    built = [f"{source.stem} ({isa})" for source, isa in found.items() if isa is not None]
    kinds = f"{version}; C++ kernels: {', '.join(built) or 'none'}"
    if not missing:
        return kinds
    return (
        f"{kinds}; NOT built for this Python or older than their sources: {', '.join(missing)}, so the slower reference computes; "
        "install a C++17 compiler (GCC or Clang) and run `pip install --force-reinstall --no-deps fewbit`"
    )


def _instruction_set(source: Path, kernels: Path) -> str | None:
    """The instruction set of a source's extension here. None if it is not built, or from another source."""
    from ..kernels.fingerprint import fingerprint

    for suffix in importlib.machinery.EXTENSION_SUFFIXES:
        path = source.with_name(f"_{source.stem}{suffix}")
        if path.exists():
            spec = importlib.util.spec_from_file_location(f"_{source.stem}", path)
            assert spec is not None
            assert spec.loader is not None
            try:
                module = importlib.util.module_from_spec(spec)
                spec.loader.exec_module(module)
            except ImportError:
                return None
            is_current = fingerprint(source, kernels) == getattr(module, "SOURCES", None)
            return str(module.ISA) if is_current else None
    return None
