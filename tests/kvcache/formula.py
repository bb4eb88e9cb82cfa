"""Attention in float64: what every backend is compared with."""

import jax
import jax.numpy as jnp
import numpy as np

import fewbit as fb

EPS = 2.0**-24  # of a rounding in float32


def draws(*shape: int, seed: int = 0, size: float = 1.0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape) * size, jnp.float32)


def by_formula(q, blocks) -> tuple[np.ndarray, float]:
    """Attention in float64 over the decoded numbers, and the error that float32 may add to it."""
    q = np.asarray(q, np.float64)
    h = q.shape[-1]
    blocks = [block.of_layer() for block in blocks]
    keys, values = (np.concatenate([decoded(getattr(b, n)) for b in blocks], axis=2) for n in ("keys", "values"))
    is_seen = np.concatenate([np.arange(b.keys.shape[2]) < np.asarray(b.seen)[:, None] for b in blocks], axis=1)
    keys, values = (np.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (keys, values))
    scores = np.where(is_seen, q @ keys.swapaxes(2, 3) / np.sqrt(h), -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    out = weights / weights.sum(-1, keepdims=True) @ values
    # A score is a sum of h products and two factors more; its error is a weight's relative error, twice with the sum's.
    # S products with the values, and a scale, a division and an exponential of a few roundings, come after.
    largest = (np.abs(q) @ np.abs(keys).swapaxes(2, 3)).max() / np.sqrt(h)
    return out, EPS * np.abs(values).max() * (2 * (h + 3) * largest + keys.shape[2] + 10)


def decoded(held) -> np.ndarray:
    return np.asarray(fb.dequantize(held) if fb.is_qarray(held) else held, np.float64)
