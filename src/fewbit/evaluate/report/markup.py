"""Pieces of HTML: cells, rows, tables, boxes, lists, decibels."""

import math
from collections.abc import Iterable, Sequence
from html import escape


def cell(text: str, kind: str = "") -> str:
    """A cell of a table; the text is escaped."""
    if kind:
        return f'<td class="{kind}">{escape(text)}</td>'
    return f"<td>{escape(text)}</td>"


def number(text: str) -> str:
    """A cell of a column of numbers."""
    return cell(text, "number")


def row(cells: Iterable[str]) -> str:
    """A row of a table."""
    return f"<tr>{''.join(cells)}</tr>"


def table(name: str, headings: Sequence[str], rows: Sequence[str], *, kind: str = "") -> str:
    """A table in a box of its own that scrolls.

    The keyboard scrolls it, too. A heading that begins with `#` is that of a column of numbers.
    """
    head = "".join(map(_heading, headings))
    body = "\n".join(rows)
    content = f"<table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table>"
    return box(content, name, kind)


def _heading(text: str) -> str:
    if text.startswith("#"):
        return f'<th scope="col" class="number">{escape(text[1:])}</th>'
    return f'<th scope="col">{escape(text)}</th>'


def box(content: str, name: str, kind: str) -> str:
    """Content in a box that scrolls, by keyboard too. `name` is for screen readers."""
    classes = f"box {kind}".strip()
    return f'<div class="{classes}" role="region" aria-label="{escape(name)}" tabindex="0">\n{content}\n</div>\n'


def bullets(sentences: Iterable[str]) -> str:
    """A list of sentences; empty without any."""
    items = "".join(f"<li>{escape(sentence)}</li>" for sentence in sentences)
    if not items:
        return ""
    return f"<ul>{items}</ul>\n"


def decibels(value: float | None) -> str:
    """An SQNR as text. `=` for equal weights, nothing where it was not measured; NaN and minus infinity as they are."""
    if value is None:
        return ""
    if value == math.inf:
        return "="
    return f"{value:.2f}"


def decibels_in_words(value: float | None) -> str:
    """An SQNR in a sentence."""
    if value == math.inf:
        return "equal to the source's"
    return f"{decibels(value)} dB"
