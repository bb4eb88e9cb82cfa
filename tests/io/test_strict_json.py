"""JSON is read strictly, and every refusal names its file."""

import pytest

from fewbit import QuantError
from fewbit.io.strict_json import canonical, dumped, field, parsed, parsed_object


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b'{"a": 1, "a": 2}', "config.json: the key 'a' stands twice"),
        (b'{"a": NaN}', "config.json: NaN is no JSON number"),
        (b"\xff", "config.json is not UTF-8 text"),
        (b"{", "config.json is not valid JSON"),
        (b"", "config.json is not valid JSON"),
        (b"[" * 100_000, "config.json is not valid JSON: it is nested too deeply"),
        (b"1" * 5_000, "config.json is not valid JSON: Exceeds the limit"),
    ],
)
def test_what_is_not_json_is_one_clear_error(text, message):
    with pytest.raises(QuantError, match=message):
        parsed(text, "config.json")


def test_an_object_is_asked_for():
    with pytest.raises(QuantError, match=r"x\.json holds a JSON list, but an object is expected"):
        parsed_object(b"[]", "x.json")


def test_what_is_dumped_comes_back_in_the_same_order():
    value = {"b": [1, 2.5, None, True], "a": "ü"}
    assert list(parsed(dumped(value, "x"), "x")) == ["b", "a"]
    assert parsed(dumped(value, "x"), "x") == value


@pytest.mark.parametrize("value", [{"a": float("nan")}, {"a": b"bytes"}, {"a": {1, 2}}])
def test_what_json_cannot_say_is_refused(value):
    with pytest.raises(QuantError, match="facts cannot be written as JSON"):
        dumped(value, "facts")


def test_the_canonical_text_does_not_depend_on_order():
    assert canonical({"a": 1, "b": {"d": 2, "c": 3}}) == canonical({"b": {"c": 3, "d": 2}, "a": 1})


def test_fields_are_typed():
    assert field({"a": 1}, "a", int, "x") == 1
    with pytest.raises(QuantError, match="x has no 'b'"):
        field({"a": 1}, "b", int, "x")
    with pytest.raises(QuantError, match="x: 'a' is True, must be of type int"):
        field({"a": True}, "a", int, "x")
