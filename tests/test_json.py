"""JSON is read strictly, and every refusal names its file."""

import dataclasses
import errno
import json
import pathlib
from typing import Literal

import msgspec
import pytest

from fewbit import QuantError
from fewbit._json import (
    Positive,
    canonical,
    checked,
    converted,
    dumped,
    form_of,
    parsed,
    parsed_object,
    schema_document,
    write_json,
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b'{"a": 1, "a": 2}', "config.json: the key 'a' appears twice"),
        (b'{"a": NaN}', "config.json: NaN is not a JSON number"),
        (b"\xff", "config.json is not UTF-8 text"),
        (b"{", "config.json is not valid JSON"),
        (b"", "config.json is not valid JSON"),
        (b"[" * 100_000, "config.json is not valid JSON: it is nested too deeply"),
        (b"1" * 5_000, "config.json: an integer of 5000 digits \\(1+...\\); at most 64 are read"),
    ],
)
def test_what_is_not_json_is_one_clear_error(text, message):
    with pytest.raises(QuantError, match=message):
        parsed(text, "config.json")


def test_an_object_is_asked_for():
    with pytest.raises(QuantError, match=r"x\.json is a JSON list, but an object is expected"):
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


class Size(msgspec.Struct):
    rows: Positive = msgspec.field(name="number.of.rows")


@dataclasses.dataclass(frozen=True)
class Box:
    """A box.

    Attributes:
        sizes: its sizes, of which
            there are many.
        colour: its colour.
    """

    sizes: dict
    colour: Literal["red", "blue"] = "red"


BOX = form_of(Box, sizes=dict[str, list[Size]])


@pytest.mark.finding(18)
@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([], r"x is \[\]; expected object with the fields sizes, colour"),
        ({}, "x lacks the field 'sizes'; its fields are sizes, colour"),
        ({"sizes": {}, "color": 1}, "x has no field 'color'; did you mean 'colour'?"),
        ({"sizes": {}, "colour": "rad"}, "x: colour is 'rad'; did you mean 'red'?"),
        ({"sizes": {"a": [], "b c": 3}}, r"x: sizes\['b c'\] is 3; expected array"),
        ({"sizes": {"a": [], "b": [{"number.of.rows": 0}]}}, r"x: sizes.b\[0\].number.of.rows is 0; expected int >= 1"),
        ({"sizes": {"a": [{"number.of.rows": True}]}}, r"x: sizes.a\[0\].number.of.rows is True; expected int"),
        ({"sizes": {"a": [{"rows": 1}]}}, r"x: sizes.a\[0\] lacks the field 'number.of.rows'$"),
        ({"sizes": {1: []}}, "x: sizes has a key that is 1; expected str"),
    ],
)
def test_what_does_not_fit_a_schema_is_named_with_its_place(value, message):
    with pytest.raises(QuantError, match=message):
        converted(value, BOX, "x")


def test_a_schema_is_made_of_a_dataclass():
    document = schema_document(BOX, "box")
    assert document["properties"]["sizes"]["description"] == "its sizes, of which there are many."
    assert (document["title"], document["required"], document["additionalProperties"]) == ("box", ["sizes"], False)
    assert checked({"sizes": {}}, BOX, "x") == {"sizes": {}}


@pytest.mark.finding(18)
@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b'{"a": ' * 65 + b"1" + b"}" * 65, "nested too deeply \\(65 levels, at most 64 are read\\)"),
        (b"[" + b"0," * 4_000_000 + b"0]", "has 4,000,002 values; at most 4,000,000 are read"),
        (b" " * 100_000_001, "has 100,000,001 bytes of JSON; at most 100,000,000 are read"),
        (b"[1e999]", "1e999 is beyond the range of float64"),
        (b'["\\ud800"]', "half of a surrogate pair"),
    ],
    ids=["depth", "count", "length", "range", "surrogate"],
)
def test_limits_end_in_one_clear_error(text, message):
    with pytest.raises(QuantError, match=message):
        parsed(text, "x")


def test_what_is_within_the_limits_is_read():
    deep = b"[" * 64 + b"]" * 64
    assert parsed(b'["\\ud83d\\ude00", "[{[{", ' + b"9" * 64 + b"]", "x")[:2] == ["\U0001f600", "[{[{"]
    assert parsed(deep, "x")
    assert len(parsed(b"[" + b'"[[[",' * 100 + b"1]", "x")) == 101


def test_a_file_keeps_its_content_until_the_new_one_is_complete(tmp_path, monkeypatch):
    file = tmp_path / "plan.json"
    write_json(file, {"a": 1})
    (tmp_path / "link.json").symlink_to(file)
    write_json(tmp_path / "link.json", {"a": 2})
    assert (tmp_path / "link.json").is_symlink() and json.loads(file.read_text()) == {"a": 2}
    written = pathlib.Path.write_bytes

    def full(path, data):
        written(path, data[:4])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(pathlib.Path, "write_bytes", full)
    with pytest.raises(OSError, match=r"No space left on device: '.*plan\.json'"):
        write_json(file, {"a": 3})
    assert json.loads(file.read_text()) == {"a": 2}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.json", "plan.json"]
