"""Times products with quantized weights on the CPU.

    python -m bench.qmatmul [--size 4096] [--rows 1 256] [--rounds 15] [--isa avx2] [--save]
    taskset -c 0 python -m bench.qmatmul --processor-time    # one core of a machine that others use, too

They are compared with torch's kernels, dense products and the copy bandwidth. Weights rotate through enough copies to lie
beyond the last-level cache. Activations are float32, and int8 in the blocks of the weight where there are kernels for that;
the time to quantize them counts. A plain read sums the packed bytes. Prints nothing about speed unless every product is within
the rounding of float32 of that of the decoded operands, measured first. Run it on one JAX device: the kernels are not chosen
by themselves where there are several.
"""

import argparse
import dataclasses
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import fewbit as fb
from fewbit.evaluate.timing import Timing, timed
from fewbit.workflows.bench.products import (
    LAYOUTS,
    ROTATED_BYTES,
    SCHEMES,
    beyond_rounding,
    copies,
    in_turn,
    product,
    quantized,
    with_int8_policy,
)
from fewbit.workflows.bench.roofline import machine

from .facts import add_isa, headline, save
from .peers import torch_products

PEERS = ("torch",)
INT8 = "x int8"
COMPARED = ("XLA float32", "torch int4, groups of 64", "torch int8", "plain read of 4 bits", "plain read of 8 bits")
"""The contenders whose ratios are saved with their spread."""


def main() -> int:
    """Runs the comparison; the exit status is 1 when a value is wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.qmatmul", description="fewbit's products on CPUs against other packages"
    )
    parser.add_argument("--size", type=int, default=4096)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 256])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument(
        "--calls", type=int, default=10, help="in a turn, with up to 16 rows, as the layers of a network come"
    )
    parser.add_argument("--schemes", nargs="+", default=SCHEMES)
    parser.add_argument("--processor-time", action="store_true", help="count it in place of the time on the wall")
    add_isa(parser)
    parser.add_argument("--save", action="store_true", help="write bench/results/qmatmul.json")
    options = parser.parse_args()
    rng = np.random.default_rng(0)
    w = jnp.asarray(rng.normal(size=(options.size, options.size)), jnp.float32)
    weights = {(name, axis): quantized(w, name, axis) for name in options.schemes for axis in LAYOUTS.values()}
    errors = {key: beyond_rounding(q, key[1], options.rows, "cpu") for key, q in weights.items()}
    for (name, axis), q in weights.items():
        if (with_policy := with_int8_policy(q, axis)) is not None:
            errors[f"{name} {INT8}", axis] = beyond_rounding(with_policy, axis, options.rows, "cpu")
    if wrong := {key: error for key, error in errors.items() if not error < 1}:
        print(f"a value is wrong, so no times are printed: {wrong}", file=sys.stderr)
        return 1
    rates = machine()
    print(headline(PEERS))
    print(f"copy {rates.copy[1]:.3g} GB/s; dense float32 {rates.float32[1]:.3g} GFLOP/s, bfloat16 {rates.bfloat16[1]:.3g}")
    rows = []
    for m in options.rows:
        x = jnp.asarray(rng.normal(size=(m, options.size)), jnp.float32)
        clock = time.process_time if options.processor_time else time.perf_counter
        calls = options.calls if m <= 16 else 1
        times = timed(contenders(x, w, weights), rounds=options.rounds, calls=calls, clock=clock)
        rows += [row(m, name, times) for name in times]
    for line in rows:
        print(line["text"])
    if options.save:
        how = {"cores": len(os.sched_getaffinity(0)), "clock": "processor" if options.processor_time else "wall"}
        how |= {"size": options.size, "rounds": options.rounds, "calls_in_a_turn_of_few_rows": options.calls}
        facts = {**how, "machine": dataclasses.asdict(rates)}
        save("qmatmul", PEERS, **facts, rows=rows)
    return 0


def contenders(x: jax.Array, w: jax.Array, weights: dict[tuple[str, int], fb.QArray]) -> dict[str, Callable[[], Any]]:
    """Every product with one x, each with its own rotating copies of its weight; a copy of bytes; and the dense product."""
    source = jnp.zeros(ROTATED_BYTES // 8, jnp.uint8)
    copy = jax.jit(lambda a: a + jnp.uint8(1))
    dense = jax.jit(jnp.matmul)
    found: dict[str, Callable[[], Any]] = {"copy": lambda: copy(source)}
    found["XLA float32"] = rotating(w, lambda w: dense(x, w), x.shape[0])
    for (name, axis), q in weights.items():
        run, layout = jax.jit(lambda x, q, axis=axis: product(x, q, axis, "cpu")), "[N, K]" if axis == -1 else "[K, N]"
        held = rotated(q, x.shape[0])
        found[f"{name} {layout}"] = in_turn(lambda q, run=run: run(x, q), held)
        if with_int8_policy(q, axis) is not None:
            with_policy = [with_int8_policy(each, axis) for each in held]
            found[f"{name} {INT8} {layout}"] = in_turn(lambda q, run=run: run(x, q), with_policy)
    for bits in (4, 8):
        words = jnp.zeros((len(w), w.shape[1] * bits // 32), jnp.uint32)
        found[f"plain read of {bits} bits"] = rotating(words, summed, x.shape[0])
    return found | torch_products(x, w, ROTATED_BYTES)


@jax.jit
def summed(words: jax.Array) -> jax.Array:
    """The sum of each row, which takes as long as reading it."""
    return jnp.sum(words, axis=1)


def rotating(weight: Any, run: Callable[[Any], Any], rows: int) -> Callable[[], Any]:
    """A contender that takes the next copy of the weight at each call."""
    return in_turn(run, rotated(weight, rows))


def rotated(weight: Any, rows: int) -> list[Any]:
    """Copies of a weight beyond the last-level cache; with many rows of x two do."""
    return copies(weight, ROTATED_BYTES if rows <= 16 else 0)


def row(m: int, name: str, times: dict[str, Timing]) -> dict[str, Any]:
    """One contender's figures, and the line that shows them."""
    low, middle, high = times[name].ratio(times["XLA float32"])
    least, median = 1e3 * min(times[name].seconds), times[name].median
    text = f"M={m:<4} {name:28} {median:8.3f} ms (least {least:.3f})  {middle:6.2f} of XLA float32 ({low:.2f} to {high:.2f})"
    of = {peer: times[name].quartiles(times[peer]) for peer in COMPARED if peer in times}
    return {"m": m, "who": name, "ms": median, "least_ms": least, "of_xla_float32": middle, "of": of, "text": text}


if __name__ == "__main__":
    sys.exit(main())
