"""Loads C++ extensions; registers their FFI functions."""

import dataclasses
import functools
import importlib
import os
from pathlib import Path

import jax

from ..errors import QuantError
from .fingerprint import fingerprint

HOW_TO_BUILD = (
    "install a C++17 compiler and run `pip install --force-reinstall --no-deps fewbit` (in a checkout: `pip install -e .`)"
)

HOW_TO_REBUILD = "run `pip install -e .`, or `python setup.py build_ext --inplace`"

EXTENSIONS = (
    "fewbit.kernels.qmatmul.cpu._dequant_gemm",
    "fewbit.kernels.qmatmul.cpu._int8_gemm",
    "fewbit.kernels.quantize.cpu._quantize",
    "fewbit.kernels.attention.cpu._attention",
)
"""Every compiled module."""

ISAS = ("portable", "avx2", "avxvnni", "avx512", "amx", "dotprod", "i8mm")
"""What FEWBIT_ISA may name. On arm64 portable means NEON without sdot, dotprod means NEON with sdot and without smmla.

Those of another processor are no limit.
"""

ARM64_ISAS = ("neon", "dotprod", "i8mm")
"""The instruction sets of arm64, whose kernels ran in an emulator only."""


@dataclasses.dataclass(frozen=True)
class Extension:
    """The result of loading one compiled module.

    Attributes:
        isa: the instruction set that it uses on this machine; empty if it did not load.
        targets: the names of its functions in compiled programs.
        missing: why it did not load and what to do, or None.
        is_stale: whether it was built from other sources than those in its folder.
    """

    isa: str = ""
    targets: tuple[str, ...] = ()
    missing: str | None = None
    is_stale: bool = False


@functools.cache
def extension(module: str) -> Extension:
    """Loads a compiled module and registers its functions for the CPU, once a process.

    Args:
        module: its full name; it is built into the folder of its C++ source.

    Returns:
        The result. A module that is missing, does not fit this JAX, or is stale (a checkout that was updated since) is no
        error: the reference runs instead.

    Raises:
        QuantError: when the environment variable FEWBIT_ISA, the best instruction set to use, names none.
    """
    limit = os.environ.get("FEWBIT_ISA")
    if limit is not None and limit not in ISAS:
        raise QuantError(f"the environment variable FEWBIT_ISA is {limit!r}; it must be one of {', '.join(ISAS)}")
    try:
        loaded = importlib.import_module(module)
    except ImportError as failure:
        return Extension(missing=f"its C++ extension is not built here ({failure}); {HOW_TO_BUILD}")
    if _is_stale(Path(loaded.__file__ or ""), getattr(loaded, "SOURCES", None)):
        return Extension(
            missing=f"its C++ extension was built from other sources than those here; {HOW_TO_REBUILD}", is_stale=True
        )
    for name, capsule in loaded.TARGETS.items():
        jax.ffi.register_ffi_target(name, capsule, platform="cpu")
    return Extension(isa=loaded.ISA, targets=tuple(loaded.TARGETS))


def _is_stale(path: Path, built_from: str | None) -> bool:
    """Whether the module's source has changed since the build.

    That includes its headers. False if the source is not in the module's folder.
    """
    source = path.with_name(path.name.partition(".")[0].removeprefix("_") + ".cc")
    return source.exists() and fingerprint(source, Path(__file__).parent) != built_from


def device_refusal() -> str | None:
    """Why a C++ kernel is not chosen automatically in this process, or None.

    XLA cannot partition an FFI call: it would gather sharded operands on every device.
    """
    try:
        count = jax.device_count("cpu")
    except RuntimeError as failure:
        return f"JAX has no CPU here ({failure})"
    if count == 1:
        return None
    return f"JAX has {count} CPU devices, and XLA cannot split its calls over them; name it for arrays that are not sharded"
