"""Flax, imported when it is used; the error says what brings it."""

import importlib
from types import ModuleType

from ..errors import UnsupportedError


def flax(name: str) -> ModuleType:
    """A module of Flax, such as `linen`.

    Args:
        name: its path below `flax`.

    Returns:
        The module.

    Raises:
        UnsupportedError: when flax is not installed.
    """
    try:
        return importlib.import_module(f"flax.{name}")
    except ModuleNotFoundError as error:
        raise UnsupportedError("flax is not installed; pip install fewbit[flax] brings it") from error
