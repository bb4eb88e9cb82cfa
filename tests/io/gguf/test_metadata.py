"""Metadata fields of config.json, and what llama.cpp cannot run."""

import math

import numpy as np
import pytest

from fewbit import QuantError, UnsupportedError
from fewbit.io.gguf.architectures import ARCHITECTURES
from fewbit.io.gguf.metadata import architecture_fields, architecture_of, extra_tensors
from fewbit.models import config_from_hf
from fewbit.models.attention.rope_scaling import LongRope
from tests.io.gguf.families import COMMON, FAMILIES, LLAMA3_ROPE, YARN
from tests.models.families.test_family import DEEPSEEK_V3

CONFIG = {**COMMON, "vocab_size": 300, "rms_norm_eps": 1e-5, "hidden_act": "silu"}


def config_of(name: str, **changed) -> dict:
    kind, own = FAMILIES[name]
    return {**CONFIG, "model_type": kind, **own, **changed}


def test_every_family_of_the_table_has_a_case():
    assert {kind for kind, _ in FAMILIES.values()} == set(ARCHITECTURES)


def test_the_fields_of_a_llama():
    config = config_of("llama", rope_theta=5e5)
    assert architecture_fields(architecture_of(config), config) == {
        "general.architecture": "llama",
        "llama.vocab_size": 300,
        "llama.block_count": 2,
        "llama.context_length": 256,
        "llama.embedding_length": 64,
        "llama.feed_forward_length": 96,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.dimension_count": 16,
        "llama.rope.freq_base": 5e5,
    }


def test_fields_of_other_families():
    found = {name: architecture_fields(architecture_of(config_of(name)), config_of(name)) for name in FAMILIES}
    assert found["qwen3"]["qwen3.attention.key_length"] == 32
    assert found["mixtral"]["llama.expert_count"] == 4
    assert found["qwen2-moe"]["qwen2moe.expert_shared_feed_forward_length"] == 64
    caps = (found["gemma2"][f"gemma2.{kind}_logit_softcapping"] for kind in ("attn", "final"))
    assert tuple(caps) == (50.0, 30.0)  # transformers' defaults
    assert found["gemma3"]["gemma3.rope.freq_base_swa"] == 1e4
    assert found["gemma3"]["gemma3.rope.freq_base"] == 1e6
    assert found["granite"]["granite.logit_scale"] == 4.0
    assert found["olmo3"]["olmo2.attention.sliding_window_pattern"] == [True, True, True, False, True]
    assert found["exaone4-64"]["exaone4.attention.sliding_window_pattern"] == [True, True, True, False] * 16
    assert found["glm4-moe"]["glm4moe.rope.dimension_count"] == found["minimax-m2"]["minimax-m2.rope.dimension_count"] == 16
    assert found["dots1"]["dots1.expert_gating_func"] == 2 and found["dots1"]["dots1.expert_weights_norm"]
    assert found["gpt-oss"]["gpt-oss.attention.sliding_window"] == 8
    assert found["llama-yarn"]["llama.rope.scaling.original_context_length"] == 64
    assert found["phi3-long"]["phi3.rope.scaling.attn_factor"] == math.sqrt(1 + math.log(4) / math.log(256))
    assert found["command-r"]["command-r.logit_scale"] == 0.25
    assert found["starcoder2"]["starcoder2.attention.layer_norm_epsilon"] == 1e-5
    assert (
        found["gptneox"]["gptneox.use_parallel_residual"]
        and not found["gptneox-sequential"]["gptneox.use_parallel_residual"]
    )
    assert [found[name][f"{name}.rope.dimension_count"] for name in ("gptneox", "stablelm", "phi2")] == [4, 4, 8]
    assert found["ernie4-5-moe"]["ernie4_5-moe.expert_shared_feed_forward_length"] == 64
    assert found["ernie4-5-moe"]["ernie4_5-moe.leading_dense_block_count"] == 1
    assert found["exaone-moe"]["exaone-moe.attention.sliding_window_pattern"] == [True, True, True, False, True]
    assert math.isclose(found["hunyuan"]["hunyuan-dense.rope.freq_base"], 100 * 20 ** (32 / 30))
    by_layer = config_of("hunyuan-moe", moe_topk=[2, 2], num_shared_expert=[1, 1], moe_intermediate_size=[96, 96])
    assert architecture_fields(architecture_of(by_layer), by_layer) == found["hunyuan-moe"]
    older = config_of("gptneox", rotary_pct=0.5, rotary_emb_base=500)
    older = architecture_fields(architecture_of(older), older)
    assert (older["gptneox.rope.dimension_count"], older["gptneox.rope.freq_base"]) == (8, 500.0)
    old = {key: value for key, value in config_of("gemma3").items() if key != "rope_parameters"}
    assert architecture_fields(architecture_of(old), old) == found["gemma3"]


