"""AxisMove: how layout operations move axes and tiles."""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex_core
from jaxtyping import Array

from ..errors import QuantError
from .layout import Axis, regrouped, reshaped, sliced

Groups: TypeAlias = tuple[tuple[Sequence[int], Sequence[int]], ...]

UNMOVED = (
    *("convert_element_type", "copy", "copy_p", "name", "stage", "stop_gradient"),
    *("sharding_constraint", "reshard", "pvary", "ppermute"),
)
"""The primitives whose result has every element of their operand in its place."""

LAYOUT_PRIMITIVES = (
    *UNMOVED,
    *("transpose", "reshape", "squeeze", "expand_dims", "broadcast_in_dim", "slice", "dynamic_slice", "split", "rev"),
    "all_gather",
)
"""The primitives whose results are elements of their first operand, in whole axes or slices."""


@dataclasses.dataclass(frozen=True)
class AxisMove:
    """One result of a layout operation, as a sequence of five steps.

    They are a transpose, a slice, a reshape, a broadcast and a reversal, in this order.

    Attributes:
        shape: the shape of the operand.
        order: the operand's axis for each axis of the transpose.
        slices: the slice of each axis of the transpose, with the start None where it is known at run time only, and the stop
            then the length; empty where nothing is cut.
        groups: the axes before and after the reshape that map to each other, in order.
        units: the shape after the reshape.
        result: the shape after the broadcast.
        flipped: the axes that are reversed.
    """

    shape: tuple[int, ...]
    order: tuple[int, ...]
    slices: tuple[slice, ...]
    groups: Groups
    units: tuple[int, ...]
    result: tuple[int, ...]
    flipped: tuple[int, ...] = ()

    @classmethod
    def identity(cls, shape: Sequence[int]) -> "AxisMove":
        """The operation that changes no axis."""
        shape, order = tuple(shape), tuple(range(len(shape)))
        return cls(shape, order, (), tuple(((a,), (a,)) for a in order), shape, shape)

    @property
    def is_identity(self) -> bool:
        """Whether no axis changes."""
        return self == AxisMove.identity(self.shape)

    @property
    def is_transposed(self) -> bool:
        """Whether the order of the axes changes."""
        return self.order != tuple(range(len(self.order)))

    @property
    def lengths(self) -> tuple[int, ...]:
        """The shape before the reshape."""
        if self.slices:
            return tuple(len(range(s.start or 0, s.stop, s.step)) for s in self.slices)
        return tuple(self.shape[a] for a in self.order)

    @property
    def cut(self) -> tuple[int, ...]:
        """The operand's axes of which some elements are removed."""
        full = (self.shape[a] for a in self.order)
        return tuple(a for a, n, m in zip(self.order, full, self.lengths, strict=True) if n != m)

    @property
    def sources(self) -> tuple[tuple[int, ...], ...]:
        """The operand's axes along each axis of the result.

        Several where axes are merged, none where an axis is added or repeated.
        """
        lengths, sources = self.lengths, []
        for old, new in self.groups:
            along = [(self.order[a],) for a in old]
            if [lengths[a] for a in old] != [self.units[a] for a in new]:
                along = [tuple(self.order[a] for a in old)] * len(new)
            sources += along
        return tuple(s if n == m else () for s, n, m in zip(sources, self.units, self.result, strict=True))

    @property
    def places(self) -> dict[int, int]:
        """The result's axis of each operand axis that is neither merged, split, nor repeated."""
        lengths, places = dict(zip(self.order, self.lengths, strict=True)), {}
        for place, (own, n) in enumerate(zip(self.sources, self.result, strict=True)):
            long = [a for a in own if lengths[a] > 1] or own
            if len(long) == 1 and lengths[long[0]] == n:
                places[long[0]] = place
        return places

    def __call__(self, x: Array, starts: Sequence[Any] = ()) -> Array:
        """Moves an array that has the operand's axes. An axis may have length 1 where the array is constant along it.

        Args:
            x: the array; further axes at the end keep their places.
            starts: the operands of a slice at run time: its start along each axis.

        Returns:
            The array, of length 1 where it is constant, and along axes that are repeated.

        Raises:
            QuantError: for a reshape that merges an axis that `x` has with one along which it is constant.

        >>> move = AxisMove((2, 3), (1, 0), (), (((0, 1), (0,)),), (6,), (6,))  # x.T.reshape(6)
        >>> move(jnp.arange(6).reshape(2, 3)).tolist()
        [0, 3, 1, 4, 2, 5]
        """
        ndim = len(self.shape)
        rest = x.shape[ndim:]
        if self.is_transposed:
            x = x.transpose(*self.order, *range(ndim, x.ndim))
        has = [n == self.shape[a] for n, a in zip(x.shape, self.order, strict=False)]
        for axis, step in enumerate(self.slices):
            if has[axis] and step.start is None:
                x = jax.lax.dynamic_slice_in_dim(x, starts[axis], step.stop, axis, allow_negative_indices=False)
            elif has[axis] and self.order[axis] in self.cut:
                x = x[(slice(None),) * axis + (step,)]
        lengths: list[int] = []
        for old, new in self.groups:
            if all(has[a] for a in old):
                lengths += [self.units[a] for a in new]
            elif math.prod(x.shape[a] for a in old) == 1:
                lengths += [1] * len(new)
            else:
                raise QuantError("the reshape merges an axis with one along which the array is constant")
        x = x.reshape(*lengths, *rest)
        if self.flipped:
            x = jnp.flip(x, self.flipped)
        return x

    def tiled(self, axes: Sequence[Axis]) -> list[Axis]:
        """The axes of the result, with their tiles. Every tile consists of the elements of one tile of the operand.

        Raises:
            QuantError: where elements of a tile are removed, or a tile or a byte would be cut.
        """
        axes = [axes[a] for a in self.order]
        if self.slices:
            axes = [sliced(axis, step) for axis, step in zip(axes, self.slices, strict=True)]
        axes = reshaped(axes, self.units)
        for a, (n, m) in enumerate(zip(self.units, self.result, strict=True)):
            if n != m:
                if axes[a].is_packed:
                    raise QuantError("codes share bytes along the axis that would be repeated")
                axes[a] = Axis(m, 1)
            if a in self.flipped and axes[a].length % axes[a].tile_length:
                raise QuantError(f"a short last tile of {axes[a].tile} would come first")
        return axes


