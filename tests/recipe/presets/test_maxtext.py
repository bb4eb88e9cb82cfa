"""MaxText's values: the numerics of each, and its fields honoured or refused."""

import pytest

import fewbit as fb
from fewbit.recipe.presets.maxtext import VALUES

ROW, TENSOR = {...: 1, -1: None}, {}


def policy(name, **fields):
    return fb.maxtext_recipe(name, **fields).rules[-1].policy


def arm(of):
    """An arm in words: what the gradient and the other operand are, and how the gradient is rounded."""
    operand = of.operand if isinstance(of.operand, str) else of.operand.name
    return (of.gradient and of.gradient.name, operand, of.rounding)


FLOAT, ORIGINAL = (None, "forward", "nearest"), (None, "original", "nearest")


@pytest.mark.parametrize(
    ("value", "forward", "dlhs", "drhs"),
    [
        ("int8", "int8_aqt", ("int8_aqt", "int8_aqt", "stochastic"), ("int8_aqt", "int8_aqt", "stochastic")),
        ("int4", "int4", ("int4", "forward", "nearest"), ("int4", "forward", "nearest")),
        ("fp8", "fp8_tensor", ("fp8_e5m2_tensor", "forward", "nearest"), ("fp8_e5m2_tensor", "forward", "nearest")),
        ("fp8_e4m3", "fp8", ("fp8", "forward", "nearest"), ("fp8", "forward", "nearest")),
        ("fp8_e5m2", "fp8_e5m2", ("fp8_e5m2", "forward", "nearest"), ("fp8_e5m2", "forward", "nearest")),
        ("fp8_full", "fp8", ("fp8_e5m2", "forward", "nearest"), ("fp8_e5m2", "forward", "nearest")),
        ("aqt_fp8", "fp8", ORIGINAL, ORIGINAL),
        (
            "aqt_fp8_full",
            "fp8_tensor",
            ("fp8_e5m2_tensor", "fp8_e5m2_tensor", "nearest"),
            ("fp8_e5m2_tensor", "fp8_e5m2_tensor", "nearest"),
        ),
        ("serve_fp8_weight", "fp8_tensor", FLOAT, FLOAT),
    ],
)
def test_the_three_products(value, forward, dlhs, drhs):
    made = policy(value)
    assert (made.weight.name, made.activation.name) == (forward, forward)
    assert (arm(made.dlhs), arm(made.drhs)) == (dlhs, drhs)


def test_what_int8_and_fp8_mean_with_qwix():
    int8, fp8 = (policy(value, use_qwix_quantization=True) for value in ("int8", "fp8"))
    assert (int8.weight.format.name, arm(int8.drhs)) == ("int8", ("int8", "forward", "nearest"))
    assert int8.weight.format.min == -128  # AQT's ends at -127
    assert policy("int8").weight.format.min == -127
    assert (fp8, fp8.delayed) == (policy("fp8_e4m3"), None)
    assert fb.recipe("maxtext/int8_qwix") == fb.maxtext_recipe("int8", use_qwix_quantization=True)


def test_delayed_scaling_and_its_kin():
    assert policy("fp8") == policy("fp8_gpu")
    assert policy("nanoo_fp8") == policy("fp8_nanoo")
    assert policy("fp8").delayed == fb.DelayedScaling(1024, 0)
    fnuz = policy("nanoo_fp8")
    assert (fnuz.weight.format.name, fnuz.drhs.gradient.format.name) == ("e4m3fnuz", "e5m2fnuz")


def test_aqt_masks_no_gradient_and_splits_the_batch():
    for value in ("int8", "aqt_fp8", "aqt_fp8_full"):
        assert not policy(value).clips_gradient
    assert policy("int4").clips_gradient
    assert policy("int8").drhs.tiled_axis == "first"
    assert policy("int4").drhs.tiled_axis == "last"


def test_shard_counts():
    none = policy("int8", quantization_local_shard_count=0)
    assert (arm(none.drhs), none.dlhs) == (ORIGINAL, policy("int8").dlhs)
    assert policy("int4", quantization_local_shard_count=1) == policy("int4")
    with pytest.raises(fb.UnsupportedError, match=r"shard_count=4: .* depends on the batch. Pass 0 or 1"):
        policy("int8", quantization_local_shard_count=4)
    with pytest.raises(fb.UnsupportedError, match=r"Pass 1,"):
        policy("int4", quantization_local_shard_count=0)


