"""Seconds that GPTQ takes for one weight, by scheme.

    python -m bench.gptq [--size 2048] [--rounds 5] [--save]

A random weight and the second moments of 4,096 random inputs whose channels go together. The first call compiles and is not
counted; later ones have other numbers of the same shape.
"""

import argparse
import statistics
import time

import jax
import jax.numpy as jnp

import fewbit as fb
from fewbit.methods.gptq import quantize_columns

from .facts import headline, save
from .methods import SCHEMES


def main() -> None:
    """Prints the table, and writes it."""
    parser = argparse.ArgumentParser(prog="python -m bench.gptq", description="seconds of GPTQ for one weight")
    parser.add_argument("--size", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--save", action="store_true", help="write bench/results/gptq.json")
    options = parser.parse_args()
    print(headline(()))
    size, rows = options.size, []
    for scheme in SCHEMES:
        times = [seconds(scheme, size, round_) for round_ in range(options.rounds + 1)]
        rows.append({"scheme": scheme, "first": times[0], "seconds": statistics.median(times[1:]), "times": times[1:]})
        print(f"{scheme:9} first {times[0]:.2f} s, then {rows[-1]['seconds']:.2f} s", flush=True)
    if options.save:
        save("gptq", (), size=size, rounds=options.rounds, rows=rows)


def seconds(scheme: str, size: int, seed: int) -> float:
    """The time for a weight of its own."""
    of_weight, of_inputs, of_mixing = jax.random.split(jax.random.key(seed), 3)
    w, x = jax.random.normal(of_weight, (size, size)), jax.random.normal(of_inputs, (2 * size, size))
    x = x @ (jnp.eye(size) + 0.5 * jax.random.normal(of_mixing, (size, size)) / size**0.5)
    hessian = jax.block_until_ready(x.T @ x)
    start = time.perf_counter()
    jax.block_until_ready(quantize_columns(w, fb.scheme(scheme), hessian, axis=(-1,), damping=0.01, act_order=True))
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
