"""Times products with block-wise int8 activations on the CPU.

    python -m bench.blocks [--size 4096] [--rows 1 4 64] [--rounds 9] [--isa avx2] [--save]

int8 activations in the blocks of the weight are compared with float32 activations and with the reference. Both orientations of
a weight, and experts of `ragged_dot`: processor time of one core, so that other work on the machine counts little. Prints
nothing about speed unless every product is within the rounding of its float32 sums of the product of the decoded operands,
measured first. Run it on one JAX device.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import fewbit as fb
from fewbit.evaluate.timing import timed

from .facts import add_isa, save
from .integers import CONTRACTS

SCHEMES = ("q4_1", "int4_g64", "mxfp4", "nvfp4", "q8_0", "mxfp6")
EXPERTS = {"1 row each": (1,) * 8, "16 rows each": (16,) * 8, "2 have 64, 6 none": (64, 0, 0, 64, 0, 0, 0, 0)}
COPIES = 4
"""Weights of each scheme, called in turn, so that none stays in the first caches."""


def main() -> int:
    """Runs the comparison; the exit status is 1 when a value is wrong."""
    parser = argparse.ArgumentParser(prog="python -m bench.blocks", description="int8 activations in blocks")
    parser.add_argument("--size", type=int, default=4096)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 64])
    parser.add_argument("--schemes", nargs="+", default=SCHEMES)
    parser.add_argument("--rounds", type=int, default=9)
    add_isa(parser)
    parser.add_argument("--save", action="store_true", help="write bench/results/blocks.json")
    options = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):  # before JAX and the kernels start their threads
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    rows: list[dict[str, Any]] = []
    for name in options.schemes:
        for axis in (-1, -2):
            weights = [_weight(name, (options.size, options.size), axis, seed) for seed in range(COPIES)]
            kind, order = f"int8_g{weights[0].tiles[axis]}", "[N, K]" if axis == -1 else "[K, N]"
            for m in options.rows:
                x = jnp.asarray(np.random.default_rng(m).normal(size=(m, options.size)), jnp.float32)

                def product(x: Any, q: fb.QArray, backend: str, axis: int = axis) -> jax.Array:
                    return fb.dot_general(x, q, CONTRACTS[axis], backend=backend)

                if not rows_agree(product, x, weights[0], kind, name, rows, f"{name} {order}", m, options.rounds, weights):
                    return 1
        stack = _weight(name, (8, 1024, 1024), -2, 0)
        for text, counts in EXPERTS.items():
            x, sizes = jnp.asarray(np.random.default_rng(0).normal(size=(sum(counts), 1024)), jnp.float32), jnp.array(counts)

            def grouped(x: Any, q: fb.QArray, backend: str, sizes: jax.Array = sizes) -> jax.Array:
                return fb.ragged_dot(x, q, sizes, backend=backend)

            kind = f"int8_g{stack.tiles[1]}"
            if not rows_agree(
                grouped, x, stack, kind, name, rows, f"{name}, 8 experts, {text}", len(x), options.rounds, [stack]
            ):
                return 1
    if options.save:
        save("blocks", (), size=options.size, rounds=options.rounds, rows=rows)
    return 0


def rows_agree(
    product: Callable[[Any, fb.QArray, str], jax.Array],
    x: jax.Array,
    q: fb.QArray,
    kind: str,
    scheme: str,
    rows: list[dict[str, Any]],
    what: str,
    m: int,
    rounds: int,
    weights: list[fb.QArray],
) -> bool:
    """Times one product three ways and adds its row; False where its values are wrong."""
    run = jax.jit(product, static_argnums=2)
    codes = fb.quantize(x, kind)
    ours, plain = np.asarray(run(codes, q, "cpu")), np.asarray(run(fb.dequantize(codes), q, "reference"))
    if not np.allclose(ours, plain, rtol=0, atol=2.0**-16 * np.abs(plain).max()):
        print(f"a value is wrong, so no times are printed: {what}, {m} rows", file=sys.stderr)
        return False
    sides = {"int8": (codes, "cpu"), "float32": (x, "cpu"), "reference": (codes, "reference")}
    turns = dict.fromkeys(sides, 0)

    def contender(who: str) -> Callable[[], Any]:
        side, backend = sides[who]

        def call() -> Any:
            turns[who] += 1
            return run(side, weights[turns[who] % len(weights)], backend)

        return call

    times = timed({who: contender(who) for who in sides}, rounds=rounds, calls=4 if m == 1 else 1, clock=time.process_time)
    beside, plain_ratio = times["int8"].ratio(times["float32"]), times["int8"].ratio(times["reference"])
    print(
        f"{what:36} M={m:<4} {times['int8'].median:8.3f} ms  {beside[1]:5.2f} of float32 activations "
        f"({beside[0]:.2f} to {beside[2]:.2f})  {plain_ratio[1]:5.3f} of the reference",
        flush=True,
    )
    rows.append(
        {
            "what": what,
            "scheme": scheme,
            "m": m,
            "ms": {who: timing.median for who, timing in times.items()},
            "of_float32": beside[1],
            "of_float32_from": beside[0],
            "of_float32_to": beside[2],
            "of_reference": plain_ratio[1],
        }
    )
    return True


def _weight(name: str, shape: tuple[int, ...], axis: int, seed: int) -> fb.QArray:
    return fb.quantize(jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32), name, axis=axis)


if __name__ == "__main__":
    sys.exit(main())
