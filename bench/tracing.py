"""Times tracing through `fb.transparent`, as a ratio to the float model.

    python -m bench.tracing [--rounds 15] [--save]

The models are perceptrons and transformers. CPU time of `jax.make_jaxpr`, round by round: the float model, the same code on
quantized leaves, and code that calls `fb.dequantize` by hand. `first` makes the transparent function anew in each round.
`named` has a `jax.named_scope` for every layer, as Flax writes layers. `calls` counts calls of Python functions of JAX and
fewbit instead of time; it is the same in every run.
"""

import argparse
import contextlib
import pathlib
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import fewbit as fb
from fewbit.evaluate.timing import Timing

from .facts import save

WIDTH, HEADS = 64, 4
Model = Callable[[Any, jax.Array], jax.Array]


def normalized(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Layer normalisation without a bias."""
    mean = x.mean(-1, keepdims=True)
    variance = ((x - mean) ** 2).mean(-1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(variance + 1e-6) * scale


def perceptron_layer(p: Any, x: jax.Array) -> jax.Array:
    """Normalisation, two products and a residual."""
    return x + jnp.tanh(normalized(x, p["norm"]) @ p["up"]) @ p["down"]


def transformer_layer(p: Any, x: jax.Array) -> jax.Array:
    """Causal attention and a gated perceptron: seven products with a parameter."""
    h, (batch, length, width) = normalized(x, p["norm"]), x.shape
    q, k, v = ((h @ p[name]).reshape(batch, length, HEADS, width // HEADS) for name in "qkv")
    scores = jnp.einsum("bthd,bshd->bhts", q, k)
    scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, jnp.float32(-1e9))
    x = x + jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores), v).reshape(x.shape) @ p["o"]
    h = normalized(x, p["norm2"])
    return x + (jax.nn.silu(h @ p["gate"]) * (h @ p["up"])) @ p["down"]


LAYERS = {"perceptron": perceptron_layer, "transformer": transformer_layer}


def model(kind: str, *, is_named: bool) -> Model:
    """A stack of layers, each in a scope of its own name or in none."""

    def run(params: Any, x: jax.Array) -> jax.Array:
        for i, p in enumerate(params):
            with jax.named_scope(f"layer_{i}") if is_named else contextlib.nullcontext():
                x = LAYERS[kind](p, x)
        return x

    return run


def operands(kind: str, layers: int) -> tuple[Any, Any, jax.Array]:
    """The float parameters, the same with nf4 matrices, and an input."""
    random = np.random.default_rng(0)
    shapes = {"up": (WIDTH, 2 * WIDTH), "down": (2 * WIDTH, WIDTH)}
    norms, lead = ("norm",), (1,)
    if kind == "transformer":
        shapes |= {"gate": (WIDTH, 2 * WIDTH), **dict.fromkeys("qkvo", (WIDTH, WIDTH))}
        norms, lead = ("norm", "norm2"), (1, 1)

    def layer() -> dict[str, jax.Array]:
        weights = {n: jnp.asarray(random.normal(size=s) / np.sqrt(s[0]), jnp.float32) for n, s in shapes.items()}
        return weights | {name: jnp.ones((*lead, WIDTH)) for name in norms}

    dense = [layer() for _ in range(layers)]
    quantized = [{n: fb.quantize(w, "nf4", axis=-2) if n in shapes else w for n, w in p.items()} for p in dense]
    return dense, quantized, jnp.ones((2, 8, WIDTH) if kind == "transformer" else (2, WIDTH))


def contenders(kind: str, layers: int, *, is_named: bool) -> dict[str, Callable[[], Any]]:
    """What is compared: each traces the model once, `dense` the float one."""
    run = model(kind, is_named=is_named)
    dense, quantized, x = operands(kind, layers)
    kept = fb.transparent(run)

    def by_hand(params: Any, x: jax.Array) -> jax.Array:
        return run([{n: fb.dequantize(w) if fb.is_qarray(w) else w for n, w in p.items()} for p in params], x)

    # Each in a function of its own, because JAX keeps what it traced of one.
    return {
        "dense": lambda: jax.make_jaxpr(lambda p, x: run(p, x))(dense, x),
        "transparent": lambda: jax.make_jaxpr(lambda p, x: kept(p, x))(quantized, x),
        "transparent, first": lambda: jax.make_jaxpr(lambda p, x: fb.transparent(run)(p, x))(quantized, x),
        "dequantize by hand": lambda: jax.make_jaxpr(lambda p, x: by_hand(p, x))(quantized, x),
    }


def calls_of(fn: Callable[[], Any]) -> int:
    """How many calls of Python functions of JAX and fewbit a function makes; those of type checkers do not count."""
    folders = tuple(f"{pathlib.Path(module.__file__ or '').parent}/" for module in (jax, fb))
    count = 0

    def counted(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call" and frame.f_code.co_filename.startswith(folders)

    before = sys.getprofile()
    sys.setprofile(counted)
    try:
        fn()
    finally:
        sys.setprofile(before)
    return count


def is_right(kind: str) -> bool:
    """Whether the transformed model computes what the float one does on decoded parameters."""
    run = model(kind, is_named=True)
    _, quantized, x = operands(kind, 2)
    decoded = jax.tree.map(lambda w: fb.dequantize(w) if fb.is_qarray(w) else w, quantized, is_leaf=fb.is_qarray)
    return bool(jnp.allclose(jax.jit(fb.transparent(run))(quantized, x), jax.jit(run)(decoded, x), rtol=1e-4, atol=1e-4))


def main() -> int:
    """Prints the ratios; the exit status is 1 when a transformed model computes something else."""
    parser = argparse.ArgumentParser(prog="python -m bench.tracing", description="what tracing through fb.transparent costs")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--save", action="store_true", help="write bench/results/tracing.json")
    options = parser.parse_args()
    if not all(map(is_right, LAYERS)):
        print("a value is wrong, so no times are printed", file=sys.stderr)
        return 1
    rows = []
    for kind in LAYERS:
        for layers in (12, 24):
            for is_named in (False, True):
                rows += measured(kind, layers, is_named=is_named, rounds=options.rounds)
    if options.save:
        save("tracing", (), rounds=options.rounds, rows=rows)
    return 0


def measured(kind: str, layers: int, *, is_named: bool, rounds: int) -> list[dict[str, Any]]:
    """The rows of one model, printed as they come."""
    runs = contenders(kind, layers, is_named=is_named)
    equations = {name: len(run().jaxpr.eqns) for name, run in runs.items()}
    calls = {name: calls_of(run) for name, run in runs.items()}
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            start = time.process_time()
            run()
            seconds[name].append(time.process_time() - start)
    rows = []
    for name in runs:
        low, middle, high = Timing(tuple(seconds[name])).quartiles(Timing(tuple(seconds["dense"])))
        row = {
            "model": kind,
            "layers": layers,
            "named": is_named,
            "who": name,
            "ms": round(1e3 * statistics.median(seconds[name]), 2),
            "ratio": round(middle, 3),
            "ratio_spread": [round(low, 3), round(high, 3)],
            "calls_ratio": round(calls[name] / calls["dense"], 3),
            "equations": equations[name],
        }
        print(
            f"{kind:11} {layers:3} layers {'named' if is_named else '     '}  {name:20} {row['ms']:7.1f} ms  "
            f"{middle:5.2f} of dense ({low:.2f} to {high:.2f}), in calls {row['calls_ratio']:.2f}, {equations[name]} equations",
            flush=True,
        )
        rows.append(row)
    return rows


if __name__ == "__main__":
    sys.exit(main())
