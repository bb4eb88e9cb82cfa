"""Post-training quantization of a Flax Linen model.

python examples/ptq.py --steps 200

It plans, quantizes, runs and measures; then one layer is excluded from the recipe.
"""

import argparse

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

import fewbit as fb
from fewbit.frameworks import linen


class Classifier(nn.Module):
    """Three dense layers."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for name in ("first", "second"):
            x = jax.nn.gelu(nn.Dense(64, name=name)(x))
        return nn.Dense(4, name="head")(x)


def batch(seed: int) -> tuple[jax.Array, jax.Array]:
    """Points, and which of four directions each points along the most."""
    x = jax.random.normal(jax.random.key(seed), (256, 32))
    return x, jnp.argmax(x @ jax.random.normal(jax.random.key(0), (32, 4)), axis=-1)


def trained(module: Classifier, steps: int) -> dict:
    """The float model, trained."""
    variables = module.init(jax.random.key(0), batch(0)[0])
    optimizer = optax.adamw(3e-3)

    @jax.jit
    def step(variables: dict, state: tuple, x: jax.Array, y: jax.Array) -> tuple[dict, tuple]:
        def loss(variables: dict) -> jax.Array:
            return optax.softmax_cross_entropy_with_integer_labels(module.apply(variables, x), y).mean()

        updates, state = optimizer.update(jax.grad(loss)(variables), state, variables)
        return optax.apply_updates(variables, updates), state

    state = optimizer.init(variables)
    for i in range(steps):
        variables, state = step(variables, state, *batch(i))
    return variables


def main(steps: int) -> dict[str, float]:
    """Prints the plan of one recipe and what four recipes cost; returns each accuracy."""
    module = Classifier()
    variables = trained(module, steps)
    x, y = batch(10**6)
    print(linen.plan(module, variables, x, recipe="nf4"))

    keep_the_head = fb.Recipe((fb.Rule("head/.*", None), fb.Rule(".*kernel", fb.Policy("nf4"))), name="nf4, float head")
    run = jax.jit(linen.apply(module))
    accuracy = {"float": float((module.apply(variables, x).argmax(-1) == y).mean())}
    print(f"float            accuracy {accuracy['float']:.3f}")
    for recipe in map(fb.recipe, ("int8", "nf4", "nvfp4", keep_the_head)):
        quantized = linen.quantize(module, variables, x, recipe=recipe)
        accuracy[recipe.name] = float((run(quantized, x).argmax(-1) == y).mean())
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(quantized))
        print(f"{recipe.name:16} accuracy {accuracy[recipe.name]:.3f}, {size:,} bytes")
    return accuracy


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200, help="training steps of the float model")
    main(parser.parse_args().steps)
