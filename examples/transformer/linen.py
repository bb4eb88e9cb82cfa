"""The transformer in Flax Linen, trained with optax.

Its layers are Linen's own Embed, Dense and RMSNorm.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

from fewbit.frameworks import linen

from .parts import CONTEXT, DTYPES, LAYERS, RATE, RECIPES, WIDTH, attention, cross_entropy

SMALL = nn.initializers.normal(0.1)


class Layer(nn.Module):
    """Causal attention and an MLP."""

    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        def dense(features: int, name: str) -> nn.Dense:
            return nn.Dense(features, use_bias=False, dtype=self.dtype, name=name)

        def norm(x: jax.Array) -> jax.Array:
            return nn.RMSNorm(use_scale=False, dtype=self.dtype)(x)

        x = x + dense(WIDTH, "out")(attention(dense(3 * WIDTH, "qkv")(norm(x))))
        return x + dense(WIDTH, "wo")(jax.nn.gelu(dense(4 * WIDTH, "wi")(norm(x))))


class Transformer(nn.Module):
    """Characters to the logits of the next ones."""

    vocabulary: int
    dtype: Any

    @nn.compact
    def __call__(self, ids: jax.Array) -> jax.Array:
        embed = nn.Embed(self.vocabulary, WIDTH, embedding_init=SMALL, dtype=self.dtype, name="embed")
        x = embed(ids) + self.param("place", SMALL, (CONTEXT, WIDTH)).astype(self.dtype)
        for i in range(LAYERS):
            x = Layer(self.dtype, name=f"layers_{i}")(x)
        return embed.attend(nn.RMSNorm(use_scale=False, dtype=self.dtype)(x))


def start(run: str, vocabulary: int) -> tuple[Any, Callable[..., tuple[Any, jax.Array]]]:
    """The state before the first step, and the step: `(state, ids, key)` to the next state and the loss."""
    model, optimizer = Transformer(vocabulary, DTYPES.get(run, jnp.float32)), optax.adamw(RATE)
    variables = model.init(jax.random.key(0), jnp.zeros((1, CONTEXT), jnp.int32))
    trained = linen.train(model, RECIPES[run]) if run in RECIPES else None

    def loss(variables: Any, ids: jax.Array, key: jax.Array) -> jax.Array:
        seen = ids[:, :-1]
        return cross_entropy(model.apply(variables, seen) if trained is None else trained(variables, seen, key=key), ids)

    @jax.jit
    def step(state: Any, ids: jax.Array, key: jax.Array) -> tuple[Any, jax.Array]:
        variables, moments = state
        value, gradient = jax.value_and_grad(loss)(variables, ids, key)
        updates, moments = optimizer.update(gradient, moments, variables)
        return (optax.apply_updates(variables, updates), moments), value

    return (variables, optimizer.init(variables)), step
