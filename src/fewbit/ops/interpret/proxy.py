"""Array proxies inside the jaxpr interpreter."""

import abc
import functools
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self, TypeGuard

import jax
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import PyTree

from ...array.qarray import QArray


class NoRuleError(Exception):
    """Why a rule cannot keep a result quantized. The evaluator then follows the fallback."""


class ArrayProxy(abc.ABC):
    """A pytree that replaces an array during evaluation. An example is a weight with a LoRA adapter.

    Traced code sees its shape and dtype. `transparent` treats it like a QArray: calls, loops, branches and derivative rules
    carry it; any other equation with it among the operands goes to `rules`, and where they have none, or raise NoRuleError,
    it is decoded as the fallback says.

    Attributes:
        rules: the rule of each primitive, by name (`fewbit.ops.interpret.rules.Rule`).
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
        """The array that it replaces."""

    def as_operand(self, primitive: str, values: Sequence[Any]) -> Any:
        """What an equation gets: the proxy, or an array or QArray in its place. `values` are all of its operands."""
        return self

    @abc.abstractmethod
    def stacked(self) -> Self:
        """The proxy with the array's first axis on every leaf, so that `scan` can slice it."""

    def forked(self) -> tuple[Self, Self]:
        """Two copies, one for one equation and one for later ones. By default JAX adds their cotangents."""
        return self, self

    def saved(self) -> Any:
        """The proxy, or an array in its place, where a function's own derivative rule saves it for its linear part."""
        return self

    def turns(self, length: int) -> PyTree:
        """Leaves with a new first axis that `scan` slices. They are for a proxy that the loop closes over."""
        return ()

    def in_turn(self, own: PyTree) -> Self:
        """The proxy within one iteration, given its slice of `turns`."""
        return self

    def shards(self, spec: PartitionSpec, mesh: Mapping[str, int]) -> tuple[Any, Any]:
        """The proxy prepared for `shard_map`, and its specs: a tree of its structure, or a prefix.

        Args:
            spec: the PartitionSpec of the array.
            mesh: the number of devices along each mesh axis.
        """
        return self, spec

    def on_device(self) -> Self:
        """The proxy of one device's shard, inside `shard_map`."""
        return self


def is_proxy(x: object) -> TypeGuard[QArray | ArrayProxy]:
    """True for array proxies (QArray, ArrayProxy): the `is_leaf` of the evaluator's tree walks."""
    return is_proxy_type(type(x))


@functools.cache
def is_proxy_type(kind: type) -> bool:
    """Whether a type is an array proxy.

    Cached per class: a trace asks for every variable, and `isinstance` of an abstract class is slow.
    """
    return issubclass(kind, QArray | ArrayProxy)
