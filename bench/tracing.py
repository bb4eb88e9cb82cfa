"""What tracing through `fb.transparent` costs beside tracing the float model: a perceptron of 48 layers.

    python -m bench.tracing [--rounds 15] [--save]

CPU time of `jax.make_jaxpr`, round by round: the float model, the same code on quantized leaves, and code that calls
`fb.dequantize` by hand. `first` makes the transparent function anew in each round, so nothing of it is kept from before.
"""

import argparse
import statistics
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import fewbit as fb

from .facts import save

LAYERS, WIDTH = 48, 64


def mlp(params: Any, x: jax.Array) -> jax.Array:
    """Normalisation, two products and a residual, 48 times."""
    for up, down, scale in params:
        mean = x.mean(-1, keepdims=True)
        variance = ((x - mean) ** 2).mean(-1, keepdims=True)
        h = (x - mean) * jax.lax.rsqrt(variance + 1e-6) * scale
        x = x + jnp.tanh(h @ up) @ down
    return x


def parameters() -> tuple[Any, Any]:
    """The float parameters, and the same with nf4 products."""
    random = np.random.default_rng(0)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(random.normal(size=shape) / np.sqrt(shape[0]), jnp.float32)

    dense = [(normal(WIDTH, 2 * WIDTH), normal(2 * WIDTH, WIDTH), jnp.ones((1, WIDTH))) for _ in range(LAYERS)]
    return dense, [(fb.quantize(up, "nf4", axis=-2), fb.quantize(down, "nf4", axis=-2), s) for up, down, s in dense]


def main() -> int:
    """Prints the ratios; the exit status is 1 when the transformed model computes something else."""
    parser = argparse.ArgumentParser(prog="python -m bench.tracing", description="what tracing through fb.transparent costs")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--save", action="store_true", help="write bench/results/tracing.json")
    options = parser.parse_args()
    dense, quantized = parameters()
    decoded = jax.tree.map(lambda q: fb.dequantize(q) if fb.is_qarray(q) else q, quantized, is_leaf=fb.is_qarray)
    x = jnp.ones((2, WIDTH))
    kept = fb.transparent(mlp)
    if not jnp.allclose(jax.jit(kept)(quantized, x), jax.jit(mlp)(decoded, x), rtol=1e-4, atol=1e-4):
        print("the correctness gate is red, so no cost is printed", file=sys.stderr)
        return 1

    def by_hand(params: Any, x: jax.Array) -> jax.Array:
        return mlp([(fb.dequantize(up), fb.dequantize(down), s) for up, down, s in params], x)

    contenders = {
        "dense": lambda: jax.make_jaxpr(lambda p, x: mlp(p, x))(dense, x),
        "transparent": lambda: jax.make_jaxpr(lambda p, x: kept(p, x))(quantized, x),
        "transparent, first": lambda: jax.make_jaxpr(lambda p, x: fb.transparent(mlp)(p, x))(quantized, x),
        "dequantize by hand": lambda: jax.make_jaxpr(lambda p, x: by_hand(p, x))(quantized, x),
    }
    equations = {name: len(run().jaxpr.eqns) for name, run in contenders.items()}
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(options.rounds):
        for name, run in contenders.items():
            start = time.process_time()
            run()
            seconds[name].append(time.process_time() - start)
    rows = [row(name, seconds, equations[name]) for name in contenders]
    for each in rows:
        low, high = each["ratio_spread"]
        print(
            f"{each['who']:20} {each['ms']:7.1f} ms  {each['ratio']:5.2f} of dense ({low:.2f} to {high:.2f})  "
            f"{each['equations']} equations"
        )
    if options.save:
        save("tracing", (), layers=LAYERS, rounds=options.rounds, rows=rows)
    return 0


def row(name: str, seconds: dict[str, list[float]], equations: int) -> dict[str, Any]:
    """The figures of one contender: medians, and the ratio's middle half."""
    ratios = [mine / theirs for mine, theirs in zip(seconds[name], seconds["dense"], strict=True)]
    low, _, high = statistics.quantiles(ratios, n=4)
    middle = statistics.median(ratios)
    spread = [round(low, 3), round(high, 3)]
    milliseconds = round(1e3 * statistics.median(seconds[name]), 2)
    return {"who": name, "ms": milliseconds, "ratio": round(middle, 3), "ratio_spread": spread, "equations": equations}


if __name__ == "__main__":
    sys.exit(main())
