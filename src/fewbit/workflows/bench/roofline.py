"""Measures copy bandwidth and matmul rates."""

import dataclasses
import datetime
import importlib.metadata
import os
import pathlib
import platform
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...evaluate.timing import timed
from ...kernels.extension import EXTENSIONS, extension

Spread = tuple[float, float, float]


@dataclasses.dataclass(frozen=True)
class Machine:
    """The lowest, median and highest rates that were measured.

    Attributes:
        copy: bytes read and written by an in-place elementwise program, in GB/s.
        float32: dense float32 matmul, in GFLOP/s (a multiply-add counts as two).
        bfloat16: the same for bfloat16 operands.
    """

    copy: Spread
    float32: Spread
    bfloat16: Spread


def machine(*, nbytes: int = 1 << 28, size: int = 1024, rounds: int = 7) -> Machine:
    """Measures the rates of JAX's default device.

    Args:
        nbytes: size of the copied array.
        size: M = K = N of the matmul.
        rounds: how many times each one runs.
    """
    times = timed(
        {"copy": _copy(nbytes), **{dtype: _dense(size, dtype) for dtype in ("float32", "bfloat16")}}, rounds=rounds
    )
    work = {"copy": 2 * nbytes, "float32": 2 * size**3, "bfloat16": 2 * size**3}

    def rate(who: str) -> Spread:
        slowest, middle, fastest = np.quantile(times[who].seconds, (1.0, 0.5, 0.0))
        low, median, high = (float(f"{1e-9 * work[who] / s:.4g}") for s in (slowest, middle, fastest))
        return low, median, high

    return Machine(rate("copy"), rate("float32"), rate("bfloat16"))


def circumstances(packages: Sequence[str] = ()) -> dict[str, Any]:
    """The date, device, kernel instruction set and versions of a measurement.

    Args:
        packages: further packages to list versions of, besides fewbit, JAX and NumPy.
    """
    return {
        "date": datetime.date.today().isoformat(),
        "device": _device_name(),
        "kernels": _kernels(),
        "python": platform.python_version(),
        "versions": {package: _version(package) for package in ("fewbit", "jax", "jaxlib", "numpy", *packages)},
    }


def _kernels() -> str:
    """The instruction sets of the C++ kernels that loaded. Then come the names of those that did not load."""
    loaded = {module.rpartition("._")[2]: extension(module) for module in EXTENSIONS}
    missing = [name for name, found in loaded.items() if found.missing is not None]
    kinds = ", ".join(dict.fromkeys(found.isa for found in loaded.values() if found.missing is None)) or "none"
    if not missing:
        return kinds
    return (
        f"{kinds}; NOT built for this Python or older than their sources: {', '.join(missing)}, "
        "so the slower reference computes (`fewbit --version` says what to do)"
    )


def _device_name() -> str:
    """The name of JAX's default device. It is an accelerator's kind, or a CPU's model and core count."""
    device = jax.devices()[0]
    if device.platform != "cpu":
        return device.device_kind
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return f"{_processor()}, {cores} cores"


def _processor() -> str:
    """The processor's model from /proc/cpuinfo, else from `platform`."""
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    facts = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    if "model name" in facts and "cpu family" in facts:
        return f"{facts['model name']} (family {facts['cpu family']}, model {facts.get('model', '?')})"
    if "CPU implementer" in facts:
        return f"{platform.machine()} (implementer {facts['CPU implementer']}, part {facts.get('CPU part', '?')})"
    return facts.get("model name") or platform.machine()


def _copy(nbytes: int) -> Callable[[], Any]:
    """Increments an array in place (donated), so that no page faults are timed."""
    buffer = [jnp.zeros(nbytes // 4, jnp.float32)]
    step = jax.jit(lambda a: a + jnp.float32(1), donate_argnums=0)

    def run() -> Any:
        buffer[0] = step(buffer[0])
        return buffer[0]

    return run


def _dense(size: int, dtype: str) -> Callable[[], Any]:
    matmul, a = jax.jit(jnp.matmul), jnp.ones((size, size), dtype)
    return lambda: matmul(a, a)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
