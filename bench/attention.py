"""Times attention over a KV cache on the CPU, compared with XLA.

    python -m bench.attention [--rounds 9] [--isa avx2] [--save]

The cache is in floats or in few bits. The heads are those of SmolLM2-135M: 9 of width 64, three of keys and values, caches of
8 layers. One token that is written, after 64, 512 or 4096 others, and a prompt of 512 tokens, each by a compiled loop through
the layers, which reads each layer of the cache once. No times are printed unless both agree within the rounding of
float32. Run it on one JAX device.
"""

import argparse
import functools
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import fewbit as fb
from fewbit.evaluate.timing import timed
from fewbit.kernels.attention import QUERIES, Block, attention, seen_positions
from fewbit.kvcache import kv_policy

from .facts import add_isa, save

LAYERS, HEADS, KEY_HEADS, WIDTH = 8, 9, 3, 64
CACHES = ("float32", "bfloat16", "int8", "int8, int8 queries", "fp8", "int4")
TASKS = {"write after 64": (63, 1), "write after 512": (511, 1), "write after 4096": (4095, 1), "read 512": (0, 512)}
BACKENDS = {"kernel": "cpu", "XLA": "reference"}


def main() -> int:
    """Runs the comparison; the exit status is 1 when a value is wrong."""
    parser = argparse.ArgumentParser(prog="python -m bench.attention", description="attention over a cache, against XLA's")
    parser.add_argument("--rounds", type=int, default=9)
    add_isa(parser)
    parser.add_argument("--save", action="store_true", help="write bench/results/attention.json")
    options = parser.parse_args()
    rows = []
    for task, (start, count) in TASKS.items():
        runs = {(name, who): run(name, start, count, backend) for name in CACHES for who, backend in BACKENDS.items()}
        for name in CACHES:
            ours, theirs = (np.asarray(runs[name, who](), np.float32) for who in BACKENDS)
            # XLA rounds weights and sums to the dtype of the queries; weights in int8 may round to the next integer.
            allowed = {"bfloat16": 2e-2, "int8, int8 queries": 1e-3}.get(name, 1e-5)
            if not np.abs(ours - theirs).max() <= allowed * np.abs(theirs).max():
                print(f"a value of {name}, {task}, is wrong, so no times are printed", file=sys.stderr)
                return 1
        times = timed(runs, rounds=options.rounds)
        for name in CACHES:
            low, middle, high = times[name, "kernel"].ratio(times[name, "XLA"])
            us = {who: 1e3 * times[name, who].median / LAYERS for who in BACKENDS}
            print(
                f"{task:18} {name:18} {us['kernel']:9.1f} us a layer, XLA {us['XLA']:9.1f}: {middle:.2f} ({low:.2f} to {high:.2f})"
            )
            rows.append({"task": task, "cache": name, "us": us["kernel"], "us_of_xla": us["XLA"], "ratio": middle})
    if options.save:
        save("attention", (), rounds=options.rounds, layers=LAYERS, rows=rows)
    return 0


def run(name: str, start: int, count: int, backend: str) -> Callable[[], jax.Array]:
    """The loop through all layers of a cache of one kind."""
    rng = np.random.default_rng(0)
    shape = (LAYERS, 1, KEY_HEADS, start + count, WIDTH)
    keys, values = (jnp.asarray(rng.normal(size=shape), jnp.float32) for _ in range(2))
    dtype = jnp.bfloat16 if name == "bfloat16" else jnp.float32
    queries = jnp.asarray(rng.normal(size=(1, HEADS, count, WIDTH)), dtype)
    kind, _, has_int8_queries = name.partition(", ")
    held = [
        x.astype(dtype) if kind in ("float32", "bfloat16") else fb.quantize(x, kv_policy(kind).keys) for x in (keys, values)
    ]
    loop = functools.partial(through, start=start, backend=backend, has_int8_queries=bool(has_int8_queries))
    return functools.partial(jax.jit(loop), queries, *held)


def through(queries: jax.Array, keys: Any, values: Any, *, start: int, backend: str, has_int8_queries: bool) -> jax.Array:
    """Attention in every layer, each with the queries that the one before gave."""
    seen = seen_positions(start, queries.shape[2])

    def layer(index: jax.Array, q: jax.Array) -> jax.Array:
        operand = fb.quantize(q, QUERIES) if has_int8_queries else q
        return queries + attention(operand, [Block(keys, values, seen, index)], backend=backend)

    return jax.lax.fori_loop(0, LAYERS, layer, queries)


if __name__ == "__main__":
    sys.exit(main())
