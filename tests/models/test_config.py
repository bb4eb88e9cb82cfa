"""A configuration is valid or refused, and its JSON form reads back."""

import dataclasses
import json

import pytest

from fewbit.errors import QuantError
from fewbit.models import DecoderConfig, Experts, FullAttention, LatentAttention, PerLayerInputs, SharedKeys
from fewbit.models.attention.rope_scaling import Dynamic, Llama3, LongRope, Proportional, Yarn
from tests.nets.random_decoder import (
    BY_HEAD,
    BY_KEY_HEAD,
    CHUNKS,
    CONFIGS,
    CORRECTED,
    FEATURES,
    LATENT,
    LEARNED_POSITIONS,
    LINEAR,
    OTHERS,
    PARALLEL,
    SHARED_KEYS,
    SINGLE_BLOCKS,
    SMALL,
    SUB_NORMS,
    TWO_WIDTHS,
)


@pytest.mark.parametrize(
    "config",
    [
        *CONFIGS.values(),
        *(FEATURES, OTHERS, LATENT, BY_KEY_HEAD, SUB_NORMS, TWO_WIDTHS, SHARED_KEYS),
        *(LEARNED_POSITIONS, BY_HEAD, PARALLEL, SINGLE_BLOCKS, CORRECTED, CHUNKS),
    ],
    ids=[
        *CONFIGS,
        *("features", "others", "latent", "linear", "sub norms", "two widths", "shared keys"),
        *("learned positions", "by head", "parallel", "single blocks", "corrected", "chunks"),
    ],
)
def test_json_reads_back(config: DecoderConfig):
    assert DecoderConfig.from_json(json.loads(json.dumps(config.to_json()))) == config


def test_json_of_a_llama_without_the_other_features_reads():
    form = {"vocab": 67, "layers": 3, "width": 24, "heads": 6, "kv_heads": 2, "head_dim": 8, "hidden": 40, "norm_eps": 1e-5}
    form |= {"rope_theta": 10000.0, "rope": "half", "tied": True, "context": 32}
    assert DecoderConfig.from_json(form) == SMALL
    assert SMALL.to_json() == form


def test_json_of_every_scaling_reads_back():
    for scaling in (
        Dynamic(2.0, 16),
        Llama3(8.0, 1.0, 4.0, 16),
        Yarn(4.0, 16),
        LongRope((1.0,), (2.0,), 16, 1.2),
        Proportional(3, 2.0),
    ):
        config = dataclasses.replace(SMALL, rope_scaling=scaling)
        assert DecoderConfig.from_json(json.loads(json.dumps(config.to_json()))) == config


