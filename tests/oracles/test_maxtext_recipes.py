"""MaxText's recipes against the configurations that AQT and Flax build for the same values."""

import dataclasses

import pytest

import fewbit as fb

pytestmark = pytest.mark.oracle
config = pytest.importorskip("aqt.jax.v2.config")


def arm_of(raw):
    """One backward product of AQT's in our words: bits of the gradient and of the other operand, rounding, the residual."""
    gradient, operand = raw.dg_quantizer.lhs.numerics, raw.dg_quantizer.rhs.numerics
    noise = gradient.noise_fn if hasattr(gradient, "bits") else None  # what is not rounded has no use for it
    words = (getattr(gradient, "bits", None), getattr(operand, "bits", None), "nearest" if noise is None else "stochastic")
    return (*words, raw.rhs.use_fwd_quant)


def our_arm(arm):
    bits = arm.gradient and arm.gradient.format.bits
    other = arm.operand.format.bits if isinstance(arm.operand, fb.Scheme) else None
    return bits, other, arm.rounding, arm.operand == "forward"


def assert_aqt_integer(scheme, quantizer, factor=1.0):
    """Narrow codes, the largest element (times the clip factor) on the edge of the last one."""
    numerics, top = quantizer.numerics, 2 ** (scheme.format.bits - 1) - 1
    assert (numerics.bits, numerics.preserve_zero, numerics.preserve_max_val, numerics.clip) == (
        scheme.format.bits,
        True,
        False,
        True,
    )
    assert (scheme.format.min, scheme.format.max) == (-top, top)
    assert scheme.calibration.factor == pytest.approx(factor * top / (top + 0.5))
    assert not numerics.clip_gradient


@pytest.mark.parametrize(("shards", "drhs_bits"), [(1, 8), (0, None)])
def test_int8_is_config_v3(shards, drhs_bits):
    theirs = config.config_v3(
        fwd_bits=8, dlhs_bits=8, drhs_bits=drhs_bits, rng_type="jax.uniform", dlhs_local_aqt=None, drhs_local_aqt=None
    )
    ours = fb.maxtext_recipe("int8", quantization_local_shard_count=shards).rules[0].policy
    assert_aqt_integer(ours.activation, theirs.fwd.dg_quantizer.lhs)
    assert_aqt_integer(ours.weight, theirs.fwd.dg_quantizer.rhs)
    assert our_arm(ours.dlhs) == arm_of(theirs.dlhs) == (8, 8, "stochastic", False)
    assert our_arm(ours.drhs) == arm_of(theirs.drhs)
    assert not ours.clips_gradient


@pytest.mark.parametrize(("w_bits", "a_bits"), [(4, 8), (8, 8)])
def test_intmp_is_dot_general_make(w_bits, a_bits):
    theirs = config.dot_general_make(lhs_bits=a_bits, rhs_bits=w_bits)
    ours = fb.maxtext_mixed_precision({"__default__": {"w_bits": w_bits, "a_bits": a_bits}}).rules[0].policy
    assert_aqt_integer(ours.activation, theirs.fwd.dg_quantizer.lhs)
    assert_aqt_integer(ours.weight, theirs.fwd.dg_quantizer.rhs)
    assert our_arm(ours.dlhs) == arm_of(theirs.dlhs) == (None, None, "nearest", True)
    assert our_arm(ours.drhs) == arm_of(theirs.drhs)


def test_aqt_fp8_is_config_fwd_fp8():
    theirs, ours = config.config_fwd_fp8(), fb.recipe("maxtext/aqt_fp8").rules[0].policy
    numerics = theirs.fwd.dg_quantizer.rhs.numerics
    assert (numerics.exponent_bits, numerics.mantissa_bits) == (ours.weight.format.exponent, ours.weight.format.mantissa)
    assert our_arm(ours.dlhs) == arm_of(theirs.dlhs) == (None, None, "nearest", False)
    assert our_arm(ours.drhs) == arm_of(theirs.drhs)


@pytest.mark.parametrize(("value", "operation"), [("fp8", "Fp8DirectDotGeneralOp"), ("nanoo_fp8", "NANOOFp8DotGeneralOp")])
def test_delayed_fp8_is_flax_own(value, operation):
    fields = {f.name: f.default for f in dataclasses.fields(getattr(pytest.importorskip("flax.linen.fp8_ops"), operation))}
    ours = fb.recipe(f"maxtext/{value}").rules[0].policy
    assert ours.delayed == fb.DelayedScaling(length=fields["amax_history_length"], margin=0)
    assert {ours.weight, ours.activation} == {ours.weight}
    assert f"float8_{ours.weight.format.name}" == fields["e4m3_dtype"].dtype.name
    assert {f"float8_{arm.gradient.format.name}" for arm in (ours.dlhs, ours.drhs)} == {fields["e5m2_dtype"].dtype.name}
