"""Formats in JSON, through real JSON text, and what is refused."""

import json

import pytest

from fewbit.errors import QuantError
from fewbit.formats import (
    E8M0,
    FORMATS,
    Binary,
    Codebook,
    Integer,
    Minifloat,
    Ternary,
    format_from_json,
    format_to_json,
)

UNREGISTERED = [
    Integer("i", 5, signed=True, narrow=True, step=0.25),
    Minifloat("m", 3, 3, 5, "fn"),
    Codebook("c", (0.1, -2.0, 3.5)),
    E8M0("e"),
    Binary("b"),
    Ternary("t"),
]


@pytest.mark.parametrize("fmt", UNREGISTERED, ids=lambda f: f.name)
def test_unregistered_formats_are_written_in_full(fmt):
    form = format_to_json(fmt)
    assert isinstance(form, dict)
    assert format_from_json(json.loads(json.dumps(form))) == fmt


def test_a_registered_name_with_other_fields_is_written_in_full():
    impostor = Integer("int4", 3)
    assert format_from_json(json.loads(json.dumps(format_to_json(impostor)))) == impostor != FORMATS["int4"]


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ("int44", r"unknown format 'int44'; did you mean .*'int4'"),
        ({"name": "x"}, "a format lacks the field 'kind'"),
        ({"kind": "posit", "name": "x"}, "a format: kind is 'posit'; known: integer, minifloat"),
        (
            {"kind": "integer", "name": "x", "wdith": 4},
            r"a format has no field 'wdith'; did you mean 'width'",
        ),
        ({"kind": "integer", "width": 4}, "a format lacks the field 'name'"),
        ({"kind": "integer", "name": "x", "width": 9}, "width is 9"),
        ({"kind": "codebook", "name": "x", "table": [1]}, "this one has 1"),
        ({"kind": "codebook", "name": "x", "table": ["a", "b"]}, r"a format: table\[0\] is 'a'; expected float"),
    ],
    ids=str,
)
@pytest.mark.usefixtures("unchecked")
def test_refusals(form, message: str):
    with pytest.raises(QuantError, match=message):
        format_from_json(form)
