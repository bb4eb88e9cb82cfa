"""Times one training step of a 12-layer transformer in few bits.

    python -m bench.training_step [--layers 12] [--width 256] [--rounds 9] [--isa avx2] [--save]

Time and compile time are compared with those of the float step. The layers are a list, each compiled for itself, as most
models are written; the step is value and gradient and an update by SGD. Each policy quantizes weights and activations forward,
and the incoming gradient backward. Prints nothing about speed unless every loss is within 5 % of the float one.
"""

import argparse
import functools
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

HEADS, VOCABULARY = 4, 96
POLICIES = {
    "int8": fb.Policy("int8", "int8", dlhs="int8", drhs="int8"),
    "fp8": fb.recipe("te_fp8_currentscaling").rules[-1].policy,
    "nvfp4": fb.recipe("te_nvfp4").rules[-1].policy,
    "mxfp4": fb.Policy("mxfp4", "mxfp4", dlhs="mxfp4", drhs="mxfp4"),
}


def main() -> int:
    """Runs the comparison; the exit status is 1 when a value is wrong."""
    parser = argparse.ArgumentParser(prog="python -m bench.training_step", description="a training step in few bits")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=128, help="of each of 8 sequences")
    parser.add_argument("--rounds", type=int, default=9)
    add_isa(parser)
    parser.add_argument("--save", action="store_true", help="write bench/results/training_step.json")
    options = parser.parse_args()
    params = random_params(options.layers, options.width)
    ids = jnp.asarray(np.random.default_rng(0).integers(0, VOCABULARY, (8, options.tokens + 1)), jnp.int32)
    losses = {"float": lambda params, ids, *, key: loss(params, ids)}
    losses |= {name: fb.train(loss, fb.Recipe((fb.Rule("layers.*", policy),))) for name, policy in POLICIES.items()}
    steps, seconds = {}, {}
    for name, fn in losses.items():
        steps[name], seconds[name] = compiled(fn, params, ids)
    values = {name: float(step()[0]) for name, step in steps.items()}
    if wrong := {name: value for name, value in values.items() if not abs(value / values["float"] - 1) < 0.05}:
        print(f"a value is wrong, so no times are printed: {wrong}, and {values['float']} in float", file=sys.stderr)
        return 1
    times, rows = timed(steps, rounds=options.rounds), []
    for name, timing in times.items():
        low, middle, high = timing.ratio(times["float"])
        compiling = seconds[name] / seconds["float"]
        text = f"{name:6} {timing.median:8.1f} ms, {middle:5.2f} of float ({low:.2f} to {high:.2f}); "
        text += f"compiled in {seconds[name]:.1f} s, {compiling:.2f} of float"
        rows.append(
            {
                "run": name,
                "ms": timing.median,
                "ratio": middle,
                "quartiles": timing.quartiles(times["float"]),
                "compile_s": seconds[name],
                "compile_ratio": compiling,
                "text": text,
            }
        )
        print(text)
    if options.save:
        facts = {"layers": options.layers, "width": options.width, "tokens": 8 * options.tokens, "rounds": options.rounds}
        save("training_step", (), **facts, rows=rows)
    return 0


def random_params(layers: int, width: int) -> dict[str, Any]:
    """An embedding and a list of layers."""
    random = np.random.default_rng(1)
    shapes = {"qkv": (width, 3 * width), "out": (width, width), "up": (width, 4 * width), "down": (4 * width, width)}

    def matrix(*shape: int) -> jax.Array:
        return jnp.asarray(random.normal(size=shape) * shape[0] ** -0.5, jnp.float32)

    return {
        "embed": matrix(VOCABULARY, width),
        "layers": [{name: matrix(*shape) for name, shape in shapes.items()} for _ in range(layers)],
    }


def norm(x: jax.Array) -> jax.Array:
    """Every vector scaled to unit root mean square."""
    return x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)


def loss(params: dict[str, Any], ids: jax.Array) -> jax.Array:
    """The mean cross entropy of the next token."""
    x = params["embed"][ids[:, :-1]]
    for p in params["layers"]:
        q, k, v = jnp.split((norm(x) @ p["qkv"]).reshape(*x.shape[:2], HEADS, -1), 3, axis=-1)
        x = x + jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape) @ p["out"]
        x = x + jax.nn.gelu(norm(x) @ p["up"]) @ p["down"]
    likelihoods = jax.nn.log_softmax(norm(x) @ params["embed"].T)
    return -jnp.mean(jnp.take_along_axis(likelihoods, ids[:, 1:, None], axis=-1))


def compiled(fn: Callable[..., jax.Array], params: Any, ids: jax.Array) -> tuple[Callable[[], Any], float]:
    """A step with its arguments, and the seconds from its tracing to its program."""

    def step(params: Any, ids: jax.Array, key: jax.Array) -> tuple[jax.Array, Any]:
        value, gradient = jax.value_and_grad(fn)(params, ids, key=key)
        return value, jax.tree.map(lambda w, g: w - 1e-3 * g, params, gradient)

    start = time.perf_counter()
    program = jax.jit(step).lower(params, ids, jax.random.key(0)).compile()
    return functools.partial(program, params, ids, jax.random.key(0)), time.perf_counter() - start


if __name__ == "__main__":
    sys.exit(main())
