"""Evaluating models: the same as the metrics on plain logits, with quantized leaves as with decoded ones."""

import dataclasses

import jax
import numpy as np
import pytest

from fewbit import evaluate, workflows
from fewbit.errors import QuantError
from fewbit.kvcache import kv_policy
from tests.nets.random_decoder import SMALL, compiled_logits
from tests.workflows.checkpoints import TEXT, llama_directory, needs_tokenizers, text_file

pytestmark = needs_tokenizers


@pytest.fixture
def model(tmp_path):
    return workflows.load(llama_directory(tmp_path / "hf"))


@pytest.mark.slow
def test_perplexity_is_that_of_the_network(model, tmp_path):
    text = text_file(tmp_path)
    quality = workflows.evaluate(model, text=str(text), tokens=128, window=16)
    windows = evaluate.token_windows(model.tokenizer.encode(text.read_text()), length=16, limit=128)
    logits = compiled_logits(model.params(), windows[:, :-1], SMALL)
    losses = -np.take_along_axis(np.asarray(jax.nn.log_softmax(logits)), windows[:, 1:, None], -1)
    # Eight float32 windows, summed in another order.
    assert abs(quality.perplexity.value / np.exp(losses.astype(np.float64).mean()) - 1) < 1e-5
    assert (quality.perplexity.tokens, quality.window) == (128, 16)


# The exact searches of the block schemes' scales take long to compile.
@pytest.mark.parametrize(
    "recipe", ["int8", "nf4", "w8a8", *(pytest.param(name, marks=pytest.mark.slow) for name in ("mxfp4", "nvfp4"))]
)
@pytest.mark.slow
def test_a_quantized_model_stands_beside_its_reference(model, tmp_path, recipe):
    outcome = workflows.quantize(model, workflows.plan_model(model, recipe=recipe), tmp_path / "q")
    quality = workflows.evaluate(workflows.load(outcome.path), against=model, text=str(text_file(tmp_path)), window=16)
    assert quality.against.reference == workflows.evaluate(model, text=str(text_file(tmp_path)), window=16).perplexity
    assert 0 < quality.against.kl.mean.value < 0.5
    measured = {t.path: t.sqnr_db for t in outcome.tensors if t.sqnr_db is not None}
    assert {p: quality.sqnr_db[p] for p in measured} == pytest.approx(measured, abs=1e-4)


def test_a_model_beside_itself_differs_in_nothing(model, tmp_path):
    quality = workflows.evaluate(model, against=model, text=str(text_file(tmp_path)), window=16)
    assert quality.against.kl.largest == 0
    assert quality.against.top1.value == 1
    assert set(quality.sqnr_db.values()) == {np.inf}


def test_keys_and_values_are_quantized_in_the_model_and_not_in_its_reference(model, tmp_path):
    text, kv = str(text_file(tmp_path)), kv_policy("int4")
    quality = workflows.evaluate(model, against=model, text=text, window=16, kv=kv)
    assert quality.kv == str(kv)
    assert 1e-4 < quality.against.kl.mean.value < 0.5
    assert quality.perplexity == workflows.evaluate(model, text=text, window=16, kv=kv).perplexity
    assert quality.against.reference == workflows.evaluate(model, text=text, window=16).perplexity != quality.perplexity


def test_rotation_changes_no_logit_and_leaves_the_weights_uncompared(model, tmp_path):
    turned = workflows.rotated(model, seed=3)
    quality = workflows.evaluate(turned, against=model, text=str(text_file(tmp_path)), window=16)
    assert quality.against.kl.largest < 1e-5  # float32 rounding
    assert quality.sqnr_db == {}
    assert "rotated" in quality.notes[0]


@pytest.mark.slow
def test_a_rotated_model_can_be_written_and_remembers_its_seed(model, tmp_path):
    turned = workflows.rotated(model, seed=3)
    workflows.quantize(turned, workflows.plan_model(turned, recipe="int8"), tmp_path / "q")
    stored = workflows.load(tmp_path / "q")
    assert stored.facts["rotation_seed"] == 3
    assert not stored.config.tied


def test_each_window_begins_with_the_start_tokens(model):
    plain = workflows.evaluation_windows(model, TEXT, tokens=32, window=16)
    begun = dataclasses.replace(model, tokenizer=dataclasses.replace(model.tokenizer, start_ids=(66,)))
    windows = workflows.evaluation_windows(begun, TEXT, tokens=32, window=16)
    assert windows[:, 0].tolist() == [66, 66]
    assert np.array_equal(windows[:, 1:], plain[:, 1:])


@pytest.mark.parametrize(
    ("start_ids", "message"),
    [((1, 2, 3), "window is 2 tokens, but the tokenizer of hf begins every text with 3"), ((67,), "gives token 67, but")],
)
def test_start_tokens_that_do_not_fit_are_refused(model, start_ids, message):
    begun = dataclasses.replace(model, tokenizer=dataclasses.replace(model.tokenizer, start_ids=start_ids))
    with pytest.raises(QuantError, match=message):
        workflows.evaluation_windows(begun, TEXT, window=2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"window": 33}, "window is 33 tokens, more than the context of hf, 32"),
        ({"window": -5}, "window is -5 tokens, must be at least 1"),
        ({"tokens": 24, "window": 16}, "tokens is 24, must be one or more whole windows of 16 tokens"),
        ({"tokens": 0, "window": 16}, "tokens is 0, must be one or more whole windows of 16 tokens"),
        ({"tokens": 16000, "window": 16}, "16001 are needed"),
        ({"text": "no/such.txt"}, r"no text 'no/such\.txt'"),
    ],
)
def test_what_cannot_be_evaluated_says_why(model, tmp_path, arguments, message):
    with pytest.raises(QuantError, match=message):
        workflows.evaluate(model, **{"text": str(text_file(tmp_path)), **arguments})


def test_without_a_number_of_tokens_all_whole_windows_of_a_short_text_are_read(model, tmp_path):
    count = len(text_file(tmp_path).read_text())
    assert workflows.evaluate(model, text=str(tmp_path / "text.txt")).perplexity.tokens == (count - 1) // 32 * 32