def test_the_fields_of_deepseek():
    config = config_of("deepseek-v3")
    found = architecture_fields(architecture_of(config), config)
    assert {key.removeprefix("deepseek2."): value for key, value in found.items()} == {
        "general.architecture": "deepseek2",
        "vocab_size": 300,
        "block_count": 3,
        "context_length": 256,
        "embedding_length": 64,
        "feed_forward_length": 96,
        "attention.head_count": 4,
        "attention.head_count_kv": 1,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "attention.q_lora_rank": 64,
        "attention.kv_lora_rank": 32,
        "attention.key_length": 40,
        "attention.value_length": 32,
        "attention.key_length_mla": 24,
        "attention.value_length_mla": 24,
        "leading_dense_block_count": 1,
        "expert_count": 8,
        "expert_used_count": 3,
        "expert_feed_forward_length": 32,
        "expert_shared_count": 2,
        "expert_weights_scale": 2.0,
        "expert_weights_norm": True,
        "expert_gating_func": 2,
        "expert_group_count": 4,
        "expert_group_used_count": 2,
        "rope.dimension_count": 8,
        "rope.freq_base": 10000.0,
    }
    assert architecture_of(DEEPSEEK_V3).name == "deepseek2"  # the published config.json
    older = config_of("deepseek-v2")
    fields = architecture_fields(architecture_of(older), older)
    assert fields["deepseek2.rope.scaling.yarn_log_multiplier"] == pytest.approx(0.0707)
    assert fields["deepseek2.expert_gating_func"] == 1
    assert fields["deepseek2.attention.q_lora_rank"] == 0  # llama.cpp needs the field
    assert "deepseek2.expert_group_count" not in fields


def test_the_factors_of_llama_3():
    config = config_of("llama-3.1")
    factors = extra_tensors(architecture_of(config), config)["rope_freqs.weight"].values()
    frequency = 10000.0 ** (-np.arange(0, 16, 2) / 16)
    wavelength = 2 * np.pi / frequency
    assert factors.dtype == np.float32
    assert (factors[wavelength < 8] == 1).all()
    assert (factors[wavelength > 32] == 8).all()
    (between,) = np.nonzero((wavelength > 8) & (wavelength < 32))
    smooth = (32 / wavelength[between] - 1) / 3
    np.testing.assert_allclose(1 / factors[between], (1 - smooth) / 8 + smooth, rtol=1e-6)
    assert between.size


def test_the_original_context_of_llama_3_is_the_context_where_none_is_given():
    rope = {key: value for key, value in LLAMA3_ROPE.items() if key != "original_max_position_embeddings"}
    found = []
    for given in (rope, {**rope, "original_max_position_embeddings": 256}):
        config = config_of("llama", rope_parameters=given)
        found.append(extra_tensors(architecture_of(config), config)["rope_freqs.weight"].values())
    np.testing.assert_array_equal(*found)


def test_rope_scaling_comes_before_rope_parameters():
    config = config_of("llama", rope_theta=5e5, rope_scaling={"type": "linear", "factor": 2.0}, rope_parameters=YARN)
    fields = architecture_fields(architecture_of(config), config)
    assert {key: fields[f"llama.rope.{key}"] for key in ("scaling.type", "scaling.factor", "freq_base")} == {
        "scaling.type": "linear",
        "scaling.factor": 2.0,
        "freq_base": 5e5,
    }
    scaling = config_from_hf(config).rope_scaling
    assert scaling is not None and scaling.kind == "linear"


@pytest.mark.parametrize(
    "given",
    [{}, {"factor": 2.0}, {"attention_factor": 1.25}, {"original_max_position_embeddings": 32}],
    ids=["context", "factor", "attention_factor", "original"],
)
def test_the_attention_factor_of_longrope_is_that_of_transformers(given):
    rope = {"type": "longrope", "short_factor": [1.5] * 8, "long_factor": [3.0] * 8, **given}
    config = config_of("phi3", rope_scaling=rope, original_max_position_embeddings=64)
    fields = architecture_fields(architecture_of(config), config)
    scaling = config_from_hf(config).rope_scaling
    assert isinstance(scaling, LongRope)
    assert fields["phi3.rope.scaling.attn_factor"] == scaling.attention_factor
    assert fields["phi3.rope.scaling.original_context_length"] == scaling.original_context == 64


