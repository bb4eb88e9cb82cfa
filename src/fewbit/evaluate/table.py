"""Tables for a terminal from plain records."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from rich import box
from rich.table import Table
from rich.text import Text


@dataclasses.dataclass(frozen=True)
class Column:
    """One column of a table.

    Attributes:
        key: which field of a record stands in it.
        title: what stands above it; None takes the key.
        align: "right" for numbers.
        no_wrap: whether a cell stays on one line.
    """

    key: str
    title: str | None = None
    align: Literal["left", "right"] = "left"
    no_wrap: bool = False


def table(
    records: Sequence[Mapping[str, Any]],
    columns: Sequence[Column],
    *,
    title: str | None = None,
    totals: Mapping[str, Any] | None = None,
) -> Table:
    """A table with a row for each record.

    Args:
        records: the rows; whole numbers get thousands separators, other floats four significant digits, None an empty cell.
        columns: what to show of them, from left to right.
        title: what stands above the table.
        totals: a last row, set off by a line.

    Returns:
        A table that a `rich.console.Console` prints.

    >>> from rich.console import Console
    >>> columns = [Column("scheme"), Column("bytes", align="right")]
    >>> Console(width=40).print(table([{"scheme": "nf4", "bytes": 4608}], columns))  # doctest: +NORMALIZE_WHITESPACE
     scheme  bytes
     nf4     4,608
    """
    result = Table(
        title=None if title is None else Text(title), title_justify="left", box=None, show_header=True, header_style="bold"
    )
    if totals is not None:
        result.box, result.show_edge = box.SIMPLE_HEAD, False
    for column in columns:
        heading = Text(column.key if column.title is None else column.title)
        result.add_column(heading, justify=column.align, no_wrap=column.no_wrap, overflow="fold")
    for record in records:
        result.add_row(*(Text(cell(record.get(column.key))) for column in columns))
    if totals is not None:
        result.add_section()
        result.add_row(*(Text(cell(totals.get(column.key)), style="bold") for column in columns))
    return result


def cell(value: Any) -> str:
    """A value as a cell shows it.

    >>> cell(1234567), cell(5.3490684), cell(None), cell("nf4")
    ('1,234,567', '5.349', '', 'nf4')
    """
    if value is None:
        return ""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
