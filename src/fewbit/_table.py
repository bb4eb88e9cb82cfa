"""Tables of plain text that fit a width: numbers and shapes stay whole, names are elided in the middle, the rest moves down."""

import dataclasses
import re
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

FILE_WIDTH = 160
"""The width where output goes to a file or a pipe."""

_GAP, _INDENT = "  ", "    "
_MIN_NAME = 16


@dataclasses.dataclass(frozen=True)
class Column:
    """One column of a table.

    Attributes:
        key: which field of a record it shows.
        title: its heading; None takes the key.
        align: "right" for numbers.
        kind: "exact" is never cut nor broken; a "name" is elided in the middle where it is too long; "words" go on in further
            lines.
        rank: 0 stays in the first line of a row as long as anything does; of the others the highest moves first to the lines
            below, where there is not enough width.
        narrowest: how narrow a column of words may become.
    """

    key: str
    title: str | None = None
    align: Literal["left", "right"] = "left"
    kind: Literal["exact", "name", "words"] = "exact"
    rank: int = 0
    narrowest: int = 24

    @property
    def heading(self) -> str:
        """What is written above it."""
        return self.key if self.title is None else self.title


def output_width() -> int:
    """The width of the terminal; `FILE_WIDTH` where the output is none."""
    return shutil.get_terminal_size((FILE_WIDTH, 24)).columns if sys.stdout.isatty() else FILE_WIDTH


def table(
    records: Sequence[Mapping[str, Any]],
    columns: Sequence[Column],
    *,
    width: int | None = None,
    title: str | None = None,
    footer: str | None = None,
) -> str:
    """The text of a table with a row for each record.

    Columns that do not fit beside the others move to indented lines below each row, as `heading value`. A column without any
    value is left out.

    Args:
        records: the rows; whole numbers get thousands separators, other floats four significant digits, None an empty cell.
        columns: what to show of them, from left to right.
        width: how many characters a line has; None takes `output_width()`.
        title: the line above the table.
        footer: a sentence below the rows, set off by a line.

    Returns:
        The lines, joined. A single number or shape that is wider than the table still stays whole.

    >>> columns = [Column("scheme", kind="name"), Column("bytes", align="right")]
    >>> print(table([{"scheme": "nf4", "bytes": 4608}], columns, width=40))
    scheme  bytes
    nf4     4,608
    """
    width = output_width() if width is None else width
    rows = [{column.key: cell(record.get(column.key)) for column in columns} for record in records]
    shown = [column for column in columns if any(row[column.key] for row in rows)] or list(columns)
    widths = {c.key: max([len(c.heading), *(len(row[c.key]) for row in rows)]) for c in shown}
    narrowest = {c.key: _narrowest(c, [row[c.key] for row in rows]) for c in shown if c.kind != "exact"}
    inline = _inline(shown, widths, narrowest, width)
    below = [column for column in shown if column not in inline]
    headings = {column.key: column.heading for column in inline}
    lines = wrapped(title, width).splitlines() if title else []
    lines += _first_lines(headings, inline, widths)
    for row in rows:
        lines += [*_first_lines(row, inline, widths), *_lines_below(row, below, width)]
    if footer is not None:
        lines += [
            "-" * min(width, sum(widths[c.key] for c in inline) + len(_GAP) * (len(inline) - 1)),
            wrapped(footer, width),
        ]
    return "\n".join(lines)


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


def wrapped(text: str, width: int) -> str:
    """A line broken between words, further lines indented as the first; a number stays beside its error.

    >>> print(wrapped("  perplexity 5.349 ± 0.002 of text", 20))
      perplexity
      5.349 ± 0.002 of
      text
    """
    indent = text[: len(text) - len(text.lstrip())]
    return "\n".join(_words_lines(re.split(r"(?<!±) +(?!±)", text.strip()), width, indent))


def elided(name: str, length: int) -> str:
    """A name of at most `length` characters, its middle replaced by a mark where it is longer; of the end more is kept.

    >>> elided("model.layers.0.mlp.up_proj.weight", 20)
    'model.…p_proj.weight'
    """
    if len(name) <= length:
        return name
    head = (length - 1) // 3
    return f"{name[:head]}…{name[len(name) - (length - 1 - head) :]}"


def _narrowest(column: Column, texts: Sequence[str]) -> int:
    """How narrow a column may become: words stay whole, and names that differ still do when they are elided."""
    if column.kind == "words":
        return max([column.narrowest, *(len(word) for text in texts for word in text.split())])
    different = set(texts)
    longest = max(map(len, different), default=0)
    lengths = range(min(_MIN_NAME, longest), longest + 1)
    return next((n for n in lengths if len({elided(text, n) for text in different}) == len(different)), longest)


def _inline(columns: Sequence[Column], widths: dict[str, int], narrowest: Mapping[str, int], width: int) -> list[Column]:
    """The columns of the first line; their widths are narrowed to what fits."""
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
    """The cells beside one another; words that go on take further lines."""
    cells = []
    for column in inline:
        text, width = row[column.key], widths[column.key]
        if column.kind == "words":
            cells.append(list(_words_lines(text.split(), width, "")) or [""])
        else:
            cells.append([elided(text, width) if column.kind == "name" else text])
    lines = []
    for place in range(max(map(len, cells))):
        parts = [each[place] if place < len(each) else "" for each in cells]
        padded = [
            part.rjust(widths[c.key]) if c.align == "right" else part.ljust(widths[c.key])
            for c, part in zip(inline, parts, strict=True)
        ]
        lines.append(_GAP.join(padded).rstrip())
    return lines


def _lines_below(row: Mapping[str, str], below: Sequence[Column], width: int) -> Iterator[str]:
    """The cells of the other columns, each after its heading; only words are broken."""
    words: list[str] = []
    for column in below:
        if text := row[column.key]:
            room = width - len(_INDENT) - len(column.heading) - 2
            text = elided(text, max(room, _MIN_NAME)) if column.kind == "name" else text
            item = f"{column.heading} {text};"
            words += item.split() if column.kind == "words" else [item]
    if words:
        words[-1] = words[-1].removesuffix(";")
    return _words_lines(words, width, _INDENT)


def _words_lines(words: Sequence[str], width: int, indent: str) -> Iterator[str]:
    """The words in lines of a width, each after the indent; a word is never broken."""
    line = ""
    for word in words:
        if line and len(indent) + len(line) + 1 + len(word) > width:
            yield indent + line
            line = word
        else:
            line = f"{line} {word}" if line else word
    if line:
        yield indent + line