def axis_moves(eqn: jex_core.JaxprEqn) -> tuple[AxisMove, ...]:
    """The moves of the axes of an equation's first operand, one per result.

    Empty for primitives that are no layout operations.
    """
    name, params = eqn.primitive.name, eqn.params
    if name not in LAYOUT_PRIMITIVES:
        return ()
    shape = tuple(eqn.invars[0].aval.shape)  # type: ignore[attr-defined]
    results = [tuple(out.aval.shape) for out in eqn.outvars]  # type: ignore[attr-defined]
    result = results[0]
    same = dataclasses.replace(AxisMove.identity(result), shape=shape)
    match name:
        case "transpose":
            return (dataclasses.replace(same, order=tuple(params["permutation"])),)
        case "rev":
            return (dataclasses.replace(same, flipped=tuple(params["dimensions"])),)
        case "slice" | "dynamic_slice" | "split":
            return tuple(
                dataclasses.replace(AxisMove.identity(out), shape=shape, slices=slices)
                for out, slices in zip(results, _slices(name, params, shape), strict=True)
            )
        case "reshape":
            order = params["dimensions"] or tuple(range(len(shape)))
            groups: Groups = tuple(regrouped([shape[a] for a in order], result))
            return (AxisMove(shape, tuple(order), (), groups, result, result),)
        case "squeeze" | "expand_dims":
            units = [a % max(len(shape), len(result)) for a in params["dimensions"]]
        case "broadcast_in_dim":
            units = [a for a in range(len(result)) if a not in params["broadcast_dimensions"]]
        case "all_gather" if not params["tiled"]:
            units = [params["all_gather_dimension"]]
        case _:
            # An all-gather makes an axis longer; each device's part of it moves nowhere.
            return (AxisMove.identity(result),)
    return (_with_units(shape, result, units),)


def _slices(name: str, params: dict[str, Any], shape: tuple[int, ...]) -> list[tuple[slice, ...]]:
    """The slices of each result."""
    full = tuple(slice(0, n, 1) for n in shape)
    if name == "slice":
        strides = params["strides"] or (1,) * len(shape)
        return [tuple(map(slice, params["start_indices"], params["limit_indices"], strides))]
    if name == "dynamic_slice":
        cut = [slice(None, size, 1) for size in params["slice_sizes"]]
        return [tuple(own if own.stop == part.stop else part for own, part in zip(full, cut, strict=True))]
    axis, edges = params["axis"], [0, *(int(n) for n in np.cumsum(params["sizes"]))]
    return [(*full[:axis], slice(*edge, 1), *full[axis + 1 :]) for edge in itertools.pairwise(edges)]


def _with_units(shape: tuple[int, ...], result: tuple[int, ...], units: Sequence[int]) -> AxisMove:
    """The move that removes or adds axes of length 1, and then repeats them."""
    groups, rest = [], itertools.count()
    for axis in range(max(len(shape), len(result))):
        other: tuple[int, ...] = ()
        if axis not in units:
            other = (next(rest),)
        groups.append(((axis,), other))
    if len(result) >= len(shape):
        groups = [(old, new) for new, old in groups]
    lengths = tuple(math.prod(shape[a] for a in old) for old, new in groups if new)
    return AxisMove(shape, tuple(range(len(shape))), (), tuple(groups), lengths, result)
