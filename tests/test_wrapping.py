"""Wrappers with the name, docstring and signature of the function that they wrap."""

import inspect
from typing import Any

import pytest

import fewbit as fb
from fewbit._wrapping import copy_signature, refuse_shared_keywords, signature_of


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


def test_a_keyword_of_both_is_refused_unless_the_function_has_its_own_by_position():
    def noisy(params, x, key=None):
        pass

    for fn, args, passed in ((noisy, (0, 0, 1), {"key": 1}), (noisy, (0, 0), {"key": None}), (named, (0, 0), {"key": 1})):
        refuse_shared_keywords(signature_of(fn), args, passed, "fb.train")
    refuse_shared_keywords(None, (), {"key": 1}, "fb.train")
    with pytest.raises(fb.QuantError, match=r"the function takes key= and so does fb\.train, so it is unclear whose it is"):
        refuse_shared_keywords(signature_of(noisy), (0, 0), {"key": 1}, "fb.train")


def test_an_object_that_is_called_has_no_name():
    class Model:
        def __call__(self, x):
            return x

    fn = wrapper()
    copy_signature(Model(), fn)
    assert fn.__name__ == "<lambda>" and list(inspect.signature(fn).parameters) == ["x"]
