"""Gemma 4's layers of several kinds, and factors of experts, as llama.cpp reads them."""

import numpy as np
import pytest

from fewbit import QuantError, UnsupportedError
from fewbit.io.gguf.conversion import applies_scale
from fewbit.io.gguf.layers.gemma4 import with_expert_factors
from fewbit.io.gguf.metadata import architecture_fields, architecture_of, extra_tensors
from fewbit.io.gguf.stored import Stored, stored
from tests.io.gguf.test_conversion import LAYER, conversion, converted, normal, quantized, values
from tests.io.gguf.test_metadata import config_of


def fields_of(name: str, **changed) -> dict:
    config = config_of(name, **changed)
    found = architecture_fields(architecture_of(config), config)
    return {key.removeprefix("gemma4."): value for key, value in found.items()}


def test_the_fields_of_gemma_4():
    assert fields_of("gemma4", rms_norm_eps=1e-6) == {
        "general.architecture": "gemma4",
        "vocab_size": 300,
        "block_count": 3,
        "context_length": 256,
        "embedding_length": 64,
        "feed_forward_length": 96,
        "attention.head_count": 4,
        "attention.head_count_kv": [2, 2, 1],
        "attention.layer_norm_rms_epsilon": 1e-6,
        "attention.key_length": 64,
        "attention.value_length": 64,
        "attention.key_length_swa": 32,
        "attention.value_length_swa": 32,
        "attention.sliding_window": 8,
        "attention.sliding_window_pattern": [True, True, False],
        "attention.shared_kv_layers": 0,
        "embedding_length_per_layer_input": 0,
        "rope.dimension_count": 64,
        "rope.dimension_count_swa": 32,
        "rope.freq_base": 1e6,
        "rope.freq_base_swa": 1e4,
        "final_logit_softcapping": 0.0,  # else llama.cpp takes 30
    }


def test_fields_of_experts_and_of_layers_that_share_keys():
    experts, shared = fields_of("gemma4-experts"), fields_of("gemma4-shared")
    of_experts = ("expert_count", "expert_used_count", "expert_feed_forward_length", "final_logit_softcapping")
    assert [experts[key] for key in of_experts] == [4, 2, 32, 4.0]
    assert experts["attention.head_count_kv"] == 2 and experts["feed_forward_length"] == 96
    assert shared["feed_forward_length"] == [96, 96, 96, 192, 192, 192]
    assert (shared["attention.shared_kv_layers"], shared["embedding_length_per_layer_input"]) == (3, 32)
    assert fields_of("gemma4-shared", use_double_wide_mlp=False)["feed_forward_length"] == 96


def test_the_last_layer_has_no_window():
    windowed = {"layer_types": ["sliding_attention"] * 3, "num_global_key_value_heads": 1}
    assert fields_of("gemma4", **windowed)["attention.sliding_window_pattern"] == [True, True, False]
    by_default = fields_of("gemma4", layer_types=None, num_hidden_layers=8)["attention.sliding_window_pattern"]
    assert by_default == [True] * 5 + [False, True, False]


def test_newer_files_have_heads_layer_by_layer():
    of_layer = {"2": {"head_dim": 64, "num_key_value_heads": 1}}
    changed = {"per_layer_config": of_layer, "global_head_dim": None, "num_global_key_value_heads": None}
    config = {key: value for key, value in config_of("gemma4", **changed).items() if value is not None}
    older = config_of("gemma4")
    architecture = architecture_of(config)
    assert architecture_fields(architecture, config) == architecture_fields(architecture, older)
    with pytest.raises(UnsupportedError, match="heads of one size in all layers without a sliding window"):
        fields_of("gemma4", per_layer_config={"1": of_layer["2"]})


@pytest.mark.parametrize(
    ("rope", "expected"),
    [
        (None, [1.0] * 8 + [1e30] * 24),
        ({"rope_type": "proportional", "partial_rotary_factor": 0.5, "factor": 4.0}, [4.0] * 16 + [1e30] * 16),
        ({"rope_type": "default", "rope_theta": 1e5}, [1.0] * 32),
    ],
    ids=["family", "factor", "all"],
)
def test_pairs_that_do_not_rotate_have_a_large_factor(rope, expected):
    config = config_of("gemma4", rope_parameters=rope and {"full_attention": rope})
    if rope is None:
        del config["rope_parameters"]
    factors = extra_tensors(architecture_of(config), config)["rope_freqs.weight"].values()
    np.testing.assert_array_equal(factors, np.array(expected, np.float32))


