"""Whether the leaves of a QArray fit its scheme: the one check of every entry that takes a QArray.

It reads shapes and dtypes only, so tracers and abstract arrays are checked like arrays. Unflattening does not check: JAX puts
anything in place of leaves there.
"""

from typing import Any

import numpy as np

from .._tiles import Tile, tile_counts
from ..errors import QuantError
from ..formats import AbstractFormat
from .packing import code_capacity, packed_length
from .qarray import QArray
from .scheme import Scheme

_BYTES = np.dtype(np.uint8)
_FLOAT32 = np.dtype(np.float32)


def refuse_invalid(q: QArray, what: str = "the QArray") -> None:
    """Raises a QuantError unless the leaves of a QArray fit each other and its scheme.

    Args:
        q: the array.
        what: how the message names it.
    """
    if reason := misfit(q):
        raise QuantError(f"{what} is not valid: {reason}; fb.quantize, slices and reshapes of a QArray make valid ones")


def misfit(q: QArray) -> str | None:
    """Why the leaves of a QArray do not fit each other and its scheme, or None when they do.

    An axis may have a scale for each element where the scheme's tile is longer: stacked arrays have that. A zero point or a
    tensor scale may have one element along an axis where the scale has more.

    Args:
        q: the array; its leaves may be tracers or abstract.

    Returns:
        The reason, or None.

    >>> import dataclasses
    >>> q = fb.quantize(jnp.ones((4, 8)), "int8")
    >>> misfit(dataclasses.replace(q, scale=q.scale[:1]))
    'scale has shape (1, 1), expected (4, 1) for an array of shape (4, 8) in tiles {...: 1, -1: None}'
    """
    scheme, codes = q.scheme, q.codes
    if (reason := _unlike("codes", codes, _BYTES)) is not None:
        return reason
    held = tuple(codes.shape)
    axis = scheme.pack_axis + len(held)
    if axis < 0:
        return f"codes have shape {held}, and the scheme packs axis {scheme.pack_axis}"
    bits = scheme.format.bits
    length = code_capacity(held[axis], bits) - q.slack
    if q.slack < 0 or length < 0 or packed_length(length, bits, scheme.packing) != held[axis]:
        return f"slack is {q.slack}, which {held[axis]} bytes of {bits}-bit codes along axis {scheme.pack_axis} cannot have"
    shape = (*held[:axis], length, *held[axis + 1 :])
    is_nested = isinstance(scheme.scale, Scheme)
    if is_nested != isinstance(q.scale, QArray):
        found = type(q.scale).__name__
        return (
            f"scale is a {found}, expected {'a QArray' if is_nested else 'an array'}, as scheme {scheme.name} stores scales"
        )
    if not is_nested and (reason := _unlike("scale", q.scale, _stored_dtype(scheme.scale))) is not None:
        return reason
    if (reason := misfit(q.scale) if is_nested else None) is not None:
        return f"its scale, a QArray, is not valid: {reason}"
    counts = tuple(q.scale.shape)
    tiles = scheme.tiles(len(shape))
    expected = tile_counts(shape, tiles)
    if counts != expected and not _is_stacked(counts, expected, shape, tiles):
        return f"scale has shape {counts}, expected {expected} for an array of shape {shape} in tiles {scheme.tile!r}"
    zero = None if scheme.zero_point is None else _stored_dtype(scheme.zero_point)
    return _misfit_beside("zero_point", q.zero_point, zero, scheme, counts) or _misfit_beside(
        "tensor_scale", q.tensor_scale, _FLOAT32 if scheme.tensor_scale else None, scheme, counts
    )


def _is_stacked(counts: tuple[int, ...], expected: tuple[int, ...], shape: tuple[int, ...], tiles: tuple[Tile, ...]) -> bool:
    """Whether each axis has the scales of its tiles, one for each element, or one for an axis that is no longer than a tile."""
    return len(counts) == len(shape) and all(
        m in (n, k) or (m == 1 and (t is None or t >= k)) for m, n, k, t in zip(counts, expected, shape, tiles, strict=True)
    )


def _misfit_beside(name: str, leaf: Any, dtype: Any, scheme: Scheme, counts: tuple[int, ...]) -> str | None:
    """Why a zero point or a tensor scale does not fit a scale of a shape; `dtype` is None where the scheme has none."""
    if (leaf is None) != (dtype is None):
        return f"{name} is {'missing' if leaf is None else 'there'}, and scheme {scheme.name} has {'none' if dtype is None else 'one'}"
    if leaf is None:
        return None
    if (reason := _unlike(name, leaf, dtype)) is not None:
        return reason
    shape = tuple(leaf.shape)
    fits = len(shape) == len(counts) and all(n in (1, m) for n, m in zip(shape, counts, strict=True))
    return None if fits else f"{name} has shape {shape}, expected {counts} as the scale, or 1 along an axis"


def _unlike(name: str, leaf: Any, dtype: np.dtype) -> str | None:
    """Why a leaf is no array of a dtype, or None."""
    found = getattr(leaf, "dtype", None)
    if found is None or not hasattr(leaf, "shape"):
        return f"{name} is a {type(leaf).__name__}, expected an array of {dtype.name}"
    return None if found == dtype else f"{name} is {found}, expected {dtype.name}"


def _stored_dtype(holder: Any) -> np.dtype:
    """The dtype of what a format or a dtype holds."""
    return _BYTES if isinstance(holder, AbstractFormat) else np.dtype(holder)
