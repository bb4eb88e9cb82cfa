"""Tokenizer fields: those that llama.cpp's own package finds, and the rules of splitting by their names."""

import json

import gguf
import pytest

from fewbit import QuantError, UnsupportedError
from fewbit._pretokenizers import SPLITS
from fewbit.io.gguf.vocabulary import tokenizer_fields
from tests.io.gguf.families import save_tokenizer
from tests.io.gguf.test_sentencepiece import model as sentencepiece_model
from tests.workflows.checkpoints import needs_tokenizers

SPACE = "\u2581"


def byte_level(rules: tuple[str, ...] = ("bytes",), **model) -> dict:
    """A tokenizer.json of byte-level BPE with these rules."""
    steps = {"bytes": {"type": "ByteLevel", "use_regex": True}, "digits": {"type": "Digits", "individual_digits": True}}
    parts = [steps.get(rule, {"type": "Split", "pattern": {"Regex": rule}, "behavior": "Isolated"}) for rule in rules]
    if "bytes" not in rules:
        parts.append({"type": "ByteLevel", "use_regex": False})
    vocab = {"<|end|>": 0, "a": 1, "b": 2, "ab": 3}
    return {
        "model": {"type": "BPE", "vocab": vocab, "merges": [["a", "b"]], **model},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": parts},
        "added_tokens": [
            {"id": 0, "content": "<|end|>", "special": True},
            {"id": 5, "content": f"{SPACE}{SPACE}", "special": False},
        ],
    }


def sentencepiece_json(**changed) -> dict:
    """A tokenizer.json that was converted from SentencePiece."""
    vocab = {"<unk>": 0, "<s>": 1, "<0x0A>": 2, "a": 3, "b": 4, SPACE: 5, "ab": 6, f"{SPACE}ab": 7}
    merges = ["a b", f"{SPACE} ab"]
    return {
        "model": {"type": "BPE", "vocab": vocab, "merges": merges, "byte_fallback": True, "unk_token": "<unk>"},
        "normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": SPACE}, {"type": "Replace"}]},
        "added_tokens": [{"id": 1, "content": "<s>", "special": True}],
    } | changed


def fields(tokenizer: dict, vocab: int = 8, config=None, **files) -> dict:
    texts = {"tokenizer.json": tokenizer, **{name.replace("__", "."): value for name, value in files.items()}}
    encoded = {name: value if isinstance(value, bytes) else json.dumps(value).encode() for name, value in texts.items()}
    return tokenizer_fields(encoded, config or {}, vocab)


def test_tokens_and_kinds_by_id():
    found = fields(byte_level())
    assert found["tokenizer.ggml.model"] == "gpt2"
    assert found["tokenizer.ggml.tokens"] == ["<|end|>", "a", "b", "ab", "[PAD4]", "  ", "[PAD6]", "[PAD7]"]
    assert found["tokenizer.ggml.token_type"] == [3, 1, 1, 1, 5, 4, 5, 5]
    assert found["tokenizer.ggml.merges"] == ["a b"]
    assert fields(byte_level(), vocab=3)["tokenizer.ggml.tokens"] == ["<|end|>", "a", "b"]


@pytest.mark.parametrize(("rules", "name"), SPLITS.items(), ids=SPLITS.values())
def test_rules_of_splitting_have_their_names(rules, name):
    assert fields(byte_level(rules))["tokenizer.ggml.pre"] == name


def test_variants_of_rules_have_names_of_their_own():
    llama3 = next(rules for rules, name in SPLITS.items() if name == "dbrx")
    assert fields(byte_level(llama3, ignore_merges=True))["tokenizer.ggml.pre"] == "llama-bpe"
    settings = {"clean_up_tokenization_spaces": True}
    assert fields(byte_level(("digits", "bytes")), tokenizer_config__json=settings)["tokenizer.ggml.pre"] == "refact"


