"""Plain-text tables that fit the terminal width."""

import dataclasses
import re
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

FILE_WIDTH = 160
"""The width of output to a file or a pipe."""

_GAP, _INDENT = "  ", "    "
_MIN_NAME = 16


@dataclasses.dataclass(frozen=True)
class Column:
    """One column of a table.

    Attributes:
        key: the field of a record that it shows.
        title: its heading; None: the key.
        align: "right" for numbers.
        kind: "exact" is never shortened nor wrapped; a "name" is elided in the middle; "words" are wrapped.
        rank: when the width is too small, the highest rank moves first to lines below the row, 0 last.
        narrowest: the smallest width of a column of words.
    """

    key: str
    title: str | None = None
    align: Literal["left", "right"] = "left"
    kind: Literal["exact", "name", "words"] = "exact"
    rank: int = 0
    narrowest: int = 24

    @property
    def heading(self) -> str:
        """The text above the column."""
        if self.title is None:
            return self.key
        return self.title


def output_width() -> int:
    """The width of the terminal; `FILE_WIDTH` when the output is not a terminal, or closed."""
    if sys.stdout is None or not sys.stdout.isatty():
        return FILE_WIDTH
    return shutil.get_terminal_size((FILE_WIDTH, 24)).columns


def table(
    records: Sequence[Mapping[str, object]],
    columns: Sequence[Column],
    *,
    width: int | None = None,
    title: str | None = None,
    footer: str | None = None,
) -> str:
    """A table with a row for each record.

    Columns that do not fit move to indented lines below each row, as `heading value`. Empty columns are left out. A number
    or shape is never shortened, even if it is wider than the table.

    Args:
        records: the rows; integers get thousands separators, floats four significant digits, None an empty cell.
        columns: the columns from left to right.
        width: characters per line; None: `output_width()`.
        title: the line above the table.
        footer: a sentence below the rows, separated by a line.

    >>> columns = [Column("scheme", kind="name"), Column("bytes", align="right")]
    >>> print(table([{"scheme": "nf4", "bytes": 4608}], columns, width=40))
    scheme  bytes
    nf4     4,608
    """
    if width is None:
        width = output_width()
    rows = [{column.key: cell(record.get(column.key)) for column in columns} for record in records]
    shown = [column for column in columns if any(row[column.key] for row in rows)] or list(columns)
    widths = {c.key: max([len(c.heading), *(len(row[c.key]) for row in rows)]) for c in shown}
    narrowest = {c.key: _narrowest(c, [row[c.key] for row in rows]) for c in shown if c.kind != "exact"}
    inline = _inline(shown, widths, narrowest, width)
    below = [column for column in shown if column not in inline]
    headings = {column.key: column.heading for column in inline}
    lines = wrapped(title or "", width).splitlines()
    lines += _first_lines(headings, inline, widths)
    for row in rows:
        lines += [*_first_lines(row, inline, widths), *_lines_below(row, below, width)]
    if footer is not None:
        rule = "-" * min(width, sum(widths[c.key] for c in inline) + len(_GAP) * (len(inline) - 1))
        lines += [rule, wrapped(footer, width)]
    return "\n".join(lines)


def cell(value: object) -> str:
    """The text of a cell.

    >>> cell(1234567), cell(5.3490684), cell(None), cell("nf4")
    ('1,234,567', '5.349', '', 'nf4')
    """
    if value is None:
        return ""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.4g}"


def wrapped(text: str, width: int) -> str:
    """The text wrapped between words, further lines indented like the first. "a ± b" is not broken.

    >>> print(wrapped("  perplexity 5.349 ± 0.002 of text", 20))
      perplexity
      5.349 ± 0.002 of
      text
    """
    indent = text[: len(text) - len(text.lstrip())]
    return "\n".join(_words_lines(re.split(r"(?<!±) +(?!±)", text.strip()), width, indent))


def elided(name: str, length: int) -> str:
    """A name shortened to `length` characters by an ellipsis in its first half.

    >>> elided("model.layers.0.mlp.up_proj.weight", 20)
    'model.…p_proj.weight'
    """
    if len(name) <= length:
        return name
    head = (length - 1) // 3
    return f"{name[:head]}…{name[len(name) - (length - 1 - head) :]}"


def _narrowest(column: Column, texts: Sequence[str]) -> int:
    """The smallest width of a column. Words are not broken, and elided names stay distinct."""
    if column.kind == "words":
        return max([column.narrowest, *(len(word) for text in texts for word in text.split())])
    different = set(texts)
    longest = max(map(len, different), default=0)
    lengths = range(min(_MIN_NAME, longest), longest + 1)
    return next((n for n in lengths if len({elided(text, n) for text in different}) == len(different)), longest)


def _inline(columns: Sequence[Column], widths: dict[str, int], narrowest: Mapping[str, int], width: int) -> list[Column]:
    """The columns of the first line of a row. Reduces their `widths` until they fit."""
    inline = list(columns)
    while True:
        excess = sum(widths[c.key] for c in inline) + len(_GAP) * (len(inline) - 1) - width
        if excess <= 0:
            return inline
        for column in reversed(inline):
            if column.kind == "words" and widths[column.key] - excess >= narrowest[column.key]:
                widths[column.key] -= excess
                return inline
        if movable := [c for c in inline if c.rank]:
            inline.remove(max(movable, key=lambda column: column.rank))
            continue
        for column in inline:
            if column.kind == "name" and widths[column.key] - excess >= narrowest[column.key]:
                widths[column.key] -= excess
                return inline
        if len(inline) == 1:
            if inline[0].kind != "exact":
                widths[inline[0].key] = width
            return inline
        inline.pop()


def _first_lines(row: Mapping[str, str], inline: Sequence[Column], widths: Mapping[str, int]) -> list[str]:
    """The lines of one row; columns of words may take several."""
    cells: list[list[str]] = []
    for column in inline:
        text, width = row[column.key], widths[column.key]
        if column.kind == "words":
            lines = list(_words_lines(text.split(), width, ""))
        elif column.kind == "name":
            lines = [elided(text, width)]
        else:
            lines = [text]
        justified = {"left": str.ljust, "right": str.rjust}[column.align]
        cells.append([justified(line, width) for line in lines])
    for cell_lines, column in zip(cells, inline, strict=True):
        cell_lines += [" " * widths[column.key]] * (max(1, *map(len, cells)) - len(cell_lines))
    return [_GAP.join(parts).rstrip() for parts in zip(*cells, strict=True)]


def _lines_below(row: Mapping[str, str], below: Sequence[Column], width: int) -> Iterator[str]:
    """The cells of the other columns, each after its heading. Only words are wrapped."""
    words: list[str] = []
    for column in below:
        text = row[column.key]
        if not text:
            continue
        if column.kind == "words":
            words += f"{column.heading} {text};".split()
            continue
        if column.kind == "name":
            text = elided(text, max(width - len(_INDENT) - len(column.heading) - 2, _MIN_NAME))
        words.append(f"{column.heading} {text};")
    if words:
        words[-1] = words[-1].removesuffix(";")
    return _words_lines(words, width, _INDENT)


def _words_lines(words: Sequence[str], width: int, indent: str) -> Iterator[str]:
    """Lines of words, each after the indent; words are not broken."""
    line = ""
    for word in words:
        if line and len(indent) + len(line) + 1 + len(word) > width:
            yield indent + line
            line = ""
        line = f"{line} {word}".removeprefix(" ")
    if line:
        yield indent + line
