"""Parameters that note what they meet: the other operand of each of their products is measured while a trace is evaluated.

So are both operands of chosen products without a parameter.

Nothing but the forward pass runs, and no callback. What is measured in a loop or a branch comes out as one more of its
results, so it may be jitted like any other code.
"""

import abc
import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from ..errors import UnsupportedError
from .indices import scan_counts
from .lookup import Lookup
from .rules.parameters import MOVES, PRODUCTS
from .rules.rule import AbstractEvaluator, NoRuleError, Rule, bound
from .standin import StandIn

_OBSERVED_RULES: dict[str, Any] = {}


@dataclasses.dataclass(frozen=True)
class Met:
    """What a parameter met in a product.

    Attributes:
        x: the other operand.
        contracted: its axes that the product sums over; None for a convolution, which sums over windows.
        batch: its axes that run beside the parameter's, such as experts; None where groups of rows meet different parts.
    """

    x: jax.Array
    contracted: tuple[int, ...] | None
    batch: tuple[int, ...] | None


class AbstractMeasure(abc.ABC):
    """What is measured: of one product, and of several together. A measurement of zeros is one of no product."""

    @abc.abstractmethod
    def of(self, met: Met) -> Any:
        """The measurement of one product of a parameter: a pytree of arrays."""

    @abc.abstractmethod
    def of_both(self, left: jax.Array, right: jax.Array) -> Any:
        """The measurement of one product without a parameter: a pytree of arrays."""

    @abc.abstractmethod
    def joined(self, earlier: Any, later: Any) -> Any:
        """The measurement of both; those of a stack one by one."""


@dataclasses.dataclass(eq=False)
class Notes:
    """What was measured so far in the body of code that is being evaluated.

    Attributes:
        measure: what is measured.
        found: the measurements by parameter, and by product without one.
    """

    measure: AbstractMeasure
    found: dict[str, Any] = dataclasses.field(default_factory=dict)

    def add(self, path: str, measurement: Any) -> None:
        """Adds what a parameter met later than everything before."""
        before = self.found.get(path)
        if before is not None and _shapes(before) != _shapes(measurement):
            raise UnsupportedError(f"{path} is taken apart by a loop and used in another way beside; it cannot be observed")
        self.found[path] = measurement if before is None else self.measure.joined(before, measurement)

    def of(self, body: Callable[..., list[Any]], values: list[Any], arrays: list[Any]) -> tuple[list[Any], dict[str, Any]]:
        """The results of a body, and what was measured in it; `values` says which of `arrays` are observed."""
        inside = [dataclasses.replace(v, value=a) if _is_observed(v) else a for v, a in zip(values, arrays, strict=True)]
        outside, self.found = self.found, {}
        try:
            outputs = [_array(out) for out in body(*inside)]
            return outputs, self.found
        finally:
            self.found = outside


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Observed(StandIn):
    """A parameter that notes what its products meet; everywhere it is the array.

    Attributes:
        value: the array.
        path: the parameter; or the name of the one product that this is the right operand of.
        notes: where it is noted.
        is_parameter: whether it is one; the right operand of a product without a parameter is measured itself, too.
    """

    rules: ClassVar[Mapping[str, Any]] = _OBSERVED_RULES

    value: Any
    path: str = dataclasses.field(metadata={"static": True})
    notes: Notes = dataclasses.field(metadata={"static": True})
    is_parameter: bool = dataclasses.field(default=True, metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        return self.value.shape

    @property
    def dtype(self) -> np.dtype:
        return self.value.dtype

    def __repr__(self) -> str:
        return self.path

    def array(self) -> jax.Array:
        return self.value

    def stacked(self) -> "Observed":
        return self


def _is_observed(x: Any) -> bool:
    return isinstance(x, Observed)


def _array(x: Any) -> Any:
    return x.value if isinstance(x, Observed) else x


def _shapes(tree: Any) -> list[tuple[int, ...]]:
    return [leaf.shape for leaf in jax.tree.leaves(tree)]


def _notes(values: list[Any]) -> Notes:
    return next(value.notes for value in values if isinstance(value, Observed))


def _product(_: AbstractEvaluator, eqn: Any, values: list[Any]) -> list[Any]:
    """A product as it is, of which the operand is measured that is not the weight; of two parameters the right one is."""
    side = 0 if _is_observed(values[1]) else 1
    x, contracted, batch = _array(values[side]), None, None
    if eqn.primitive.name == "dot_general":
        contracted, batch = (numbers[side] for numbers in eqn.params["dimension_numbers"])
    elif eqn.primitive.name == "ragged_dot_general":
        contracted = eqn.params["ragged_dot_dimension_numbers"].dot_dimension_numbers[0][side]
    if _is_observed(values[0]) or _is_observed(values[1]):
        weight = values[1 - side]
        measure = weight.notes.measure
        found = measure.of(Met(x, contracted, batch)) if weight.is_parameter else measure.of_both(x, weight.value)
        weight.notes.add(weight.path, found)
    return bound(eqn, list(map(_array, values)))


def _moved(_: AbstractEvaluator, eqn: Any, values: list[Any]) -> list[Any]:
    """A move of the array; its results are the parameter still, but for a row that was looked up."""
    outputs = bound(eqn, list(map(_array, values)))
    if Lookup.of(eqn) is not None:
        return outputs
    sources = values if len(values) == len(outputs) else [values[0]] * len(outputs)
    return [dataclasses.replace(s, value=out) if _is_observed(s) else out for s, out in zip(sources, outputs, strict=True)]


def _call(evaluator: AbstractEvaluator, eqn: Any, values: list[Any]) -> list[Any]:
    """The body of a call, in its place: it is not differentiated, and all of it is compiled together."""
    inner = eqn.params.get("call_jaxpr", eqn.params.get("jaxpr"))
    return evaluator.function(inner)(*values)


def _scan(evaluator: AbstractEvaluator, eqn: Any, values: list[Any], notes: Notes | None = None) -> list[Any]:
    """A loop: of a parameter that it takes apart there is one measurement a turn, of others one of all turns together."""
    params, (constants, carries), notes = eqn.params, scan_counts(eqn), notes or _notes(values)
    body, arrays = evaluator.function(params["jaxpr"]), list(map(_array, values))
    consts, carry, xs = arrays[:constants], arrays[constants : constants + carries], arrays[constants + carries :]

    def step(carry: Any, x: Any) -> tuple[Any, Any]:
        outputs, found = notes.of(body, values, [*consts, *carry, *x])
        return tuple(outputs[:carries]), (tuple(outputs[carries:]), found)

    settings = {name: params[name] for name in ("length", "reverse", "unroll")}
    carry, (ys, found) = jax.lax.scan(step, tuple(carry), tuple(xs), **settings)
    taken_apart = {value.path for value in values[constants + carries :] if isinstance(value, Observed)}
    for path, stack in found.items():
        notes.add(path, stack if path in taken_apart else folded(notes.measure, stack))
    return [*carry, *ys]


def folded(measure: AbstractMeasure, stack: Any) -> Any:
    """The measurement of all elements of a stack together."""
    none = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape[1:], leaf.dtype), stack)
    return jax.lax.scan(lambda before, one: (measure.joined(before, one), None), none, stack)[0]


