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
