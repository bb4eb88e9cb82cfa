"""Checkpoints of networks that we cannot trace, as transformers writes them: quantized by their tensors' roles, along the contracted axis."""

import sys

import numpy as np
import pytest

import fewbit as fb
from fewbit import io, workflows

transformers = pytest.importorskip("transformers")

pytestmark = [pytest.mark.oracle, pytest.mark.finding(1)]


def test_gpt_has_its_blocks_along_the_contracted_axis(tmp_path):
    """Its Conv1D keeps matrices `[in, out]`; blocks along the outputs would be those of `axis=-1`."""
    config = transformers.OpenAIGPTConfig(n_embd=64, n_layer=1, n_head=2, vocab_size=40, n_positions=16)
    transformers.OpenAIGPTLMHeadModel(config).save_pretrained(tmp_path / "gpt")
    model = workflows.load(tmp_path / "gpt")
    plan = workflows.plan_model(model, recipe="int8")
    left = {row.path for row in plan if row.policy is None}
    assert left == {path for path in model.info if path.endswith(("bias", "positions_embed.weight")) or ".ln_" in path}
    path = "transformer.h.0.mlp.c_fc.weight"
    assert plan[path].axis == (-2,)
    workflows.quantize(
        model, workflows.plan_model(model, recipe={"rules": [{"path": path, "policy": "int8"}]}), tmp_path / "q"
    )
    stored, expected = io.read(tmp_path / "q").tensors[path], fb.quantize(np.asarray(model.load(path)), "int8", axis=-2)
    np.testing.assert_array_equal(stored.codes, expected.codes)
    np.testing.assert_array_equal(stored.scale, expected.scale)
    assert plan.notes[0].startswith("the model cannot be traced (config.json's model_type is 'openai-gpt'")
    assert plan.notes[0].endswith("the roles of 14 tensors: 14 from transformers' module classes")


def test_without_transformers_the_table_of_names_says_the_same(tmp_path, monkeypatch):
    config = transformers.OpenAIGPTConfig(n_embd=16, n_layer=1, n_head=2, vocab_size=40, n_positions=16)
    transformers.OpenAIGPTLMHeadModel(config).save_pretrained(tmp_path)
    by_module = workflows.plan_model(workflows.load(tmp_path), recipe="nf4")
    monkeypatch.setitem(sys.modules, "transformers", None)  # as where it is not installed
    by_name = workflows.plan_model(workflows.load(tmp_path), recipe="nf4")
    assert [(row.path, row.role, row.policy, row.axis) for row in by_name] == [
        (row.path, row.role, row.policy, row.axis) for row in by_module
    ]
    assert by_name.notes[0].endswith("pip install fewbit[transformers]")
