"""What the four transformers share: sizes, number formats, attention and loss."""

import jax
import jax.numpy as jnp
import optax

import fewbit as fb

WIDTH, LAYERS, HEADS, CONTEXT, RATE = 64, 2, 4, 64, 3e-3

DTYPES = {"float": jnp.float32, "bfloat16": jnp.bfloat16}
"""Runs without a recipe: what all products are computed in. The parameters are float32 in every run."""

POLICIES = {
    "int8": fb.Policy("int8", "int8", dlhs="int8", drhs="int8"),
    "fp8": fb.recipe("te_fp8_currentscaling").rules[-1].policy,
    "nvfp4": fb.recipe("te_nvfp4").rules[-1].policy,
    "int4 weights (QAT)": fb.Policy("int4_g32"),
}
RECIPES = {name: fb.Recipe((fb.Rule("layers.*", policy),), name=name) for name, policy in POLICIES.items()}
"""The other runs: one policy for the layers; the table of characters stays float."""


def attention(qkv: jax.Array) -> jax.Array:
    """Each character's mixture of the values up to its own, from queries, keys and values side by side."""
    q, k, v = jnp.split(qkv.reshape(*qkv.shape[:-1], HEADS, -1), 3, axis=-1)
    return jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(*qkv.shape[:-1], -1)


def cross_entropy(logits: jax.Array, ids: jax.Array) -> jax.Array:
    """The mean over the next characters, in nats."""
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), ids[:, 1:]).mean()
