"""The transformer in Flax NNX, trained with nnx.Optimizer.

Its layers are NNX's own Embed, Linear and RMSNorm.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from fewbit.frameworks import nnx as few

from .parts import CONTEXT, DTYPES, LAYERS, RATE, RECIPES, WIDTH, attention, cross_entropy

SMALL = nnx.initializers.normal(0.1)


class Layer(nnx.Module):
    """Causal attention and an MLP."""

    def __init__(self, dtype: Any, rngs: nnx.Rngs) -> None:
        self.qkv = nnx.Linear(WIDTH, 3 * WIDTH, use_bias=False, dtype=dtype, rngs=rngs)
        self.out = nnx.Linear(WIDTH, WIDTH, use_bias=False, dtype=dtype, rngs=rngs)
        self.wi = nnx.Linear(WIDTH, 4 * WIDTH, use_bias=False, dtype=dtype, rngs=rngs)
        self.wo = nnx.Linear(4 * WIDTH, WIDTH, use_bias=False, dtype=dtype, rngs=rngs)
        self.norm = nnx.RMSNorm(WIDTH, use_scale=False, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.out(attention(self.qkv(self.norm(x))))
        return x + self.wo(jax.nn.gelu(self.wi(self.norm(x))))


class Transformer(nnx.Module):
    """Characters to the logits of the next ones."""

    def __init__(self, vocabulary: int, dtype: Any, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(vocabulary, WIDTH, embedding_init=SMALL, dtype=dtype, rngs=rngs)
        self.place = nnx.Embed(CONTEXT, WIDTH, embedding_init=SMALL, dtype=dtype, rngs=rngs)
        self.layers = nnx.List([Layer(dtype, rngs) for _ in range(LAYERS)])
        self.norm = nnx.RMSNorm(WIDTH, use_scale=False, dtype=dtype, rngs=rngs)

    def __call__(self, ids: jax.Array) -> jax.Array:
        x = self.embed(ids) + self.place(jnp.arange(CONTEXT))
        for layer in self.layers:
            x = layer(x)
        return self.embed.attend(self.norm(x))


def loss(model: Transformer, ids: jax.Array) -> jax.Array:
    """The mean cross entropy of the next character."""
    return cross_entropy(model(ids[:, :-1]), ids)


def start(run: str, vocabulary: int) -> tuple[Any, Callable[..., tuple[Any, jax.Array]]]:
    """The state before the first step, and the step: `(state, ids, key)` to the next state and the loss."""
    model = Transformer(vocabulary, DTYPES.get(run, jnp.float32), nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(RATE), wrt=nnx.Param)
    trained = few.train(loss, RECIPES[run]) if run in RECIPES else None

    def objective(model: Transformer, ids: jax.Array, key: jax.Array) -> jax.Array:
        return loss(model, ids) if trained is None else trained(model, ids, key=key)

    @nnx.jit
    def update(model: Transformer, optimizer: nnx.Optimizer, ids: jax.Array, key: jax.Array) -> jax.Array:
        value, gradient = nnx.value_and_grad(objective)(model, ids, key)
        optimizer.update(model, gradient)
        return value

    def step(state: Any, ids: jax.Array, key: jax.Array) -> tuple[Any, jax.Array]:
        return state, update(*state, ids, key)  # the model and the optimizer change in place

    return (model, optimizer), step
