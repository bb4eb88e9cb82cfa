"""Times integer products on the CPU, compared with torch and XLA.

    python -m bench.integers [--size 4096] [--rows 1 16 256] [--rounds 15] [--isa avx2] [--save]

Both operands are integers. Prints nothing about speed unless every product has the bits of the reference, or where tiles are
added is within the rounding of float32, measured first. Run it on one JAX device, as `bench/qmatmul.py`.
"""

import argparse
import importlib.util
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import fewbit as fb
from fewbit.evaluate.timing import timed

from .facts import add_isa, save

SCHEMES = ("int8", "int4", "int4_g64")
CONTRACTS = {-1: (((1,), (1,)), ((), ())), -2: (((1,), (0,)), ((), ()))}
"""The dimension numbers for a weight [N, K], whose tiles run along its last axis, and [K, N]."""


def main() -> int:
    """Runs the comparison; the exit status is 1 when a value is wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.integers", description="fewbit's integer products against other packages"
    )
    parser.add_argument("--size", type=int, default=4096)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 256])
    parser.add_argument("--rounds", type=int, default=15)
    add_isa(parser)
    parser.add_argument("--save", action="store_true", help="write bench/results/integers.json")
    options = parser.parse_args()
    rng = np.random.default_rng(0)
    w = jnp.asarray(rng.normal(size=(options.size, options.size)), jnp.float32)
    weights = {(name, axis): fb.quantize(w, name, axis=axis) for name in SCHEMES for axis in (-1, -2)}
    few = fb.quantize(w[:3], "int8")
    errors = {key: error(few, q, key[1]) for key, q in weights.items()}
    if wrong := {key: e for key, e in errors.items() if not e < 1}:
        print(f"a value is wrong, so no times are printed: {wrong}", file=sys.stderr)
        return 1
    rows = []
    for m in options.rows:
        x = jnp.asarray(rng.normal(size=(m, options.size)), jnp.float32)
        calls = 10 if m == 1 else 1  # as the layers of a network come
        times = timed(contenders(x, weights), rounds=options.rounds, calls=calls, pause=0.01)
        beside = next(name for name in ("torch int8 [N, K]", "XLA int8 [N, K]") if name in times)
        for name, timing in times.items():
            low, middle, high = timing.ratio(times[beside])
            rate = 2e-6 * m * options.size**2 / timing.median
            text = f"M={m:<4} {name:22} {timing.median:8.3f} ms  {rate:6.0f} GOP/s  {middle:5.2f} of {beside} ({low:.2f} to {high:.2f})"
            facts = {"m": m, "who": name, "ms": timing.median, "gops": rate, "beside": beside, "ratio": middle}
            rows.append({**facts, "of": {beside: timing.quartiles(times[beside])}, "text": text})
            print(text)
    if options.save:
        save("integers", ("torch",), size=options.size, rounds=options.rounds, rows=rows)
    return 0


def error(x: fb.QArray, q: fb.QArray, axis: int) -> float:
    """The largest difference from the reference, over what the rounding of each tile's sum may make of it."""
    ours, reference = (
        np.asarray(fb.dot_general(x, q, CONTRACTS[axis], backend=b), np.float64) for b in ("cpu", "reference")
    )
    magnitude = np.abs(np.asarray(fb.dequantize(x))) @ np.abs(np.moveaxis(np.asarray(fb.dequantize(q)), axis, 0))
    return float(np.max(np.abs(ours - reference) / (2.0**-24 * x.shape[1] * magnitude)))


def contenders(rows: jax.Array, weights: dict[tuple[str, int], fb.QArray]) -> dict[str, Callable[[], Any]]:
    """Every product with one x: ours, that of x in float32, XLA's of the same codes, torch's."""
    x, found = fb.quantize(rows, "int8"), {}
    for (name, axis), q in weights.items():
        run = jax.jit(lambda x, q, axis=axis: fb.dot_general(x, q, CONTRACTS[axis], backend="cpu"))
        found[f"{name} {_order(axis)}"] = lambda run=run, q=q: run(x, q)
    last = jax.jit(lambda x, q: fb.dot_general(x, q, CONTRACTS[-1], backend="cpu"))
    found["float32 by int8 [N, K]"] = lambda: last(rows, weights["int8", -1])
    plain = jax.jit(lambda x, q: fb.dot_general(x, q, CONTRACTS[-1], backend="reference"))
    found["XLA int8 [N, K]"] = lambda: plain(x, weights["int8", -1])
    return found | torch_products(x, weights)


def torch_products(x: fb.QArray, weights: dict[tuple[str, int], fb.QArray]) -> dict[str, Callable[[], Any]]:
    """torch's product of int8 matrices, without scales; none without torch, nor for 16 rows or fewer, which it refuses."""
    if importlib.util.find_spec("torch") is None or x.shape[0] <= 16:
        return {}
    import torch

    rows, last, first = (
        torch.from_numpy(np.array(q.codes).view(np.int8)) for q in (x, weights["int8", -1], weights["int8", -2])
    )
    return {
        "torch int8 [N, K]": lambda: torch.ops.aten._int_mm(rows, last.T),
        "torch int8 [K, N]": lambda: torch.ops.aten._int_mm(rows, first),
    }


def _order(axis: int) -> str:
    return "[N, K]" if axis == -1 else "[K, N]"


if __name__ == "__main__":
    sys.exit(main())
