"""Tokenizers from GGUF metadata and from files split, join and stop as their checkpoints say."""

import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tokenizers")

from fewbit.errors import QuantError, UnsupportedError
from fewbit.models import (
    Tokenizer,
    tokenizer_from_directory,
    tokenizer_from_files,
    tokenizer_from_gguf,
    tokenizer_from_glassllm,
)
from fewbit.models.tokenizer import chat_text

CHATML = (
    "{% if not system %}{{ '<|im_start|>system\nBe brief.<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
)


def gguf_fields(pre: str = "smollm") -> dict[str, Any]:
    """Bytes as tokens, merges of `he`, `ll` and of two digits, and two special tokens."""
    from tokenizers.pre_tokenizers import ByteLevel

    specials = ["<|im_start|>", "<|im_end|>"]
    merges = ["h e", "l l", "1 2", "Ġ h"]
    tokens = [*specials, *sorted(ByteLevel.alphabet()), *(m.replace(" ", "") for m in merges)]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3, *[1] * (len(tokens) - 2)],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.chat_template": CHATML,
    }


def pieces(tokenizer: Tokenizer, text: str) -> list[str]:
    return [tokenizer.backend.id_to_token(int(i)) for i in tokenizer.encode(text)]


def test_digits_stand_alone_under_the_smollm_rule_only():
    assert pieces(tokenizer_from_gguf(gguf_fields("smollm")), "12") == ["1", "2"]
    assert pieces(tokenizer_from_gguf(gguf_fields("gpt-2")), "12") == ["12"]


@pytest.mark.parametrize("text", ["hello  12\n\tx", "naïve 一 🙂", "", " ", "a\u0301"])
def test_text_comes_back(text: str):
    tokenizer = tokenizer_from_gguf(gguf_fields())
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_merges_and_special_tokens():
    tokenizer = tokenizer_from_gguf(gguf_fields())
    assert pieces(tokenizer, "hell") == ["he", "ll"]
    ids = tokenizer.encode("<|im_start|>he<|im_end|>")
    assert ids.tolist()[0] == 0
    assert ids.tolist()[-1] == 1
    assert ids.dtype == "int32"
    assert tokenizer.decode(ids) == "he"
    assert tokenizer.decode(ids, keep_special=True) == "<|im_start|>he<|im_end|>"
    assert tokenizer.stop_ids == (1,)
    assert tokenizer.vocab == len(gguf_fields()["tokenizer.ggml.tokens"])


def test_chat_is_written_with_the_templates_own_system_message():
    expected = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    tokenizer = tokenizer_from_gguf(gguf_fields())
    assert tokenizer.decode(tokenizer.chat("hi"), keep_special=True) == expected
    assert chat_text("hi", CHATML.replace("\n", "\\n")) == expected  # a template whose line ends are escaped


@pytest.mark.parametrize("template", [None, "[INST] {{ content }} [/INST]"], ids=["none", "other"])
def test_chat_refuses_what_it_cannot_write(template: str | None):
    with pytest.raises(UnsupportedError, match=r"the checkpoint has .*chat template.*; give the prompt as plain text"):
        chat_text("hi", template)


def test_files_read_back(tmp_path: Path):
    tokenizer = tokenizer_from_gguf(gguf_fields())
    tokenizer.save(tmp_path)
    for again in (tokenizer_from_directory(tmp_path), tokenizer_from_files(tokenizer.files())):
        assert again.encode("hello 12").tolist() == tokenizer.encode("hello 12").tolist()
        assert (again.stop_ids, again.chat_template) == (tokenizer.stop_ids, tokenizer.chat_template)
        assert again.files() == tokenizer.files()


def test_files_of_hugging_face():
    files = tokenizer_from_gguf(gguf_fields()).files()
    as_object = {**files, "tokenizer_config.json": b'{"eos_token": {"content": "<|im_end|>"}}', "chat_template.jinja": b"t"}
    tokenizer = tokenizer_from_files(as_object)
    assert (tokenizer.stop_ids, tokenizer.chat_template) == ((1,), "t")
    assert tokenizer_from_files({"tokenizer.json": files["tokenizer.json"]}).stop_ids == ()
    generation = {**as_object, "generation_config.json": b'{"eos_token_id": [0, 1, 999999]}'}
    assert tokenizer_from_files(generation).stop_ids == (1, 0)


def test_glassllm_pieces():
    letters = {"alphabet": ["a", "b", "\n", "▁"], "merges": [["▁", "a"], ["a", "b"]]}
    tokenizer = tokenizer_from_glassllm(letters)
    assert pieces(tokenizer, "ab a\nb?") == ["ab", "▁a", "\n", "b", "<unk>"]
    assert tokenizer.decode(tokenizer.encode("ab a\nb")) == "ab a\nb"


def test_refuses():
    with pytest.raises(UnsupportedError, match="tokenizer is of kind 'llama'"):
        tokenizer_from_gguf({**gguf_fields(), "tokenizer.ggml.model": "llama"})
    with pytest.raises(UnsupportedError, match="pre-tokenizer is 'falcon'; supported are dbrx, default, gpt-2"):
        tokenizer_from_gguf(gguf_fields("falcon"))
    with pytest.raises(QuantError, match=r"the GGUF metadata lacks the field 'tokenizer\.ggml\.merges'"):
        tokenizer_from_gguf({k: v for k, v in gguf_fields().items() if not k.endswith("merges")})
    with pytest.raises(QuantError, match="the glassllm tokenizer lacks the field 'alphabet'"):
        tokenizer_from_glassllm({})
    with pytest.raises(QuantError, match=r"no tokenizer\.json among config\.json"):
        tokenizer_from_files({"config.json": b"{}"})
    with pytest.raises(QuantError, match="the tokenizer's files cannot be read"):
        tokenizer_from_files({"tokenizer.json": b"{"})


def test_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(UnsupportedError, match=r"tokenizers is not installed; pip install fewbit\[io\] brings it"):
        tokenizer_from_files({"tokenizer.json": b"{}"})


@pytest.mark.parametrize("name", ["smollm", "dbrx", "qwen2", "tekken", "gpt-4o"])
def test_a_gguf_tokenizer_splits_as_the_tokenizer_that_it_was_written_from(name):
    from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers, trainers

    from fewbit._pretokenizers import SPLITS
    from fewbit.io.gguf.vocabulary import tokenizer_fields

    rule = next(rule for rule, its_name in SPLITS.items() if its_name == name)
    steps = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    if name != "smollm":
        steps = [pre_tokenizers.Split(Regex(rule[0]), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    source = Tokenizer(models.BPE())
    source.pre_tokenizer = pre_tokenizers.Sequence(steps)
    text = "It's 2025, they've gone to  SEE 'em.\n\n\tNaïve/Zürich? <tool>"
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|end|>"],
        show_progress=False,
    )
    source.train_from_iterator([text * 3], trainer)
    source.add_tokens([AddedToken("<tool>", normalized=False)])
    fields = tokenizer_fields({"tokenizer.json": source.to_str().encode()}, {}, source.get_vocab_size())
    found = tokenizer_from_gguf({"tokenizer.ggml.eos_token_id": 0, **fields})
    assert found.encode(text).tolist() == source.encode(text).ids
    assert found.decode(found.encode(text)) == text and found.stop_ids == (0,)
