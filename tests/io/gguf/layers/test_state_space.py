"""Granite 4 as llama.cpp reads it: state spaces, and the shared feed-forward block in two parts."""

import numpy as np
import pytest

import fewbit as fb
from fewbit import QuantError, UnsupportedError
from fewbit.io.gguf.metadata import architecture_fields, architecture_of
from tests.io.gguf.test_conversion import LAYER, conversion, converted, normal, quantized, values
from tests.io.gguf.test_metadata import config_of


def fields_of(name: str, **changed) -> dict:
    config = config_of(name, **changed)
    found = architecture_fields(architecture_of(config), config)
    return {key.removeprefix(f"{found['general.architecture']}."): value for key, value in found.items()}


def test_the_fields_of_granite_4():
    assert fields_of("granite-hybrid", rms_norm_eps=1e-6) == {
        "general.architecture": "granitehybrid",
        "vocab_size": 300,
        "block_count": 3,
        "context_length": 256,
        "embedding_length": 64,
        "feed_forward_length": 64,
        "attention.head_count": 4,
        "attention.head_count_kv": [0, 2, 0],
        "attention.layer_norm_rms_epsilon": 1e-6,
        "attention.scale": 0.25,
        "embedding_scale": 1.0,
        "residual_scale": 1.0,
        "logit_scale": 1.0,
        "ssm.conv_kernel": 4,
        "ssm.state_size": 16,
        "ssm.group_count": 2,
        "ssm.inner_size": 128,
        "ssm.time_step_rank": 8,
        "rope.dimension_count": 16,
        "rope.freq_base": 10000.0,
        "rope.scaling.finetuned": False,
    }
    experts = fields_of("granite-hybrid-moe")
    assert (experts["feed_forward_length"], experts["expert_shared_feed_forward_length"]) == (96, 64)
    assert (experts["expert_count"], experts["expert_used_count"], experts["rope.scaling.finetuned"]) == (4, 2, True)


def test_attention_in_every_layer_has_the_architecture_of_granite_3():
    found = fields_of("granite-4")
    assert found["general.architecture"] == "granite" and not [key for key in found if key.startswith(("ssm.", "expert"))]
    assert (found["feed_forward_length"], found["attention.head_count_kv"], found["rope.scaling.finetuned"]) == (
        64,
        2,
        False,
    )
    experts = fields_of("granite-4-moe")
    assert experts["general.architecture"] == "granitemoe"
    assert (experts["feed_forward_length"], experts["expert_shared_feed_forward_length"]) == (96, 64)
    with pytest.raises(UnsupportedError, match=r"always rotates granitemoe, .* position_embedding_type 'nope'"):
        fields_of("granite-4-moe", position_embedding_type="nope")


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"layer_types": ["mamba"] * 3}, UnsupportedError, "only with attention in some layers"),
        ({"layer_types": None}, UnsupportedError, "only with attention in some layers"),
        ({"layer_types": ["mamba", "attention"]}, QuantError, "2 layer_types and num_hidden_layers 3"),
        ({"layer_types": ["conv", "mamba", "attention"]}, UnsupportedError, "layer_types = 'conv'; supported is 'mamba' or"),
        ({"time_step_limit": [0.1, 1.0]}, UnsupportedError, "only with time_step_limit None"),
        ({"mamba_d_head": 24}, QuantError, "mamba_d_head 24, and 8 heads of another width"),
        ({"mamba_expand": 4}, UnsupportedError, "only with mamba_expand 2 and without mamba_proj_bias"),
        ({"mamba_proj_bias": True}, UnsupportedError, "only with mamba_expand 2 and without mamba_proj_bias"),
        ({"attention_bias": True}, UnsupportedError, "only with attention_bias False"),
        ({"shared_intermediate_size": "80"}, QuantError, "shared_intermediate_size is '80'"),
        ({"num_local_experts": 4, "num_experts_per_tok": None}, QuantError, "lacks 'num_experts_per_tok'"),
        ({"num_local_experts": 4, "num_experts_per_tok": 0}, QuantError, "lacks 'num_experts_per_tok'"),
    ],
)
def test_what_llama_cpp_cannot_run_is_refused(changed, error, message):
    with pytest.raises(error, match=message):
        fields_of("granite-hybrid", **changed)


def test_parameters_of_states_have_their_form():
    gains = {"A_log": normal(8), "D": normal(8), "dt_bias": normal(8), "norm.weight": normal(128)}
    gains |= {"conv1d.weight": normal(192, 1, 4), "conv1d.bias": normal(192)}
    found = converted("granite-hybrid", {f"{LAYER}mamba.{name}": x for name, x in gains.items()})
    expected = {
        "ssm_a": -np.exp(gains["A_log"])[:, None],
        "ssm_d": gains["D"][:, None],
        "ssm_dt.bias": gains["dt_bias"],
        "ssm_norm.weight": gains["norm.weight"].reshape(2, 64),
        "ssm_conv1d.weight": gains["conv1d.weight"][:, 0],
        "ssm_conv1d.bias": gains["conv1d.bias"],
    }
    assert set(found) == {f"blk.1.{name}" for name in expected}
    for name, x in expected.items():
        np.testing.assert_array_equal(found[f"blk.1.{name}"].values(), x, err_msg=name)


@pytest.mark.parametrize("form", ["float", "Q4_0"])
@pytest.mark.parametrize(
    ("name", "suffix"),
    [("granite-hybrid", ""), ("granite-hybrid-moe", "_shexp"), ("granite-4", ""), ("granite-4-moe", "_shexp")],
)
def test_projections_keep_their_blocks(form: str, name: str, suffix: str):
    shapes = {"mamba.in_proj": (328, 64), "shared_mlp.input_linear": (160, 64), "shared_mlp.output_linear": (64, 96)}
    given = {part: normal(*shape) if form == "float" else quantized(form, *shape) for part, shape in shapes.items()}
    exact = {part: x if form == "float" else np.asarray(fb.dequantize(x)) for part, x in given.items()}
    found = converted(name, {f"{LAYER}{part}.weight": x for part, x in given.items()})
    gate, up = np.split(exact["shared_mlp.input_linear"], 2)
    expected = {"ssm_in": exact["mamba.in_proj"], f"ffn_gate{suffix}": gate, f"ffn_up{suffix}": up}
    expected[f"ffn_down{suffix}"] = exact["shared_mlp.output_linear"]
    assert set(found) == {f"blk.1.{part}.weight" for part in expected}
    for part, x in expected.items():
        np.testing.assert_array_equal(values(found[f"blk.1.{part}.weight"]), x, err_msg=part)


def test_quantized_parameters_of_states_are_refused():
    with pytest.raises(
        QuantError, match=r"needs tensor 'model\.layers\.1\.mamba\.conv1d\.weight' in float32; leave it float"
    ):
        converted("granite-hybrid", {f"{LAYER}mamba.conv1d.weight": quantized("Q4_0", 192, 1, 32)})


def test_names_of_other_parameters_are_refused():
    with pytest.raises(UnsupportedError, match=r"'model\.layers\.0\.mamba\.other\.weight' has no GGUF name"):
        conversion("granite-hybrid").check_names([f"model.layers.{i}.mamba.other.weight" for i in range(3)])
