"""Tokenizers of GGUF metadata split text as the tokenizers that they were written from."""

import pytest

pytest.importorskip("tokenizers")

from fewbit.errors import QuantError, UnsupportedError
from fewbit.models import tokenizer_from_gguf
from tests.models.tokenizers.fields import gguf_fields, pieces


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


def test_refuses():
    with pytest.raises(UnsupportedError, match="tokenizer is of kind 'llama'"):
        tokenizer_from_gguf({**gguf_fields(), "tokenizer.ggml.model": "llama"})
    with pytest.raises(UnsupportedError, match="pre-tokenizer is 'falcon'; supported are dbrx, default, gpt-2"):
        tokenizer_from_gguf(gguf_fields("falcon"))
    with pytest.raises(QuantError, match=r"the GGUF metadata lacks the field 'tokenizer\.ggml\.merges'"):
        tokenizer_from_gguf({k: v for k, v in gguf_fields().items() if not k.endswith("merges")})