@pytest.mark.parametrize(
    ("name", "changed", "error", "message"),
    [
        ("gemma4", {"sliding_window": None}, QuantError, "lacks 'sliding_window'"),
        ("gemma4", {"num_kv_shared_layers": 3}, QuantError, "3 layers, 3 layer_types, and num_kv_shared_layers 3"),
        ("gemma4", {"layer_types": ["full_attention"]}, QuantError, "3 layers, 1 layer_types"),
        ("gemma4", {"layer_types": ["linear_attention"] * 3}, UnsupportedError, "no attention of kind 'linear_attention'"),
        ("gemma4", {"use_bidirectional_attention": "all"}, UnsupportedError, "only with use_bidirectional_attention None"),
        (
            "gemma4",
            {"rope_parameters": {"full_attention": {"rope_type": "yarn"}}},
            UnsupportedError,
            "no rope scaling 'yarn'",
        ),
        ("gemma4-shared", {"vocab_size_per_layer_input": 100}, UnsupportedError, "per-layer embeddings of 300 tokens"),
        ("gemma4-experts", {"top_k_experts": None}, QuantError, "lacks 'top_k_experts'"),
    ],
)
def test_what_llama_cpp_cannot_run_is_refused(name, changed, error, message):
    with pytest.raises(error, match=message):
        fields_of(name, **changed)


def test_a_share_of_rotating_pairs_that_is_none_is_refused():
    for share in (2.0, 0.0):
        rope = {"full_attention": {"rope_type": "proportional", "partial_rotary_factor": share}}
        config = config_of("gemma4", rope_parameters=rope)
        with pytest.raises(QuantError, match=f"partial_rotary_factor {share}"):
            extra_tensors(architecture_of(config), config)


NAMES = {
    "layer_scalar": "layer_output_scale.weight",
    "router.proj.weight": "ffn_gate_inp.weight",
    "router.scale": "ffn_gate_inp.scale",
    "per_layer_input_gate.weight": "inp_gate.weight",
    "post_feedforward_layernorm_1.weight": "post_ffw_norm_1.weight",
}


def test_names_and_gains_without_an_offset():
    gains = {f"{LAYER}{name}": normal(4, seed=i) for i, name in enumerate(NAMES)}
    found = converted("gemma4-experts", gains)
    assert list(found) == [f"blk.1.{name}" for name in NAMES.values()]
    for (name, gain), tensor in zip(gains.items(), found.values(), strict=True):
        np.testing.assert_array_equal(tensor.values(), gain, err_msg=name)


@pytest.mark.parametrize("form", ["float", "Q4_0", "NVFP4"])
def test_the_factor_of_an_expert_is_the_scale_of_its_down_projection(form: str):
    """So that a tensor scale is multiplied by it; the numbers of the projection stay as they are."""
    weight = normal(4, 64, 64) if form == "float" else quantized(form, 4, 64, 64, unit=0.5)
    factors = np.array([1, 2, 4, 8], np.float32)
    both = {f"{LAYER}experts.down_proj": weight, f"{LAYER}router.per_expert_scale": factors}
    for order in (both, dict(reversed(both.items()))):
        ((name, tensor),) = converted("gemma4-experts", order).items()
        assert name == "blk.1.ffn_down_exps.weight"
        np.testing.assert_array_equal(tensor.tensor_scale, factors * (0.5 if form == "NVFP4" else 1))
    assert {one for path in both for one in conversion("gemma4-experts").targets(path)} == {name}


def test_gates_and_up_projections_of_experts_are_separated():
    weight = normal(4, 64, 64)
    found = converted("gemma4-experts", {f"{LAYER}experts.gate_up_proj": weight})
    np.testing.assert_array_equal(values(found["blk.1.ffn_gate_exps.weight"]), weight[:, :32])
    np.testing.assert_array_equal(values(found["blk.1.ffn_up_exps.weight"]), weight[:, 32:])


def test_experts_without_their_factors_are_refused():
    down: tuple[str, Stored] = ("blk.0.ffn_down_exps.weight", stored(normal(4, 8, 8), "down"))
    with pytest.raises(QuantError, match=r"blk\.0\.ffn_down_exps\.weight is incomplete: the checkpoint lacks their factors"):
        list(with_expert_factors([down]))
    with pytest.raises(QuantError, match="has 4 experts, and factors of 3"):
        list(with_expert_factors([down, ("blk.0.ffn_down_exps.scale", stored(normal(3), "factors"))]))
    with pytest.raises(QuantError, match="lacks the experts"):
        list(with_expert_factors([("blk.0.ffn_down_exps.scale", stored(normal(4), "factors"))]))


@pytest.mark.parametrize(
    ("name", "is_applied"),
    [("attn_q", True), ("ffn_down_exps", True), ("inp_gate", False), ("proj", False), ("ffn_gate_up_exps", False)],
)
def test_tensor_scales_that_llama_cpp_applies(name: str, is_applied: bool):
    assert applies_scale("gemma4", f"blk.1.{name}.weight") == is_applied
