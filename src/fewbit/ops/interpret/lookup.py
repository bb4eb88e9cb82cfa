"""Which axes a look-up (gather) indexes."""

import dataclasses

import jax
import jax.numpy as jnp
from jax.extend import core as jex_core
from jax.typing import ArrayLike

from .indices import shape_of


@dataclasses.dataclass(frozen=True)
class Lookup:
    """A look-up: a `gather`, or a `dynamic_slice` that takes one row.

    A row has one axis of more than one element. A `dynamic_slice` with more such axes takes an element of a stack, such as the
    matrix of a layer, and is no look-up; nor is one that takes several rows.

    Attributes:
        indexed: the axes that the indices select from.
        batch: the axes along which each element has its own indices, as under `jax.vmap` of the table.
        whole: the axes of more than one element that are kept in full. Tiles run along the last: each row has its own scales.
        places: the result's axis of each kept axis.
    """

    indexed: tuple[int, ...]
    batch: tuple[int, ...]
    whole: tuple[int, ...]
    places: dict[int, int]

    @classmethod
    def of(cls, eqn: jex_core.JaxprEqn) -> "Lookup | None":
        """The look-up of an equation, or None."""
        name = eqn.primitive.name
        if name not in ("gather", "dynamic_slice"):
            return None
        shape, sizes = shape_of(eqn.invars[0]), eqn.params["slice_sizes"]
        batch: tuple[int, ...] = ()
        dropped: tuple[int, ...] = ()
        places = {axis: axis for axis in range(len(shape))}
        if name == "gather":
            numbers = eqn.params["dimension_numbers"]
            batch, dropped = tuple(map(int, numbers.operand_batching_dims)), tuple(map(int, numbers.collapsed_slice_dims))
            offset, ndim = tuple(map(int, numbers.offset_dims)), len(shape_of(eqn.outvars[0]))
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


def widened(indices: ArrayLike) -> jax.Array:
    """Indices of at least 32 bits: an axis may be longer than what an int8 or uint8 holds."""
    indices = jnp.asarray(indices)
    return indices.astype(jnp.int32) if indices.dtype.itemsize < 4 else indices