@pytest.mark.parametrize(
    ("name", "changed", "message"),
    [
        ("llama", {"model_type": "t5"}, "model_type 't5' has no GGUF conversion in fewbit"),
        ("llama", {"hidden_act": "relu"}, "llama.cpp runs llama only with hidden_act 'silu', config.json has 'relu'"),
        ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "no rope scaling 'dynamic' for llama"),
        ("qwen2", {"rope_parameters": LLAMA3_ROPE}, "no rope scaling 'llama3' for qwen2"),
        (
            "llama",
            {"rope_parameters": {**YARN, "attention_factor": 2.0}},
            "computes the attention factor of yarn as 1.138629",
        ),
        ("llama4", {"moe_layers": [0, 2]}, "has experts in every n-th layer of llama4, and no chunks in every fourth"),
        ("llama4", {"layer_types": ["full_attention"] * 4}, "moe_layers or layer_types differ"),
        ("llama4", {"use_qk_norm": False}, "norms queries and keys of llama4 unless it has 128 experts"),
        ("llama4", {"num_local_experts": 128}, "has use_qk_norm True and 128 experts"),
        ("llama4", {"no_rope_layer_interval": 2}, "every fourth layer of llama4_text; no_rope_layer_interval is 2"),
        ("llama4", {"attention_chunk_size": 4096}, "only with attention_chunk_size 8192"),
        ("llama4", {"attn_temperature_tuning": False}, "only with attn_temperature_tuning True"),
        ("jais2", {"mlp_bias": False}, "only with mlp_bias True"),
        ("qwen3-moe", {"norm_topk_prob": False}, "only with norm_topk_prob True"),
        ("ernie4-5-moe", {"moe_layer_interval": 2}, "only with moe_layer_interval 1"),
        ("ernie4-5-moe", {"moe_layer_end_index": 1}, "has dense layers only before those with experts"),
        ("exaone-moe", {"mlp_layer_types": ["sparse"] * 4 + ["dense"]}, "has dense layers only before those with experts"),
        ("exaone-moe", {"sliding_window": None}, "runs EXAONE of experts only with a sliding window and shared experts"),
        ("solar-open", {"first_k_dense_replace": 1}, "only with first_k_dense_replace 0"),
        ("hunyuan-moe", {"num_shared_expert": [2, 2]}, "only with num_shared_expert 1"),
        ("qwen2-moe", {"norm_topk_prob": True}, "only with norm_topk_prob False"),
        ("qwen2-moe", {"mlp_only_layers": [0]}, "only with mlp_only_layers"),
        ("qwen2", {"use_sliding_window": True}, "only with use_sliding_window False"),
        ("gemma2", {"query_pre_attn_scalar": 24}, "scales the attention of gemma2 by 32; query_pre_attn_scalar is 24"),
        ("gemma2", {"layer_types": ["full_attention"] * 2}, "its own pattern of sliding windows for gemma2"),
        ("gemma2", {"final_logit_softcapping": None}, "always caps the logits of gemma2"),
        ("smollm3", {"no_rope_layers": [1, 1, 1, 1, 1]}, "rotates all but every fourth layer"),
        ("smollm3", {"no_rope_layers": None, "no_rope_layer_interval": 3}, "no_rope_layer_interval is 3"),
        ("gemma3", {"layer_types": None, "sliding_window_pattern": 3}, "every 6th layer of gemma3"),
        ("qwen3.5", {"rms_norm_eps": 1e-5}, "llama.cpp runs qwen3_5_text only with rms_norm_eps 1e-06"),
        ("qwen3.5", {"attn_output_gate": False}, "only with attn_output_gate True"),
        ("qwen3.5", {"layer_types": ["full_attention", "linear_attention"] * 2}, "every n-th layer of qwen3_5_text"),
        ("qwen3-next", {"mlp_only_layers": [1]}, "only with mlp_only_layers"),
        (
            "exaone4",
            {"sliding_window": 8},
            "where, and only where, there are 64 layers; config.json has 2 and sliding_window 8",
        ),
        ("exaone4-64", {"sliding_window": None}, "where, and only where, there are 64 layers"),
        ("olmoe", {"num_key_value_heads": 2}, "llama.cpp runs olmoe only with as many heads of keys as of queries"),
        ("dots1", {"num_key_value_heads": 2}, "llama.cpp runs dots1 only with as many heads of keys as of queries"),
        ("dots1", {"sliding_window": 8}, "only with sliding_window None"),
        ("glm4-moe", {"n_shared_experts": 0}, "only with shared experts"),
        ("glm4-moe", {"n_group": 2}, "only with n_group 1"),
        ("minimax-m2", {"use_routing_bias": False}, "only with use_routing_bias True"),
        ("olmo3", {"tie_word_embeddings": True}, "only with tie_word_embeddings False"),
        ("gpt-oss", {"swiglu_limit": 5.0}, "only with swiglu_limit 7.0"),
        (
            "llama",
            {"rope_parameters": {**YARN, "mscale": 0.5, "mscale_all_dim": 1.0}},
            "computes the attention factor of yarn as 1.138629; config.json has 0.939",
        ),
        ("llama", {"rope_parameters": {**YARN, "truncate": False}}, "config.json has truncate false"),
        (
            "qwen3",
            {"partial_rotary_factor": 0.5},
            "partial_rotary_factor 0.5, which transformers ignores in models of qwen3",
        ),
        ("deepseek-v3", {"rope_interleave": False}, "only with rope_interleave True"),
        ("deepseek-v3", {"rms_norm_eps": 1e-5}, "only with rms_norm_eps 1e-06"),
        ("deepseek-v3", {"num_hidden_layers": 27}, "takes DeepSeek with 27 layers for one without q_lora_rank"),
        ("deepseek-v3", {"n_shared_experts": None}, "only with routed and shared experts in some layer"),
        ("deepseek-v3", {"first_k_dense_replace": 3}, "only with routed and shared experts in some layer"),
        ("deepseek-v2", {"topk_method": "group_limited_greedy", "n_group": 4}, "by the sum of its two best"),
        ("deepseek-v2", {"rope_parameters": YARN}, "only with mscale_all_dim"),
        (
            "deepseek-v2",
            {"rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5}},
            "computes the attention factor of yarn as 1.000000; config.json has 1.06",
        ),
    ],
)
def test_what_llama_cpp_cannot_run_is_refused(name, changed, message):
    config = config_of(name, **changed)
    with pytest.raises(UnsupportedError, match=message):
        architecture_fields(architecture_of(config), config)


