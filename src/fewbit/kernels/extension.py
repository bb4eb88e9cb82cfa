"""The compiled part of a kernel: where it was built, its functions become targets of `jax.ffi`; where not, it says why."""

import dataclasses
import functools
import importlib
from pathlib import Path
from typing import Any

import jax

from .fingerprint import fingerprint

HOW_TO_BUILD = (
    "install a C++17 compiler and run `pip install --force-reinstall --no-deps fewbit` (in a checkout: `pip install -e .`)"
)


HOW_TO_REBUILD = "run `pip install -e .`, or `python setup.py build_ext --inplace`"

EXTENSIONS = tuple(
    f"fewbit.kernels.{name}" for name in ("qmatmul._cpu", "qmatmul._integers", "quantize._cpu", "attention._cpu")
)
"""Every compiled module."""


@dataclasses.dataclass(frozen=True)
class Extension:
    """What came of loading one compiled module.

    Attributes:
        isa: the instruction set that it takes on this machine; empty where it did not load.
        missing: why it did not load and what to do, or None.
        is_stale: whether it is there, and was built from other sources than lie beside it.
    """

    isa: str = ""
    missing: str | None = None
    is_stale: bool = False


@functools.cache
def extension(module: str) -> Extension:
    """Loads a compiled module and registers its functions for the CPU, once a process.

    Args:
        module: its full name; the build leaves it beside its C++ source.

    Returns:
        What came of it. A module that is not there, does not fit this JAX, or was built from other sources than lie beside it
        (in a checkout that was updated since) is no error: the reference serves.
    """
    try:
        loaded: Any = importlib.import_module(module)
    except ImportError as failure:
        return Extension(missing=f"its C++ extension is not built here ({failure}); {HOW_TO_BUILD}")
    if _is_stale(loaded):
        return Extension(
            missing=f"its C++ extension was built from other sources than lie here; {HOW_TO_REBUILD}", is_stale=True
        )
    for name, capsule in loaded.TARGETS.items():
        jax.ffi.register_ffi_target(name, capsule, platform="cpu")
    return Extension(isa=loaded.ISA)


def _is_stale(loaded: Any) -> bool:
    """Whether a compiled module has its source beside it, and was not built from that and the headers of today."""
    path = Path(loaded.__file__)
    source = path.with_name(path.name.partition(".")[0].removeprefix("_") + ".cc")
    return source.exists() and fingerprint(source, Path(__file__).parent) != getattr(loaded, "SOURCES", None)


def device_refusal() -> str | None:
    """Why a compiled kernel is not chosen by itself in this process, or None.

    XLA splits no call of foreign code over devices: it gathers the operands on each, which would undo a sharding.
    """
    try:
        count = jax.device_count("cpu")
    except RuntimeError as failure:
        return f"JAX has no CPU here ({failure})"
    if count == 1:
        return None
    return f"JAX has {count} CPU devices, and XLA cannot split its calls over them; name it for arrays that are not sharded"
