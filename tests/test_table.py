"""Tables from records."""

from rich.console import Console

from fewbit.evaluate.table import Column, table


def printed(shown):
    console = Console(width=60, markup=True)
    with console.capture() as capture:
        console.print(shown)
    return capture.get()


def test_cells_are_printed_as_they_are():
    text = printed(
        table([{"path": "w[0]", "axis": "[-1]", "bytes": 1234567}], [Column(k) for k in ("path", "axis", "bytes")])
    )
    assert "w[0]" in text
    assert "[-1]" in text
    assert "1,234,567" in text


def test_totals_stand_below():
    lines = printed(table([{"a": 1}, {"a": 2}], [Column("a", "number")], totals={"a": 3})).split()
    assert lines[0] == "number"
    assert lines[-1] == "3"
