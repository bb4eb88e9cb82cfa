"""Delayed scaling as a policy's wish: its JSON, and what it refuses."""

import dataclasses

import pytest

import fewbit as fb
from fewbit.training import DelayedScale


def test_a_policy_carries_it_in_json():
    policy = fb.Policy("fp8_tensor", "fp8_tensor", "fp8_e5m2_tensor", "fp8_e5m2_tensor", delayed={"length": 16, "margin": 1})
    assert policy.delayed == fb.DelayedScaling(16, 1)
    assert fb.Policy.from_json(policy.to_json()) == policy
    assert policy.to_json()["delayed"] == {"length": 16, "margin": 1}
    assert str(policy).endswith("delayed scales")
    assert "delayed" not in fb.Policy("fp8_tensor").to_json()


def test_its_fields_are_those_that_the_state_is_made_of():
    wish = fb.DelayedScaling(length=8, margin=2)
    state = DelayedScale.init("e5m2", **dataclasses.asdict(wish))
    assert (state.amax_history.shape, state.margin) == ((8,), 2)


WHOLE_INT8 = fb.Scheme(fb.FORMATS["int8"], {})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: fb.DelayedScaling(length=0), "length is 0, must be at least 1 step"),
        (
            lambda: fb.Policy("fp8", delayed={}),
            "needs one float32 scale per tensor.* weight is fp8. Use a scheme such as fp8_tensor",
        ),
        (lambda: fb.Policy("fp8_tensor", "mxfp8", delayed={}), "activation is mxfp8"),
        (lambda: fb.Policy("fp8_tensor", drhs="fp8_e5m2", delayed={}), "drhs is fp8_e5m2"),
        (lambda: fb.Policy("ternary", delayed={}), "weight is ternary"),
        (
            lambda: fb.Policy("fp8_tensor", dlhs=fb.Arm(WHOLE_INT8, rounding="stochastic"), delayed={}),
            "stochastic rounding is biased; use a narrow range, such as int8_narrow",
        ),
        (
            lambda: fb.Policy("fp8_tensor", delayed={"lenght": 3}),
            "delayed scaling has no field 'lenght'; did you mean 'length'",
        ),
    ],
)
def test_refusals(make, message):
    with pytest.raises(fb.QuantError, match=message):
        make()
