"""The transformer in Equinox, trained with optax.

Its layers are Equinox's own Embedding, Linear and RMSNorm.
"""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import optax

import fewbit as fb

from .parts import CONTEXT, DTYPES, LAYERS, RATE, RECIPES, WIDTH, attention, cross_entropy


class Layer(eqx.Module):
    """Causal attention and an MLP, for one text."""

    qkv: eqx.nn.Linear
    out: eqx.nn.Linear
    wi: eqx.nn.Linear
    wo: eqx.nn.Linear
    norm: eqx.nn.RMSNorm

    def __init__(self, key: jax.Array) -> None:
        sizes = {"qkv": (WIDTH, 3 * WIDTH), "out": (WIDTH, WIDTH), "wi": (WIDTH, 4 * WIDTH), "wo": (4 * WIDTH, WIDTH)}
        for (name, size), one in zip(sizes.items(), jax.random.split(key, len(sizes)), strict=True):
            setattr(self, name, eqx.nn.Linear(*size, use_bias=False, key=one))
        self.norm = eqx.nn.RMSNorm(WIDTH, use_weight=False, use_bias=False)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + jax.vmap(self.out)(attention(jax.vmap(self.qkv)(jax.vmap(self.norm)(x))))
        return x + jax.vmap(lambda token: self.wo(jax.nn.gelu(self.wi(self.norm(token)))))(x)


class Transformer(eqx.Module):
    """The characters of one text to the logits of the next ones."""

    embed: eqx.nn.Embedding
    place: jax.Array
    layers: list[Layer]
    norm: eqx.nn.RMSNorm

    def __init__(self, vocabulary: int, key: jax.Array) -> None:
        one, two, *others = jax.random.split(key, LAYERS + 2)
        self.embed = eqx.nn.Embedding(weight=jax.random.normal(one, (vocabulary, WIDTH)) * 0.1)
        self.place = jax.random.normal(two, (CONTEXT, WIDTH)) * 0.1
        self.layers = [Layer(other) for other in others]
        self.norm = eqx.nn.RMSNorm(WIDTH, use_weight=False, use_bias=False)

    def __call__(self, ids: jax.Array) -> jax.Array:
        x = jax.vmap(self.embed)(ids) + self.place
        for layer in self.layers:
            x = layer(x)
        return jax.vmap(self.norm)(x) @ self.embed.weight.T


def loss(model: Transformer, ids: jax.Array) -> jax.Array:
    """The mean cross entropy of the next character."""
    return cross_entropy(jax.vmap(model)(ids[:, :-1]), ids)


def start(run: str, vocabulary: int) -> tuple[Any, Callable[..., tuple[Any, jax.Array]]]:
    """The state before the first step, and the step: `(state, ids, key)` to the next state and the loss."""
    model, optimizer = Transformer(vocabulary, jax.random.key(0)), optax.adamw(RATE)

    if run in RECIPES:
        objective = fb.train(loss, RECIPES[run])
    else:

        def objective(model: Transformer, ids: jax.Array, *, key: jax.Array) -> jax.Array:
            return loss(jax.tree.map(lambda w: w.astype(DTYPES[run]), model), ids)

    @eqx.filter_jit
    def step(state: Any, ids: jax.Array, key: jax.Array) -> tuple[Any, jax.Array]:
        model, moments = state
        value, gradient = eqx.filter_value_and_grad(objective)(model, ids, key=key)
        updates, moments = optimizer.update(gradient, moments, model)
        return (eqx.apply_updates(model, updates), moments), value

    return (model, optimizer.init(eqx.filter(model, eqx.is_array))), step
