"""Registries of named formats, schemes, calibrations and recipes."""

import difflib
from collections.abc import Iterator
from typing import Generic, TypeVar

from .errors import QuantError

T = TypeVar("T")


class Registry(Generic[T]):
    """A mapping from unique names to values, in order of registration.

    >>> colours = Registry[int]("colour")
    >>> colours.add("red", 1)
    1
    >>> colours["rad"]
    Traceback (most recent call last):
    ...
    fewbit.errors.QuantError: unknown colour 'rad'; did you mean 'red'?
    """

    def __init__(self, kind: str):
        self.kind = kind
        self._values: dict[str, T] = {}

    def add(self, name: str, value: T) -> T:
        """Registers `value` under `name` and returns it; QuantError if the name exists."""
        if name in self._values:
            raise QuantError(f"{self.kind} {name!r} is registered already; choose another name")
        self._values[name] = value
        return value

    def remove(self, name: str) -> T:
        """Removes `name` and returns its value; for tests that register formats."""
        self[name]
        return self._values.pop(name)

    def __getitem__(self, name: str) -> T:
        if name not in self._values:
            raise QuantError(f"unknown {self.kind} {name!r}; {near_names(name, self.names())}")
        return self._values[name]

    def __contains__(self, name: object) -> bool:
        return name in self._values

    def __iter__(self) -> Iterator[T]:
        return iter(self._values.values())

    def __len__(self) -> int:
        return len(self._values)

    def names(self) -> tuple[str, ...]:
        """Every name, in order of registration."""
        return tuple(self._values)


def near_names(name: str, known: tuple[str, ...]) -> str:
    """The known names similar to `name`, or else all of them. They end an error message.

    >>> near_names("int44", ("int4", "nf4"))
    "did you mean 'int4'?"
    >>> near_names("zzz", ("int4", "nf4"))
    'known: int4, nf4'
    >>> near_names("INT4", ("int4", "nf4"))
    "did you mean 'int4'?"
    """
    near = difflib.get_close_matches(str(name), known, n=3) or difflib.get_close_matches(str(name).lower(), known, n=3)
    if near:
        return f"did you mean {' or '.join(repr(n) for n in near)}?"
    return "known: " + ", ".join(known)
