"""Nemotron-H as llama.cpp reads it: layers with attention, a state space, a feed-forward block or experts."""

import numpy as np
import pytest

from fewbit import QuantError, UnsupportedError
from fewbit.io.gguf.metadata import architecture_fields, architecture_of
from tests.io.gguf.test_conversion import conversion, normal
from tests.io.gguf.test_metadata import config_of


def fields_of(name: str, **changed) -> dict:
    config = config_of(name, **changed)
    found = architecture_fields(architecture_of(config), config)
    return {key.removeprefix(f"{found['general.architecture']}."): value for key, value in found.items()}


def test_the_fields_of_nemotron_h():
    expected = {
        "general.architecture": "nemotron_h",
        "vocab_size": 300,
        "block_count": 4,
        "context_length": 256,
        "embedding_length": 64,
        "feed_forward_length": [0, 96, 0, 96],
        "attention.head_count": 4,
        "attention.head_count_kv": [0, 0, 2, 0],
        "attention.key_length": 32,
        "attention.value_length": 32,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "attention.layer_norm_epsilon": 1e-5,
        "ssm.conv_kernel": 4,
        "ssm.state_size": 16,
        "ssm.group_count": 2,
        "ssm.inner_size": 128,
        "ssm.time_step_rank": 8,
        "rope.dimension_count": 32,
        "rope.freq_base": 10000.0,
    }
    assert fields_of("nemotron-h") == expected
    assert fields_of("nemotron-h", layers_block_type=None, hybrid_override_pattern="M-*-") == expected
    assert fields_of("nemotron-h", layers_block_type=["mamba", "mlp", "attention", "mlp"]) == expected


def test_experts_have_an_architecture_of_their_own():
    found = fields_of("nemotron-h-latent")
    assert found["general.architecture"] == "nemotron_h_moe"
    assert (found["feed_forward_length"], found["attention.head_count_kv"]) == ([0, 32, 0], [0, 0, 2])
    assert (found["expert_count"], found["expert_used_count"], found["expert_gating_func"]) == (8, 3, 2)
    assert (found["expert_feed_forward_length"], found["expert_shared_feed_forward_length"]) == (32, 64)
    assert (found["expert_weights_scale"], found["expert_weights_norm"], found["moe_latent_size"]) == (2.0, True, 32)
    assert "moe_latent_size" not in fields_of("nemotron-h-moe")


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        (
            {"layers_block_type": ["mlp", "moe", "linear_attention"]},
            UnsupportedError,
            "dense feed-forward blocks or experts",
        ),
        ({"layers_block_type": ["mlp", "full_attention"]}, UnsupportedError, "only with state spaces in some layers"),
        (
            {"layers_block_type": ["conv"]},
            UnsupportedError,
            "a layer of the kind 'conv'; supported is 'linear_attention' or",
        ),
        ({"layers_block_type": None}, QuantError, "lacks 'layers_block_type', or the older 'hybrid_override_pattern'"),
        ({"use_bias": True}, UnsupportedError, "only with use_bias False"),
        ({"n_group": 2, "topk_group": 1}, UnsupportedError, "only with n_group 1"),
        ({"mamba_num_heads": 0}, QuantError, "mamba_num_heads is 0"),
    ],
)
def test_what_llama_cpp_cannot_run_is_refused(changed, error, message):
    with pytest.raises(error, match=message):
        fields_of("nemotron-h", **changed)


def test_state_spaces_and_experts_have_the_names_and_shapes_of_llama_cpp():
    at, decay, gain = "backbone.layers.0.mixer.", normal(8), normal(128)
    experts = {f"backbone.layers.1.mixer.experts.{e}.up_proj.weight": normal(32, 64, seed=e) for e in range(8)}
    found = dict(conversion("nemotron-h-moe").tensors({f"{at}A_log": decay, f"{at}norm.weight": gain, **experts}.items()))
    assert sorted(found) == ["blk.0.ssm_a", "blk.0.ssm_norm.weight", "blk.1.ffn_up_exps.weight"]
    np.testing.assert_array_equal(found["blk.0.ssm_a"].values(), -np.exp(decay)[:, None])
    np.testing.assert_array_equal(found["blk.0.ssm_norm.weight"].values(), gain.reshape(2, 64))
    np.testing.assert_array_equal(found["blk.1.ffn_up_exps.weight"].values(), np.stack(list(experts.values())))
