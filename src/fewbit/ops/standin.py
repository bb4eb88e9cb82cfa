"""Operands that stand for an array while a function is evaluated: stored ones, QArrays, and those that a transform makes."""

import abc
import functools
from collections.abc import Mapping
from typing import Any, ClassVar, Self, TypeGuard

import jax
import numpy as np
from jax.sharding import PartitionSpec

from ..array import QArray
from ..kernels.quantize import dequantize


class StandIn(abc.ABC):
    """A pytree that takes an array's place while a function is evaluated, such as a weight with an adapter beside it.

    Traced code sees its shape and dtype. `transparent` takes it as it takes a QArray: calls, loops, branches and derivative
    rules carry it; every other equation that meets it goes to `rules`, and where they have none, or raise NoRuleError, it
    is decoded as the fallback says.

    Attributes:
        rules: for primitives by name, how an equation with it among its operands is computed (`fewbit.ops.rules.Rule`).
    """

    rules: ClassVar[Mapping[str, Any]]

    @property
    @abc.abstractmethod
    def shape(self) -> tuple[int, ...]:
        """The shape of the array."""

    @property
    @abc.abstractmethod
    def dtype(self) -> np.dtype:
        """The dtype of the array."""

    @abc.abstractmethod
    def array(self) -> jax.Array:
        """The array that it stands for."""

    @abc.abstractmethod
    def stacked(self) -> Self:
        """The same with leaves of which each has the array's first axis, so that a loop can take one element at a time."""

    def forked(self) -> tuple[Self, Self]:
        """The same twice: one for an equation that reads it, one for those after; where JAX's sum of their derivatives is right."""
        return self, self

    def turns(self, length: int) -> Any:
        """What each turn of a loop takes of its own of a stand-in that all turns read: leaves with a new first axis."""
        return ()

    def in_turn(self, own: Any) -> Self:
        """The stand-in in one turn, which took `own`."""
        return self

    def shards(self, spec: PartitionSpec, mesh: Mapping[str, int]) -> tuple[Any, Any]:
        """The stand-in, ready to be cut for the devices of a mesh, and the specs that cut it: a tree of its structure, or a prefix.

        Args:
            spec: how the array is sharded.
            mesh: how many devices there are along each axis of the mesh.
        """
        return self, spec

    def on_device(self) -> Self:
        """The stand-in of one device's part, of what `shards` made and its specs cut."""
        return self


def stands_in(x: Any) -> TypeGuard[QArray | StandIn]:
    """Whether a value stands for an array without being one: the `is_leaf` of walks in the evaluator."""
    return _is_kind(type(x))


@functools.cache
def _is_kind(kind: type) -> bool:
    """Asked once of each class: a trace asks of every variable, and `isinstance` of an abstract class is slow."""
    return issubclass(kind, QArray | StandIn)


def array_of(x: QArray | StandIn) -> jax.Array:
    """The array that an operand stands for."""
    return x.array() if isinstance(x, StandIn) else dequantize(x)
