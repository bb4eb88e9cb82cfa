"""Text that is decoded token by token is the text of all tokens."""

import pytest

pytest.importorskip("tokenizers")

from fewbit.models import tokenizer_from_gguf
from fewbit.models.tokenizers.text_stream import text_pieces
from tests.models.tokenizers.fields import gguf_fields, sentencepiece_fields

TEXTS = ["hello  12\n\tx", "naïve 一 🙂", "a\u0301", " ", "\N{REPLACEMENT CHARACTER}", "🙂🙂 x"]
TOKENIZERS = {"bytes": gguf_fields, "SentencePiece": sentencepiece_fields}


@pytest.mark.parametrize("kind", TOKENIZERS)
@pytest.mark.parametrize("text", TEXTS)
def test_the_pieces_are_the_text(kind, text):
    tokenizer = tokenizer_from_gguf(TOKENIZERS[kind]())
    ids = tokenizer.encode(text)
    pieces = list(text_pieces(tokenizer, ids.tolist()))
    assert "".join(pieces) == tokenizer.decode(ids) and all(pieces)


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_the_prompt_is_left_out_and_the_space_after_it_is_not(kind):
    tokenizer = tokenizer_from_gguf(TOKENIZERS[kind]())
    prompt, both = tokenizer.encode("hello"), tokenizer.encode("hello hello")
    assert both[: len(prompt)].tolist() == prompt.tolist()
    assert "".join(text_pieces(tokenizer, both[len(prompt) :].tolist(), before=prompt)) == " hello"


def test_a_character_comes_when_it_is_complete():
    tokenizer = tokenizer_from_gguf(gguf_fields())
    ids = tokenizer.encode("🙂x")
    assert len(ids) > 2
    assert list(text_pieces(tokenizer, ids.tolist())) == ["🙂", "x"]
    assert list(text_pieces(tokenizer, ids[:2].tolist())) == ["\N{REPLACEMENT CHARACTER}"]


def test_a_piece_comes_as_soon_as_its_token():
    tokenizer, seen = tokenizer_from_gguf(gguf_fields()), []

    def tokens():
        for token in tokenizer.encode("12 x"):
            seen.append(int(token))
            yield int(token)

    assert next(text_pieces(tokenizer, tokens())) and len(seen) == 1