def test_json_has_a_closed_schema():
    with pytest.raises(QuantError, match=r"a decoder configuration has no field 'head'; did you mean 'heads'"):
        DecoderConfig.from_json({**SMALL.to_json(), "head": 3})
    with pytest.raises(QuantError, match="lacks the field 'vocab'"):
        DecoderConfig.from_json({k: v for k, v in SMALL.to_json().items() if k not in ("vocab", "hidden")})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": 0}, "layers is 0, must be a positive integer"),
        ({"vocab": True}, "vocab is True, must be a positive integer"),
        ({"norm_eps": 0.0}, "norm_eps is 0.0, must be a positive number"),
        ({"rope_theta": float("nan")}, "rope_theta is nan, must be a positive number"),
        ({"rope": "full"}, "rope is 'full', must be one of interleaved, half"),
        ({"kv_heads": 4}, "kv_heads is 4, must divide heads, which is 6"),
        ({"head_dim": 7}, "head_dim is 7, must be even"),
        ({"tied": None}, "tied is None, must be true or false"),
        ({"norms": "both"}, "norms is 'both', must be one of pre, post, sandwich"),
        ({"window": -1}, "window is -1, must be a positive number, or 0 for none"),
        ({"window_layers": (0,)}, "window_layers is given, but window is 0"),
        ({"nope_layers": (3,)}, r"nope_layers is \(3,\), must be layers from 0 to 2"),
        ({"separate_gate": True}, "separate_gate is true, but attention_gate is not"),
        ({"window_is_chunk": True}, "window_is_chunk is true, but window is 0"),
        ({"temperature_nope": True}, "temperature_nope is true, but temperature_scale is 0"),
        ({"rotary_dim": 10}, "rotary_dim is 10, must be even and no larger than the head"),
        ({"fused": True, "mlp_bias": True}, "fused and mlp_bias are true"),
        ({"norm_bias": True}, "norm_bias is true, but norm_kind is 'rms': an RMSNorm has no bias"),
        ({"norm_kind": "layer", "norms": "post"}, "norm_kind is 'layer', with norms on outputs"),
        ({"activation": "xielu"}, "activation is 'xielu', with a gate or experts"),
        ({"gated": False, "fused_mlp": True}, "gated is false, with a fused gate or an activation of two inputs"),
        ({"gated": False, "experts": Experts(4, 2, 8, layout="joined")}, "gated is false, and experts.layout is 'joined'"),
        ({"mlp_layers": (0, 1, 2)}, "mlp_layers is given, and no layer has softmax attention"),
        ({"mlp_layers": (1,), "norms": "post"}, "mlp_layers is given, with norms on outputs"),
        ({"mlp_layers": (1,), "experts": Experts(4, 2, 8)}, r"mlp_layers is \(1,\), must have the layers with experts"),
        ({"parallel": "one_norm", "norms": "sandwich"}, "parallel is 'one_norm', with norms on outputs"),
        ({"positions": 33, "position_offset": 2}, "positions is 33, which from row 2 are fewer than context, 32"),
        ({"fused_by_head": True}, "fused_by_head is true, but fused is not"),
        ({"rope_scaling": Yarn(2.0, 8), "rope_theta": 1.0}, "rope_theta is 1, whose logarithm YaRN divides by"),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, dict) else "",
)
@pytest.mark.usefixtures("unchecked")
def test_refuses(change: dict, message: str):
    with pytest.raises(QuantError, match=message):
        dataclasses.replace(SMALL, **change)


def test_refuses_experts_that_do_not_fit():
    with pytest.raises(QuantError, match=r"experts\.active is 5, more than experts\.count, 4"):
        Experts(4, 5, 8)
    with pytest.raises(QuantError, match=r"experts\.layers is \(7,\), must be layers from 0 to 2"):
        dataclasses.replace(SMALL, experts=Experts(4, 2, 8, layers=(7,)))
    form = {**FEATURES.to_json(), "rope_scaling": {"kind": "linaer", "factor": 2.0}}
    with pytest.raises(QuantError, match=r"rope_scaling has kind 'linaer'; did you mean 'linear'"):
        DecoderConfig.from_json(form)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scores": "tanh"}, r"experts\.scores is 'tanh', must be one of softmax, sigmoid"),
        ({"scale": 0.0}, r"experts\.scale is 0\.0, must be a positive number"),
        ({"groups": 3}, r"experts\.groups is 3, must divide experts\.count, 8"),
        ({"active_groups": 5}, r"experts\.active_groups is 5, more than experts\.groups, 4"),
        ({"active": 5}, r"experts\.active is 5, more than 2 groups of 2 experts have"),
        ({"count": 4, "active": 2}, r"experts\.groups have one expert each"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
@pytest.mark.usefixtures("unchecked")
def test_refuses_groups_of_experts_that_do_not_fit(change: dict, message: str):
    assert LATENT.experts is not None
    with pytest.raises(QuantError, match=message):
        dataclasses.replace(LATENT.experts, **change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kv_heads": 3}, "kv_heads is 3, must be heads, 6"),
        ({"rotary_dim": 8}, "rotary_dim is 8, must be between 0 and head_dim, 8"),
        ({"latent": LatentAttention(12, 9)}, r"latent\.value_dim is 9, more than head_dim, 8"),
        ({"qk_norm": "head"}, "latent attention has neither fused projections, nor a gate, nor norms"),
        ({"extra_layers": -1}, "extra_layers is -1, must be a positive number, or 0 for none"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
@pytest.mark.usefixtures("unchecked")
def test_refuses_latent_attention_that_does_not_fit(change: dict, message: str):
    with pytest.raises(QuantError, match=message):
        dataclasses.replace(LATENT, **change)
    with pytest.raises(QuantError, match=r"latent\.split is 1, must be true or false"):
        LatentAttention(12, 8, split=1)
    with pytest.raises(QuantError, match=r"latent\.rank is 0, must be a positive integer"):
        LatentAttention(0, 4)
    with pytest.raises(QuantError, match=r"latent\.norm_eps is 0\.0, must be a positive number"):
        LatentAttention(4, 4, norm_eps=0.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"key_heads": 3}, r"linear\.key_heads is 3, must divide linear\.value_heads, 4"),
        ({"value_dim": 0}, r"linear\.value_dim is 0, must be a positive integer"),
        ({"layout": "stacked"}, r"linear\.layout is 'stacked', must be one of separate, by_key_head"),
        ({"layers": ()}, r"linear\.layers is \(\), must be layers in ascending order, at least one"),
        ({"layers": (1, 0)}, r"linear\.layers is \(1, 0\), must be layers in ascending order"),
        ({"layers": (0, 4)}, r"linear\.layers is \(0, 4\), must be layers from 0 to 3"),
        ({"layers": (0, 1, 2, 3)}, r"linear\.layers has 4 of 4 layers; one without is expected at least"),
    ],
    ids=lambda value: "-".join(map(str, value.items())) if isinstance(value, dict) else "",
)
@pytest.mark.usefixtures("unchecked")
def test_refuses_linear_attention_that_does_not_fit(change: dict, message: str):
    assert LINEAR.linear is not None
    with pytest.raises(QuantError, match=message):
        dataclasses.replace(LINEAR, linear=dataclasses.replace(LINEAR.linear, **change))


