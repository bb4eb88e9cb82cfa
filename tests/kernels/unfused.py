"""Programs whose every operation rounds, as the formulas of the references do."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np


def unfused(function: Callable[..., jax.Array]) -> Callable[..., np.ndarray]:
    """The function, one operation at a time: compilers make one operation, with one rounding, of a product and a sum."""

    def run(*args: Any) -> np.ndarray:
        with jax.disable_jit():
            return np.asarray(function(*args))

    return run
