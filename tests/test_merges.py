"""Merges by score are those of transformers."""

import itertools

import pytest

from fewbit import QuantError
from fewbit._merges import merges_by_score
from tests.models.tokenizers.fields import sentencepiece_fields


@pytest.mark.oracle
def test_merges_are_those_that_transformers_makes():
    convert = pytest.importorskip("transformers.convert_slow_tokenizer")
    fields = sentencepiece_fields()
    tokens = [*fields["tokenizer.ggml.tokens"], *map("".join, itertools.product("ab", repeat=5)), "a", "b", "ab", "aba"]
    scores = {token: -float(i) for i, token in enumerate(tokens)}
    ids = {token: i for i, token in enumerate(tokens)}
    assert merges_by_score(scores) == convert.generate_merges(ids, scores)


def test_the_length_of_merges_is_bounded():
    with pytest.raises(QuantError, match="merges of more than 32 times their own length"):
        merges_by_score({"a" * n: float(n) for n in range(1, 100)})
