"""Recipes side by side: each as it would be alone."""

import pytest

from fewbit import workflows
from tests.workflows.checkpoints import TEXT, llama_directory, needs_tokenizers, text_file

pytestmark = needs_tokenizers


@pytest.mark.slow
def test_a_candidate_is_what_eval_measures_of_the_written_model(tmp_path):
    model = workflows.load(llama_directory(tmp_path / "hf"))
    base = workflows.baseline(model, workflows.evaluation_windows(model, TEXT, window=16))
    plan = workflows.plan_model(model, recipe="mixed")
    candidate = workflows.compare(base, plan)
    outcome = workflows.quantize(model, plan, tmp_path / "q")
    quality = workflows.evaluate(workflows.load(tmp_path / "q"), against=model, text=str(text_file(tmp_path)), window=16)
    assert candidate.quality.candidate.value == pytest.approx(quality.perplexity.value, rel=1e-6)
    assert candidate.nbytes == outcome.array_bytes
    assert [t.path for t in candidate.worst] == [t.path for t in workflows.worst(outcome.tensors)]
    assert workflows.released(candidate).params is None


@pytest.mark.slow
def test_activations_are_quantized_in_the_candidate_and_not_in_the_float_model(tmp_path):
    model = workflows.load(llama_directory(tmp_path / "hf"))
    windows = workflows.evaluation_windows(model, TEXT, window=16)
    base = workflows.baseline(model, windows, int8_activations=True)
    assert base.perplexity == workflows.baseline(model, windows).perplexity
    plan = workflows.plan_model(model, recipe="int8")
    candidate = workflows.compare(base, plan)
    assert candidate.activations is not None and set(candidate.activations.schemes.values()) == {"int8"}
    outcome = workflows.quantize(model, plan, tmp_path / "q")
    stored, text = workflows.load(outcome.path), str(text_file(tmp_path))
    quality = workflows.evaluate(stored, text=text, window=16, int8_activations=True)
    assert quality.activations == candidate.activations
    assert candidate.quality.candidate.value == pytest.approx(quality.perplexity.value, rel=1e-6)
    assert quality.perplexity != workflows.evaluate(stored, text=text, window=16).perplexity
