"""Tokenizers of GGUF metadata split text as the tokenizers that they were written from."""

import itertools
import math
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import example, given

pytest.importorskip("tokenizers")

from fewbit.errors import QuantError, UnsupportedError
from fewbit.io.gguf.vocabulary import tokenizer_fields
from fewbit.models import FAMILIES, tokenizer_from_gguf
from tests.models.tokenizers.fields import SPACE, WORDS, gguf_fields, pieces, sentencepiece_fields, sentencepiece_source

TEXTS = st.lists(
    st.one_of(
        st.sampled_from([*WORDS.split(" "), *" <>x\n\té一🙂", "  ", "<s>", "<tool>", "<|end|>", "<0x41>", "<unk>", SPACE]),
        st.text(),
    )
).map("".join)


def test_digits_stand_alone_under_the_smollm_rule_only():
    assert pieces(tokenizer_from_gguf(gguf_fields("smollm")), "12") == ["1", "2"]
    assert pieces(tokenizer_from_gguf(gguf_fields("gpt-2")), "12") == ["12"]


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


def with_control(*tokens: str, **ids: int) -> dict[str, Any]:
    """The fields of a tokenizer with further control tokens; the ids are counted from the first of them."""
    fields = gguf_fields()
    first = len(fields["tokenizer.ggml.tokens"])
    return {
        **fields,
        "tokenizer.ggml.tokens": [*fields["tokenizer.ggml.tokens"], *tokens],
        "tokenizer.ggml.token_type": [*fields["tokenizer.ggml.token_type"], *[3] * len(tokens)],
        **{f"tokenizer.ggml.{name}_token_id": first + i for name, i in ids.items()},
    }


def stops(fields: dict[str, Any]) -> list[str]:
    return [fields["tokenizer.ggml.tokens"][i] for i in tokenizer_from_gguf(fields).stop_ids]


def test_generations_end_where_llama_cpp_ends_them():
    assert stops(with_control("<a>", "<b>", eot=0, eom=1)) == ["<|im_end|>", "<a>", "<b>"]
    assert stops(with_control("<end_of_turn>", "<x>", eos=1)) == ["<x>", "<|im_end|>", "<end_of_turn>"]
    assert stops(with_control("<|end|>")) == ["<|im_end|>", "<|end|>"]
    assert stops(with_control("<|return|>", "<|call|>", "<|end|>", eos=0)) == ["<|return|>", "<|im_end|>", "<|call|>"]
    ordinary = with_control("</s>")
    ordinary["tokenizer.ggml.token_type"][-1] = 1
    assert stops(ordinary) == ["<|im_end|>"]  # as in Gemma's vocabulary, where it is a tag of HTML
    with pytest.raises(QuantError, match=r"tokenizer\.ggml\.eot_token_id is \d+, but there are"):
        tokenizer_from_gguf(with_control("<a>", eot=1))


@pytest.mark.parametrize("name", ["smollm", "dbrx", "qwen2", "qwen35", "seed-coder", "tekken", "gpt-4o"])
def test_a_gguf_tokenizer_splits_as_the_tokenizer_that_it_was_written_from(name):
    from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers, trainers

    from fewbit._pretokenizers import SPLITS

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


@pytest.mark.oracle
def test_qwen3_5_splits_words_with_their_marks_as_transformers_does():
    module = pytest.importorskip("transformers.models.qwen3_5.tokenization_qwen3_5")
    from tokenizers import Regex, pre_tokenizers

    from fewbit._pretokenizers import SPLITS

    assert SPLITS[(module.PRETOKENIZE_REGEX,)] == "qwen35"
    text = "e\u0301te\u0301 \u0301x"

    def pieces(name: str) -> list[str]:
        ((rule,),) = (rule for rule, its_name in SPLITS.items() if its_name == name)
        return [piece for piece, _ in pre_tokenizers.Split(Regex(rule), "isolated").pre_tokenize_str(text)]

    assert pieces("qwen35")[0] == "e\u0301te\u0301" and pieces("qwen2")[0] == "e"


# --- BPE of SentencePiece ---


