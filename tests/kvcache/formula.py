"""Attention in float64: what every backend is compared with."""

import jax
import numpy as np

import fewbit as fb

EPS = 2.0**-24  # of a rounding in float32


def draws(*shape: int, seed: int = 0, size: float = 1.0) -> jax.Array:
    return jax.device_put(np.float32(np.random.default_rng(seed).normal(size=shape) * size))


def by_formula(q, blocks, sinks=None, soft_cap: float = 0.0) -> tuple[np.ndarray, float]:
    """Attention in float64 over the decoded numbers, and the error that float32 may add to it."""
    q = np.asarray(q, np.float64)
    h = q.shape[-1]
    blocks = [block.of_layer() for block in blocks]
    keys, values = (np.concatenate([decoded(getattr(b, n)) for b in blocks], axis=2) for n in ("keys", "values"))
    is_seen = np.concatenate([visible(block) for block in blocks], axis=1)
    keys, values = (np.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (keys, values))
    logits = q @ keys.swapaxes(2, 3) / np.sqrt(h)
    if soft_cap:
        logits = soft_cap * np.tanh(logits / soft_cap)
    scores = np.where(is_seen, logits, -np.inf)
    highest = scores.max(-1, keepdims=True)
    weights = np.exp(scores - highest)
    total = weights.sum(-1, keepdims=True)
    if sinks is not None:
        total = total + np.exp(np.asarray(sinks, np.float64)[:, None, None] - highest)
    out = weights / total @ values
    # A score is a sum of h products and two factors more; its error is a weight's relative error, twice with the sum's.
    # S products with the values, and a scale, a division and an exponential of a few roundings, come after.
    largest = (np.abs(q) @ np.abs(keys).swapaxes(2, 3)).max() / np.sqrt(h)
    return out, EPS * np.abs(values).max() * (2 * (h + 3) * largest + keys.shape[2] + 10)


def visible(block) -> np.ndarray:
    """Which positions each token attends to."""
    place = np.arange(block.keys.shape[2])
    first = np.zeros_like(block.seen) if block.first is None else np.asarray(block.first)
    return (place < np.asarray(block.seen)[:, None]) & (place >= first[:, None])


def decoded(held) -> np.ndarray:
    return np.asarray(fb.dequantize(held) if fb.is_qarray(held) else held, np.float64)