def test_layers_with_different_sizes_are_refused():
    config = config_of("hunyuan-moe", moe_topk=[2, 1])
    with pytest.raises(QuantError, match=r"has moe_topk \[2, 1\]; expected a int for the GGUF field 'expert_used_count'"):
        architecture_fields(architecture_of(config), config)


@pytest.mark.parametrize("name", ["mixtral", "smollm3", "gpt-oss", "llama", "qwen3", "olmo2", "granite", "gemma3"])
def test_a_rotary_embedding_that_config_json_omits_is_that_of_the_family(name):
    keys = ("rope_theta", "rope_parameters", "rope_scaling")
    config = {key: value for key, value in config_of(name).items() if key not in keys}
    expected, found = config_from_hf(config), architecture_fields(architecture_of(config), config)
    rope = {key.split(".rope.")[1]: value for key, value in found.items() if ".rope." in key}
    assert rope["freq_base"] == expected.rope_theta
    assert rope.get("scaling.type") == (None if expected.rope_scaling is None else "yarn")
    if expected.rope_scaling is not None:
        assert rope["scaling.factor"] == expected.rope_scaling.factor


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"hidden_size": None}, "lacks 'hidden_size', which the GGUF field 'embedding_length' needs"),
        ({"hidden_size": "64"}, "hidden_size is '64'; expected int"),
        ({"hidden_size": -1}, "hidden_size is -1; expected int >= 1"),
        ({"head_dim": 2**20}, "head_dim is 1048576, more than 65536"),
        ({"vocab_size": 2**31}, "has vocab_size 2147483648; expected a int"),
        ({"rms_norm_eps": float("nan")}, "has rms_norm_eps nan; expected a float"),
    ],
)
def test_values_that_are_no_numbers_are_named(changed, message):
    config = config_of("llama", **{"head_dim": 16, **changed})
    with pytest.raises(QuantError, match=message):
        architecture_fields(architecture_of(config), config)


def test_impossible_rope_factors_are_refused():
    config = config_of("llama-3.1", rope_parameters={**LLAMA3_ROPE, "rope_theta": -1.0})
    with pytest.raises(QuantError, match="factors that are not finite"):
        extra_tensors(architecture_of(config), config)
    config = config_of("llama-3.1", rope_parameters={**LLAMA3_ROPE, "factor": 1e308})
    with pytest.raises(QuantError, match="factors that are not finite"):
        extra_tensors(architecture_of(config), config)
    rope = {**FAMILIES["phi3-long"][1]["rope_parameters"], "long_factor": [1e308] * 8}
    config = config_of("phi3-long", rope_parameters=rope)
    with pytest.raises(QuantError, match="long_factor with a number that float32 does not hold"):
        extra_tensors(architecture_of(config), config)
    rope = {**rope, "original_max_position_embeddings": 1}
    config = config_of("phi3-long", rope_parameters=rope, original_max_position_embeddings=1)
    with pytest.raises(QuantError, match="an original_max_position_embeddings of 1"):
        architecture_fields(architecture_of(config), config)


def test_factors_of_another_length_are_refused():
    rope = FAMILIES["phi3-long"][1]["rope_parameters"]
    config = config_of("phi3-long", rope_parameters={**rope, "long_factor": [1.0]})
    with pytest.raises(QuantError, match=r"long_factor \[1.0\]; expected 8 numbers"):
        extra_tensors(architecture_of(config), config)