def llama_cpp_ids(text: str, fields: dict[str, Any]) -> list[int]:
    """llama.cpp's algorithm: control and user-defined tokens, the longest first; then the neighbours of the highest score."""
    tokens, kinds, scores = (fields[f"tokenizer.ggml.{key}"] for key in ("tokens", "token_type", "scores"))
    ids = {token: i for i, token in enumerate(tokens)}
    parts: list[str | int] = [text]
    for token in sorted((t for t, kind in zip(tokens, kinds, strict=True) if kind in (2, 3, 4)), key=len, reverse=True):
        for at, part in reversed(list(enumerate(parts))):
            if isinstance(part, str):
                joints = [[ids[token], rest] for rest in part.split(token)]
                parts[at : at + 1] = list(itertools.chain(*joints))[1:]
    prefix = " " * fields["tokenizer.ggml.add_space_prefix"]
    found: list[int] = []
    for part in parts:
        if isinstance(part, int):
            found.append(part)
            continue
        if not part:
            continue
        symbols = list((prefix + part).replace(" ", SPACE))
        while pairs := [(-scores[ids[a + b]], i) for i, (a, b) in enumerate(itertools.pairwise(symbols)) if a + b in ids]:
            at = min(pairs)[1]
            symbols[at : at + 2] = ["".join(symbols[at : at + 2])]
        for symbol in symbols:
            found += [ids[symbol]] if symbol in ids else [ids[f"<0x{byte:02X}>"] for byte in symbol.encode()]
    return found


FIELDS = {"llama": sentencepiece_fields(), "gemma": sentencepiece_fields(adds_space=False)}
TOKENIZERS = {name: tokenizer_from_gguf(fields) for name, fields in FIELDS.items()}


@pytest.mark.parametrize("name", FIELDS)
@given(text=TEXTS)
@example("<s> the  mother<tool>bathes</s>")
def test_sentencepiece_is_split_as_llama_cpp_does(name: str, text: str):
    assert TOKENIZERS[name].encode(text).tolist() == llama_cpp_ids(text, FIELDS[name])


SOURCES = {name: sentencepiece_source(adds_space=name == "llama") for name in FIELDS}
WRITTEN = {
    name: tokenizer_from_gguf(tokenizer_fields({"tokenizer.json": source.to_str().encode()}, {}, 330))
    for name, source in SOURCES.items()
}


@pytest.mark.parametrize("name", SOURCES)
@given(text=TEXTS.map(lambda text: text.replace(SPACE, " ")))  # the file has tokens of several spaces with plain ones
def test_sentencepiece_comes_back_from_a_gguf_file(name: str, text: str):
    expected = SOURCES[name].encode(text).ids
    assert [1, *WRITTEN[name].encode(text)] == expected
    assert WRITTEN[name].decode(expected) == SOURCES[name].decode(expected)


def gemma4_tokenizer() -> Any:
    files = {"tokenizer.json": SOURCES["gemma"].to_str().encode()}
    return tokenizer_from_gguf(tokenizer_fields(files, {"model_type": "gemma4_text"}, 330))


@given(text=TEXTS.map(lambda text: text.replace("\n", "")))
def test_the_tokenizer_of_gemma_4_comes_back_from_its_merges(text: str):
    found, expected = gemma4_tokenizer(), SOURCES["gemma"].encode(text).ids
    assert [1, *found.encode(text)] == expected and found.start_ids == (1,)
    assert found.decode(expected) == SOURCES["gemma"].decode(expected)


def test_merges_of_gemma_4_end_with_the_line():
    assert pieces(TOKENIZERS["gemma"], "the \n\nthe") == ["the", "▁\n", "\n", "the"]
    assert pieces(gemma4_tokenizer(), "the \n\nthe") == ["the", "▁", "\n", "\n", "the"]


@given(text=st.text())
def test_text_comes_back_from_sentencepiece(text: str):
    for tokenizer in TOKENIZERS.values():
        assert tokenizer.decode(tokenizer.encode(text)) == text.replace(SPACE, " ")


def test_special_tokens_of_phi_3_take_the_space_after_them():
    named = tokenizer_from_gguf({**FIELDS["llama"], "general.name": "Phi-3 mini"})
    assert pieces(named, "the<|end|>\nthe<s>\nthe") == ["▁the", "<|end|>", "▁the", "<s>", "▁\n", "the"]
    assert pieces(TOKENIZERS["llama"], "the<|end|>\nthe") == ["▁the", "<|end|>", "▁\n", "the"]


# --- start tokens ---


