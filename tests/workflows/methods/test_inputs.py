"""Inputs of products against `fb.observe` of the whole float model; tokens of experts in a plan."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

import fewbit as fb
from fewbit import workflows
from fewbit.evaluate.report.facts import MeasuredInputs
from fewbit.models import forward
from fewbit.workflows.methods.inputs import measured_inputs, with_expert_tokens
from tests.nets.random_decoder import FEATURES, LEARNED_POSITIONS, SMALL
from tests.workflows.methods.test_calibrated import data_of, model_of


def test_inputs_are_those_of_observe(tmp_path):
    model, data, steps = model_of(SMALL, tmp_path), data_of(SMALL, 4), []
    found = measured_inputs(model, data, progress=lambda *done: steps.append(done))
    assert (found.text, found.tokens, found.expert_tokens) == ("random", data.windows.size, {})
    assert steps == [(0, 3), (1, 3), (2, 3), (3, 3)]
    names = ["attn/q,k,v", "attn/o", "mlp/gate,up", "mlp/down"]
    assert {one.path for one in found.products} == {f"layers/{i}/{name}" for i in range(3) for name in names}
    recipe = fb.Recipe((fb.Rule(r"layers/.*/(q|o|gate|down)", "int4"),))
    stats = fb.observe(
        lambda params, tokens: forward(params, tokens, SMALL),
        model.params(),
        [jnp.asarray(data.windows)],
        recipe,
        collect=("absmax", "hessian"),
    )
    for one in found.products:
        seen = stats[one.path.split(",")[0]]
        squares = np.diagonal(seen.hessian) / seen.count
        assert one.channels == len(squares) and one.channel == int(np.argmax(seen.absmax))
        # Float32 sums of up to 128 vectors, in another order.
        assert one.amax == pytest.approx(float(np.max(seen.absmax)), rel=1e-4)
        assert one.rms == pytest.approx(float(np.sqrt(np.mean(squares))), rel=1e-4)
        assert one.channel_ratio == pytest.approx(
            float(np.sqrt(np.max(squares) / np.median(np.sqrt(squares)) ** 2)), rel=1e-4
        )
        assert one.peak == one.amax / one.rms


def test_blocks_without_a_gate_are_measured(tmp_path):
    found = measured_inputs(model_of(LEARNED_POSITIONS, tmp_path), data_of(LEARNED_POSITIONS, 2))
    names = ["attn/q,k,v", "attn/o", "mlp/up", "mlp/down"]
    assert {one.path for one in found.products} == {f"layers/{i}/{name}" for i in range(3) for name in names}


def test_a_plan_says_which_experts_have_no_token(tmp_path):
    plan = workflows.plan_model(model_of(FEATURES, tmp_path), recipe="int4")
    inputs = MeasuredInputs("a text", 1234, (), {"layers/2/mlp/experts": (0, 7, 3, 1229)})
    made = with_expert_tokens(plan, inputs, "share")
    assert made["layers/2/mlp/experts/0/up"].reason == "no token of a text: takes the statistics of the others"
    assert made["layers/2/mlp/experts/1/up"] == plan["layers/2/mlp/experts/1/up"]
    assert made.notes[-2:] == (
        "experts on 1,234 tokens of a text",
        "layers/2/mlp/experts: 0 to 1,229 tokens an expert, 1 of 4 without any",
    )
    experts = {row.policy.weight for row in made if "/experts/" in row.path and row.path.endswith("up")}
    assert len(experts) == 1
    stacked = dataclasses.replace(
        plan, rows=(dataclasses.replace(plan["layers/2/mlp/experts/0/up"], path="layers/2/mlp/experts/up"),)
    )
    row = with_expert_tokens(stacked, inputs, "nearest").rows[0]
    assert row.reason == "1 of 4 experts have no token of a text: rounded to nearest"
    with pytest.raises(fb.QuantError, match="unknown policy 'x' for experts without tokens"):
        with_expert_tokens(plan, inputs, "x")


@pytest.mark.slow
def test_experts_are_counted(tmp_path):
    model, data = model_of(FEATURES, tmp_path), data_of(FEATURES, 4)
    found = measured_inputs(model, data)
    (counts,) = found.expert_tokens.values()
    assert sum(counts) == FEATURES.experts.active * data.windows.size
    by_path = {one.path: one for one in found.products}
    assert by_path["layers/2/mlp/experts/down"].channels == FEATURES.experts.hidden
    assert by_path["layers/2/mlp/experts/gate,up"].amax > 0 and "layers/2/mlp/shared/gate,up" in by_path
