"""Compiles the C++ kernels: every .cc file becomes one optional extension in its folder.

The rest is in pyproject.toml. `kernels/quantize/cpu/quantize.cc` becomes `fewbit.kernels.quantize.cpu._quantize`. Without a C++
compiler, or where one fails, the installation goes on without the extension, and the reference kernels compute.
"""

import contextlib
import functools
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import sysconfig
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

KERNELS = Path("src/fewbit/kernels")
SOURCES = sorted(KERNELS.rglob("*.cc"))
HEADERS = sorted(map(str, KERNELS.rglob("*.h")))
STABLE_ABI = not sysconfig.get_config_var("Py_GIL_DISABLED")
"""Whether one binary serves every Python from 3.11; one without the global lock has no stable interface."""
fingerprint = runpy.run_path(str(KERNELS / "fingerprint.py"))["fingerprint"]


def say_left_out(why: str) -> None:
    """Says in one line why there are no kernels: on the terminal, too, because pip shows nothing that a build prints."""
    line = f"fewbit: the C++ kernels are left out, because {why}; the reference kernels compute"
    print(line)
    if not sys.stdout.isatty():
        with contextlib.suppress(OSError), open("/dev/tty", "w") as terminal:
            terminal.write(f"\n{line}\n")  # pip's own line has no end yet


def ffi_include() -> str | None:
    """The folder of the XLA FFI headers, which are part of jaxlib; None where jax is not importable."""
    try:
        import jax.ffi
    except ImportError:
        say_left_out("jax is not importable here")
        return None
    return jax.ffi.include_dir()


@functools.cache
def is_clang() -> bool:
    """Whether the C++ compiler is Clang, which has other names for GCC's passes."""
    command = [*shlex.split(os.environ.get("CXX", "c++")), "--version"]
    return (
        shutil.which(command[0]) is not None and b"clang" in subprocess.run(command, capture_output=True, check=False).stdout
    )