def test_the_rules_are_those_of_llama_cpp():
    """The regular expressions as tokenizer.json of Llama 3, Qwen 2 and gpt-oss has them."""
    texts = {name: rules[0] for rules, name in SPLITS.items()}
    assert texts["dbrx"] == (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    assert texts["qwen2"] == texts["dbrx"].replace("{1,3}", "")
    assert texts["gpt-4o"] == (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


def test_ends_of_lines_in_rules_may_be_escaped_or_not():
    """tokenizer.json of DeepSeek-V3 has the characters themselves."""
    rules = next(rules for rules, name in SPLITS.items() if name == "deepseek-v3")
    written = tuple(rule.replace(r"\r\n", "\r\n") for rule in rules)
    assert written != rules
    assert fields(byte_level(written))["tokenizer.ggml.pre"] == "deepseek-v3"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"normalizer": {"type": "Lowercase"}}, "normalizes text by Lowercase"),
        ({"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "NFKC"}]}}, "by NFKC"),
        ({"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True}}, "a space before every text"),
        ({"merges": []}, "has no merges"),
    ],
)
def test_what_gguf_does_not_say_of_a_byte_level_bpe_is_refused(changed, message):
    tokenizer = byte_level()
    assert fields(tokenizer | {"normalizer": {"type": "NFC"}})["tokenizer.ggml.pre"] == "gpt-2"
    with pytest.raises(UnsupportedError, match=message):
        fields(byte_level(merges=[]) if "merges" in changed else tokenizer | changed)


def test_scores_follow_the_merges_without_tokenizer_model():
    found = fields(sentencepiece_json())
    assert found["tokenizer.ggml.model"] == "llama"
    scores = dict(zip(found["tokenizer.ggml.tokens"], found["tokenizer.ggml.scores"], strict=True))
    assert scores["ab"] > scores[f"{SPACE}ab"] > scores["a"]
    assert found["tokenizer.ggml.token_type"] == [2, 3, 6, 1, 1, 1, 1, 1]
    assert found["tokenizer.ggml.add_space_prefix"] is True


def test_merges_that_llama_cpp_would_apply_otherwise_are_refused():
    tokenizer = sentencepiece_json()
    model = tokenizer["model"]
    model["merges"] = ["a b"]
    with pytest.raises(UnsupportedError, match=f"does not merge '{SPACE}' and 'ab', though '{SPACE}ab' is a token"):
        fields(tokenizer)
    model["vocab"][f"{SPACE}a"] = 8
    model["merges"] = [f"{SPACE} ab", f"{SPACE} a", "a b", f"{SPACE}a b"]
    with pytest.raises(UnsupportedError, match="has other merges between those of one token"):
        fields(tokenizer, vocab=9)
    assert fields(tokenizer, vocab=9, tokenizer__model=sentencepiece_model())["tokenizer.ggml.model"] == "llama"


def test_tokenizer_model_gives_scores_and_kinds():
    found = fields(sentencepiece_json(), tokenizer__model=sentencepiece_model())
    assert found["tokenizer.ggml.tokens"][3] == f"{SPACE}the"
    assert found["tokenizer.ggml.scores"][3:5] == [-1.5, -3e5]
    assert found["tokenizer.ggml.token_type"][:5] == [2, 3, 6, 1, 4]


@pytest.mark.parametrize(
    ("changed", "adds"),
    [
        ({"normalizer": {"type": "Replace"}}, False),
        ({"normalizer": None, "pre_tokenizer": {"type": "Metaspace", "prepend_scheme": "first"}}, True),
        ({"normalizer": None, "pre_tokenizer": {"type": "Metaspace", "prepend_scheme": "never"}}, False),
    ],
)
def test_the_space_before_a_text(changed, adds):
    assert fields(sentencepiece_json(**changed))["tokenizer.ggml.add_space_prefix"] is adds


@needs_tokenizers
def test_special_tokens_and_template_are_those_of_the_package(tmp_path):
    save_tokenizer(tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    template = [{"name": "default", "template": "{{ x }}"}, {"name": "tool", "template": "t"}]
    settings |= {"chat_template": template, "pad_token": {"content": "<|end|>"}, "add_eos_token": True}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    config = {"bos_token_id": 5, "eos_token_id": 6, "unk_token_id": 7}
    (tmp_path / "config.json").write_text(json.dumps(config))
    theirs = gguf.SpecialVocab(tmp_path, load_merges=True)
    ours = tokenizer_fields({file.name: file.read_bytes() for file in tmp_path.iterdir()}, config, 300)
    assert ours["tokenizer.ggml.merges"] == theirs.merges
    names = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
    assert {kind: ours[f"tokenizer.ggml.{name}_token_id"] for kind, name in names.items()} == theirs.special_token_ids
    assert {kind: ours[f"tokenizer.ggml.add_{kind}_token"] for kind in ("bos", "eos")} == {"bos": False, "eos": True}
    assert ours["tokenizer.chat_template"] == "{{ x }}"


def test_a_post_processor_says_what_is_added():
    step = {"type": "TemplateProcessing", "single": [{"SpecialToken": {}}, {"Sequence": {}}]}
    tokenizer = byte_level() | {"post_processor": {"type": "Sequence", "processors": [{"type": "ByteLevel"}, step]}}
    found = fields(tokenizer)
    assert (found["tokenizer.ggml.add_bos_token"], found["tokenizer.ggml.add_eos_token"]) == (True, False)
    found = fields(tokenizer, tokenizer_config__json={"add_bos_token": False})
    assert found["tokenizer.ggml.add_bos_token"] is False


def test_a_post_processor_says_which_token_begins_a_text():
    step = {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<|end|>"}}, {"Sequence": {"id": "A"}}]}
    tokenizer = byte_level() | {"post_processor": step}
    assert fields(tokenizer, config={"bos_token_id": 3})["tokenizer.ggml.bos_token_id"] == 0
    assert fields(tokenizer, tokenizer_config__json={"bos_token": "ab"})["tokenizer.ggml.bos_token_id"] == 3
    assert "tokenizer.ggml.bos_token_id" not in fields(byte_level())


@pytest.mark.parametrize(
    ("tokenizer", "error", "message"),
    [
        ({"model": {"type": "Unigram", "vocab": []}}, UnsupportedError, "is not a BPE"),
        (
            {"model": {"type": "BPE", "vocab": {"a": 0}}},
            UnsupportedError,
            "neither a byte-level BPE nor one with byte fallback",
        ),
        (byte_level((r"\w+",)), UnsupportedError, r"splits text by .* which llama\.cpp has no name for"),
        (byte_level() | {"added_tokens": [{"id": 3, "content": "a", "special": True}]}, QuantError, "the token 'a' twice"),
        (byte_level() | {"added_tokens": [{"content": "a"}]}, QuantError, "tokenizer.json"),
        (byte_level(vocab={"a": "x"}), QuantError, "tokenizer.json"),
    ],
)
def test_what_llama_cpp_lacks_is_refused(tokenizer, error, message):
    with pytest.raises(error, match=message):
        fields(tokenizer)


def test_a_missing_or_broken_file_is_named():
    with pytest.raises(QuantError, match=r"no tokenizer\.json among vocab\.txt"):
        tokenizer_fields({"vocab.txt": b""}, {}, 8)
    with pytest.raises(QuantError, match=r"tokenizer\.json"):
        tokenizer_fields({"tokenizer.json": b"{"}, {}, 8)
