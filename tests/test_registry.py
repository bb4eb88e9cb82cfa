"""The registry: order, doubled and unknown names, near names."""

import pytest

from fewbit._registry import Registry, near_names
from fewbit.errors import QuantError, UnsupportedError


@pytest.fixture
def colours() -> Registry[int]:
    registry: Registry[int] = Registry("colour")
    for value, name in enumerate(("red", "green", "blue")):
        assert registry.add(name, value) == value
    return registry


def test_names_and_values_stand_in_order(colours: Registry[int]):
    assert colours.names() == ("red", "green", "blue")
    assert list(colours) == [0, 1, 2]
    assert len(colours) == 3
    assert "red" in colours and "pink" not in colours and 7 not in colours


def test_a_name_is_taken_once(colours: Registry[int]):
    with pytest.raises(QuantError, match="colour 'red' is registered already; choose another name"):
        colours.add("red", 9)
    assert colours["red"] == 0


def test_removed_names_are_free_again(colours: Registry[int]):
    assert colours.remove("red") == 0
    assert "red" not in colours
    colours.add("red", 5)
    assert colours.names() == ("green", "blue", "red")


@pytest.mark.parametrize(
    ("name", "message"),
    [("gren", "unknown colour 'gren'; did you mean 'green'?"), ("x", "unknown colour 'x'; known: red, green, blue")],
)
def test_unknown_names_are_answered(colours: Registry[int], name: str, message: str):
    for ask in (colours.__getitem__, colours.remove):
        with pytest.raises(QuantError) as error:
            ask(name)
        assert str(error.value) == message


def test_near_names_are_at_most_three():
    assert near_names("int", ("int1", "int2", "int3", "int4")).count("'int") == 3


def test_unsupported_error_lists_every_reason():
    error = UnsupportedError("qmatmul cannot run", {"triton": "k is 100", "cpu": "no compiler"})
    assert str(error) == "qmatmul cannot run:\n  triton: k is 100\n  cpu: no compiler"
    assert error.reasons == {"triton": "k is 100", "cpu": "no compiler"}
    assert isinstance(error, NotImplementedError)
    assert str(UnsupportedError("no way")) == "no way"
    assert issubclass(QuantError, ValueError)
