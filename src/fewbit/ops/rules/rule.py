"""What a rule is: a function of the evaluator, an equation and its operands, which gives the equation's results."""

import abc
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
from jax.sharding import AxisType

from ...array import QArray
from ..standin import StandIn, stands_in


class NoRuleError(Exception):
    """Why a rule cannot keep the result of an equation quantized; the evaluator then follows the fallback."""


class AbstractEvaluator(abc.ABC):
    """What rules ask of the evaluator of `fewbit.ops.transparent`.

    Attributes:
        is_traced: whether JAX is tracing what is evaluated.
    """

    is_traced: bool

    @abc.abstractmethod
    def evaluate(self, jaxpr: Any, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
        """The outputs of a jaxpr for values that may be QArrays."""

    @abc.abstractmethod
    def function(self, inner: Any) -> Callable[..., list[Any]]:
        """The body of an equation, a jaxpr, as a function of values that may be QArrays."""

    @abc.abstractmethod
    def decoded(self, eqn: Any, value: Any, reason: str) -> Any:
        """The array that a value stands for, where the fallback allows it."""

    @abc.abstractmethod
    def equation(self, eqn: Any, values: Sequence[Any]) -> list[Any]:
        """The results of one equation, by the rule of its primitive where a value stands for an array."""

    @abc.abstractmethod
    def inside(self) -> list[StandIn]:
        """The stand-ins, without their arrays, that products in the body of the equation will make of their right operands."""

    @abc.abstractmethod
    def with_inside(self, stand_ins: Sequence[Any]) -> "AbstractEvaluator":
        """An evaluator with others in their places."""

    @abc.abstractmethod
    def jitted(self, eqn: Any) -> Callable[..., list[Any]]:
        """The body of an inner `jit`, jitted, and the same function whenever the same body comes again."""


Rule: TypeAlias = Callable[[Any, Any, list[Any]], list[Any]]
"""The evaluator, the equation and the values of its operands, at least one of which stands for an array, to its results."""


def bound(eqn: Any, values: Sequence[Any]) -> list[Any]:
    """The equation as JAX computes it."""
    primitive = eqn.primitive
    outputs = primitive.bind(*values, **primitive.get_bind_params(eqn.params))
    return list(outputs) if primitive.multiple_results else [outputs]


def logical(x: Any) -> Any:
    """What traced code sees of a value: of a QArray its shape, dtype, and sharding where JAX keeps it in the type."""
    if not stands_in(x):
        return x
    leaf = jax.typeof(x.codes if isinstance(x, QArray) else jax.tree.leaves(x)[0])  # it has the axes of the array
    where = {}
    if AxisType.Explicit in leaf.sharding.mesh.axis_types:
        where["sharding"] = leaf.sharding
    if leaf.manual_axis_type.varying:  # within shard_map
        where |= {"sharding": leaf.sharding, "manual_axis_type": leaf.manual_axis_type}
    return jax.ShapeDtypeStruct(x.shape, x.dtype, **where)
