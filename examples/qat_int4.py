"""Int4 quantization-aware training compared with post-training quantization (Flax NNX).

Both models start from the same float weights.

python examples/qat_int4.py --steps 300
"""

import argparse

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import fewbit as fb
from fewbit.frameworks import nnx as few

RECIPE = fb.Recipe((fb.Rule(".*kernel", fb.Policy("int4")),), name="int4, one scale a channel")
BATCH = 128


class Model(nnx.Module):
    """A perceptron with one hidden layer."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.wi = nnx.Linear(32, 64, rngs=rngs)
        self.wo = nnx.Linear(64, 8, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.wo(jax.nn.gelu(self.wi(x)))


TEACHER = Model(nnx.Rngs(7))


def loss(model: Model, x: jax.Array) -> jax.Array:
    """How far the model is from a teacher of its size."""
    return jnp.mean((model(x) - TEACHER(x)) ** 2)


def train(model: Model, objective: object, steps: int, rate: float) -> None:
    """Changes the model; nothing here knows of quantization."""
    optimizer = nnx.Optimizer(model, optax.adamw(rate), wrt=nnx.Param)

    @nnx.jit
    def step(model: Model, optimizer: nnx.Optimizer, x: jax.Array) -> None:
        optimizer.update(model, nnx.grad(objective)(model, x))

    for i in range(steps):
        step(model, optimizer, jax.random.normal(jax.random.key(i), (BATCH, 32)))


def served(model: Model, x: jax.Array) -> float:
    """The loss of the model as it is served: with its parameters quantized."""
    quantized = few.quantize(model, x, recipe=RECIPE)
    return float(nnx.jit(few.transparent(loss))(quantized, x))


def main(steps: int) -> dict[str, float]:
    """Prints and returns the losses of the float model, of its int4 form, and of the model after QAT."""
    x = jax.random.normal(jax.random.key(10**6), (BATCH, 32))
    model = Model(nnx.Rngs(0))
    train(model, loss, 2 * steps, 3e-3)
    aware = nnx.clone(model)
    train(model, loss, steps, 1e-3)
    train(aware, few.train(loss, RECIPE), steps, 1e-3)
    losses = {"float": float(loss(model, x)), "int4 afterwards": served(model, x), "int4 with QAT": served(aware, x)}
    for name, value in losses.items():
        print(f"{name:16} {value:.5f}")
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300, help="steps with and without QAT, after twice as many in common")
    main(parser.parse_args().steps)
