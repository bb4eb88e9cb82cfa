"""Small Llamas with random weights, and the formula of the network in float64 numpy to compare with."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fewbit.models import LlamaConfig, params_from_paths, paths_of_params, shapes

SMALL = LlamaConfig(vocab=67, layers=3, width=24, heads=6, kv_heads=2, head_dim=8, hidden=40, context=32)
UNTIED = dataclasses.replace(SMALL, tied=False, rope="interleaved", rope_theta=500.0)
ONE_HEAD = LlamaConfig(
    vocab=11, layers=1, width=7, heads=1, kv_heads=1, head_dim=2, hidden=5, context=16, rope="interleaved"
)
CONFIGS = {"half-tied": SMALL, "interleaved-untied": UNTIED, "one-head": ONE_HEAD}


def random_params(config: LlamaConfig, seed: int = 0) -> dict[str, Any]:
    """Weights of deviation `1 / sqrt(in)`, so that every layer matters, and gains around 1."""
    draw = np.random.default_rng(seed).normal
    flat = {
        path: jnp.asarray(draw(size=s) * s[-1] ** -0.5 if len(s) == 2 else 1 + 0.3 * draw(size=s), jnp.float32)
        for path, s in shapes(config).items()
    }
    return params_from_paths(flat, config)


def random_tokens(config: LlamaConfig, batch: int, length: int, seed: int = 0) -> jax.Array:
    """Token ids `[batch, length]`."""
    return jnp.asarray(np.random.default_rng(seed).integers(config.vocab, size=(batch, length)), jnp.int32)


def logits_float64(params: dict[str, Any], tokens: Any, config: LlamaConfig) -> np.ndarray:
    """The network token by token and head by head, written from its formulas."""
    w = {path: np.asarray(a, np.float64) for path, a in paths_of_params(params, config).items()}
    return np.stack([_sequence(w, row, config) for row in np.asarray(tokens)])


def _sequence(w: dict[str, np.ndarray], tokens: np.ndarray, c: LlamaConfig) -> np.ndarray:
    x = w["embed"][tokens]
    for i in range(c.layers):
        layer = {path.split("/", 2)[2]: a for path, a in w.items() if path.startswith(f"layers/{i}/")}
        y = _norm(x, layer["attn/norm"], c)
        heads = [_head(y, layer, h, c) for h in range(c.heads)]
        x = x + np.concatenate(heads, axis=1) @ layer["attn/o"].T
        y = _norm(x, layer["mlp/norm"], c)
        gate = y @ layer["mlp/gate"].T
        x = x + (gate / (1 + np.exp(-gate)) * (y @ layer["mlp/up"].T)) @ layer["mlp/down"].T
    return _norm(x, w["norm"], c) @ w["embed" if c.tied else "head"].T


def _norm(x: np.ndarray, gain: np.ndarray, c: LlamaConfig) -> np.ndarray:
    return x / np.sqrt((x**2).mean(axis=1, keepdims=True) + c.norm_eps) * gain


def _head(y: np.ndarray, layer: dict[str, np.ndarray], h: int, c: LlamaConfig) -> np.ndarray:
    """One query head over the key head that it shares."""

    def rows(name: str, head: int) -> np.ndarray:
        return y @ layer[f"attn/{name}"][head * c.head_dim : (head + 1) * c.head_dim].T

    shared = h // (c.heads // c.kv_heads)
    q, k, v = _turned(rows("q", h), c), _turned(rows("k", shared), c), rows("v", shared)
    out = np.zeros_like(q)
    for t in range(len(y)):
        scores = np.exp(k[: t + 1] @ q[t] / np.sqrt(c.head_dim))
        out[t] = (scores / scores.sum()) @ v[: t + 1]
    return out


def _turned(x: np.ndarray, c: LlamaConfig) -> np.ndarray:
    """Each pair of coordinates as a complex number, times `exp(i position frequency)`."""
    half = c.head_dim // 2
    first, second = (x[:, :half], x[:, half:]) if c.rope == "half" else (x[:, 0::2], x[:, 1::2])
    frequency = c.rope_theta ** (-2 * np.arange(half) / c.head_dim)
    z = (first + 1j * second) * np.exp(1j * np.arange(len(x))[:, None] * frequency)
    pairs = (z.real, z.imag)
    return np.concatenate(pairs, axis=1) if c.rope == "half" else np.stack(pairs, axis=2).reshape(x.shape)
