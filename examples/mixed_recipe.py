"""One recipe of several policies: a file, a plan, a model.

python examples/mixed_recipe.py

The first and the last layer stay float, attention is int8, the MLP NVFP4.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import fewbit as fb

WIDTH = 64
RECIPE = """{"name": "mixed", "rules": [
  {"path": "embed|head|layers/0/.*", "policy": null},
  {"path": "layers/.*/(query|out)", "policy": {"weight": "int8", "activation": "int8"}},
  {"path": "layers/.*/w[io]", "policy": "nvfp4"}
]}"""


def init(layers: int) -> dict[str, Any]:
    """The parameters of a small model."""
    names = ("query", "out", "wi", "wo")
    keys = iter(jax.random.split(jax.random.key(0), layers * len(names) + 2))
    body = [{name: jax.random.normal(next(keys), (WIDTH, WIDTH)) / 8 for name in names} for _ in range(layers)]
    return {
        "embed": jax.random.normal(next(keys), (100, WIDTH)),
        "layers": body,
        "head": jax.random.normal(next(keys), (WIDTH, 100)),
    }


def forward(params: dict[str, Any], ids: jax.Array) -> jax.Array:
    """Attention on the queries themselves, then an MLP, layer by layer."""
    x = params["embed"][ids]
    for layer in params["layers"]:
        query = x @ layer["query"]
        x = x + jax.nn.softmax(query @ query.T / WIDTH) @ x @ layer["out"]
        x = x + jax.nn.silu(x @ layer["wi"]) @ layer["wo"]
    return x @ params["head"]


def main(steps: int) -> fb.Plan:
    """Prints the plan and the error of its model; `steps` is how many layers there are."""
    params, ids = init(max(steps, 2)), jnp.arange(8)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "mixed.json"
        path.write_text(RECIPE)
        plan = fb.plan(forward, params, ids, recipe=fb.recipe(path))
        plan.save(Path(folder) / "plan.json")  # editable: another policy for one row, or null
        rows = json.loads((Path(folder) / "plan.json").read_text())["rows"]
    print(plan)
    print(f"{sum(row['policy'] is None for row in rows)} rows have no policy")
    quantized = fb.quantize_params(params, plan)
    got, want = fb.transparent(forward)(quantized, ids), forward(params, ids)
    print(f"relative error of the logits: {jnp.linalg.norm(got - want) / jnp.linalg.norm(want):.4f}")
    return plan


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=3, help="how many layers the model has")
    main(parser.parse_args().steps)
