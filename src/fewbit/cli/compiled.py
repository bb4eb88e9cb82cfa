"""Compiled programs are kept on disk, by JAX's own cache."""

import hashlib
import importlib.util
import os
import platform
from pathlib import Path

_LIMIT = 1 << 28


def keep_compiled_programs() -> None:
    """Lets JAX, before it is imported, keep compiled programs in the user's cache directory.

    The directory is `$XDG_CACHE_HOME/fewbit`, or `~/.cache/fewbit`, with a folder for each kind of processor, since machines
    may share a home directory. It holds at most 256 MiB where `filelock` is installed, which JAX needs for a limit. JAX's own
    environment variables take precedence: `JAX_COMPILATION_CACHE_DIR` names a directory, `JAX_ENABLE_COMPILATION_CACHE=0`
    keeps nothing.
    """
    if "JAX_COMPILATION_CACHE_DIR" in os.environ or "JAX_ENABLE_COMPILATION_CACHE" in os.environ:
        return
    directory = user_directory("compiled")
    if directory is None:
        return
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(directory)
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    if importlib.util.find_spec("filelock") is not None:
        os.environ.setdefault("JAX_COMPILATION_CACHE_MAX_SIZE", str(_LIMIT))


def user_directory(name: str) -> Path | None:
    """A directory for programs compiled for this kind of processor, in the user's cache directory; None: none can be written.

    Args:
        name: the first part of its name.
    """
    try:
        directory = _cache_home() / "fewbit" / f"{name}-{_processor()}"
        directory.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # no such directory, and none can be made; no home
        return None
    return directory if os.access(directory, os.W_OK) else None


def _cache_home() -> Path:
    """The user's cache directory, by the XDG specification: a relative path does not count."""
    home = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if home.is_absolute():
        return home
    return Path.home() / ".cache"


def _processor() -> str:
    """A name of this kind of processor. Code compiled for one kind may not run on another."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    features = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return f"{platform.machine()}-{hashlib.sha256(features.encode()).hexdigest()[:8]}"
