"""The compiled kernels on arm64 without such a machine: their calls are recorded here, and made again in an emulator.

A cross compiler and the emulator are looked up where they are installed: `apt install g++-aarch64-linux-gnu qemu-user`, or
`pip install ziglang` for the compiler.
"""

import contextlib
import importlib.util
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fewbit.kernels import lowering

ROOT = Path(__file__).parents[2]
KERNELS = ROOT / "src/fewbit/kernels"
REPLAY = Path(__file__).parent / "replay"

# XLA's numbers of element types (xla/ffi/api/c_api.h).
_TYPES = {
    "bool": 1,
    "int8": 2,
    "int32": 4,
    "int64": 5,
    "uint8": 6,
    "uint32": 8,
    "float16": 10,
    "float32": 11,
    "bfloat16": 16,
}


def compiler() -> list[str] | None:
    """The command that compiles C++ for arm64 into a program that needs no library, or None."""
    if path := shutil.which("aarch64-linux-gnu-g++"):
        return [path, "-static"]
    if importlib.util.find_spec("ziglang"):
        return [sys.executable, "-m", "ziglang", "c++", "-target", "aarch64-linux-musl", "-static"]
    if path := shutil.which("zig"):
        return [path, "c++", "-target", "aarch64-linux-musl", "-static"]
    return None


def emulator() -> str | None:
    """The program that runs one for arm64, or None."""
    return shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")


def missing() -> str | None:
    """What is not installed, or None."""
    if compiler() is None:
        return "no compiler for arm64: install g++-aarch64-linux-gnu, or ziglang from PyPI"
    return None if emulator() else "no emulator of arm64: install qemu-user"


def compiled(out: Path, *sources: Path, define: str | None = None, optimize: str = "-O2") -> Path:
    """A program for arm64, with the flags of setup.py that bear on values."""
    folders = [REPLAY, KERNELS]
    flags = ["-std=c++17", optimize, "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-w", "-isystem"]
    flags += [jax.ffi.include_dir(), *(f"-I{folder}" for folder in folders), *([f"-D{define}"] if define else [])]
    subprocess.run([*compiler(), *flags, *map(str, sources), "-o", str(out)], check=True)
    return out


def emulated(program: Path, *arguments: str, cpu: str = "max") -> str:
    """What a program for arm64 prints when it runs on an emulated processor."""
    command = [emulator(), "-cpu", cpu, str(program), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


class Calls:
    """Calls of one extension with their results here."""

    def __init__(self):
        self.words: list[bytes] = []
        self.results: list[np.ndarray] = []
        self.count = 0

    def add(self, target: str, args: tuple[Any, ...], rets: list[np.ndarray], attrs: dict[str, Any]) -> None:
        """Adds a call."""
        self.count += 1
        self._block(target.encode())
        for buffers in (map(np.asarray, args), rets):
            listed = list(buffers)
            self._number(len(listed))
            for buffer in listed:
                self._number(_TYPES[buffer.dtype.name])
                self._block(np.asarray(buffer.shape, np.int64).tobytes())
                self._block(np.ascontiguousarray(buffer).tobytes())
        self._number(len(attrs))
        for name in sorted(attrs):
            value = np.asarray(attrs[name])
            self._block(name.encode())
            for number in (value.ndim, _TYPES[value.dtype.name], value.size):
                self._number(number)
            self._block(value.tobytes())
        self.results += rets

    def replayed(self, program: Path, folder: Path, cpu: str = "max") -> list[np.ndarray]:
        """The results of the same calls in the emulator."""
        assert self.count
        (folder / "calls").write_bytes(struct.pack("<q", self.count) + b"".join(self.words))
        emulated(program, str(folder / "calls"), str(folder / "results"), cpu=cpu)
        memory, results = (folder / "results").read_bytes(), []
        for expected in self.results:
            results.append(np.frombuffer(memory[: expected.nbytes], expected.dtype).reshape(expected.shape))
            memory = memory[expected.nbytes :]
        assert not memory
        return results

    def _number(self, number: int) -> None:
        self.words.append(struct.pack("<q", number))

    def _block(self, block: bytes) -> None:
        self._number(len(block))
        self.words.append(block)


@contextlib.contextmanager
def recorded(monkeypatch: Any) -> Iterator[Calls]:
    """Within it every call of an extension on values is written down; what only traces one, for its shapes, is not."""
    calls, real = Calls(), jax.ffi.ffi_call

    def bind(call: lowering.AbstractCall, *leaves: jax.Array) -> lowering.Leaves:
        """Not compiled, so that the extension is called with values."""
        (kernel,) = (kernel for kernel in call.kernels if kernel.platform == "cpu")
        return call.by_kernel(kernel, *leaves)

    def ffi_call(target: str, result: Any, **settings: Any) -> Any:
        call = real(target, result, **settings)

        def run(*args: Any, **attrs: Any) -> Any:
            out = call(*args, **attrs)
            results = jax.tree.leaves(out)
            if not any(isinstance(leaf, jax.core.Tracer) for leaf in results):
                calls.add(target, args, [np.asarray(leaf) for leaf in results], attrs)
            return out

        return run

    with monkeypatch.context() as patched:
        patched.setattr(jax.ffi, "ffi_call", ffi_call)
        patched.setattr(lowering, "bind", bind)
        yield calls
