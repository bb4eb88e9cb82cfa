"""Experts without tokens: each policy, on observations, on random decoders, and on a mixture that was trained."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fewbit as fb
from fewbit import workflows
from fewbit.calibration.measure import Measure, Observation
from fewbit.calibration.range_rules import AbsMaxRange
from fewbit.evaluate.report.facts import CalibratedExperts
from fewbit.io.checkpoint import TensorInfo
from fewbit.methods import GPTQ
from fewbit.models import Experts, forward, params_from_paths
from fewbit.workflows.methods.calibrated import calibrated_weights, float_layers
from fewbit.workflows.methods.calibration_data import CalibrationData, calibration_data
from fewbit.workflows.methods.experts import ExpertTokens, with_unseen_experts
from fewbit.workflows.model import Model
from fewbit.workflows.report import report
from tests.nets.random_decoder import FEATURES, OTHERS, SMALL, random_tokens
from tests.nets.trained_mixture import MIXTURE, character_windows, trained_mixture
from tests.workflows.checkpoints import family_directory, needs_tokenizers, text_file
from tests.workflows.methods.test_calibrated import model_of

MEASURE = Measure(AbsMaxRange(), ("hessian",))
SUMMED = MEASURE.folded
ONE_TOKEN = np.zeros((1, 1), np.int32)
ONE_LAYER = dataclasses.replace(SMALL, layers=1, experts=Experts(4, 1, 12))


def observed(counts):
    """Observations whose Hessians are the number of their expert."""
    hessian = jnp.broadcast_to(jnp.arange(1.0, 1 + len(counts))[:, None, None], (len(counts), 2, 2))
    counted = jnp.asarray(counts, jnp.float32)
    own = Observation(range=None, absmax=None, hessian=hessian * jnp.minimum(counted, 1)[:, None, None], count=counted)
    return {"mlp/experts/up": own, "attn/q": Observation(range=None, absmax=None, hessian=jnp.eye(2), count=jnp.float32(9))}


def test_unseen_experts_take_the_sum_over_the_others():
    stats = observed([3, 0, 4])
    found, counts = with_unseen_experts(stats, SUMMED, "share", "layers/1")
    assert counts.tolist() == [3, 0, 4] and found["attn/q"] is stats["attn/q"]
    one = found["mlp/experts/up"]
    assert one.hessian[:, 0, 0].tolist() == [1, 4, 3] and one.count.tolist() == [3, 7, 4]
    for policy, counts in (("nearest", [3, 0, 4]), ("share", [3, 1, 4]), ("error", [3, 1, 4])):
        stats = observed(counts)
        found, _ = with_unseen_experts(stats, SUMMED, policy, "layers/1")
        assert all(found[path] is one for path, one in stats.items())
    assert with_unseen_experts({"attn/q": stats["attn/q"]}, SUMMED, "error", "layers/1")[1] is None


def test_an_error_names_the_experts():
    with pytest.raises(fb.QuantError, match=r"no token .* is routed to layers/1/mlp/experts 0, 2; take more .* or share"):
        with_unseen_experts(observed([0, 1, 0]), SUMMED, "error", "layers/1")
    with pytest.raises(fb.QuantError, match=r"unknown policy 'shared' for experts without tokens; .*share"):
        CalibrationData("x", ONE_TOKEN, "shared")


def test_tokens_of_a_weight():
    tokens = ExpertTokens("layers/3/mlp/experts", (1205, 0))
    assert tokens.unseen == (1,) and tokens.of("layers/30/mlp/experts/1/up") == ()
    assert str(tokens) == "layers/3/mlp/experts: 0 to 1,205 tokens an expert, 1 of 2 without any"


@pytest.mark.slow
@pytest.mark.parametrize("config", [FEATURES, OTHERS], ids=["separate", "interleaved"])
def test_policies_on_a_decoder(config, tmp_path):
    config = dataclasses.replace(config, experts=dataclasses.replace(config.experts, count=8))
    model, seen = model_of(config, tmp_path), []
    plan = workflows.plan_model(model, recipe="int4")
    shared = calibrated_weights(model, plan, GPTQ(), CalibrationData("one", ONE_TOKEN, "share"), on_experts=seen.append)
    experts = {row.path for row in plan if row.policy is not None and "/experts/" in row.path}
    assert experts and experts <= set(shared)
    assert all(sum(layer.counts) == config.experts.active for layer in seen)
    assert [layer.path for layer in seen] == [f"layers/{i}/mlp/experts" for i in config.experts.layers]
    with pytest.raises(fb.QuantError, match=rf"routed to {seen[0].path} {', '.join(map(str, seen[0].unseen))};"):
        calibrated_weights(model, plan, GPTQ(), CalibrationData("one", ONE_TOKEN, "error"))


@pytest.mark.slow
@needs_tokenizers
def test_the_log_the_manifest_and_a_resumed_run_have_the_tokens(tmp_path):
    settings = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    settings |= {"intermediate_size": 32, "num_local_experts": 8, "num_experts_per_tok": 2, "max_position_embeddings": 32}
    model = workflows.load(family_directory(tmp_path / "hf", "mixtral", settings))
    plan = workflows.plan_model(model, recipe="int4")
    data, lines = calibration_data(model, str(text_file(tmp_path)), windows=2), []

    def stop(layer, layers):
        if layer == 2:
            raise KeyboardInterrupt

    run = {"method": GPTQ(), "calibration": data}
    with pytest.raises(KeyboardInterrupt):
        workflows.quantize(model, plan, tmp_path / "out", on_layer=stop, **run)
    workflows.quantize(model, plan, tmp_path / "out", on_tensor=lines.append, **run)
    facts = json.loads((tmp_path / "out" / "manifest.json").read_text())["facts"]["method"]
    assert facts["calibration"]["unseen_experts"] == "nearest"
    counts = facts["expert_tokens"]
    assert list(counts) == ["layers/0/mlp/experts", "layers/1/mlp/experts"]
    assert all(sum(layer) == 2 * data.windows.size for layer in counts.values())
    (reported,) = report([workflows.load(tmp_path / "out")], model, quality=False).models
    known = CalibratedExperts(data.text, data.windows.size, "nearest", {path: tuple(n) for path, n in counts.items()})
    assert reported.experts == known
    by_path = {line.path: line for line in lines}
    for layer, tokens in counts.items():
        for number, count in enumerate(tokens):
            line = by_path[f"{layer}/{number}/up"]
            assert line.tokens == (count,) and str(line).endswith(f" s  {count:,} tokens")
            assert line.method == ("gptq" if count else "rtn")
    assert by_path["layers/0/attn/q"].tokens == ()
    llama = dataclasses.replace(model, config=dataclasses.replace(model.config, experts=None))
    with pytest.raises(fb.QuantError, match="hf has no experts; leave out --unseen-experts share"):
        calibration_data(llama, str(tmp_path / "text.txt"), unseen_experts="share")


def trained_model(tmp_path):
    arrays = trained_mixture()
    info = {path: TensorInfo(a.shape, "float32", "F32", a.nbytes) for path, a in arrays.items()}
    return Model(tmp_path, "npz", MIXTURE, "", info, arrays.__getitem__)


@pytest.mark.slow
def test_gptq_loses_less_than_half_of_what_rounding_loses_on_a_trained_mixture(tmp_path):
    model = trained_model(tmp_path)
    plan = workflows.plan_model(model, recipe="int3_g32")
    nearest = {path: nearest_weight(model, row) for path, row in quantized_rows(plan).items()}
    windows = jnp.asarray(character_windows(32, seed=9))

    @jax.jit
    def log_probabilities(params):
        logits = fb.transparent(lambda params: forward(params, windows, MIXTURE))(params)
        return jax.nn.log_softmax(logits)

    def divergence(values):
        params = params_from_paths({path: values.get(path, model.load(path)) for path in model.info}, MIXTURE)
        difference = exact - log_probabilities(jax.tree.map(jnp.asarray, params))
        return float(jnp.mean(jnp.sum(jnp.exp(exact) * difference, axis=-1)))

    exact = log_probabilities(jax.tree.map(jnp.asarray, model.params()))
    values = calibrated_weights(model, plan, GPTQ(), CalibrationData("pydoc", character_windows(32, seed=5)))
    assert divergence(nearest | values) < 0.5 * divergence(nearest)


@pytest.mark.slow
def test_policies_on_a_trained_mixture(tmp_path):
    """Each expert in turn loses its tokens; then the output error of its weights on these tokens is measured.

    Which of `nearest` and `share` has less is a matter of a few percent, which the rounding of training decides.
    """
    model = trained_model(tmp_path)
    rows = quantized_rows(workflows.plan_model(model, recipe="int3_g32"))
    data, losses = CalibrationData("pydoc", character_windows(32, seed=5)), {"nearest": 0.0, "share": 0.0, "its own": 0.0}
    for layer in float_layers(model, data.windows):
        stats = layer.statistics(MEASURE, [path for path in layer.paths if "/mlp/experts/" in path])
        for number in range(MIXTURE.experts.count):
            for name, own in ((path.split("/")[-1], one) for path, one in stats.items()):
                row = rows[f"{layer.prefix}mlp/experts/{number}/{name}"]
                without = dataclasses.replace(own, hessian=own.hessian.at[number].set(0), count=own.count.at[number].set(0))
                shared = with_unseen_experts({"x": without}, SUMMED, "share", "")[0]["x"]
                for policy, seen in (("nearest", None), ("share", shared), ("its own", own)):
                    q = nearest_weight(model, row)
                    if seen is not None:
                        one = jax.tree.map(lambda leaf, number=number: leaf[number], seen)
                        q = GPTQ().quantized(jnp.asarray(model.load(row.path)), row.policy.weight, row.axis, one)
                    error = fb.dequantize(q) - model.load(row.path)
                    losses[policy] += float(jnp.einsum("nk,kl,nl->", error, own.hessian[number], error))
    assert losses["its own"] < 0.7 * min(losses["share"], losses["nearest"]), losses


def quantized_rows(plan):
    return {row.path: row for row in plan if row.policy is not None}


def nearest_weight(model, row):
    return fb.quantize(model.load(row.path), row.policy.weight, axis=row.axis)


def test_experts_of_several_dtypes_have_their_own_tokens(tmp_path):
    model = model_of(ONE_LAYER, tmp_path)
    wide = dict.fromkeys(("layers/0/mlp/experts/1/down",), np.float32)
    mixed = dataclasses.replace(model, load=lambda path: model.load(path).astype(wide.get(path, np.float16)))
    windows = np.asarray(random_tokens(ONE_LAYER, 1, 8))
    layer, _ = float_layers(mixed, windows)
    found = layer.statistics(MEASURE, [f"layers/0/mlp/experts/{e}/up" for e in range(4)])
    assert sum(float(one.count) for one in found.values()) == windows.size
