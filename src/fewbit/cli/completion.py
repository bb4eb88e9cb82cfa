"""Shell completion of the names of recipes, schemes, methods and layouts.

The names are read from `catalogue.json` (see `listing.py`), since a shell waits for every completion and JAX takes seconds.
"""

import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

Described: TypeAlias = tuple[str, str]
"""A name and its description, which zsh and fish show."""


@functools.cache
def records(kind: str) -> list[dict[str, Any]]:
    """The records of a list of `catalogue.json`."""
    found: dict[str, list[dict[str, Any]]] = json.loads(
        Path(__file__).with_name("catalogue.json").read_text(encoding="utf-8")
    )
    return found[kind]


def recipe_names(incomplete: str) -> list[Described]:
    """The recipes and the schemes, each of which is a recipe, that begin so."""
    described = [(one["name"], one["description"]) for one in records("recipes")]
    names = {name for name, _ in described}
    described += [(name, text) for name, text in _schemes() if name not in names]
    return [one for one in described if one[0].startswith(incomplete)]


def scheme_lists(incomplete: str) -> list[Described]:
    """Lists of schemes, separated by commas, that begin so. The last scheme is completed."""
    before, _, last = incomplete.rpartition(",")
    if before:
        before += ","
    taken = before.split(",")
    return [(before + name, text) for name, text in _schemes() if name.startswith(last) and name not in taken]


def method_names(incomplete: str) -> list[Described]:
    """The methods and scalings that begin so. After `awq+` and `qep+` it is a method that goes with it."""
    before, plus, last = incomplete.rpartition("+")
    described = dict(_described("methods"))
    names = list(described)
    if plus:
        after = {one["name"]: one["followed by"] for one in records("methods")}
        names = after.get(before.rpartition("+")[2], [])
    return [(before + plus + name, described[name]) for name in names if name.startswith(last)]


def layout_names(incomplete: str) -> list[Described]:
    """The layouts of files that begin so."""
    return [one for one in _described("layouts") if one[0].startswith(incomplete)]


def _described(kind: str) -> Iterator[Described]:
    return ((one["name"], one["description"]) for one in records(kind))


def _schemes() -> Iterator[Described]:
    for one in records("schemes"):
        yield one["name"], f"{one['bits per weight']:g} bits per weight"
