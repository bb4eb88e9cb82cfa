"""Wrappers with the name, docstring and signature of the function that they wrap."""

import inspect
from typing import Any

import pytest

from fewbit._wrapping import copy_signature, signature_of


def wrapper() -> Any:
    return lambda *args, **kwargs: (args, kwargs)


def named(params, /, x, *rest, scale: float = 1.0, **more):
    """Some text."""


@pytest.mark.parametrize(
    ("second", "keywords", "expected"),
    [
        (None, (), "(params, /, x, *rest, scale: float = 1.0, **more)"),
        (None, ("key", "scale"), "(params, /, x, *rest, scale: float = 1.0, key=None, **more)"),
        ("adapters", (), "(params, adapters, /, x, *rest, scale: float = 1.0, **more)"),
    ],
)
def test_a_wrapper_has_the_name_the_text_and_the_signature(second, keywords, expected):
    fn = wrapper()
    copy_signature(named, fn, second, keywords)
    assert (fn.__name__, fn.__doc__, fn.__module__) == ("named", "Some text.", __name__)
    assert str(inspect.signature(fn)) == expected


def test_what_has_no_signature_keeps_that_of_the_wrapper():
    for one in (max, lambda *args: args):
        fn = wrapper()
        copy_signature(one, fn, second="adapters")
        assert str(inspect.signature(fn)) == "(*args, **kwargs)"
    assert signature_of(max) is None


def test_an_object_that_is_called_has_no_name():
    class Model:
        def __call__(self, x):
            return x

    fn = wrapper()
    copy_signature(Model(), fn)
    assert fn.__name__ == "<lambda>" and list(inspect.signature(fn).parameters) == ["x"]
