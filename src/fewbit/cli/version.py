"""The line of `fewbit --version`: the version, and which C++ kernels were built, without JAX."""

import importlib.machinery
import importlib.metadata
import importlib.util
from pathlib import Path

KERNELS = Path(__file__).parent.parent / "kernels"
"""Where the compiled extensions lie, each beside its source."""


def version_line(kernels: Path = KERNELS) -> str:
    """The version and the kernels, in one line.

    Args:
        kernels: the folder with the sources and extensions of all kernels.

    Returns:
        The line; where extensions are missing or older than their sources, it names them and says what to do.
    """
    version = f"fewbit {importlib.metadata.version('fewbit')}"
    found = {source: _instruction_set(source) for source in sorted(kernels.glob("*/*.cc"))}
    missing = [_name(source, kernels) for source, isa in found.items() if isa is None]
    built = [f"{_name(source, kernels)} ({isa})" for source, isa in found.items() if isa is not None]
    kinds = f"{version}; C++ kernels: {', '.join(built) or 'none'}"
    if not missing:
        return kinds
    return (
        f"{kinds}; NOT built for this Python or older than their sources: {', '.join(missing)}, so the slower reference computes; "
        "install a C++17 compiler (GCC or Clang) and run `pip install --force-reinstall --no-deps fewbit`"
    )


def _name(source: Path, kernels: Path) -> str:
    """What a kernel is called: its folder, and its file where that is not `cpu.cc`."""
    folder = source.parent.relative_to(kernels).as_posix()
    return folder if source.stem == "cpu" else f"{folder}/{source.stem}"


def _instruction_set(source: Path) -> str | None:
    """The instruction set that a source's extension takes here; None where it is not built, or was from another source."""
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
            is_current = fingerprint(source, source.parent.parent) == getattr(module, "SOURCES", None)
            return str(module.ISA) if is_current else None
    return None