def extension(source: Path, include: str) -> Extension:
    """The optional extension of a source, in its folder and of its name with an underscore in front."""
    module = ".".join(source.relative_to("src").with_name(f"_{source.stem}").parts)
    # -ffp-contract=off: a fused multiply-add would round once where the reference rounds twice. The next two let loops with
    # conditions become vector code, and change no result: nobody reads errno or the exception flags. -O2 takes four fifths of
    # -O3's time, and makes code as fast where loops over arrays of vectors have an `unroll`: products took up to four times as
    # long without. Two of -O3's passes serve the other loops.
    flags = ["-std=c++17", "-O2", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"]
    flags += [] if is_clang() else ["-fpeel-loops", "-fvect-cost-model=dynamic"]
    flags += ["-fvisibility=hidden", "-Wno-unused-function"]
    flags += ["-Wno-maybe-uninitialized", "-Wno-uninitialized"]  # false alarms in GCC's own intrinsics
    if "-g" not in os.environ.get("CFLAGS", ""):
        flags.append("-g0")  # Python's own flags ask for debug information, nine tenths of the file
    folders = ["-isystem", include, f"-I{KERNELS}"]  # -isystem: no warnings from headers that are not ours
    macros = [("FEWBIT_SOURCES", f'"{fingerprint(source, KERNELS)}"')]  # what `kernels/extension.py` compares
    if STABLE_ABI:
        macros.append(("Py_LIMITED_API", "0x030B0000"))
    return Extension(
        module,
        [str(source)],
        define_macros=macros,  # type: ignore[arg-type]
        py_limited_api=STABLE_ABI,
        depends=HEADERS,
        extra_compile_args=flags + folders,
        language="c++",
        optional=True,
    )


def extensions() -> list[Extension]:
    """One extension for each C++ file; none without the headers, or with a compiler that cannot compile them."""
    if sys.platform == "win32":  # the sources use the vectors and attributes of GCC and Clang
        say_left_out("they need GCC or Clang")
        return []
    include = ffi_include()
    return [extension(source, include) for source in SOURCES] if include else []


def unit_count(source: str) -> int:
    """In how many translation units a source is compiled: its `#define FEWBIT_UNITS`, or 1 (cpp/foreach_isa.h)."""
    found = re.search(r"^#define FEWBIT_UNITS (\d+)", Path(source).read_text(), re.MULTILINE)
    return int(found[1]) if found else 1


def job_count() -> int:
    """How many compilers run at once: MAX_JOBS, or one for each core of this process."""
    if jobs := os.environ.get("MAX_JOBS"):
        return max(1, int(jobs))
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class BuildKernels(build_ext):
    """Compiles the translation units of all extensions in one pool of threads, then links each extension."""

    def build_extensions(self) -> None:
        """Builds what is older than its sources; says which unit is done, and how long it took."""
        if self.editable_mode and not self.force:
            self._take_those_in_place()
        outdated = [extension for extension in self.extensions if self.force or self._is_outdated(extension)]
        compiler = shlex.split(os.environ.get("CXX", "")) or getattr(self.compiler, "compiler_cxx", None) or ["c++"]
        if outdated and shutil.which(compiler[0]) is None:
            say_left_out(f"{compiler[0]} is not found")
            self.extensions = [extension for extension in self.extensions if extension not in outdated]
            return
        # The sources of several units first, so that none of them is compiled alone at the end.
        outdated.sort(key=lambda extension: -unit_count(extension.sources[0]))
        with ThreadPoolExecutor(job_count()) as pool:
            compiled = [
                [pool.submit(self._compile, extension, unit, count) for unit in range(count)]
                for extension in outdated
                for count in [unit_count(extension.sources[0])]
            ]
            for extension, units in zip(outdated, compiled, strict=True):
                with self._filter_build_errors(extension):  # reports the failure of an optional extension, and goes on
                    self._link(extension, units)

    def copy_extensions_to_source(self) -> None:
        """Copies the extensions beside their sources; removes those of earlier builds for one Python, which would be imported first."""
        super().copy_extensions_to_source()
        for extension in self.extensions if STABLE_ABI else ():
            built = Path("src", self.get_ext_filename(extension.name))
            for other in built.parent.glob(f"{built.name.split('.')[0]}.cpython-*.so"):
                other.unlink()

    def _take_those_in_place(self) -> None:
        """Takes what `build_ext --inplace` has compiled, for an editable installation builds in an empty folder."""
        for extension in self.extensions:
            in_place, built = Path("src", self.get_ext_filename(extension.name)), Path(self.get_ext_fullpath(extension.name))
            if not self._is_outdated(extension, in_place):
                built.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(in_place, built)

    def _is_outdated(self, extension: Extension, built: Path | None = None) -> bool:
        """Whether a compiled extension is missing or older than one of its sources and headers."""
        built = built or Path(self.get_ext_fullpath(extension.name))
        parts = [*extension.sources, *extension.depends, "setup.py"]
        return not built.exists() or any(Path(part).stat().st_mtime > built.stat().st_mtime for part in parts)

    def _compile(self, extension: Extension, unit: int, count: int) -> list[str]:
        """Compiles one translation unit; returns its object."""
        start = time.monotonic()
        macros = [*extension.define_macros, *([("FEWBIT_UNIT", str(unit))] if count > 1 else [])]
        objects = self.compiler.compile(
            extension.sources,
            output_dir=str(Path(self.build_temp) / f"unit{unit}"),
            macros=macros,
            debug=self.debug,
            extra_postargs=extension.extra_compile_args,
            depends=extension.depends,
        )
        print(
            f"fewbit: compiled {extension.sources[0]} ({unit + 1} of {count}) in {time.monotonic() - start:.0f} s",
            flush=True,
        )
        return objects

    def _link(self, extension: Extension, units: "list[Future[list[str]]]") -> None:
        """Links the objects of an extension."""
        self.compiler.link_shared_object(
            [path for unit in units for path in unit.result()],
            self.get_ext_fullpath(extension.name),
            libraries=self.get_libraries(extension),
            library_dirs=extension.library_dirs,
            extra_postargs=extension.extra_link_args,
            export_symbols=self.get_export_symbols(extension),
            debug=self.debug,
            build_temp=self.build_temp,
            target_lang="c++",
        )


setup(
    ext_modules=extensions(),
    cmdclass={"build_ext": BuildKernels},
    options={"bdist_wheel": {"py_limited_api": "cp311"}} if STABLE_ABI else {},
)
