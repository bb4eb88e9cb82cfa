"""The transformer as a tree of arrays, trained with optax.

Its layers are stacked under one scan.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

import fewbit as fb

from .parts import CONTEXT, DTYPES, LAYERS, RATE, RECIPES, WIDTH, attention, cross_entropy


def init(vocabulary: int) -> dict[str, Any]:
    """The parameters."""
    shapes = {"qkv": (WIDTH, 3 * WIDTH), "out": (WIDTH, WIDTH), "wi": (WIDTH, 4 * WIDTH), "wo": (4 * WIDTH, WIDTH)}
    keys = iter(jax.random.split(jax.random.key(0), len(shapes) + 2))
    layers = {name: jax.random.normal(next(keys), (LAYERS, *s)) * s[0] ** -0.5 for name, s in shapes.items()}
    embed, place = (jax.random.normal(next(keys), (n, WIDTH)) * 0.1 for n in (vocabulary, CONTEXT))
    return {"embed": embed, "place": place, "layers": layers}


def norm(x: jax.Array) -> jax.Array:
    """Every vector scaled to unit root mean square."""
    return x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)


def layer(x: jax.Array, p: dict[str, jax.Array]) -> tuple[jax.Array, None]:
    """Causal attention and an MLP."""
    x = x + attention(norm(x) @ p["qkv"]) @ p["out"]
    return x + jax.nn.gelu(norm(x) @ p["wi"]) @ p["wo"], None


def loss(params: dict[str, Any], ids: jax.Array) -> jax.Array:
    """The mean cross entropy of the next character."""
    x, _ = jax.lax.scan(layer, params["embed"][ids[:, :-1]] + params["place"], params["layers"])
    return cross_entropy(norm(x) @ params["embed"].T, ids)


def start(run: str, vocabulary: int) -> tuple[Any, Callable[..., tuple[Any, jax.Array]]]:
    """The state before the first step, and the step: `(state, ids, key)` to the next state and the loss."""
    params, optimizer = init(vocabulary), optax.adamw(RATE)

    if run in RECIPES:
        objective = fb.train(loss, RECIPES[run])
    else:

        def objective(params: Any, ids: jax.Array, *, key: jax.Array) -> jax.Array:
            return loss(jax.tree.map(lambda w: w.astype(DTYPES[run]), params), ids)

    @jax.jit
    def step(state: Any, ids: jax.Array, key: jax.Array) -> tuple[Any, jax.Array]:
        params, moments = state
        value, gradient = jax.value_and_grad(objective)(params, ids, key=key)
        updates, moments = optimizer.update(gradient, moments, params)
        return (optax.apply_updates(params, updates), moments), value

    return (params, optimizer.init(params)), step
