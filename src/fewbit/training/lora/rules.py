"""Rules of primitives for adapted weights: low-rank products, layout ops on all factors."""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex_core
from jaxtyping import Array

from ...array.layout import regrouped
from ...ops.interpret.proxy import ArrayProxy
from ...ops.interpret.rules.layout import LAYOUT
from ...ops.interpret.rules.products import filled, gathered
from ...ops.interpret.rules.rule import AbstractEvaluator, NoRuleError, Rule
from .factors import updated
from .products import PRODUCTS

if TYPE_CHECKING:
    from .adapted import Adapted

Move: TypeAlias = Callable[[Array], Array]
"""What a layout op does to a factor."""

# --- look-ups ---


def _gather(evaluator: AbstractEvaluator, eqn: jex_core.JaxprEqn, values: list[Any]) -> list[Any]:
    """Looked-up rows of the base plus their update; dropout is for products only."""
    w, indices = _weight(values), values[1]
    (base,) = evaluator.equation(eqn, [w.base, indices])
    a, b = (gathered(eqn, factor, indices, (1,) * len(w.shape)) for factor in (w.a, w.b))
    return [filled(eqn, updated(base, a, b, w.scale), indices)]


def _weight(values: list[Any]) -> "Adapted":
    """The first operand, from which elements are moved or taken."""
    if not isinstance(values[0], ArrayProxy):
        raise NoRuleError("the index is no plain array")
    return cast("Adapted", values[0])


# --- layout ops ---


def _moving(move: Callable[[jex_core.JaxprEqn, "Adapted"], Move]) -> Rule:
    """The rule of a layout op; `move(eqn, weight)` is its action on a factor."""

    def rule(evaluator: AbstractEvaluator, eqn: jex_core.JaxprEqn, values: list[Any]) -> list[Any]:
        w = _weight(values)
        on_factor = move(eqn, w)
        (base,) = evaluator.equation(eqn, [w.base, *values[1:]])
        return [w.moved(base, on_factor)]

    return rule


def _kept(eqn: jex_core.JaxprEqn, w: "Adapted") -> Move:
    return lambda factor: factor


def _transposed(eqn: jex_core.JaxprEqn, w: "Adapted") -> Move:
    return lambda factor: factor.transpose(*eqn.params["permutation"], len(w.shape))


def _reshaped(eqn: jex_core.JaxprEqn, w: "Adapted") -> Move:
    if eqn.primitive.name == "reshape" and eqn.params.get("dimensions") is not None:
        raise NoRuleError("the reshape permutes axes")
    aval: Any = eqn.outvars[0].aval
    shape = aval.shape
    groups = [([w.shape[i] for i in old], old, [shape[j] for j in new]) for old, new in regrouped(w.shape, shape)]

    def lengths(factor: Array) -> list[int]:
        """The factor's new lengths: the weight's for a group of axes that it has in full, 1 for one that it lacks."""
        result: list[int] = []
        for full, old, new in groups:
            own = [factor.shape[i] for i in old]
            if own == full:
                result += new
            elif math.prod(own) == 1:
                result += [1] * len(new)
            else:
                raise NoRuleError("the reshape merges axes of a with axes of b")
        return [*result, factor.shape[-1]]

    for factor in w.factors:
        lengths(factor)
    return lambda factor: factor.reshape(lengths(factor))


def _broadcast(eqn: jex_core.JaxprEqn, w: "Adapted") -> Move:
    places, ndim = eqn.params["broadcast_dimensions"], len(eqn.params["shape"])

    def on_factor(factor: Array) -> Array:
        length = dict(zip(places, factor.shape[:-1], strict=True))
        return factor.reshape([*(length.get(axis, 1) for axis in range(ndim)), factor.shape[-1]])

    return on_factor


def _cut(factor: Array, w: "Adapted", steps: Sequence[slice]) -> Array:
    """A factor sliced along the axes of the weight that it has."""
    own = zip(steps, factor.shape, w.shape, strict=False)
    return factor[tuple(step if n == full else slice(None) for step, n, full in own)]


def _sliced(eqn: jex_core.JaxprEqn, w: "Adapted") -> Move:
    strides = eqn.params["strides"] or (1,) * len(w.shape)
    steps = list(map(slice, eqn.params["start_indices"], eqn.params["limit_indices"], strides))
    return lambda factor: _cut(factor, w, steps)


def _dynamic_slice(evaluator: AbstractEvaluator, eqn: jex_core.JaxprEqn, values: list[Any]) -> list[Any]:
    w, starts = _weight(values), values[1:]
    (base,) = evaluator.equation(eqn, [w.base, *starts])

    def on_factor(factor: Array) -> Array:
        own = [n == full for n, full in zip(factor.shape, w.shape, strict=False)]
        at = [jnp.where(is_own, start, jnp.zeros_like(start)) for is_own, start in zip(own, starts, strict=True)]
        sizes = [size if is_own else 1 for is_own, size in zip(own, eqn.params["slice_sizes"], strict=True)]
        return jax.lax.dynamic_slice(factor, [*at, jnp.zeros_like(at[0])], [*sizes, factor.shape[-1]])

    return [w.moved(base, on_factor)]


def _split(evaluator: AbstractEvaluator, eqn: jex_core.JaxprEqn, values: list[Any]) -> list[Any]:
    (w,) = values
    before = (slice(None),) * eqn.params["axis"]
    edges = [0, *(int(n) for n in np.cumsum(eqn.params["sizes"]))]
    parts = zip(evaluator.equation(eqn, [w.base]), itertools.pairwise(edges), strict=True)
    return [w.moved(base, lambda f, edge=edge: _cut(f, w, (*before, slice(*edge)))) for base, edge in parts]


def _convert(evaluator: AbstractEvaluator, eqn: jex_core.JaxprEqn, values: list[Any]) -> list[Any]:
    """A cast of the weight; the factors are cast in the product."""
    if not jnp.issubdtype(eqn.params["new_dtype"], jnp.floating):
        raise NoRuleError(f"an adapted weight is floating and cannot be cast to {eqn.params['new_dtype'].name}")
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
"""The rule of each primitive with an adapted weight among its operands, by its name."""
