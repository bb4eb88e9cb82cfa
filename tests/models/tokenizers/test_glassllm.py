"""Tokenizers of glassllm keep words with the spaces before them."""

import pytest

pytest.importorskip("tokenizers")

from fewbit.errors import QuantError
from fewbit.models import tokenizer_from_glassllm
from tests.models.tokenizers.fields import pieces


def test_glassllm_pieces():
    letters = {"alphabet": ["a", "b", "\n", "▁"], "merges": [["▁", "a"], ["a", "b"]]}
    tokenizer = tokenizer_from_glassllm(letters)
    assert pieces(tokenizer, "ab a\nb?") == ["ab", "▁a", "\n", "b", "<unk>"]
    assert tokenizer.decode(tokenizer.encode("ab a\nb")) == "ab a\nb"


def test_refuses():
    with pytest.raises(QuantError, match="the glassllm tokenizer lacks the field 'alphabet'"):
        tokenizer_from_glassllm({})