@pytest.mark.parametrize(
    ("fields", "changed", "start_ids"),
    [
        (sentencepiece_fields(), {}, (1,)),
        (sentencepiece_fields(), {"tokenizer.ggml.bos_token_id": 6}, (6,)),
        (sentencepiece_fields(), {"tokenizer.ggml.add_bos_token": False}, ()),
        (gguf_fields(), {"tokenizer.ggml.bos_token_id": 0}, ()),
        (gguf_fields(), {"tokenizer.ggml.bos_token_id": 0, "tokenizer.ggml.add_bos_token": True}, (0,)),
        (gguf_fields(), {"tokenizer.ggml.add_bos_token": True}, ()),
        (gguf_fields("llama-bpe"), {"tokenizer.ggml.bos_token_id": 0}, (0,)),
        (gguf_fields("tekken"), {"tokenizer.ggml.bos_token_id": 0}, (0,)),
    ],
)
def test_start_tokens_are_those_of_llama_cpp(fields: dict[str, Any], changed: dict[str, Any], start_ids: tuple[int, ...]):
    assert tokenizer_from_gguf({**fields, **changed}).start_ids == start_ids


def test_sentencepiece_begins_with_token_1_where_the_file_says_nothing():
    fields = sentencepiece_fields()
    del fields["tokenizer.ggml.bos_token_id"]
    assert tokenizer_from_gguf(fields).start_ids == (1,)


# --- every family ---

KINDS = {
    "llama": [("llama", "default"), ("gpt2", "llama-bpe"), ("gpt2", "smollm")],
    "internlm3": [("llama", "default")],
    "iquestcoder": [("gpt2", "qwen2")],
    "mistral": [("llama", "default"), ("gpt2", "tekken")],
    "mixtral": [("llama", "default")],
    "qwen2": [("gpt2", "qwen2"), ("gpt2", "deepseek-r1-qwen")],
    "qwen3": [("gpt2", "qwen2")],
    "qwen2_moe": [("gpt2", "qwen2")],
    "qwen3_moe": [("gpt2", "qwen2")],
    "qwen3_next": [("gpt2", "qwen2")],
    "qwen3_5_text": [("gpt2", "qwen35")],
    "qwen3_5_moe_text": [("gpt2", "qwen35")],
    "gemma": [("llama", "default")],
    "gemma2": [("llama", "default")],
    "gemma3_text": [("llama", "default")],
    "gemma4_text": [("gemma4", "default")],
    "phi3": [("llama", "default"), ("gpt2", "dbrx")],
    "olmo2": [("gpt2", "dbrx")],
    "olmo3": [("gpt2", "dbrx")],
    "olmoe": [("gpt2", "olmo")],
    "smollm3": [("gpt2", "smaug-bpe")],
    "granite": [("gpt2", "refact"), ("gpt2", "dbrx")],
    "granitemoe": [("gpt2", "refact")],
    "granitemoehybrid": [("gpt2", "dbrx")],
    "gpt_oss": [("gpt2", "gpt-4o")],
    "llama4_text": [("gpt2", "llama4"), ("gpt2", "gpt-4o")],
    "deepseek_v2": [("gpt2", "deepseek-v3")],
    "deepseek_v3": [("gpt2", "deepseek-v3")],
    "glm4": [("gpt2", "glm4"), ("gpt2", "chatglm-bpe")],
    "glm4_moe": [("gpt2", "glm4")],
    "glm4_moe_lite": [("gpt2", "glm4")],
    "dots1": [("gpt2", "qwen2")],
    "minimax_m2": [("gpt2", "minimax-m2")],
    "seed_oss": [("gpt2", "seed-coder")],
    "exaone4": [("gpt2", "exaone4")],
    "ernie4_5": [("llama", "default")],
    "ernie4_5_moe": [("llama", "default")],
    "hunyuan_v1_dense": [("gpt2", "hunyuan-dense")],
    "hunyuan_v1_moe": [("gpt2", "hunyuan")],
    "exaone_moe": [("gpt2", "exaone-moe")],
    "solar_open": [("gpt2", "solar-open")],
    "granitemoeshared": [("gpt2", "refact")],
    "nemotron_h": [("gpt2", "tekken")],
    "lfm2": [("gpt2", "lfm2")],
    "lfm2_moe": [("gpt2", "lfm2")],
    "arcee": [("gpt2", "llama-bpe")],
    "phi": [("gpt2", "phi-2"), ("gpt2", "gpt-2")],
    "jais2": [("gpt2", "jais-2")],
    "starcoder2": [("gpt2", "starcoder")],
    "stablelm": [("gpt2", "stablelm2"), ("gpt2", "olmo")],
    "nemotron": [("llama", "default")],
    "cohere": [("gpt2", "command-r")],
    "cohere2": [("gpt2", "command-r")],
    "gpt2": [("gpt2", "gpt-2")],
    "gpt_neox": [("gpt2", "olmo")],
}
"""The `tokenizer.ggml.model` and `tokenizer.ggml.pre` of each family's GGUF files."""


