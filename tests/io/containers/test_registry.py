"""The containers: unique names, one class a file, schemes that exist."""

import pytest

import fewbit as fb
from fewbit.errors import QuantError
from fewbit.io.containers.registry import CONTAINERS, container


def test_names_are_unique_and_found():
    assert [container(one.name) for one in CONTAINERS] == list(CONTAINERS)
    with pytest.raises(QuantError, match="'zip' is not a container"):
        container("zip")


def test_each_names_schemes_that_exist():
    for one in CONTAINERS:
        assert [fb.scheme(name) for name in one.schemes]


@pytest.mark.parametrize("found", CONTAINERS, ids=lambda one: one.name)
def test_a_model_without_quantized_weights_is_refused(found):
    with pytest.raises(fb.UnsupportedError, match=f"no weight is quantized, and {found.name} is for quantized models"):
        found.check(())
