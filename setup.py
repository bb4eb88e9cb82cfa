"""Compiles what is compiled: every C++ file of a kernel becomes one optional extension beside it.

All else is said in pyproject.toml. `kernels/qmatmul/cpu.cc` becomes `fewbit.kernels.qmatmul._cpu`. Where no compiler is, or
one refuses, the installation goes on without the extension, and the reference kernels serve.
"""

import os
import runpy
import sys
from pathlib import Path

from setuptools import Extension, setup

KERNELS = Path("src/fewbit/kernels")
SOURCES = sorted(KERNELS.rglob("*.cc"))
HEADERS = sorted(map(str, KERNELS.rglob("*.h")))
fingerprint = runpy.run_path(str(KERNELS / "fingerprint.py"))["fingerprint"]


def ffi_include() -> str | None:
    """The folder of the XLA FFI headers, which ship in jaxlib; None where jax is not importable."""
    try:
        import jax.ffi
    except ImportError:
        print("fewbit: jax is not importable here, so the C++ kernels are left out")
        return None
    return jax.ffi.include_dir()


def extension(source: Path, include: str) -> Extension:
    """The optional extension that stands beside its source, under the source's name with an underscore before it."""
    module = ".".join(source.relative_to("src").with_name(f"_{source.stem}").parts)
    # -ffp-contract=off: a fused multiply-add would round once where the reference rounds twice. The next two let loops with
    # conditions become vector code, and change no result: nobody reads errno or the exception flags.
    flags = ["-std=c++17", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-fvisibility=hidden"]
    flags += ["-Wno-maybe-uninitialized", "-Wno-uninitialized"]  # GCC says it of its own intrinsics
    if "-g" not in os.environ.get("CFLAGS", ""):
        flags.append("-g0")  # Python's own flags ask for debug information, nine tenths of the file
    folders = ["-isystem", include, f"-I{KERNELS / 'native'}"]  # of others' headers we want no warnings
    built_from = ("FEWBIT_SOURCES", f'"{fingerprint(source, KERNELS)}"')  # what `kernels/extension.py` compares
    return Extension(
        module,
        [str(source)],
        define_macros=[built_from],
        depends=HEADERS,
        extra_compile_args=flags + folders,
        language="c++",
        optional=True,
    )


def extensions() -> list[Extension]:
    """One extension for each C++ file; none where there are no headers, or no compiler that could."""
    if sys.platform == "win32":  # the sources are written in the vectors and attributes of GCC and Clang
        print("fewbit: the C++ kernels need GCC or Clang, and MSVC is neither, so they are left out; the reference computes")
        return []
    include = ffi_include()
    return [extension(source, include) for source in SOURCES] if include else []


setup(ext_modules=extensions(), options={"build_ext": {"parallel": True}})
