"""A griffe extension: the examples of a docstring (`>>> ...`) become code blocks, in any section.

Powers (`2**-126`) stay as they are written.
"""

import re
from typing import Any

import griffe

EXAMPLE = re.compile(r"((?:^[ \t]*>>> .*\n?)(?:^[ \t]*\S.*\n?)*)", re.MULTILINE)
POWER = re.compile(EXAMPLE.pattern + r"|(`[^`]*`)|(?<=\d)(\*\*)(?=[-\d])", re.MULTILINE)


def escaped(text: str) -> str:
    """Escapes the stars of `2**-126` outside of examples and code, where markdown takes two of them for bold text."""
    return POWER.sub(lambda found: r"\*\*" if found.group(3) else found.group(), text)


def fenced(text: str) -> str:
    """Puts a fence around each run of lines that starts with a prompt and ends at an empty line."""
    return EXAMPLE.sub(lambda found: "```pycon\n" + found.group(1).rstrip("\n") + "\n```\n", text)


class Examples(griffe.Extension):
    """Fences the examples of every docstring that griffe reads."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called for each object; the docstring is what the page is made of."""
        if obj.docstring is not None:
            obj.docstring.value = fenced(escaped(obj.docstring.value))
