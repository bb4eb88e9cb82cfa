"""What this machine could do at best: its copy bandwidth and its rates of dense products, and what they were measured with."""

import dataclasses
import datetime
import importlib.metadata
import platform
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..evaluate.timing import timed
from ..kernels.device import device_name
from ..kernels.extension import extension

Spread = tuple[float, float, float]


@dataclasses.dataclass(frozen=True)
class Machine:
    """What a machine can do: of each rate the lowest, the median and the highest that was measured.

    Attributes:
        copy: bytes read and written by an elementwise program in place, in GB/s.
        float32: of a dense product, in GFLOP/s, two for a multiplication with its addition.
        bfloat16: the same of bfloat16 operands.
    """

    copy: Spread
    float32: Spread
    bfloat16: Spread


def machine(*, nbytes: int = 1 << 28, size: int = 1024, rounds: int = 7) -> Machine:
    """Measures the rates of JAX's default device.

    Args:
        nbytes: how long the array is that is read and written.
        size: of the square matrices that are multiplied.
        rounds: how many times each.
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
    """What a measurement was made on, as a record: date, device, instruction set of the kernels, versions.

    Args:
        packages: whose versions are told beside those of JAX, NumPy and fewbit.
    """
    return {
        "date": datetime.date.today().isoformat(),
        "device": device_name(),
        "kernels": extension("fewbit.kernels.qmatmul._cpu").isa or "not built",
        "python": platform.python_version(),
        "versions": {package: _version(package) for package in ("fewbit", "jax", "jaxlib", "numpy", *packages)},
    }


def _copy(nbytes: int) -> Callable[[], Any]:
    """A pass over an array in place, so that no fresh page costs a fault."""
    held = [jnp.zeros(nbytes // 4, jnp.float32)]
    step = jax.jit(lambda a: a + jnp.float32(1), donate_argnums=0)

    def run() -> Any:
        held[0] = step(held[0])
        return held[0]

    return run


def _dense(size: int, dtype: str) -> Callable[[], Any]:
    matmul, a = jax.jit(jnp.matmul), jnp.ones((size, size), dtype)
    return lambda: matmul(a, a)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
