"""Strategies of compressed-tensors: which elements share a scale."""

from collections.abc import Sequence
from typing import Any

from ...._tiles import Tile
from ....array.scheme import Scheme
from ....formats.format import AbstractFormat
from ....formats.integer import Integer
from .layout import Module


def strategy_of(scheme: Scheme, shape: Sequence[int]) -> dict[str, Any]:
    """The `strategy` of a matrix, with its group size or block. `strategy` is None if there is none."""
    rows, columns = scheme.tiles(2)
    if rows == 1 and (columns is None or columns >= shape[1]):
        return {"strategy": "channel", "group_size": None}
    if rows == 1 and columns is not None and shape[1] % columns == 0:
        return {"strategy": "group", "group_size": columns}
    if rows is None and columns is None:
        return {"strategy": "tensor", "group_size": None}
    if rows is not None and columns is not None and rows > 1:
        return {"strategy": "block", "group_size": None, "block_structure": [rows, columns]}
    return {"strategy": None}


def why_not_scaled(scheme: Scheme, shape: Sequence[int]) -> str | None:
    """Why the scales of a scheme have no strategy."""
    if isinstance(scheme.scale, AbstractFormat | Scheme):
        return "its scales are floats there"
    if strategy_of(scheme, shape)["strategy"] is None:
        return f"groups must divide rows of {shape[1]} elements"
    return None


def why_not_integer(scheme: Scheme) -> str | None:
    """Why the numbers of an integer scheme are not stored."""
    fmt, zero = scheme.format, scheme.zero_point
    if not isinstance(fmt, Integer) or fmt.step != 1:
        return "its integers have steps of 1 there"
    if zero is None:
        return None if fmt.signed else "unsigned integers need a zero point there"
    if not isinstance(zero, Integer) or (zero.bits, zero.signed, zero.step) != (fmt.bits, fmt.signed, 1):
        return "zero points are integers of as many bits as the codes there"
    return None


def stored_tiles(module: Module, shape: tuple[int, int], counts: tuple[int, ...]) -> tuple[Tile, Tile]:
    """The tiles of a matrix from the shape of its stored scales."""
    rows, columns = shape
    blocks = module.arguments.blocks(module.where)
    if blocks is not None and counts == tuple(-(-n // size) for n, size in zip(shape, blocks, strict=True)):
        return blocks
    if counts in ((1,), ()) and module.arguments.strategy in ("tensor", None):
        return None, None
    if counts in ((rows,), (rows, 1)):
        return 1, None
    if len(counts) == 2 and counts[0] == rows and counts[1] > 0 and columns % counts[1] == 0:
        return 1, columns // counts[1]
    if counts in ((1,), (), (1, 1)):
        return None, None
    raise module.fault(f"has scales of shape {counts} for a weight of shape {shape}")
