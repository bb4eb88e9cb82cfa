"""A griffe extension: the examples of a docstring (`>>> ...`) become code blocks, whatever section they stand in."""

import re
from typing import Any

import griffe

EXAMPLE = re.compile(r"((?:^[ \t]*>>> .*\n?)(?:^[ \t]*\S.*\n?)*)", re.MULTILINE)


def fenced(text: str) -> str:
    """Puts a fence around each run of lines that starts with a prompt and ends at an empty line."""
    return EXAMPLE.sub(lambda found: "```pycon\n" + found.group(1).rstrip("\n") + "\n```\n", text)


class Examples(griffe.Extension):
    """Fences the examples of every docstring that griffe reads."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called for each object; the docstring is what the page is made of."""
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)
