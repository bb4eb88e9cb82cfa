"""Programs whose every operation rounds, as the formulas of the references do."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np


def unfused(function: Callable[..., jax.Array]) -> Callable[..., np.ndarray]:
    """The function compiled without LLVM's optimizations, which make one operation, with one rounding, of a product and a sum."""

    def run(*args: Any) -> np.ndarray:
        before = jax.config.read("jax_disable_most_optimizations")
        jax.config.update("jax_disable_most_optimizations", True)
        try:
            return np.asarray(jax.jit(lambda *args: function(*args))(*args))  # a program of its own, for JAX's caches
        finally:
            jax.config.update("jax_disable_most_optimizations", before)

    return run
