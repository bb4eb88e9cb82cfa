"""Lazy import of Flax."""

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any, Protocol, runtime_checkable

from ..errors import UnsupportedError


@runtime_checkable
class LinenModule(Protocol):
    """A Linen module, as a type that needs no import of Flax."""

    @property
    def apply(self) -> Callable[..., Any]:
        """Calls a method on variables."""
        ...


def flax(name: str) -> ModuleType:
    """Imports `flax.<name>`, such as `linen`.

    Raises:
        UnsupportedError: when flax is not installed.
    """
    try:
        return importlib.import_module(f"flax.{name}")
    except ModuleNotFoundError as error:
        raise UnsupportedError("flax is not installed; pip install fewbit[flax] brings it") from error