def test_the_calibrations_of_fp8_full():
    made = policy(
        "fp8_full",
        weight_quantization_calibration_method="fixed,-0.6,0.6",
        act_quantization_calibration_method="absmax,0.9",
        bwd_quantization_calibration_method="rms,7",
        drhs_grad_quantization_calibration_method="fixed,2",
    )
    schemes = (made.weight, made.activation, made.dlhs.gradient, made.drhs.gradient)
    assert [str(s.calibration) for s in schemes] == ["fixed,-0.6,0.6", "absmax,0.9", "rms,7", "fixed,-2,2"]
    assert [s.tile for s in schemes] == [TENSOR, ROW, ROW, TENSOR]
    assert made.drhs.gradient.format.name == "e5m2"
    assert policy("fp8_full", bwd_quantization_calibration_method="rms,7").drhs.gradient == made.dlhs.gradient
    assert fb.recipe("maxtext/fp8_full").rules[0].ops == ("dot_general", "ragged_dot")
    for asymmetric in ("minmax", "fixed,-1,2"):
        with pytest.raises(fb.QuantError, match="is asymmetric"):
            policy("fp8_full", weight_quantization_calibration_method=asymmetric)


def test_the_sparsity_of_fp8_full():
    rule = fb.maxtext_recipe("fp8_full", weight_sparsity_n=2, weight_sparsity_m=4).rules[0]
    assert rule.sparsity == fb.Sparsity(2, 4, start_step=50, update_step=10)
    assert rule.policy == policy("fp8_full")
    with pytest.raises(fb.QuantError, match="weight_sparsity_n is 2 and weight_sparsity_m None; sparsity needs both"):
        fb.maxtext_recipe("fp8_full", weight_sparsity_n=2)
    with pytest.raises(fb.QuantError, match="'fp8_e4m3' does not read weight_sparsity_n"):
        fb.maxtext_recipe("fp8_e4m3", weight_sparsity_n=2, weight_sparsity_m=4)


def test_the_six_bounds_of_aqt_fp8_full():
    made = policy("aqt_fp8_full", constant_bound_config=(1, 2, 3, 4, 5, None))
    schemes = (made.activation, made.weight, made.dlhs.gradient, made.dlhs.operand, made.drhs.gradient, made.drhs.operand)
    assert [str(s.calibration) for s in schemes] == [*(f"fixed,-{i},{i}" for i in range(1, 6)), "absmax"]
    assert [s.format.name for s in schemes] == ["e4m3fn"] * 2 + ["e5m2"] * 4
    assert policy("aqt_fp8_full", constant_bound_config=()) == policy("aqt_fp8_full")
    with pytest.raises(fb.QuantError, match="has 2 numbers; it takes six"):
        policy("aqt_fp8_full", constant_bound_config=(1, 2))
    with pytest.raises(fb.QuantError, match="the range is empty"):  # 0 is a bound, not "none given"
        policy("aqt_fp8_full", constant_bound_config=(0, 1, 1, 1, 1, 1))


def test_serving_takes_activations_in_the_grain_of_the_weights():
    made = policy("serve_fp8_weight", weight_block_size=128)
    assert (made.weight.name, made.activation.name) == ("fp8_block128", "fp8_g128")
    fixed = policy("serve_fp8_weight", act_quantization_calibration_method="fixed,8")
    assert (str(fixed.activation.calibration), fixed.activation.tile) == ("fixed,-8,8", TENSOR)


@pytest.mark.parametrize("value", VALUES)
def test_every_value_has_its_preset(value):
    if value == "intmp":
        assert sum(name.startswith("maxtext/intmp/") for name in fb.RECIPES.names()) == 4
    else:
        assert fb.recipe(f"maxtext/{value}") == fb.maxtext_recipe(value)


def test_which_parameters():
    rule = fb.recipe("maxtext/int8").rules[0]
    for path in (
        "params/decoder/layers/mlp/wi_0/kernel",
        "decoder/moe_layers_3/mlp/wo",
        "layers/0/attn/q",
        "model/layers/1/w",
    ):
        assert rule.matches(path, ("dot_general",)), path
    for path in ("params/decoder/logits_dense/kernel", "token_embedder/embedding", "vision_encoder/layers_0/w/kernel"):
        assert not rule.matches(path, ("dot_general",)), path
    assert fb.maxtext_recipe("int8", path="mine/.*").rules[0].path == "mine/.*"


@pytest.mark.parametrize(
    ("value", "fields", "message"),
    [
        ("int9", {}, r"unknown quantization 'int9'; did you mean"),
        (
            "int8",
            {"act_quantization_calibration_method": "absmax"},
            r"'int8' does not read act_quan.* \(it reads quantization_local_sh",
        ),
        ("te_mxfp8", {"weight_block_size": 32}, r"does not read weight_block_size in MaxText \(it reads none\)"),
        ("int4", {"use_qwix_quantization": False}, "'int4' needs use_qwix_quantization=True"),
        ("aqt_fp8", {"use_qwix_quantization": True}, "'aqt_fp8' needs use_qwix_quantization=False"),
        ("intmp", {}, "needs quant_cfg_path"),
    ],
)
def test_refusals(value, fields, message):
    with pytest.raises(fb.QuantError, match=message):
        fb.maxtext_recipe(value, **fields)
