"""Every naming of a Llama's parameters maps to our paths and back, and a checkpoint that does not fit is refused by name."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fewbit as fb
from fewbit.errors import QuantError
from fewbit.models import (
    GGUF,
    GLASSLLM,
    HUGGING_FACE,
    NameTable,
    named_from_params,
    params_from_named,
    paths_of_params,
    shapes,
)
from tests.nets.random_decoder import SMALL, UNTIED, random_params

TABLES = {table.title: table for table in (GGUF, HUGGING_FACE, GLASSLLM)}
every_table = pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)


@every_table
def test_names_and_paths_are_one_to_one(table: NameTable):
    config = SMALL if table is GLASSLLM else UNTIED
    names = {path: table.name(path) for path in shapes(config)}
    assert len(set(names.values())) == len(names)
    assert {path: table.path(name) for path, name in names.items()} == {path: path for path in names}


@every_table
def test_a_tree_reads_back_from_its_names(table: NameTable):
    config = SMALL if table is GLASSLLM else UNTIED
    params = random_params(config)
    again = params_from_named(named_from_params(params, table, config), table, config)
    assert jax.tree.structure(again) == jax.tree.structure(params)
    jax.tree.map(np.testing.assert_array_equal, again, params)


def test_only_glassllm_keeps_matrices_in_out():
    params = random_params(SMALL)
    for table in (GGUF, HUGGING_FACE):
        named = named_from_params(params, table, SMALL)
        assert named[table.name("layers/1/mlp/down")].shape == (SMALL.width, SMALL.hidden)
    named = named_from_params(params, GLASSLLM, SMALL)
    assert named["blocks.1.ffn.W2"].shape == (SMALL.hidden, SMALL.width)
    assert named["E"].shape == (SMALL.vocab, SMALL.width)


def test_quantized_arrays_stay_quantized():
    named = named_from_params(random_params(SMALL), GLASSLLM, SMALL)
    named["blocks.0.ffn.W1"] = fb.quantize(named["blocks.0.ffn.W1"], "int8", axis=-2)
    held = params_from_named(named, GLASSLLM, SMALL)["layers"][0]["mlp"]["gate"]
    assert fb.is_qarray(held)
    assert held.shape == (SMALL.hidden, SMALL.width)


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("blk.11.ffn_down.weight", "layers/11/mlp/down"),
        ("output_norm.weight", "norm"),
        ("model.layers.0.post_attention_layernorm.weight", "layers/0/mlp/norm"),
        ("lm_head.weight", "head"),
        ("blocks.2.attn.W_K", "layers/2/attn/k"),
    ],
)
def test_known_names(name: str, path: str):
    table = GGUF if name.startswith(("blk", "out")) else GLASSLLM if name.startswith("blocks") else HUGGING_FACE
    assert table.path(name) == path


def test_what_holds_nothing_of_its_own_is_left_out():
    named = named_from_params(random_params(UNTIED), HUGGING_FACE, UNTIED)
    named["model.layers.2.self_attn.rotary_emb.inv_freq"] = np.zeros(4)
    tied = dataclasses.replace(UNTIED, tied=True)
    assert "head" not in params_from_named(named, HUGGING_FACE, tied)  # the copy of a tied embedding
    assert "head" in params_from_named(named, HUGGING_FACE, UNTIED)


def test_refuses_names_that_do_not_fit():
    named = named_from_params(random_params(SMALL), GGUF, SMALL)
    with pytest.raises(QuantError, match=r"unknown GGUF name of a decoder's parameter 'blk\.0\.attn_w\.bias'; did you mean"):
        params_from_named({**named, "blk.0.attn_w.bias": jnp.zeros(3)}, GGUF, SMALL)
    with pytest.raises(QuantError, match=r"'blk\.0\.attn_q\.bias' is layers/0/attn/q_bias, but the .* such a parameter"):
        params_from_named({**named, "blk.0.attn_q.bias": jnp.zeros(3)}, GGUF, SMALL)
    with pytest.raises(QuantError, match=r"'blk\.3\.attn_q\.weight' is layers/3/attn/q, but the model has 3 layers"):
        params_from_named({**named, "blk.3.attn_q.weight": named["blk.0.attn_q.weight"]}, GGUF, SMALL)
    with pytest.raises(QuantError, match=r"'blk\.1\.ffn_up\.weight' \(layers/1/mlp/up\) has shape \(3, 3\), .* \(40, 24\)"):
        params_from_named({**named, "blk.1.ffn_up.weight": jnp.zeros((3, 3))}, GGUF, SMALL)
    with pytest.raises(QuantError, match=r"the GGUF checkpoint lacks blk\.0\.attn_q\.weight, .* and 1 more"):
        params_from_named({k: v for k, v in named.items() if not k.startswith("blk.0.attn_") or "norm" in k}, GGUF, SMALL)
    with pytest.raises(QuantError, match=r"unknown parameter path of a decoder \(to GGUF names\) 'layers/0/attn/w'"):
        GGUF.name("layers/0/attn/w")


def test_paths_cover_the_tree():
    params = random_params(UNTIED)
    paths = paths_of_params(params, UNTIED)
    assert {path: a.shape for path, a in paths.items()} == shapes(UNTIED)
    assert len(paths) == len(jax.tree.leaves(params))
