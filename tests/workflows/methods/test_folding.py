"""Scalings of whole decoders: the function stays, the error falls, and plan, log and manifest say so."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import fewbit as fb
from fewbit import workflows
from fewbit.array.qarray import QArray
from fewbit.io.checkpoint import TensorInfo
from fewbit.io.gguf.imatrix import ImportanceMatrix
from fewbit.methods import AWQ, GPTQ, AWQScaling, IMatrix, SmoothQuant
from fewbit.models import Experts, params_from_paths
from fewbit.workflows.methods.calibrated import calibrated_scales, calibrated_weights
from fewbit.workflows.methods.calibration_data import CalibrationData, calibration_data
from fewbit.workflows.methods.folding import scaled_inputs, scaled_model, with_scaling
from fewbit.workflows.model import Model
from tests.nets.random_decoder import (
    FEATURES,
    LATENT,
    LEARNED_POSITIONS,
    LINEAR,
    OTHERS,
    SMALL,
    SUB_NORMS,
    UNTIED,
    compiled_logits,
)
from tests.workflows.checkpoints import llama_directory, needs_tokenizers, text_file
from tests.workflows.methods.test_calibrated import data_of, errors, model_of

CONFIGS = {
    "small": dataclasses.replace(SMALL, layers=1),
    "experts": dataclasses.replace(SMALL, layers=1, experts=Experts(4, 2, 12, shared_hidden=10)),
    "untied": UNTIED,
    "features": FEATURES,
    "others": OTHERS,
    "latent": LATENT,
    "linear": LINEAR,
    "sub norms": SUB_NORMS,
    "learned positions": LEARNED_POSITIONS,
}


def logits(model: Model, tokens) -> jax.Array:
    return compiled_logits(model.params(), tokens, model.runnable_config())


def with_outliers(model: Model) -> Model:
    """The same network, where two channels of every input after a norm of a layer are 40 times as large."""

    def load(path: str) -> np.ndarray:
        x, (part, name) = np.array(model.load(path)), f"/{path}".split("/")[-2:]
        if path.startswith("layers/") and name == "norm":
            x[[3, 11]] *= 40
        elif part in ("attn", "mlp") and name in ("q", "k", "v", "qkv", "z", "beta", "alpha", "gate", "up"):
            x[:, [3, 11]] /= 40
        return x

    return dataclasses.replace(model, load=load)


def rounded(model: Model, plan) -> dict[str, QArray]:
    """All planned weights rounded to nearest."""
    return {result.path: value for value, result in workflows.quantized_tensors(model, plan) if isinstance(value, QArray)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "scaling"),
    [
        pytest.param("experts", SmoothQuant(), id="experts-smoothquant"),
        *(
            pytest.param(name, SmoothQuant(), id=f"{name}-smoothquant", marks=pytest.mark.slow)
            for name in CONFIGS
            if name != "experts"
        ),
        *(
            pytest.param(name, AWQScaling(grid=4), id=f"{name}-awq", marks=mark)
            for name, mark in (
                dict.fromkeys(CONFIGS, pytest.mark.long) | dict.fromkeys(("experts", "latent"), pytest.mark.slow)
            ).items()
        ),
    ],
)
def test_the_float_function_stays(name, scaling, tmp_path):
    """To float32 rounding: every weight is rounded once, 2**-24, and so is each of some hundred operations of a logit."""
    model = model_of(CONFIGS[name], tmp_path)
    plan, data = workflows.plan_model(model, recipe="int4"), data_of(CONFIGS[name], 4)
    scales = calibrated_scales(model, plan, scaling, data)
    inputs = scaled_inputs(model, plan)
    names = {one.name for one in inputs}
    assert names >= set(scales) >= {name for name in names if "/experts/" not in name}, "but for unseen experts"
    assert any(np.ptp(s) > 0.1 for s in scales.values())
    new, exact = scaled_model(model, plan, scales), logits(model, data.windows)
    assert float(jnp.abs(logits(new, data.windows) - exact).max()) < 2.0**-17 * float(jnp.abs(exact).max())
    assert all(new.load(path).dtype == model.load(path).dtype for path in model.info)


def test_outliers_of_activations_are_smoothed(tmp_path):
    """With int8 weights and activations, which the products multiply as integers."""
    model = with_outliers(model_of(CONFIGS["small"], tmp_path))
    plan, data = workflows.plan_model(model, recipe="w8a8"), data_of(CONFIGS["small"], 4)
    smooth = scaled_model(model, plan, calibrated_scales(model, plan, SmoothQuant(), data))
    before, after = rounded(model, plan), rounded(smooth, plan)
    assert after["layers/0/attn/q"].policy.activation.format.name == "int8"
    tokens = jnp.asarray(data.windows)
    assert errors(smooth, plan, after, tokens) < 0.3 * errors(model, plan, before, tokens)


@pytest.mark.slow
def test_large_channels_keep_more_of_their_bits(tmp_path):
    config = CONFIGS["small"]
    model = with_outliers(model_of(config, tmp_path))
    plan, data = workflows.plan_model(model, recipe="int4"), data_of(config, 4)
    scaled = scaled_model(model, plan, calibrated_scales(model, plan, AWQScaling(), data))
    before, after = rounded(model, plan), rounded(scaled, plan)
    tokens = jnp.asarray(data.windows)
    nearest = errors(model, plan, before, tokens)
    assert errors(scaled, plan, after, tokens) < 0.7 * nearest
    composed = calibrated_weights(scaled, plan, GPTQ(), data)
    alone = calibrated_weights(model, plan, GPTQ(), data)
    assert errors(scaled, plan, after | composed, tokens) < errors(model, plan, before | alone, tokens)


def test_parameters_keep_the_dtype_of_the_file(tmp_path):
    """A bfloat16 checkpoint: what is quantized was scaled in float32, gains are rounded without loss."""
    model = model_of(CONFIGS["small"], tmp_path)
    arrays = {path: np.asarray(model.load(path)).astype(ml_dtypes.bfloat16) for path in model.info}
    info = {path: TensorInfo(x.shape, "bfloat16", "BF16", x.nbytes) for path, x in arrays.items()}
    model = dataclasses.replace(model, info=info, load=arrays.__getitem__)
    plan = workflows.plan_model(model, recipe="int4")
    names = [one.name for one in scaled_inputs(model, plan)]
    scales = {one.name: np.linspace(0.5, 2, one.size, dtype=np.float32) for one in scaled_inputs(model, plan)}
    new, said = scaled_model(model, plan, scales), dict.fromkeys(model.info, "scaled")
    assert "layers/0/attn/norm" in names and new.load("layers/0/attn/norm").dtype == ml_dtypes.bfloat16
    assert new.load("layers/0/attn/q").dtype == np.float32
    ratio = np.asarray(new.load("layers/0/attn/q"), np.float64) / np.asarray(model.load("layers/0/attn/q"), np.float64)
    gains = [np.asarray(one.load("layers/0/attn/norm"), np.float64) for one in (model, new)]
    np.testing.assert_allclose(ratio, np.tile(gains[0] / gains[1], (len(ratio), 1)), rtol=2.0**-23)
    for value, result in workflows.quantized_tensors(new, plan, scaled=said):
        assert value.dtype == ml_dtypes.bfloat16, result.path


def test_what_may_not_change_is_not_scaled(tmp_path):
    """A weight that the file stores quantized, and that the plan keeps."""
    model = model_of(CONFIGS["small"], tmp_path)
    q = fb.quantize(model.load("layers/0/attn/k"), "int4_g32")
    info = {**model.info, "layers/0/attn/k": TensorInfo(q.shape, "float32", "int4_g32", q.nbytes, q.scheme)}
    model = dataclasses.replace(model, info=info, load=lambda path: q if path.endswith("k") else model_load(path))
    model_load = model_of(CONFIGS["small"], tmp_path).load
    plan = workflows.plan_model(model, recipe="int4")
    assert [one.name for one in scaled_inputs(model, plan)] == ["layers/0/attn/v", "layers/0/mlp/norm", "layers/0/mlp/up"]
    rows = {row.path: row.reason for row in with_scaling(plan, model, SmoothQuant())}
    assert "smoothquant does not scale its input: a parameter that would change is kept as stored" in rows["layers/0/attn/q"]
    keep = workflows.plan_model(model, recipe="keep")
    assert not scaled_inputs(model, keep)


def test_the_plan_says_what_is_scaled(tmp_path):
    model = model_of(OTHERS, tmp_path)
    plan = with_scaling(workflows.plan_model(model, recipe="int4"), model, AWQScaling())
    rows = {row.path: row.reason for row in plan}
    assert rows["layers/2/attn/o"] == "awq scales of its input, folded into q+k+v"
    assert rows["layers/2/attn/q+k+v"] == (
        "divided by the awq scales of o; awq does not scale its input: no norm comes before it"
    )
    assert rows["layers/2/mlp/down"].endswith("the activation clamped_swiglu is not linear in up")
    assert plan.notes[-1] == "awq scales the inputs of 3 of 13 quantized weights; what produces them is divided"


def test_statistics_that_are_not_finite_are_refused(tmp_path):
    model = model_of(CONFIGS["small"], tmp_path)
    broken = dataclasses.replace(
        model, load=lambda path: model.load(path) * (np.float32(np.inf) if path.endswith("0/mlp/up") else 1)
    )
    plan = workflows.plan_model(model, recipe="int4")
    with pytest.raises(
        fb.QuantError, match=r"in the weights of the input scaled at layers/0/mlp/norm \([\d,]+ of [\d,]+\); check the"
    ):
        calibrated_scales(broken, plan, SmoothQuant(), data_of(CONFIGS["small"], 2))


@pytest.mark.slow
@needs_tokenizers
def test_a_directory_is_an_ordinary_model_and_says_how_it_was_made(tmp_path):
    model = workflows.load(llama_directory(tmp_path / "hf"))
    plan = workflows.plan_model(model, recipe="int4")
    data, layers, results = calibration_data(model, str(text_file(tmp_path)), windows=4), [], []

    def run(name, stop=None, **options):
        def on_layer(done, every):
            layers.append((done, every))
            if done == stop:
                raise KeyboardInterrupt

        workflows.quantize(
            model,
            plan,
            tmp_path / name,
            method=AWQ(),
            scaling=AWQScaling(grid=4),
            calibration=data,
            on_layer=on_layer,
            on_tensor=results.append,
            **options,
        )

    run("a")
    assert layers == [(i, 6) for i in (0, 1, 2, 3, 3, 4, 5, 6)]
    found = {result.path: result for result in results}
    assert " int4_g32 by awq " in str(found["layers/0/attn/q"])
    assert "  awq scales of its input, folded into norm  " in str(found["layers/0/attn/q"])
    assert "  float32  float  divided by the awq scales of q, k, v  " in str(found["layers/0/attn/norm"])
    facts = json.loads((tmp_path / "a" / "manifest.json").read_text())["facts"]
    assert facts["scaling"] == {"name": "awq", "grid": 4, "calibration": data.facts}
    assert facts["method"]["name"] == "awq"
    stored = workflows.load(tmp_path / "a")
    assert stored.config == model.config and set(stored.info) == set(model.info)
    assert not np.allclose(stored.load("layers/0/attn/norm"), model.load("layers/0/attn/norm"))
    np.testing.assert_array_equal(stored.load("norm"), model.load("norm"))
    sqnr, (note,) = workflows.weight_sqnr(stored, model)
    assert not sqnr and "scales of inputs are folded into one model and not into the other" in note
    tokens = jnp.asarray(data.windows)
    values = {path: stored.load(path) for path in stored.info}
    assert errors(model, plan, values, tokens) < errors(model, plan, rounded(model, plan), tokens)
    for stop in (2, 4):  # in the search of scales, then in that of clippings
        with pytest.raises(KeyboardInterrupt):
            run("b", stop)
    parts = {part.name for part in (tmp_path / ".b.fewbit-work").iterdir()}
    assert parts == {"journal", "scales-0", "scales-1", "scales-2", "float-stream-3", "layer-0", "stream-1"}
    run("b")
    files = [{file.name: file.read_bytes() for file in (tmp_path / name).iterdir()} for name in "ab"]
    assert files[0] == files[1] and not (tmp_path / ".b.fewbit-work").exists()


@needs_tokenizers
def test_a_scaling_without_calibration_is_refused(tmp_path):
    model = workflows.load(llama_directory(tmp_path / "hf"))
    plan = workflows.plan_model(model, recipe="w8a8")
    with pytest.raises(fb.QuantError, match="method smoothquant needs calibration data"):
        workflows.quantize(model, plan, tmp_path / "q", scaling=SmoothQuant())
    file = workflows.ImportanceFile(tmp_path / "imatrix.gguf", ImportanceMatrix({}))
    with pytest.raises(
        fb.QuantError, match=r"smoothquant changes the inputs .*, and an importance matrix is of the model as it is"
    ):
        workflows.quantize(model, plan, tmp_path / "q", method=IMatrix(), scaling=SmoothQuant(), calibration=file)


def test_experts_without_tokens_have_no_scales(tmp_path):
    """Unless they take the statistics of the others."""
    model = model_of(CONFIGS["experts"], tmp_path)
    plan = workflows.plan_model(model, recipe="int4")

    def scaled_experts(policy: str) -> set[str]:
        data = CalibrationData("one token", np.zeros((1, 1), np.int32), policy)
        return {name for name in calibrated_scales(model, plan, SmoothQuant(), data) if "/experts/" in name}

    assert len(scaled_experts("nearest")) == 2 and len(scaled_experts("share")) == 4
    with pytest.raises(fb.QuantError, match="no token of the calibration data is routed to layers/0/mlp/experts"):
        scaled_experts("error")


@pytest.mark.slow
@needs_tokenizers
@pytest.mark.parametrize("to", ["compressed-tensors", "hf"])
def test_every_layout_of_files_has_the_scales(to, tmp_path):
    model = workflows.load(llama_directory(tmp_path / "hf"))
    recipes = {"compressed-tensors": "w8a8", "hf": "int4"}
    plan = workflows.plan_model(model, recipe=recipes[to])
    data, out = calibration_data(model, str(text_file(tmp_path)), windows=4), tmp_path / "q"
    workflows.quantize(model, plan, out, to=to, scaling=SmoothQuant(), calibration=data)
    stored = workflows.load(out)
    scales = calibrated_scales(model, plan, SmoothQuant(), data)
    gain = np.asarray(stored.load("layers/0/attn/norm"), np.float64)
    np.testing.assert_allclose(gain * scales["layers/0/attn/norm"], model.load("layers/0/attn/norm"), rtol=2.0**-7)
    params = params_from_paths({path: stored.load(path) for path in stored.info}, stored.runnable_config())
    tokens = jnp.asarray(data.windows)
    found = compiled_logits(params, tokens, stored.runnable_config())
    exact = logits(model, data.windows)
    assert float(jnp.linalg.norm(found - exact) / jnp.linalg.norm(exact)) < 0.6
