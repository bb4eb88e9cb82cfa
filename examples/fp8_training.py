"""FP8 training with Transformer Engine's current scaling.

Products take E4M3 forwards and E5M2 gradients, over a scan of rematerialized layers. Plain JAX and optax; the parameters, the
optimizer and the checkpoint are those of the float model.

    python examples/fp8_training.py --steps 300
"""

import argparse
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

import fewbit as fb

WIDTH, LAYERS, BATCH = 64, 3, 128


def init(seed: int) -> dict[str, Any]:
    """Stacked layers, so that one scan runs over them."""
    keys = jax.random.split(jax.random.key(seed), 3)
    stack = (LAYERS, WIDTH, WIDTH)
    return {
        "embed": jax.random.normal(keys[0], (16, WIDTH)) / 4,
        "layers": {"wi": jax.random.normal(keys[1], stack) / 8, "wo": jax.random.normal(keys[2], stack) / 16},
        "head": jnp.zeros((WIDTH, 1)),
    }


def forward(params: dict[str, Any], x: jax.Array) -> jax.Array:
    """Residual layers."""

    @jax.checkpoint
    def layer(x: jax.Array, p: dict[str, jax.Array]) -> tuple[jax.Array, None]:
        return x + jax.nn.gelu(x @ p["wi"]) @ p["wo"], None

    return jax.lax.scan(layer, x @ params["embed"], params["layers"])[0] @ params["head"]


def curve(run: Callable[..., jax.Array], steps: int) -> list[float]:
    """The loss of each step."""
    optimizer, params = optax.adamw(3e-3), init(0)

    @jax.jit
    def step(params: Any, state: Any, key: jax.Array) -> tuple[Any, Any, jax.Array]:
        x = jax.random.normal(key, (BATCH, 16))
        y = jnp.sin(x.sum(-1, keepdims=True)) + x[:, :1] * x[:, 1:2]
        value, gradient = jax.value_and_grad(lambda params: jnp.mean((run(params, x) - y) ** 2))(params)
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, value

    state, losses = optimizer.init(params), []
    for i in range(steps):
        params, state, value = step(params, state, jax.random.key(i))
        losses.append(float(value))
    return losses


def main(steps: int) -> dict[str, list[float]]:
    """Prints and returns the losses of the float and the fp8 run."""
    policy = fb.recipe("te_fp8_currentscaling").rules[-1].policy
    recipe = fb.Recipe((fb.Rule("layers/.*", policy),), name="fp8 in the layers")
    losses: dict[str, list[float]] = {}
    for name, run in {"float": forward, "fp8": fb.train(forward, recipe)}.items():
        losses[name] = curve(run, steps)
    for i in sorted({*range(0, steps, max(steps // 6, 1)), steps - 1}):
        print(f"step {i:4}  float {losses['float'][i]:.4f}  fp8 {losses['fp8'][i]:.4f}")
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300, help="training steps of each run")
    main(parser.parse_args().steps)
