"""Tokenizers of Hugging Face files stop as the files say."""

import pytest

pytest.importorskip("tokenizers")

from fewbit.errors import QuantError
from fewbit.models import tokenizer_from_files, tokenizer_from_gguf
from tests.models.tokenizers.fields import gguf_fields


def test_files_of_hugging_face():
    files = tokenizer_from_gguf(gguf_fields()).files()
    as_object = {**files, "tokenizer_config.json": b'{"eos_token": {"content": "<|im_end|>"}}', "chat_template.jinja": b"t"}
    tokenizer = tokenizer_from_files(as_object)
    assert (tokenizer.stop_ids, tokenizer.chat_template) == ((1,), "t")
    assert tokenizer_from_files({"tokenizer.json": files["tokenizer.json"]}).stop_ids == ()
    generation = {**as_object, "generation_config.json": b'{"eos_token_id": [0, 1, 999999]}'}
    assert tokenizer_from_files(generation).stop_ids == (1, 0)


def test_refuses():
    with pytest.raises(QuantError, match=r"no tokenizer\.json among config\.json"):
        tokenizer_from_files({"config.json": b"{}"})
    with pytest.raises(QuantError, match="the tokenizer's files cannot be read"):
        tokenizer_from_files({"tokenizer.json": b"{"})
