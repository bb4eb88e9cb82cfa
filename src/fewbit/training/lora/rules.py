"""What each primitive does with an adapted weight: products go by way of the rank, moves act on weight and factors alike."""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...array.layout import regrouped
from ...ops.rules.layout import LAYOUT
from ...ops.rules.products import filled, gathered
from ...ops.rules.rule import AbstractEvaluator, NoRuleError, Rule
from ...ops.standin import StandIn
from .factors import updated
from .products import PRODUCTS

# --- look-ups ---


def _gather(evaluator: AbstractEvaluator, eqn: Any, values: list[Any]) -> list[Any]:
    """Rows of the base and of the factors, added up; dropout is for products only."""
    w, indices = _weight(values), values[1]
    (base,) = evaluator.equation(eqn, [w.base, indices])
    a, b = (gathered(eqn, factor, indices, (1,) * len(w.shape)) for factor in (w.a, w.b))
    return [filled(eqn, updated(base, a, b, w.scale), indices)]


def _weight(values: list[Any]) -> Any:
    """The first operand, which is the one that is moved or taken from."""
    if not isinstance(values[0], StandIn):
        raise NoRuleError("the index stands for an array")
    return values[0]


# --- moves ---


def _moving(move: Callable[[Any, Any], Callable[[Any], Any]]) -> Rule:
    """The rule of an equation that moves elements: `move(eqn, weight)` says what it does to a factor."""

    def rule(evaluator: AbstractEvaluator, eqn: Any, values: list[Any]) -> list[Any]:
        w = _weight(values)
        on_factor = move(eqn, w)
        (base,) = evaluator.equation(eqn, [w.base, *values[1:]])
        return [w.moved(base, on_factor)]

    return rule


def _kept(eqn: Any, w: Any) -> Callable[[Any], Any]:
    return lambda factor: factor


def _transposed(eqn: Any, w: Any) -> Callable[[Any], Any]:
    return lambda factor: factor.transpose(*eqn.params["permutation"], len(w.shape))


def _reshaped(eqn: Any, w: Any) -> Callable[[Any], Any]:
    if eqn.primitive.name == "reshape" and eqn.params.get("dimensions") is not None:
        raise NoRuleError("the reshape permutes axes")
    shape = eqn.outvars[0].aval.shape
    groups = [([w.shape[i] for i in old], old, [shape[j] for j in new]) for old, new in regrouped(w.shape, shape)]

    def lengths(factor: Any) -> list[int]:
        """Of the factor's new axes: those of the weight where it has a whole group, 1 where it has none of it."""
        result: list[int] = []
        for whole, old, new in groups:
            own = [factor.shape[i] for i in old]
            if own != whole and math.prod(own) != 1:
                raise NoRuleError("the reshape merges axes of which each factor has some")
            result += new if own == whole else [1] * len(new)
        return [*result, factor.shape[-1]]

    for factor in w.factors:
        lengths(factor)
    return lambda factor: factor.reshape(lengths(factor))


def _broadcast(eqn: Any, w: Any) -> Callable[[Any], Any]:
    places, ndim = eqn.params["broadcast_dimensions"], len(eqn.params["shape"])

    def on_factor(factor: Any) -> Any:
        length = dict(zip(places, factor.shape[:-1], strict=True))
        return factor.reshape([*(length.get(axis, 1) for axis in range(ndim)), factor.shape[-1]])

    return on_factor


def _cut(factor: Any, w: Any, steps: Sequence[slice]) -> Any:
    """The elements of a factor at slices of the weight's axes; an axis that it does not have stays."""
    own = zip(steps, factor.shape, w.shape, strict=False)
    return factor[tuple(step if n == whole else slice(None) for step, n, whole in own)]


def _sliced(eqn: Any, w: Any) -> Callable[[Any], Any]:
    strides = eqn.params["strides"] or (1,) * len(w.shape)
    steps = list(map(slice, eqn.params["start_indices"], eqn.params["limit_indices"], strides))
    return lambda factor: _cut(factor, w, steps)


def _dynamic_slice(evaluator: AbstractEvaluator, eqn: Any, values: list[Any]) -> list[Any]:
    w, starts = _weight(values), values[1:]
    (base,) = evaluator.equation(eqn, [w.base, *starts])

    def on_factor(factor: Any) -> Any:
        own = [n == whole for n, whole in zip(factor.shape, w.shape, strict=False)]
        at = [jnp.where(is_own, start, jnp.zeros_like(start)) for is_own, start in zip(own, starts, strict=True)]
        sizes = [size if is_own else 1 for is_own, size in zip(own, eqn.params["slice_sizes"], strict=True)]
        return jax.lax.dynamic_slice(factor, [*at, jnp.zeros_like(at[0])], [*sizes, factor.shape[-1]])

    return [w.moved(base, on_factor)]


def _split(evaluator: AbstractEvaluator, eqn: Any, values: list[Any]) -> list[Any]:
    (w,) = values
    before = (slice(None),) * eqn.params["axis"]
    edges = [0, *(int(n) for n in np.cumsum(eqn.params["sizes"]))]
    parts = zip(evaluator.equation(eqn, [w.base]), itertools.pairwise(edges), strict=True)
    return [w.moved(base, lambda f, edge=edge: _cut(f, w, (*before, slice(*edge)))) for base, edge in parts]


def _convert(evaluator: AbstractEvaluator, eqn: Any, values: list[Any]) -> list[Any]:
    """A cast of the weight; the factors are cast where a product meets them."""
    if not jnp.issubdtype(eqn.params["new_dtype"], jnp.floating):
        raise NoRuleError(f"it stands for floating numbers, not {eqn.params['new_dtype'].name}")
    return _moving(_kept)(evaluator, eqn, values)


ADAPTED: dict[str, Rule] = {
    **PRODUCTS,
    "gather": _gather,
    "convert_element_type": _convert,
    "transpose": _moving(_transposed),
    "reshape": _moving(_reshaped),
    "squeeze": _moving(_reshaped),
    "expand_dims": _moving(_reshaped),
    "broadcast_in_dim": _moving(_broadcast),
    "slice": _moving(_sliced),
    "dynamic_slice": _dynamic_slice,
    "split": _split,
    "copy": _moving(_kept),
    "copy_p": _moving(_kept),
    "name": _moving(_kept),
    "sharding_constraint": _moving(_kept),
    "stop_gradient": LAYOUT["stop_gradient"],
    "optimization_barrier": LAYOUT["optimization_barrier"],
}
"""For each primitive, by its name, how an equation with an adapted weight among its operands is computed."""