def test_a_layer_has_a_place_among_those_of_its_kind():
    assert [LINEAR.place_of(layer) for layer in range(4)] == [0, 1, 0, 2]
    assert LINEAR.cached_layers() == 1
    with pytest.raises(QuantError, match="sub_norms is true, but layers of linear have a norm of their own"):
        dataclasses.replace(LINEAR, sub_norms=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"full": FullAttention(3, 8)}, r"full\.head_dim is 8, must be another one than head_dim"),
        ({"full": FullAttention(4, 12)}, "kv_heads is 4, must divide heads, which is 6"),
        ({"window_layers": (), "rope_scaling": None}, "full is given, but window_layers is empty"),
        (
            {"attention_gate": True, "shared_keys": None},
            "full is given, with latent or linear attention, mamba, short_conv, fused",
        ),
        ({"full": None, "kv_heads": 2}, "shared_keys is given with layers with a window and without; full is expected"),
        ({"shared_keys": SharedKeys(4)}, r"shared_keys\.layers is 4, but the other layers of 5 have not every kind"),
        ({"norms": "pre"}, "per_layer is given, and norms is 'pre'"),
        ({"layer_scale": 1}, "layer_scale is 1, must be true or false"),
    ],
    ids=["width", "heads", "no window", "gate", "one width", "too many", "norms", "scale"],
)
@pytest.mark.usefixtures("unchecked")
def test_refuses_two_kinds_of_heads_that_do_not_fit(change: dict, message: str):
    with pytest.raises(QuantError, match=message):
        dataclasses.replace(SHARED_KEYS, **change)
    with pytest.raises(QuantError, match=r"full\.keys_are_values is 1, must be true or false"):
        FullAttention(2, 8, keys_are_values=1)
    with pytest.raises(QuantError, match=r"per_layer\.width is 0, must be a positive integer"):
        PerLayerInputs(8, 0)
    with pytest.raises(QuantError, match=r"experts\.beside_dense is true and shared_hidden not 0"):
        Experts(4, 2, 8, beside_dense=True, shared_hidden=4)


def test_a_layer_without_keys_has_the_place_of_the_last_one_with_its_kind():
    assert [SHARED_KEYS.kind_of(layer) for layer in range(5)] == [0, 1, 0, 0, 1]
    assert [SHARED_KEYS.place_of(layer) for layer in range(5)] == [0, 0, 1, 1, 0]
    assert (SHARED_KEYS.cached_layers(0), SHARED_KEYS.cached_layers(1)) == (2, 1)
