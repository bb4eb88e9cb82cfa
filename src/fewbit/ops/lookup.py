"""Which axes of an array a look-up indexes, and which it takes whole: one rule for plans, training and serving."""

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Lookup:
    """A look-up: a `gather`, or a `dynamic_slice` of which one row is left.

    A row is what has one axis of more than one element. A `dynamic_slice` that leaves more than one takes an element of a stack,
    such as the matrix of a layer, and is no look-up; nor is one that leaves several rows.

    Attributes:
        indexed: the axes of which elements are taken at indices.
        batch: the axes of which each element has indices of its own, as under `jax.vmap` of the table.
        whole: the axes of more than one element that are taken whole. Tiles run along the last: a row has scales of its own.
        places: for each axis of the array that the result has, where it has it.
    """

    indexed: tuple[int, ...]
    batch: tuple[int, ...]
    whole: tuple[int, ...]
    places: dict[int, int]

    @classmethod
    def of(cls, eqn: Any) -> "Lookup | None":
        """The look-up that an equation is, or None."""
        name = eqn.primitive.name
        if name not in ("gather", "dynamic_slice"):
            return None
        shape, sizes = eqn.invars[0].aval.shape, eqn.params["slice_sizes"]
        batch: tuple[int, ...] = ()
        dropped: tuple[int, ...] = ()
        places = {axis: axis for axis in range(len(shape))}
        if name == "gather":
            numbers = eqn.params["dimension_numbers"]
            batch, dropped = tuple(map(int, numbers.operand_batching_dims)), tuple(map(int, numbers.collapsed_slice_dims))
            offset, ndim = tuple(map(int, numbers.offset_dims)), len(eqn.outvars[0].aval.shape)
            kept = (axis for axis in range(len(shape)) if axis not in (*batch, *dropped))
            of_indices = [place for place in range(ndim) if place not in offset]
            places = dict(zip(kept, offset, strict=True))
            places |= {
                axis: of_indices[at] for axis, at in zip(batch, map(int, numbers.start_indices_batching_dims), strict=True)
            }
        every = [axis for axis in range(len(shape)) if axis not in batch]
        whole = tuple(axis for axis in every if axis not in dropped and sizes[axis] == shape[axis] != 1)
        indexed = tuple(axis for axis in every if axis in dropped or sizes[axis] != shape[axis])
        if name == "dynamic_slice" and (len(whole) > 1 or not indexed or any(sizes[axis] != 1 for axis in indexed)):
            return None
        return cls(indexed, batch, whole, places)
