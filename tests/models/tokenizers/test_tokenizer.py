"""Tokenizers write chats, begin texts and decode as their checkpoints say."""

import dataclasses
import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("tokenizers")

from fewbit.errors import QuantError, UnsupportedError
from fewbit.models import tokenizer_from_directory, tokenizer_from_files, tokenizer_from_gguf
from tests.models.tokenizers.fields import CHATML, gguf_fields, sentencepiece_fields


@pytest.mark.parametrize("text", ["hello  12\n\tx", "naïve 一 🙂", "", " ", "a\u0301"])
def test_text_comes_back(text: str):
    tokenizer = tokenizer_from_gguf(gguf_fields())
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_chat_is_written_with_the_templates_own_system_message():
    expected = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    tokenizer = tokenizer_from_gguf(gguf_fields())
    assert tokenizer.decode(tokenizer.chat("hi"), keep_special=True) == expected


def test_chat_begins_with_the_start_token_where_the_template_writes_it():
    fields = {**sentencepiece_fields(), "tokenizer.chat_template": "{{ bos_token + messages[0].content + eos_token }}"}
    for adds in (True, False):
        tokenizer = tokenizer_from_gguf({**fields, "tokenizer.ggml.add_bos_token": adds})
        assert tokenizer.chat("the").tolist() == tokenizer.encode("<s>the</s>").tolist()
        assert tokenizer_from_files(tokenizer.files()).chat("the").tolist() == tokenizer.chat("the").tolist()
    silent = dataclasses.replace(tokenizer, chat_template="{{ messages[0].content }}")
    assert silent.chat("the").tolist() == silent.encode("the").tolist()


def test_files_read_back(tmp_path: Path):
    tokenizer = tokenizer_from_gguf(gguf_fields())
    tokenizer.save(tmp_path)
    for again in (tokenizer_from_directory(tmp_path), tokenizer_from_files(tokenizer.files())):
        assert again.encode("hello 12").tolist() == tokenizer.encode("hello 12").tolist()
        assert (again.stop_ids, again.chat_template) == (tokenizer.stop_ids, tokenizer.chat_template)
        assert again.files() == tokenizer.files()


def test_further_stop_tokens_stand_in_the_generation_config():
    """transformers reads one `eos_token`, and a list of ids there."""
    tokenizer = dataclasses.replace(tokenizer_from_gguf(gguf_fields()), stop_ids=(1, 0))
    files = tokenizer.files()
    assert json.loads(files["tokenizer_config.json"])["eos_token"] == "<|im_end|>"
    assert json.loads(files["generation_config.json"]) == {"eos_token_id": [1, 0]}
    assert tokenizer_from_files(files).stop_ids == (1, 0)
    without = dataclasses.replace(tokenizer, stop_ids=())
    assert tokenizer_from_files(without.files()).stop_ids == ()


def test_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(UnsupportedError, match=r"tokenizers is not installed; pip install fewbit\[io\] brings it"):
        tokenizer_from_files({"tokenizer.json": b"{}"})


def test_start_tokens_are_put_before_a_text_once():
    tokenizer = tokenizer_from_gguf(sentencepiece_fields())
    assert tokenizer.start_ids == (1,)
    plain = tokenizer.encode("the")
    assert tokenizer.encode("the", add_start=True).tolist() == [1, *plain]
    assert tokenizer.encode("<s>the", add_start=True).tolist() == [1, *plain]
    assert tokenizer.encode("", add_start=True).tolist() == [1]
    without = tokenizer_from_gguf(gguf_fields())
    assert without.encode("he", add_start=True).tolist() == without.encode("he").tolist()


@pytest.mark.parametrize("writes", ["", "{{ bos_token }}"])
def test_a_chat_begins_with_the_start_tokens_that_its_template_writes(writes: str):
    fields = {**sentencepiece_fields(), "tokenizer.chat_template": writes + CHATML}
    ids = tokenizer_from_gguf(fields).chat("hi").tolist()
    assert (ids[0] == 1, 1 in ids[1:]) == (bool(writes), False)


def test_start_tokens_read_back_from_files():
    tokenizer = tokenizer_from_gguf(sentencepiece_fields())
    again = tokenizer_from_files(tokenizer.files())
    assert (again.start_ids, again.files()) == ((1,), tokenizer.files())
    assert b"bos_token" not in tokenizer_from_gguf(gguf_fields()).files()["tokenizer_config.json"]


def test_bytes_that_are_no_characters_are_refused():
    text = b"ab\xffcd".decode(errors="surrogateescape")  # as Python gives an argument of the command line
    with pytest.raises(QuantError, match=r"the text is no UTF-8: 'ab\\udcff' ends in a byte that is no character"):
        tokenizer_from_gguf(gguf_fields()).encode(text)
