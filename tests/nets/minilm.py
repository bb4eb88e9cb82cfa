"""all-MiniLM-L6-v2, a BERT encoder of sentences, in plain JAX over a tree of parameters.

A net whose checkpoint is float32, for quality tests. The tree:

    {"word", "position", "kind": embeddings, "norm": {"gain", "bias"},
     "layers": [{"q", "k", "v", "o", "up", "down": each {"weight": [out, in], "bias"}, "attn_norm", "mlp_norm"}, ...]}
"""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

HEADS = 12
EPS = 1e-12

_LINEARS = {
    "q": "attention.self.query",
    "k": "attention.self.key",
    "v": "attention.self.value",
    "o": "attention.output.dense",
    "up": "intermediate.dense",
    "down": "output.dense",
}


def load(directory: Path) -> tuple[dict[str, Any], Any]:
    """The parameters and the tokenizer of the model's directory."""
    from safetensors.numpy import load_file
    from tokenizers import Tokenizer

    config = json.loads((directory / "config.json").read_text())
    assert (config["num_attention_heads"], config["layer_norm_eps"], config["hidden_act"]) == (HEADS, EPS, "gelu")
    arrays = {name: jnp.asarray(a) for name, a in load_file(directory / "model.safetensors").items()}

    def norm(name: str) -> dict[str, Any]:
        return {"gain": arrays[f"{name}.LayerNorm.weight"], "bias": arrays[f"{name}.LayerNorm.bias"]}

    def layer(i: int) -> dict[str, Any]:
        at = f"encoder.layer.{i}"
        linears = {
            ours: {"weight": arrays[f"{at}.{theirs}.weight"], "bias": arrays[f"{at}.{theirs}.bias"]}
            for ours, theirs in _LINEARS.items()
        }
        return {**linears, "attn_norm": norm(f"{at}.attention.output"), "mlp_norm": norm(f"{at}.output")}

    params = {
        "word": arrays["embeddings.word_embeddings.weight"],
        "position": arrays["embeddings.position_embeddings.weight"],
        "kind": arrays["embeddings.token_type_embeddings.weight"],
        "norm": norm("embeddings"),
        "layers": [layer(i) for i in range(config["num_hidden_layers"])],
    }
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.no_padding()
    return params, tokenizer


def batch_of(tokenizer: Any, sentences: list[str]) -> tuple[jax.Array, jax.Array]:
    """Token ids `[B, T]`, filled up with zeros, and where they are real."""
    rows = [tokenizer.encode(s).ids for s in sentences]
    tokens = np.zeros((len(rows), max(map(len, rows))), np.int32)
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = row
    is_real = np.arange(tokens.shape[1])[None, :] < np.array([len(r) for r in rows])[:, None]
    return jnp.asarray(tokens), jnp.asarray(is_real)


def embed(params: dict[str, Any], tokens: jax.Array, is_real: jax.Array) -> jax.Array:
    """A unit vector for each sentence `[B, D]`: the mean of its tokens' last hidden states, normalized."""
    T = tokens.shape[1]
    positions = jnp.take(params["position"], jnp.arange(T), axis=0)[None]
    kind = jnp.take(params["kind"], jnp.zeros((1, 1), jnp.int32), axis=0)
    x = _layer_norm(jnp.take(params["word"], tokens, axis=0) + positions + kind, params["norm"])
    for layer in params["layers"]:
        x = _layer_norm(x + _attention(x, layer, is_real), layer["attn_norm"])
        hidden = jax.nn.gelu(_linear(x, layer["up"]), approximate=False)
        x = _layer_norm(x + _linear(hidden, layer["down"]), layer["mlp_norm"])
    mask = is_real[:, :, None].astype(x.dtype)
    mean = jnp.sum(x * mask, axis=1) / jnp.sum(mask, axis=1)
    return mean / jnp.linalg.norm(mean, axis=-1, keepdims=True)


def _attention(x: jax.Array, layer: Any, is_real: jax.Array) -> jax.Array:
    B, T, D = x.shape
    q, k, v = (_linear(x, layer[name]).reshape(B, T, HEADS, -1) for name in "qkv")
    scores = jnp.einsum("bthd,bshd->bhts", q, k) * (D // HEADS) ** -0.5
    is_seen = jnp.broadcast_to(is_real[:, None, None, :], scores.shape)
    weights = jax.nn.softmax(jnp.where(is_seen, scores, jnp.full_like(scores, -jnp.inf)), axis=-1)
    return _linear(jnp.einsum("bhts,bshd->bthd", weights, v).reshape(B, T, D), layer["o"])


def _linear(x: jax.Array, linear: Any) -> jax.Array:
    return jnp.einsum("bti,oi->bto", x, linear["weight"]) + linear["bias"][None, None, :]


def _layer_norm(x: jax.Array, norm: Any) -> jax.Array:
    centred = x - jnp.mean(x, axis=-1, keepdims=True)
    scaled = centred * lax.rsqrt(jnp.mean(centred * centred, axis=-1, keepdims=True) + EPS)
    return scaled * norm["gain"][None, None, :] + norm["bias"][None, None, :]
