"""The interface of rules, and of the evaluator that calls them."""

import abc
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
from jax.extend import core as jex_core
from jaxtyping import PyTree

from ..proxy import ArrayProxy, is_proxy


class NoRuleError(Exception):
    """Why a rule cannot keep a result quantized; the evaluator then follows the fallback."""


class AbstractEvaluator(abc.ABC):
    """The evaluator of `fewbit.ops.interpret.transparent`, as rules use it.

    Attributes:
        is_traced: whether the evaluation is being traced.
    """

    is_traced: bool

    @abc.abstractmethod
    def evaluate(self, jaxpr: jex_core.Jaxpr, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
        """The outputs of a jaxpr for values that may be proxies."""

    @abc.abstractmethod
    def function(self, inner: jex_core.Jaxpr | jex_core.ClosedJaxpr) -> Callable[..., list[Any]]:
        """An equation's body as a function of values that may be proxies."""

    @abc.abstractmethod
    def decoded(self, eqn: jex_core.JaxprEqn, value: PyTree, reason: str) -> Any:
        """The decoded value, where the fallback allows it."""

    @abc.abstractmethod
    def equation(self, eqn: jex_core.JaxprEqn, values: Sequence[Any]) -> list[Any]:
        """The results of one equation, by the rule of its primitive where an operand is a proxy."""

    @abc.abstractmethod
    def inside(self) -> list[ArrayProxy]:
        """The proxies (without array) of the chosen products in the body of the equation."""

    @abc.abstractmethod
    def with_inside(self, stand_ins: Sequence[Any]) -> "AbstractEvaluator":
        """An evaluator with other proxies for those products."""

    @abc.abstractmethod
    def jitted(self, eqn: jex_core.JaxprEqn) -> Callable[..., list[Any]]:
        """The jitted body of an inner `jit`; the same function for the same body."""


Rule: TypeAlias = Callable[[Any, Any, list[Any]], list[Any]]
"""From the evaluator, an equation and its operands, at least one of them a proxy, to the results."""


def bound(eqn: jex_core.JaxprEqn, values: Sequence[Any]) -> list[Any]:
    """The equation as JAX computes it."""
    primitive = eqn.primitive
    outputs = primitive.bind(*values, **primitive.get_bind_params(eqn.params))
    if primitive.multiple_results:
        return list(outputs)
    return [outputs]


def logical(x: PyTree) -> PyTree:
    """What traced code sees of a value: of a proxy its shape, dtype and sharding."""
    if not is_proxy(x):
        return x
    leaf = jax.typeof(jax.tree.leaves(x)[0])  # of a QArray the codes; it has the axes of the array
    return leaf.update(shape=x.shape, dtype=x.dtype)