def _cond(evaluator: AbstractEvaluator, eqn: Any, values: list[Any], notes: Notes | None = None) -> list[Any]:
    """A choice; a branch that does not use a parameter has measured nothing of it."""
    index, *operands = values
    if eqn.params.get("branches_platforms") is not None:
        raise NoRuleError("the platform decides between branches")
    notes, arrays = notes or _notes(operands), list(map(_array, operands))
    branches = [_branch(notes, evaluator.function(body), operands) for body in eqn.params["branches"]]
    every: dict[str, Any] = {}
    for branch in branches:
        every |= jax.eval_shape(branch, *arrays)[1]
    none = {path: jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes) for path, shapes in every.items()}

    def filled(branch: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arrays: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
            outputs, found = branch(*arrays)
            return outputs, none | found

        return run

    outputs, found = jax.lax.switch(index, list(map(filled, branches)), *arrays)
    for path, measurement in found.items():
        notes.add(path, measurement)
    return list(outputs)


def _branch(notes: Notes, body: Callable[..., list[Any]], values: list[Any]) -> Callable[..., Any]:
    def run(*arrays: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        outputs, found = notes.of(body, values, list(arrays))
        return tuple(outputs), found

    return run


def _unseen(_: AbstractEvaluator, eqn: Any, values: list[Any]) -> list[Any]:
    raise NoRuleError("what is measured inside cannot come out of it")


_CALLS = (
    "jit",
    "pjit",
    "closed_call",
    "eval_jaxpr",
    "composite",
    "remat2",
    "checkpoint",
    "custom_jvp_call",
    "custom_vjp_call",
)
_RULES: dict[str, Rule] = dict.fromkeys(PRODUCTS, _product) | dict.fromkeys(MOVES, _moved) | dict.fromkeys(_CALLS, _call)
_OBSERVED_RULES |= _RULES | {"scan": _scan, "cond": _cond} | dict.fromkeys(("while", "shard_map"), _unseen)


def rules_around(notes: Notes) -> dict[str, Rule]:
    """The rules of equations with a measured product in their bodies and no observed parameter among their operands.

    Args:
        notes: where it is noted.

    Returns:
        Rules, by primitive.
    """
    return _RULES | {
        "scan": functools.partial(_scan, notes=notes),
        "cond": functools.partial(_cond, notes=notes),
        **dict.fromkeys(("while", "shard_map"), _unseen),
    }
