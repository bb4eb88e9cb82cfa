"""Importance matrices of decoders: against `fb.observe`, and the quality that it gives."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fewbit as fb
from fewbit import workflows
from fewbit.io import write_imatrix
from fewbit.methods import IMatrix
from fewbit.models import forward
from fewbit.workflows import ImportanceFile, importance_matrix
from fewbit.workflows.methods.importance_file import tensor_names
from tests.nets.random_decoder import FEATURES, LATENT, SMALL, UNTIED

from .test_calibrated import data_of, errors, model_of


@pytest.mark.parametrize("config", [pytest.param(SMALL, marks=pytest.mark.slow), UNTIED], ids=["tied", "untied"])
def test_the_sums_are_those_of_observe(config, tmp_path):
    model, data = model_of(config, tmp_path), data_of(config, 4)
    matrix = importance_matrix(model, data)
    stats = fb.observe(
        lambda params, tokens: forward(params, tokens, config),
        model.params(),
        [jnp.asarray(data.windows)],
        "int8",
        collect=("squares",),
    )
    assert (matrix.datasets, matrix.chunk_count, matrix.chunk_size) == (("random",), *data.windows.shape)
    paths = {path for path in stats.observations if path != "embed" or config.tied}
    assert set(matrix.entries) == {tensor_names(model, path)[0] for path in paths}
    for path in paths:
        one = matrix.entries[tensor_names(model, path)[0]]
        np.testing.assert_allclose(one.squares[0], stats[path].squares, rtol=1e-4)
        assert one.counts.tolist() == [data.windows.size]


@pytest.mark.slow
def test_experts_have_rows_of_their_own(tmp_path):
    config = dataclasses.replace(FEATURES, experts=dataclasses.replace(FEATURES.experts, count=8))
    model, data = model_of(config, tmp_path), data_of(config, 1)
    matrix = importance_matrix(model, data)
    name = next(name for name in matrix.entries if name.endswith("ffn_down_exps.weight"))
    assert matrix.entries[name].squares.shape == (8, config.experts.hidden)
    assert matrix.entries[name].counts.sum() == data.windows.size * config.experts.active
    plan, used = workflows.plan_model(model, recipe="int4"), matrix.entries[name].counts > 0
    observed = ImportanceFile(write_imatrix(tmp_path / "a.gguf", matrix), matrix).observations(model, plan)
    layer = name.split(".")[1]
    found = [f"layers/{layer}/mlp/experts/{e}/down" in observed for e in range(8)]
    assert found == used.tolist()
    first = int(np.flatnonzero(used)[0])
    np.testing.assert_array_equal(
        observed[f"layers/{layer}/mlp/experts/{first}/down"].squares, matrix.entries[name].squares[first]
    )


def test_stacks_of_heads_have_rows_of_their_own(tmp_path):
    """The two parts of a latent's projection, as GGUF files store it."""
    config = dataclasses.replace(LATENT, layers=1, experts=None, latent=dataclasses.replace(LATENT.latent, split=True))
    model, data = model_of(config, tmp_path), data_of(config, 1)
    matrix = importance_matrix(model, data)
    path = "layers/0/attn/v_b"
    one = matrix.entries[tensor_names(model, path)[0]]
    assert one.squares.shape == (config.heads, config.latent.rank)
    assert one.counts.tolist() == [data.windows.size] * config.heads
    plan = workflows.plan_model(model, recipe="int4")
    observed = ImportanceFile(write_imatrix(tmp_path / "a.gguf", matrix), matrix).observations(model, plan)
    np.testing.assert_array_equal(observed[path].squares, one.squares)


@pytest.mark.slow
def test_logits_are_nearer_than_with_rounded_weights(tmp_path):
    """On a network whose channels differ; each layer sees the outputs of the quantized layers before it."""
    model, rng = model_of(SMALL, tmp_path), np.random.default_rng(0)
    gains = {
        path: np.exp(rng.standard_normal(model.info[path].shape)).astype(np.float32)
        for path in model.info
        if path.endswith("norm")
    }
    model = dataclasses.replace(model, load=lambda path, load=model.load: gains.get(path, load(path)))
    plan, data = workflows.plan_model(model, recipe="int3"), data_of(SMALL)
    values = workflows.calibrated_weights(model, plan, IMatrix(), data)
    planned = [row for row in plan if row.policy is not None]
    nearest = {row.path: fb.quantize(model.load(row.path), row.policy.weight, axis=row.axis) for row in planned}
    assert jax.tree.structure(values) == jax.tree.structure({path: nearest[path] for path in values})
    tokens = jnp.asarray(data.windows)
    assert errors(model, plan, nearest | values, tokens) < 0.9 * errors(model, plan, nearest, tokens)
