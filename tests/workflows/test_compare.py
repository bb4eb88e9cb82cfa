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
