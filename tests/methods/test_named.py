"""Methods by name."""

import pytest

import fewbit as fb
from fewbit.methods import METHODS, SCALINGS, method, scaled_method


def test_every_method_has_its_name():
    assert {name: method(name).name for name in METHODS} == {name: name for name in METHODS}
    assert method("rtn") == fb.methods.RTN()
    with pytest.raises(fb.QuantError, match="unknown method 'gptw'; did you mean 'gptq'"):
        method("gptw")
    with pytest.raises(fb.QuantError, match=r"known: rtn, gptq, gptq_mse, awq, imatrix, hqq, qep, rounding, smoothquant$"):
        method("nope")


def test_a_scaling_goes_with_any_method():
    assert scaled_method("gptq") == (None, fb.methods.GPTQ())
    assert scaled_method("awq") == (fb.methods.AWQScaling(), fb.methods.AWQ())
    for name in SCALINGS:
        scaling, _ = scaled_method(name)
        assert scaling is not None and scaling.name == name
        for codes in METHODS:
            assert scaled_method(f"{name}+{codes}") == (scaling, method(codes))
    with pytest.raises(fb.QuantError, match="unknown method 'smothquant'; did you mean 'smoothquant'"):
        scaled_method("smothquant")
    with pytest.raises(fb.QuantError, match=r"unknown method 'gptw'"):
        scaled_method("awq+gptw")
    with pytest.raises(fb.QuantError, match="unknown method ''; known: "):
        scaled_method("awq+")
    for name in ("smoothquant", "awq+gptq"):
        with pytest.raises(fb.QuantError, match=r"scales the inputs of products first.*fb\.methods\.scaled_method"):
            method(name)