def test_the_tokenizers_of_every_family_are_listed():
    assert set(KINDS) == {name for name, family in FAMILIES.items() if family.gguf}


@pytest.mark.parametrize(("model", "pre"), sorted({kind for kinds in KINDS.values() for kind in kinds}))
def test_the_tokenizer_of_every_family_is_read(model: str, pre: str):
    if model == "gemma4":
        tokenizer = gemma4_tokenizer()
    else:
        tokenizer = tokenizer_from_gguf({"gpt2": gguf_fields(pre), "llama": FIELDS["llama"]}[model])
    text = "It's 12345 hell,\n he said."
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_without_a_name_text_is_split_as_by_llama_cpp():
    """Its default rule: punctuation alone, GPT-2's rule, runs of digits by threes."""
    fields = {key: value for key, value in gguf_fields().items() if key != "tokenizer.ggml.pre"}
    backend = tokenizer_from_gguf(fields).backend
    pieces = [piece for piece, _ in backend.pre_tokenizer.pre_tokenize_str("it's 12345!!x")]
    assert pieces == ["it", "'", "s", "Ġ", "123", "45", "!!", "x"]


# --- refusals ---


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"tokenizer.ggml.scores": [0.0]}, "the GGUF metadata has 328 tokens and 1 scores"),
        ({"tokenizer.ggml.scores": [math.nan] * 328}, "scores that are not finite"),
        ({"tokenizer.ggml.scores": None}, r"tokenizer\.ggml\.scores'?\]? is None"),
        ({"tokenizer.ggml.token_type": [1]}, "the GGUF metadata has 328 tokens and 1 token types"),
        ({"tokenizer.ggml.eos_token_id": 328}, r"tokenizer\.ggml\.eos_token_id is 328, but there are 328 tokens"),
        ({"tokenizer.ggml.bos_token_id": 328}, r"tokenizer\.ggml\.bos_token_id is 328, but there are 328 tokens"),
        ({"tokenizer.ggml.eos_token_id": -1}, r"tokenizer\.ggml\.eos_token_id'?\]? is -1"),
        ({"tokenizer.ggml.tokens": ["a"] * 328}, r"tokenizer\.ggml\.tokens has 'a' twice, with the ids 0 and 1"),
    ],
)
def test_damaged_fields_are_named(changed: dict[str, Any], message: str):
    with pytest.raises(QuantError, match=message):
        tokenizer_from_gguf({**FIELDS["llama"], **changed})


def test_refuses():
    with pytest.raises(UnsupportedError, match="tokenizer is of kind 'bert'; supported are"):
        tokenizer_from_gguf({**gguf_fields(), "tokenizer.ggml.model": "bert"})
    with pytest.raises(
        UnsupportedError,
        match="pre-tokenizer is 'falcon'; supported are chatglm-bpe, command-r, dbrx, deepseek-r1-qwen, deepseek-v3, default",
    ):
        tokenizer_from_gguf(gguf_fields("falcon"))
    with pytest.raises(QuantError, match=r"the GGUF metadata lacks the field 'tokenizer\.ggml\.merges'"):
        tokenizer_from_gguf({k: v for k, v in gguf_fields().items() if not k.endswith("merges")})
    with pytest.raises(QuantError, match=r"the GGUF metadata lacks the field 'tokenizer\.ggml\.scores'"):
        tokenizer_from_gguf({k: v for k, v in FIELDS["llama"].items() if not k.endswith("scores")})
    colon = {
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.bos_token_id": gguf_fields()["tokenizer.ggml.tokens"].index(":"),
    }
    with pytest.raises(
        UnsupportedError, match="the beginning-of-text token is ':', which the package tokenizers cannot add"
    ):
        tokenizer_from_gguf({**gguf_fields(), **colon})
