"""QLoRA: trains adapters on a frozen 4-bit Equinox model with optax.

python examples/qlora.py --steps 300
"""

import argparse
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

import fewbit as fb

BATCH, WIDTHS = 128, {"in_size": 32, "out_size": 8, "width_size": 64, "depth": 2}
RECIPE = fb.Recipe((fb.Rule("layers/[0-9]/weight", "nf4"),), name="nf4 weights")
TEACHER = eqx.nn.MLP(**WIDTHS, key=jax.random.key(7))


def run(model: eqx.nn.MLP, x: jax.Array) -> jax.Array:
    """The model on each row: the code that knows neither quantization nor adapters."""
    return jax.vmap(model)(x)


def batch(i: int) -> jax.Array:
    """Inputs of one step."""
    return jax.random.normal(jax.random.key(i), (BATCH, 32))


def fitted(learned: Any, outputs: Any, targets: Any, steps: int) -> Any:
    """Trains the arrays in `learned` with `optax.adam`, so that `outputs(learned, x)` fits `targets(x)`."""
    optimizer = optax.adam(3e-3)

    @eqx.filter_jit
    def step(learned: Any, state: Any, x: jax.Array) -> tuple[Any, Any]:
        gradient = eqx.filter_grad(lambda learned: jnp.mean((outputs(learned, x) - targets(x)) ** 2))(learned)
        updates, state = optimizer.update(gradient, state)
        return eqx.apply_updates(learned, updates), state

    state = optimizer.init(eqx.filter(learned, eqx.is_array))
    for i in range(steps):
        learned, state = step(learned, state, batch(i))
    return learned


def main(steps: int) -> dict[str, float]:
    """Prints and returns the losses at the new task: of the base, with adapters, and merged into float and int8 weights."""
    x = batch(10**6)
    first = fitted(eqx.nn.MLP(**WIDTHS, key=jax.random.key(0)), run, lambda x: run(TEACHER, x), steps)
    base = fb.quantize_params(first, fb.plan(run, first, x, recipe=RECIPE))

    def new_task(x: jax.Array) -> jax.Array:
        return jnp.roll(run(TEACHER, x), 1, axis=-1)

    adapted = fb.lora.apply(run)
    fresh = fb.lora.init(jax.random.key(1), run, base, x, match=".*weight", rank=8, alpha=16)
    adapters = fitted(fresh, lambda adapters, x: adapted(base, adapters, x), new_task, steps)

    def loss(y: jax.Array) -> float:
        return float(jnp.mean((y - new_task(x)) ** 2))

    served = {name: fb.lora.merge(base, adapters, scheme=scheme) for name, scheme in (("float", None), ("int8", "int8"))}
    losses = {"nf4 base": loss(fb.transparent(run)(base, x)), "with adapters": loss(adapted(base, adapters, x))}
    losses |= {f"merged, {name}": loss(fb.transparent(run)(model, x)) for name, model in served.items()}
    for name, value in losses.items():
        print(f"{name:16} {value:.5f}")
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300, help="steps of each of the two tasks")
    main(parser.parse_args().steps)
