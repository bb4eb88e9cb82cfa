"""Tables of text: numbers and shapes whole, names elided, the rest below."""

import re

import pytest

from fewbit._table import Column, elided, table, wrapped

NAME = "model.language_model.layers.0.self_attn.query_key_value_projection.weight"
COLUMNS = (
    Column("name", kind="name"),
    Column("shape", align="right"),
    Column("axis", rank=2),
    Column("bytes", align="right"),
    Column("why", kind="words", rank=1),
)
RECORDS = [
    {"name": "w[0]", "shape": "2 x 4x256x128", "axis": "-1,-2", "bytes": 262_144, "why": "no rule matches it"},
    {"name": NAME, "shape": "30 x 151936x16384", "axis": "", "bytes": 149_357_035_520, "why": ""},
]


@pytest.mark.finding(16)
@pytest.mark.parametrize("width", range(50, 201))
def test_each_number_and_shape_is_whole_at_every_width(width):
    text = table(RECORDS, COLUMNS, width=width, title="a table", footer="2 rows; 149,357,297,664 bytes")
    lines = text.splitlines()
    assert max(map(len, lines)) <= width
    for whole in ("2 x 4x256x128", "262,144", "30 x 151936x16384", "149,357,035,520", "149,357,297,664", "-1,-2"):
        assert sum(whole in line for line in lines) == 1, whole
    assert "no rule matches it" in re.sub(r"\s+", " ", text)
    assert "w[0]" in text
    shown = NAME if NAME in text else next(word for word in text.split() if "\N{HORIZONTAL ELLIPSIS}" in word)
    head, _, tail = shown.partition("\N{HORIZONTAL ELLIPSIS}")
    assert NAME.startswith(head) and NAME.endswith(tail) and len(shown) >= 16


def test_where_there_is_room_everything_stands_in_one_line():
    assert table(RECORDS, COLUMNS, width=160).splitlines()[1].split() == [
        *("w[0]", "2", "x", "4x256x128", "-1,-2", "262,144", "no", "rule", "matches", "it")
    ]


def test_what_does_not_fit_beside_goes_below_with_its_heading():
    text = table(RECORDS, COLUMNS, width=50)
    assert "    axis -1,-2; bytes 262,144; why no rule matches\n    it\n" in text


def test_a_column_without_values_is_left_out():
    assert table([{"name": "a", "bytes": 1}], COLUMNS, width=60) == "name  bytes\na         1"
    assert table([], COLUMNS, width=60).startswith("name")


def test_a_cell_that_is_wider_than_the_table_is_kept_whole():
    shape = "x".join(["1024"] * 20)
    assert shape in table([{"name": NAME, "shape": shape}], COLUMNS, width=50)


def test_names_and_sentences():
    assert elided(NAME, len(NAME)) == NAME and len(elided(NAME, 20)) == 20
    assert wrapped("  loss 1.25 ± 0.5 nats", 16) == "  loss\n  1.25 ± 0.5\n  nats"
