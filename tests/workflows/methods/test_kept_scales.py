"""Kept scales of inputs: the same network until it is quantized, in fewbit's own layouts only, with less error than rounding."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from fewbit import workflows
from fewbit.errors import QuantError, UnsupportedError
from fewbit.methods import AWQScaling
from fewbit.models import Experts
from fewbit.workflows.methods.calibrated import calibrated_scales
from fewbit.workflows.methods.calibration_data import calibration_data
from fewbit.workflows.methods.folding import scaled_inputs, scaled_model, with_scaled_inputs
from tests.nets.random_decoder import FEATURES, LATENT, LINEAR, SMALL
from tests.workflows.checkpoints import llama_directory, needs_tokenizers, text_file
from tests.workflows.methods.test_calibrated import data_of, errors, model_of
from tests.workflows.methods.test_folding import logits, rounded

ONE = dataclasses.replace(SMALL, layers=1)
EXPERTS = Experts(4, 2, 12, shared_hidden=10)
CONFIGS = {
    "small": ONE,
    "features": FEATURES,
    "latent": LATENT,
    "linear": LINEAR,
    "experts": dataclasses.replace(ONE, experts=EXPERTS),
    "interleaved": dataclasses.replace(
        ONE,
        activation="clamped_swiglu",
        activation_limit=7.0,
        experts=dataclasses.replace(EXPERTS, layout="interleaved", shared_hidden=0),
    ),
    "rotated": dataclasses.replace(ONE, rotated_inputs=("down",)),
}


FAST = ("small", "interleaved", "rotated")


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in FAST else [pytest.mark.slow]) for n in CONFIGS])
def test_the_function_stays(name: str, tmp_path):
    model = model_of(CONFIGS[name], tmp_path)
    kept = with_scaled_inputs(model, ("o", "down"))
    plan = workflows.plan_model(kept, recipe="int4")
    tokens = np.arange(24, dtype=np.int32).reshape(2, 12)
    np.testing.assert_array_equal(logits(kept, tokens), logits(model, tokens))
    inputs = scaled_inputs(kept, plan)
    own = [one for one in inputs if one.name.endswith("_input_scale")]
    assert {one.name.removesuffix("_input_scale") for one in own} == {
        path for path in kept.info if path.rsplit("/", 1)[-1] in ("o", "out", "down")
    }
    rng = np.random.default_rng(0)
    scales = {
        one.name: np.exp(rng.normal(size=(one.groups, one.size) if one.groups else one.size)).astype(np.float32)
        for one in own
    }
    scaled = scaled_model(kept, plan, scales)
    changed = next(one.readers[0].path for one in own)
    assert not np.allclose(scaled.load(changed), kept.load(changed))
    np.testing.assert_allclose(logits(scaled, tokens), logits(model, tokens), atol=2e-4, rtol=2e-4)


def with_large_channels(model: workflows.Model) -> workflows.Model:
    """The same network, where two channels of the input of down are 40 times as large."""

    def load(path: str) -> np.ndarray:
        x = np.array(model.load(path))
        if path.endswith("/up"):
            x[[3, 11]] *= 40
        elif path.endswith("/down"):
            x[:, [3, 11]] /= 40
        return x

    return dataclasses.replace(model, load=load)


@pytest.mark.slow
def test_scales_of_a_search_are_kept(tmp_path):
    model = with_scaled_inputs(with_large_channels(model_of(ONE, tmp_path)), ("o", "down"))
    plan = workflows.plan_model(model, recipe="int3")
    data, scaling = data_of(ONE), AWQScaling(grid=4)
    scales = calibrated_scales(model, plan, scaling, data)
    o, down = (scales[f"layers/0/{path}_input_scale"] for path in ("attn/o", "mlp/down"))
    assert o.shape == (model.info["layers/0/attn/o"].shape[1],) and np.ptp(o) > 0 and np.ptp(down) > 0
    scaled, tokens = scaled_model(model, plan, scales), jnp.asarray(data.windows)
    np.testing.assert_allclose(scaled.load("layers/0/attn/o_input_scale"), 1 / o, rtol=1e-6)
    assert errors(scaled, plan, rounded(scaled, plan), tokens) < errors(model, plan, rounded(model, plan), tokens)
    rows = {row.path: row for row in workflows.with_scaling(plan, model, scaling)}
    assert "awq scales of its input, kept in down_input_scale" in rows["layers/0/mlp/down"].reason
    assert "divided by the awq scales of down" in rows["layers/0/mlp/down_input_scale"].reason


@pytest.mark.slow
@needs_tokenizers
def test_what_is_written_runs(tmp_path):
    model = workflows.load(llama_directory(tmp_path / "hf"))
    kept = with_scaled_inputs(model, ("o",))
    plan = workflows.plan_model(kept, recipe="int8")
    data = calibration_data(kept, str(text_file(tmp_path)), windows=2, window=16)
    out = workflows.quantize(kept, plan, tmp_path / "out", scaling=AWQScaling(grid=4), calibration=data).path
    stored = workflows.load(out)
    assert stored.config == kept.config and stored.config.scaled_inputs == ("o",)
    assert np.ptp(stored.load("layers/0/attn/o_input_scale")) > 0
    y, exact = logits(stored, data.windows), logits(model, data.windows)
    assert jnp.linalg.norm(y - exact) < 0.05 * jnp.linalg.norm(exact)
    with pytest.raises(QuantError, match="scales the inputs of o already; start from its source"):
        with_scaled_inputs(stored, ("down",))
    with pytest.raises(UnsupportedError, match=r"scales the inputs of o when it runs, .* without --keep-scales"):
        workflows.quantize(kept, plan, tmp_path / "gguf", to="gguf")


def test_another_product(unchecked, tmp_path):
    with pytest.raises(QuantError, match="scaled_inputs has 'q', must be some of o, down"):
        with_scaled_inputs(model_of(ONE, tmp_path), ("q",))


def test_a_rotation_comes_first(tmp_path):
    with pytest.raises(QuantError, match="scales the inputs of down, and a rotation comes before scales"):
        workflows.with_rotated_inputs(with_scaled_inputs(model_of(ONE, tmp_path), ("down",)), ("down",))
