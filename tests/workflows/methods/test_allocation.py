"""Bits where they matter: estimated losses beside measured ones, and plans within a budget."""

import dataclasses
import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fewbit as fb
from fewbit import workflows
from fewbit.methods import GPTQ
from fewbit.models import forward, params_from_paths
from fewbit.recipe.plan import Plan
from fewbit.workflows.methods.allocation import (
    Sensitivity,
    allocated,
    check_bits,
    fitting,
    forget,
    rank_correlations,
    sensitivities,
    tied,
)
from tests.nets.random_decoder import FEATURES, LINEAR, SMALL, UNTIED, random_tokens
from tests.workflows.methods.test_calibrated import data_of, llama_directory, model_of

CANDIDATES = ["int8", "int4_g8", "int2_g8"]


def measured(model, plan, found, name, tokens=None) -> list[float]:
    """The KL divergence of the model with one group of weights quantized, in nats a token."""
    config = model.config
    tokens = random_tokens(config, 16, 16, seed=9) if tokens is None else tokens
    params = {path: jnp.asarray(model.load(path)) for path in model.info}

    @jax.jit
    def log_probabilities(params):
        return jax.nn.log_softmax(forward(params_from_paths(params, config), tokens, config))

    exact, losses = log_probabilities(params), []
    for one in found:
        scheme = fb.scheme(name)
        changed = {path: fb.dequantize(fb.quantize(params[path], scheme, axis=plan[path].axis)) for path in one.paths}
        difference = exact - log_probabilities(params | changed)
        losses.append(float(jnp.mean(jnp.sum(jnp.exp(exact) * difference, axis=-1))))
    return losses


@pytest.mark.slow
@pytest.mark.parametrize("config", [UNTIED, pytest.param(FEATURES, marks=pytest.mark.slow)], ids=["llama", "features"])
def test_estimates_follow_measured_divergences(config, tmp_path):
    model = model_of(config, tmp_path)
    plan = workflows.plan_model(model, recipe="int8")
    windows = np.asarray(random_tokens(config, 96, 16))
    found = sensitivities(model, plan, CANDIDATES, windows)
    exact = np.array(measured(model, plan, found, "int4_g8"))
    estimated = np.array([one.losses["int4_g8"] for one in found])
    ranks = [np.argsort(np.argsort(x)) for x in (exact, estimated)]
    assert np.corrcoef(*ranks)[0, 1] > 0.8
    assert 0.5 < estimated.sum() / exact.sum() < 2
    for one in found:
        assert one.losses["int8"] < one.losses["int4_g8"] < one.losses["int2_g8"]
        assert one.nbytes["int8"] > one.nbytes["int4_g8"] > one.nbytes["int2_g8"]


@pytest.mark.slow
def test_measured_losses_are_those_of_a_model_with_one_group_quantized(tmp_path):
    model = model_of(SMALL, tmp_path)
    plan, windows = workflows.plan_model(model, recipe="int8"), np.asarray(random_tokens(SMALL, 10, 16))
    found = sensitivities(model, plan, CANDIDATES, windows, measure=True)
    for name in CANDIDATES[1:]:
        exact = measured(model, plan, found, name, jnp.asarray(windows[:8]))
        # The errors are kept in bfloat16, each within 2**-9 of itself, and the loss is quadratic in them.
        np.testing.assert_allclose([one.measured[name] for one in found], exact, rtol=2.0**-7, atol=1e-7)
    assert [one.estimates for one in found] == [one.losses for one in sensitivities(model, plan, CANDIDATES, windows)]
    made = allocated(plan, found, 7)
    assert "measured KL" in str(made)
    assert made.notes[-2].startswith(f"the KL divergences measured for each of {len(found)} groups of weights sum to")
    assert made.notes[-1].startswith("the rank correlation of the measured and the estimated ones is 0.")
    assert made.notes[-1].endswith("for int2_g8")
    assert all(0.5 < correlation <= 1 for correlation in rank_correlations(found).values())


def test_a_plan_within_the_budget_beats_a_uniform_one(tmp_path):
    model = model_of(SMALL, tmp_path)
    plan = workflows.plan_model(model, recipe="int8")
    found = sensitivities(model, plan, CANDIDATES, np.asarray(random_tokens(SMALL, 24, 16)))
    uniform = sum(row.bytes_after for row in plan) - sum(one.nbytes["int8"] - one.nbytes["int4_g8"] for one in found)
    bits = 8 * uniform / model.size
    made = allocated(plan, found, bits)
    assert made.bits_per_weight <= bits and made.bytes_after == sum(row.bytes_after for row in made)
    schemes = {row.path: row.policy.weight.name for row in made if row.policy is not None}
    assert len(set(schemes.values())) > 1
    losses = [sum(one.losses[name] for one in found) for name in ("int4_g8",)]
    assert sum(one.losses[schemes[one.paths[0]]] for one in found) < losses[0]
    for one in found:
        assert len({schemes[path] for path in one.paths}) == 1
    assert made == allocated(plan, sensitivities(model, plan, CANDIDATES, np.asarray(random_tokens(SMALL, 24, 16))), bits)
    assert "estimated KL" in str(made) and made.recipe.endswith("bits of int8, int4_g8, int2_g8")
    path = tmp_path / "plan.json"
    made.save(path)
    assert workflows.plan_model(model, plan=path).bytes_after == made.bytes_after
    with pytest.raises(fb.QuantError, match=r"1.0 bits per weight cannot be reached: the smallest candidates take [0-9.]+"):
        allocated(plan, found, 1.0)


