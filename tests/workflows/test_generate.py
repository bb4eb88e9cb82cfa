"""Writing on from a prompt, with plain and with quantized parameters."""

import dataclasses

import numpy as np
import pytest

from fewbit import workflows
from fewbit.errors import QuantError, UnsupportedError
from fewbit.kvcache import kv_policy
from fewbit.models.attention.rope_scaling import LongRope
from fewbit.workflows import generate
from tests.nets.random_decoder import SMALL
from tests.workflows.checkpoints import llama_directory, needs_tokenizers

pytestmark = needs_tokenizers


@pytest.fixture
def model(tmp_path):
    return workflows.load(llama_directory(tmp_path / "hf"))


@pytest.mark.slow
def test_weights_are_decoded_once_and_write_what_packed_ones_write(model, tmp_path):
    workflows.quantize(model, workflows.plan_model(model, recipe="nf4"), tmp_path / "q")
    stored = workflows.load(tmp_path / "q")
    sample = workflows.generate_text(stored, "The quick ", max_tokens=8)
    packed = workflows.generate_text(model, "The quick ", params=stored.params(), max_tokens=8)
    assert (sample.tokens, sample.decoded, sample.is_chat) == (8, 22, False)
    assert packed.text == sample.text


@pytest.mark.slow
def test_weights_with_quantized_activations_stay_packed(model, tmp_path):
    workflows.quantize(model, workflows.plan_model(model, recipe="w8a8"), tmp_path / "q")
    sample = workflows.generate_text(workflows.load(tmp_path / "q"), "The quick ", max_tokens=4)
    assert sample.decoded == 0


@pytest.mark.slow
def test_the_same_seed_draws_the_same(model):
    a, b, c = (workflows.generate_text(model, "Who ", max_tokens=12, temperature=2.0, seed=s).text for s in (1, 1, 2))
    assert a == b != c


@pytest.mark.slow
def test_text_comes_in_pieces_after_the_prompt(model):
    pieces: list[str] = []
    sample = workflows.generate_text(model, "The quick ", max_tokens=8, on_text=pieces.append)
    assert pieces[0] == "The quick " and "".join(pieces[1:]) == sample.text and len(pieces) > 4
    assert (sample.tokens, sample.steps) == (8, 7)


@pytest.mark.slow
def test_one_token_takes_no_decode_step(model):
    sample = workflows.generate_text(model, "The quick ", max_tokens=1)
    assert (sample.tokens, sample.steps, sample.decode_seconds) == (1, 0, 0.0)
    assert "decode" not in sample.speed()


@pytest.mark.slow
def test_padding_and_rounding_change_no_token(model):
    """The longest prompt and continuation that fit the context are neither padded nor rounded up."""
    short = workflows.generate_text(model, "The quick ", max_tokens=8)
    prompt = short.prompt_tokens
    longest = workflows.generate_text(model, "The quick ", max_tokens=32 - prompt)
    assert longest.text.startswith(short.text)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"prompt": ""}, QuantError, "the prompt is empty"),
        ({"seed": 1}, QuantError, "seed is 1, but temperature is 0.0"),
        ({"temperature": -1.0}, QuantError, "temperature is -1.0"),
        ({"max_tokens": 40}, QuantError, "exceed the context of the model, 32"),
        ({"chat": True}, UnsupportedError, "no chat template"),
    ],
)
def test_what_cannot_be_written_says_why(model, arguments, error, message):
    with pytest.raises(error, match=message):
        workflows.generate_text(model, **{"prompt": "Who ", "max_tokens": 4, **arguments})


@pytest.mark.parametrize("chat", [None, True])
def test_a_chat_template_that_fails_is_not_left_out(model, chat):
    tokenizer = dataclasses.replace(model.tokenizer, chat_template="{{ raise_exception('no system message') }}")
    with pytest.raises(UnsupportedError, match="the chat template fails: no system message; give the prompt as plain text"):
        workflows.generate_text(dataclasses.replace(model, tokenizer=tokenizer), "Who ", max_tokens=4, chat=chat)


def test_a_token_without_an_embedding_is_refused(model, monkeypatch):
    ids = generate._prompt_ids

    def beyond(*given):
        found, is_chat = ids(*given)
        return np.append(found, model.config.vocab), is_chat

    monkeypatch.setattr(generate, "_prompt_ids", beyond)
    with pytest.raises(QuantError, match=r"gives token \d+, but its vocabulary has"):
        workflows.generate_text(model, "Who ", max_tokens=4)


def test_equal_factors_for_all_lengths_keep_the_padded_lengths():
    """Those of a Llama 3.1 GGUF file; Phi-3's differ, and the length of the cache chooses among them."""
    factors = (1.0, 2.0, 4.0, 8.0)
    for long, expected in ((factors, (16, 256)), ((1.0, 2.0, 4.0, 9.0), (5, 69))):
        scaling = LongRope(factors, long, original_context=32, attention_factor=1.0)
        config = dataclasses.replace(SMALL, rope_scaling=scaling, context=512)
        assert generate._padded_lengths(5, 64, config) == expected


@pytest.mark.parametrize(
    ("kv", "of_token"),
    [(None, 2 * 2 * 8 * 4), (kv_policy("int8"), 2 * 2 * (8 + 4)), (kv_policy("int4", per="token"), 2 * (2 * 4 + 4))],
)
@pytest.mark.slow
def test_the_cache_is_of_the_kind_that_was_asked_for(model, kv, of_token):
    sample = workflows.generate_text(model, "Who ", max_tokens=4, kv=kv)
    assert sample.kv == (None if kv is None else str(kv))
    assert sample.cache_bytes == 3 * (4 + 4) * of_token  # layers, positions
    assert sample.tokens == 4
