"""A small mixture of experts, trained for seconds on the help texts of Python, so that its router has preferences."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from fewbit.models import DecoderConfig, Experts, find_text, forward, params_from_paths, paths_of_params, stack_layers
from tests.nets.random_decoder import random_params

MIXTURE = DecoderConfig(
    vocab=97, layers=2, width=64, heads=4, kv_heads=2, head_dim=16, hidden=64, context=64, experts=Experts(8, 2, 64)
)
"""Of Mixtral's shape: eight experts in each layer, two of them active, their weights normalized. A token is a printable character."""
_BATCH = 8


def character_windows(count: int, seed: int) -> np.ndarray:
    """Windows `[count, context]` of the help texts, from random places; what is not printable ASCII is token 96."""
    codes = np.frombuffer(find_text("pydoc").content.encode("utf-8"), np.uint8).astype(np.int32) - 32
    tokens = np.where((codes < 0) | (codes > 95), 96, codes)
    starts = np.random.default_rng(seed).integers(len(tokens) - MIXTURE.context, size=count)
    return tokens[starts[:, None] + np.arange(MIXTURE.context)]


@functools.cache
def trained_mixture(steps: int = 200) -> dict[str, np.ndarray]:
    """The parameters by path after Adam at a rate of 3e-3."""
    params = paths_of_params(random_params(MIXTURE), MIXTURE)

    def loss(params: dict[str, jax.Array], tokens: jax.Array) -> jax.Array:
        logits = forward(stack_layers(params_from_paths(params, MIXTURE)), tokens, MIXTURE)[:, :-1]
        chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], axis=-1)
        return -jnp.mean(chosen)

    @jax.jit
    def trained(params: dict[str, jax.Array], batches: jax.Array) -> tuple[dict[str, jax.Array], jax.Array]:
        def step(state, batch):
            params, mean, square, count = state
            value, gradient = jax.value_and_grad(loss)(params, batch)
            mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, mean, gradient)
            square = jax.tree.map(lambda v, g: 0.99 * v + 0.01 * g * g, square, gradient)
            rate = 3e-3 * jnp.sqrt(1 - 0.99**count) / (1 - 0.9**count)
            params = jax.tree.map(lambda p, m, v: p - rate * m / (jnp.sqrt(v) + 1e-8), params, mean, square)
            return (params, mean, square, count + 1), value

        zeros = jax.tree.map(jnp.zeros_like, params)
        state, losses = jax.lax.scan(step, (params, zeros, zeros, jnp.float32(1)), batches)
        return state[0], losses

    batches = character_windows(steps * _BATCH, seed=0).reshape(steps, _BATCH, -1)
    params, losses = trained(params, jnp.asarray(batches))
    assert losses[-20:].mean() < 0.7 * losses[:20].mean()
    return {path: np.asarray(leaf) for path, leaf in params.items()}