@pytest.mark.slow
def test_two_processes_write_the_same_plan(tmp_path):
    """Whatever order their sets have."""
    model = llama_directory(tmp_path / "hf")
    command = [sys.executable, "-c", "from fewbit.cli import main; main()", "plan", model, "--bits", "6"]
    command += ["--candidates", "int8,int4_g16,int2_g16"]
    plans = []
    for seed in ("1", "2"):
        plan = tmp_path / f"{seed}.json"
        environment = os.environ | {"PYTHONHASHSEED": seed}
        done = subprocess.run(
            [*command, "--save", plan, "--json"], check=True, capture_output=True, text=True, env=environment
        )
        plans.append((plan.read_bytes(), json.loads(done.stdout)["sha256"]))
        assert Plan.load(plan).sha256 == plans[-1][1]
    assert plans[0] == plans[1]


@pytest.mark.slow
def test_the_errors_are_those_of_the_method(tmp_path):
    model = model_of(SMALL, tmp_path)
    plan, windows = workflows.plan_model(model, recipe="int8"), np.asarray(random_tokens(SMALL, 24, 16))
    rounded = sensitivities(model, plan, ["int4_g8"], windows)
    better = sensitivities(model, plan, ["int4_g8"], windows, method=GPTQ(), calibration=data_of(SMALL))
    assert sum(one.losses["int4_g8"] for one in better) < 0.8 * sum(one.losses["int4_g8"] for one in rounded)


def test_a_weight_that_is_kept_as_stored_costs_nothing(tmp_path):
    config, path = dataclasses.replace(SMALL, layers=1), "layers/0/mlp/down"
    model = model_of(config, tmp_path)
    q = fb.quantize(jnp.asarray(model.load(path)), "int4")
    info = {**model.info, path: dataclasses.replace(model.info[path], scheme=q.scheme)}
    stored = dataclasses.replace(model, info=info, load=lambda name: q if name == path else model.load(name))
    plan = workflows.plan_model(stored, recipe=fb.Recipe((fb.Rule(r".*/down", "int8"),)))
    (one,) = sensitivities(stored, plan, ["int4", "int4_g8"], np.zeros((1, 4), np.int32))
    assert one.losses["int4"] == 0 < one.losses["int4_g8"]


def test_losses_that_are_all_equal_have_no_rank_correlation():
    losses = [(0.1, 0.0), (0.2, 0.0)]
    found = [
        Sensitivity((str(i),), {"a": a, "b": b}, {"a": 1, "b": 2}, {"a": 2 * a, "b": b}) for i, (a, b) in enumerate(losses)
    ]
    assert rank_correlations(found) == {"a": pytest.approx(1)}
    assert rank_correlations(found[:1]) == {}


@pytest.mark.slow
@pytest.mark.parametrize("is_measured", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["estimated", "measured"])
def test_measuring_that_was_interrupted_anywhere_resumes(is_measured, tmp_path):
    config = dataclasses.replace(SMALL, layers=2)
    model = model_of(config, tmp_path)
    plan, windows = workflows.plan_model(model, recipe="int8"), np.asarray(random_tokens(config, 3, 16))
    settings = {"method": GPTQ(), "calibration": data_of(config), "measure": is_measured}

    def measure(plan=plan, **others):
        return sensitivities(model, plan, ["int8", "int4_g8"], windows, **settings, **others)

    out, seen = tmp_path / "out", []

    def stop_at(step):
        def progress(done, steps):
            seen.append((done, steps))
            if done == step:
                raise KeyboardInterrupt

        return progress

    known = measure(progress=stop_at(-1))
    steps = seen[-1][1]
    for step in (1, config.layers + 1, steps - 1, steps):
        with pytest.raises(KeyboardInterrupt):
            measure(progress=stop_at(step), out=out)
    seen.clear()
    elsewhere = tuple(dataclasses.replace(row, sites=("dot_general at /elsewhere/net.py:1:2",)) for row in plan)
    assert measure(dataclasses.replace(plan, rows=elsewhere), progress=stop_at(-1), out=out) == known
    assert all(done in (0, config.layers, 2 * config.layers) for done, _ in seen)  # nothing was left to measure
    assert measure(out=out) == known
    assert [path.name for path in (tmp_path / ".out.bits.fewbit-work").iterdir()] == ["journal"]  # the sums, and no weights
    other = sensitivities(model, plan, ["int4_g8"], windows, out=out)  # another job does not take them
    assert other[0].losses == sensitivities(model, plan, ["int4_g8"], windows)[0].losses
    assert [path.name for path in tmp_path.glob(".out*")] == [".out.bits.fewbit-work"]
    forget(out)
    assert not list(tmp_path.glob(".out*"))


