"""Times products with scales along N, and products of experts.

    python -m bench.layouts [--size 4096] [--rows 1 256] [--rounds 9] [--save]

They are compared with dense products on the CPU. The first part is `x @ fb.quantize(w, scheme)` with `w` [K, N], whose tiles
run along N, and `x @ q.T` of a weight [N, K] with tiles along N: what one gets without naming an axis, and every gradient. The
second is `fb.ragged_dot` with 8 experts of 1024 x 1024, against XLA's `ragged_dot` of the decoded experts, once decoded
beforehand and once within the call. No times are printed unless every product is within the rounding of float32,
measured first. Run it on one JAX device, as `bench/qmatmul.py`.
"""

import argparse
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import fewbit as fb
from fewbit.evaluate.timing import timed
from fewbit.workflows.bench.products import LAYOUTS, ROTATED_BYTES, beyond_rounding, chain, copies, in_turn, random_weight

from .facts import save

SCHEMES = ("int8", "int4", "int8 by 64", "nf4", "mxfp4")
EXPERTS, WIDTH = 8, 1024
GROUPS = {
    "1 row each": [1] * 8,
    "16 rows each": [16] * 8,
    "2 have 64": [64, 0, 0, 64, 0, 0, 0, 0],
    "128 rows each": [128] * 8,
}


def main() -> int:
    """Runs the comparison; the exit status is 1 when a value is wrong."""
    parser = argparse.ArgumentParser(prog="python -m bench.layouts", description="scales along the other axis, and experts")
    parser.add_argument("--size", type=int, default=4096)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 256])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--save", action="store_true", help="write bench/results/layouts.json")
    options = parser.parse_args()
    w = random_weight(options.size)
    weights = {(name, axis): crosswise(w, name, axis) for name in SCHEMES for axis in LAYOUTS.values()}
    experts = {name: fb.quantize(random_experts(), name, axis=-2) for name in ("int4_g64", "int8", "nf4")}
    errors = {key: beyond_rounding(q, key[1], options.rows, "cpu") for key, q in weights.items()}
    errors |= {(name, 0): expert_error(q) for name, q in experts.items()}
    if wrong := {key: e for key, e in errors.items() if not e < 1}:
        print(f"a value is wrong, so no times are printed: {wrong}", file=sys.stderr)
        return 1
    rows = [row for m in options.rows for row in matrices(m, w, weights, options.rounds)]
    rows += [row for who, sizes in GROUPS.items() for row in of_experts(who, sizes, experts, options.rounds)]
    if options.save:
        save("layouts", (), size=options.size, rounds=options.rounds, rows=rows)
    return 0


def crosswise(w: jax.Array, name: str, axis: int) -> fb.QArray:
    """A weight whose contracted axis is `axis`, and whose tiles run along the other one; "NAME by 64" has tiles of 64."""
    scheme, _, tile = name.partition(" by ")
    found = fb.scheme(scheme)
    return fb.quantize(w, found.with_tiles((1, int(tile)), -1) if tile else found, axis=-3 - axis)


def matrices(m: int, w: jax.Array, weights: dict[tuple[str, int], fb.QArray], rounds: int) -> list[dict[str, Any]]:
    """The rows of all schemes and both layouts for one number of rows of x."""
    rotated, links = (ROTATED_BYTES, 4) if m <= 16 else (0, 1)
    x = jnp.asarray(np.random.default_rng(2).normal(size=(m, len(w))), jnp.float32)
    floats = copies(w, rotated)
    runs = {
        f"dense {name}": in_turn(functools.partial(chain, x, axis=axis), floats, links) for name, axis in LAYOUTS.items()
    }
    names = {axis: name for name, axis in LAYOUTS.items()}
    for (name, axis), q in weights.items():
        run = functools.partial(chain, x, axis=axis, backend="cpu")
        runs[f"{name} {names[axis]}"] = in_turn(run, copies(q, rotated), links)
    return printed_rows(f"M={m}", runs, rounds, links, lambda who: f"dense {who[who.index('[') :]}")


def of_experts(title: str, sizes: Sequence[int], experts: dict[str, fb.QArray], rounds: int) -> list[dict[str, Any]]:
    """The rows of all schemes for experts that have so many rows each."""
    groups = jnp.array(sizes, jnp.int32)
    x = jnp.asarray(np.random.default_rng(3).normal(size=(sum(sizes), WIDTH)), jnp.float32)
    dense = jax.jit(jax.lax.ragged_dot)
    runs = {"dense": in_turn(lambda w: dense(x, w, groups), copies(random_experts(), ROTATED_BYTES))}
    for name, q in experts.items():
        for backend in ("cpu", "reference"):
            run = jax.jit(functools.partial(fb.ragged_dot, backend=backend))
            runs[f"{name} {backend}"] = in_turn(lambda q, run=run: run(x, q, groups), copies(q, ROTATED_BYTES))
    return printed_rows(f"experts, {title}", runs, rounds, 1, lambda _: "dense")


def printed_rows(
    title: str, runs: dict[str, Callable[[], Any]], rounds: int, links: int, compared: Callable[[str], str]
) -> list[dict[str, Any]]:
    """Prints the times of products that take turns, and returns them as rows."""
    times = timed(runs, rounds=rounds)
    rows = []
    for who, timing in times.items():
        low, middle, high = timing.ratio(times[compared(who)])
        ms = timing.median / links
        print(f"{title:24} {who:20} {ms:8.3f} ms {middle:6.2f} of {compared(who)} ({low:.2f} to {high:.2f})")
        rows.append({"product": title, "who": who, "ms": ms, "beside": compared(who), "ratio": middle})
    return rows


def random_experts() -> jax.Array:
    """The experts' matrices, `[8, 1024, 1024]`."""
    return jnp.asarray(np.random.default_rng(0).normal(size=(EXPERTS, WIDTH, WIDTH)), jnp.float32)


def expert_error(q: fb.QArray) -> float:
    """The largest error of products with experts, over what their sums may round away."""
    sizes = [1, 0, 3, 16, 7, 5, 0, 40]
    group = np.repeat(np.arange(EXPERTS), sizes)
    x = np.random.default_rng(1).normal(size=(len(group), WIDTH)).astype(np.float32)
    w = np.asarray(fb.dequantize(q), np.float64)
    y = np.asarray(fb.ragged_dot(jnp.asarray(x), q, jnp.array(sizes), backend="cpu"))
    worst = 0.0
    for g in set(group.tolist()):
        mine = x[group == g]
        allowed = 2.0**-24 * (WIDTH + 4) * (np.abs(mine) @ np.abs(w[g]) + 1e-30)
        worst = max(worst, float(np.max(np.abs(y[group == g] - mine @ w[g]) / allowed)))
    return worst


if __name__ == "__main__":
    sys.exit(main())
