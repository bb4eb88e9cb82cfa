"""Methods by name."""

import pytest

import fewbit as fb
from fewbit.methods import METHODS, method


def test_every_method_has_its_name():
    assert {name: method(name).name for name in METHODS} == {name: name for name in METHODS}
    assert method("rtn") == fb.methods.RTN()
    with pytest.raises(fb.QuantError, match="unknown method 'gptw'; did you mean 'gptq'"):
        method("gptw")