def test_what_is_multiplied_at_once_is_tied(tmp_path):
    plan = workflows.plan_model(model_of(FEATURES, tmp_path), recipe="int8")
    groups = tied(row for row in plan if row.policy is not None)
    assert ("layers/0/attn/q", "layers/0/attn/k", "layers/0/attn/v") in groups
    (experts,) = (group for group in groups if "layers/2/mlp/experts/0/down" in group)
    assert len(experts) == FEATURES.experts.count
    assert sorted(path for group in groups for path in group) == sorted(row.path for row in plan if row.policy is not None)
    linear = workflows.plan_model(model_of(LINEAR, tmp_path), recipe="int8")
    groups = tied(row for row in linear if row.policy is not None)
    assert {("layers/0/attn/qkv", "layers/0/attn/z"), ("layers/0/attn/out",)} <= set(groups)


def test_bits_that_cannot_be_reached_are_refused_before_measuring(tmp_path):
    plan = workflows.plan_model(model_of(SMALL, tmp_path), recipe="int8")
    check_bits(plan, ["int8", "int4_g8"], 32)
    with pytest.raises(fb.QuantError, match="2 bits per weight cannot be reached: the smallest candidates take"):
        check_bits(plan, ["int8", "int4_g8"], 2)


def test_an_unknown_candidate(tmp_path):
    model = model_of(SMALL, tmp_path)
    with pytest.raises(fb.QuantError, match="unknown scheme 'int5_x'"):
        sensitivities(model, workflows.plan_model(model, recipe="int8"), ["int5_x"], np.zeros((1, 4), np.int32))


def short_rows(plan) -> dict[str, str]:
    """A layout that stores int4_g8 in rows of 40 or more only, and no nf4."""
    rows = [row for row in plan if row.policy is not None]
    found = {row.path: "too short" for row in rows if row.policy.weight.name == "int4_g8" and row.shape[-1] < 40}
    return found | {row.path: "no type" for row in rows if row.policy.weight.name == "nf4"}


def test_candidates_that_fit_no_weight(tmp_path):
    model, windows = model_of(SMALL, tmp_path), np.zeros((1, 4), np.int32)
    plan = workflows.plan_model(model, recipe="int8")
    assert fitting(plan, ["nf4", "int4_g8", "int8"], short_rows) == ["int4_g8", "int8"]
    with pytest.raises(fb.QuantError, match="none of the default candidates nf4 fits a weight: embed: no type; name"):
        fitting(plan, ["nf4"], short_rows)
    with pytest.raises(fb.QuantError, match="candidate nf4 fits no weight: no type"):
        sensitivities(model, plan, ["int8", "nf4"], windows, refusals=short_rows)
    with pytest.raises(fb.QuantError, match=r"none of int4_g8 can store embed: too short"):
        sensitivities(model, plan, ["int4_g8"], windows, refusals=short_rows)


def test_candidates_that_cannot_be_in_one_model(tmp_path):
    plan = workflows.plan_model(model_of(SMALL, tmp_path), recipe="int8")

    def one_kind(mixture) -> None:
        kinds = {row.policy.weight.name for row in mixture if row.policy is not None}
        if kinds == {"int8", "int4_g8"}:
            raise fb.UnsupportedError("one group size")

    check_bits(plan, ["int8", "int4"], 32, check=one_kind)
    with pytest.raises(fb.UnsupportedError, match="candidates int8 and int4_g8 cannot be in one model: one group size"):
        check_bits(plan, ["int8", "int4", "int4_g8"], 32, short_rows, one_kind)


@pytest.mark.slow
def test_a_candidate_that_fits_some_weights_is_chosen_for_these_only(tmp_path):
    model = model_of(SMALL, tmp_path)
    plan = workflows.plan_model(model, recipe="int8")
    found = sensitivities(model, plan, ["int8", "int4_g8"], np.asarray(random_tokens(SMALL, 2, 8)), refusals=short_rows)
    long = {f"layers/{i}/{name}" for i in range(SMALL.layers) for name in ("attn/o", "mlp/down")}
    assert {path for one in found if "int4_g8" in one.losses for path in one.paths} == long
    measured = {path for one in found for path in one.paths}
    smallest = sum(row.bytes_after for row in plan if row.path not in measured) + sum(
        min(one.nbytes.values()) for one in found
    )
    made = allocated(plan, found, 8 * smallest / model.size)
    assert {row.path for row in made if row.policy is not None and row.policy.weight.name == "int4_g8"} == long
