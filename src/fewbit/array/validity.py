"""Validation of QArrays: do the leaves fit the scheme?

Reads only shapes and dtypes, so tracers and abstract arrays work too. Unflattening does not validate: JAX may put any
objects in place of leaves.
"""

from typing import Any

import numpy as np

from .._tiles import Tile, tile_counts
from ..errors import QuantError
from ..formats.format import AbstractFormat
from .packing import code_capacity, packed_length
from .qarray import QArray
from .scheme import Scheme

_BYTES = np.dtype(np.uint8)
_FLOAT32 = np.dtype(np.float32)


def refuse_invalid(q: QArray, what: str = "the QArray") -> None:
    """Raises QuantError unless the leaves fit the scheme. `what` names the array in the message.

    Args:
        q: the array.
        what: how the message names it.
    """
    if reason := misfit(q):
        raise QuantError(
            f"{what} is not valid: {reason}; fb.quantize, slices and reshapes of a QArray make valid ones, and so does "
            "jax.vmap with in_axes=0"
        )


def misfit(q: QArray) -> str | None:
    """Why the leaves of a QArray do not fit each other and its scheme. None if they do.

    Stacked arrays may have a scale for each element of an axis where the scheme's tile is longer. A zero point or a tensor
    scale may have one element along an axis where the scale has more.

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
    packed = tuple(codes.shape)
    axis = scheme.pack_axis + len(packed)
    if axis < 0:
        return f"codes have shape {packed}, and the scheme packs axis {scheme.pack_axis}"
    bits = scheme.format.bits
    length = code_capacity(packed[axis], bits) - q.slack
    if q.slack < 0 or length < 0 or packed_length(length, bits, scheme.packing) != packed[axis]:
        return (
            f"slack is {q.slack}, which {packed[axis]} bytes of {bits}-bit codes along axis {scheme.pack_axis} cannot have"
        )
    shape = (*packed[:axis], length, *packed[axis + 1 :])
    is_nested = isinstance(scheme.scale, Scheme)
    if is_nested != isinstance(q.scale, QArray):
        expected = {True: "a QArray", False: "an array"}[is_nested]
        return f"scale is a {type(q.scale).__name__}, expected {expected}, as scheme {scheme.name} stores scales"
    if is_nested:
        if (reason := misfit(q.scale)) is not None:
            return f"its scale, a QArray, is not valid: {reason}"
    elif (reason := _unlike("scale", q.scale, _stored_dtype(scheme.scale))) is not None:
        return reason
    counts = tuple(q.scale.shape)
    tiles = scheme.tiles(len(shape))
    expected = tile_counts(shape, tiles)
    if counts != expected and not _has_valid_lengths(counts, expected, shape, tiles):
        return f"scale has shape {counts}, expected {expected} for an array of shape {shape} in tiles {scheme.tile!r}"
    zero = tensor = None
    if scheme.zero_point is not None:
        zero = _stored_dtype(scheme.zero_point)
    if scheme.tensor_scale:
        tensor = _FLOAT32
    return _optional_misfit("zero_point", q.zero_point, zero, scheme, counts) or _optional_misfit(
        "tensor_scale", q.tensor_scale, tensor, scheme, counts
    )


def _has_valid_lengths(
    counts: tuple[int, ...], expected: tuple[int, ...], shape: tuple[int, ...], tiles: tuple[Tile, ...]
) -> bool:
    """Whether the scale has a valid length along each axis.

    Valid are one per tile, one per element, or one for an axis no longer than a tile.
    """
    return len(counts) == len(shape) and all(
        m in (n, k) or (m == 1 and (t is None or t >= k)) for m, n, k, t in zip(counts, expected, shape, tiles, strict=True)
    )


def _optional_misfit(name: str, leaf: Any, dtype: np.dtype | None, scheme: Scheme, counts: tuple[int, ...]) -> str | None:
    """Why a zero point or a tensor scale does not fit. `dtype` is None if the scheme has none."""
    if dtype is None:
        if leaf is None:
            return None
        return f"{name} is there, and scheme {scheme.name} has none"
    if leaf is None:
        return f"{name} is missing, and scheme {scheme.name} has one"
    if (reason := _unlike(name, leaf, dtype)) is not None:
        return reason
    shape = tuple(leaf.shape)
    if len(shape) == len(counts) and all(n in (1, m) for n, m in zip(shape, counts, strict=True)):
        return None
    return f"{name} has shape {shape}, expected {counts} as the scale, or 1 along an axis"


def _unlike(name: str, leaf: object, dtype: np.dtype) -> str | None:
    """Why a leaf is not an array of a dtype, or None."""
    found = getattr(leaf, "dtype", None)
    if found is None or not hasattr(leaf, "shape"):
        return f"{name} is a {type(leaf).__name__}, expected an array of {dtype.name}"
    if found != dtype:
        return f"{name} is {found}, expected {dtype.name}"
    return None


def _stored_dtype(holder: object) -> np.dtype:
    """The dtype of stored numbers: uint8 codes of a format, or the dtype itself."""
    if isinstance(holder, AbstractFormat):
        return _BYTES
    return np.dtype(holder)  # type: ignore[call-overload]
