"""Rules of primitives with an adapted weight."""

from typing import TYPE_CHECKING, Any, cast

import jax.numpy as jnp
from jax.extend import core as jex_core

from ...array.axis_move import LAYOUT_PRIMITIVES, axis_moves
from ...errors import QuantError
from ...ops.interpret.evaluator import Evaluator, NoRuleError, Rule
from ...ops.interpret.proxy import ArrayProxy
from ...ops.interpret.rules.layout import LAYOUT
from ...ops.interpret.rules.products import filled, gathered
from .factors import updated
from .products import PRODUCTS

if TYPE_CHECKING:
    from .adapted import Adapted


def _gather(evaluator: Evaluator, eqn: jex_core.JaxprEqn, values: list[Any]) -> list[Any]:
    """Looked-up rows of the base plus their update; dropout is for products only."""
    w, indices = _weight(values), values[1]
    (base,) = evaluator.equation(eqn, [w.base, indices])
    a, b = (
        gathered(eqn, factor, indices, [None if size == 1 else 1 for size in factor.shape[: len(w.shape)]])
        for factor in (w.a, w.b)
    )
    return [filled(eqn, updated(base, a, b, w.scale), indices)]


def _weight(values: list[Any]) -> "Adapted":
    """The first operand, from which elements are moved or taken."""
    if not isinstance(values[0], ArrayProxy):
        raise NoRuleError("the index is no plain array")
    return cast("Adapted", values[0])


def _moved(evaluator: Evaluator, eqn: jex_core.JaxprEqn, values: list[Any]) -> list[Any]:
    """A layout operation on the base and on each factor. A factor is constant along the weight's axes that it lacks."""
    w, starts = _weight(values), values[1:]
    try:
        factors = [[move(factor, starts) for factor in w.factors] for move in axis_moves(eqn)]
    except QuantError as error:
        raise NoRuleError("the reshape merges axes of a with axes of b") from error
    bases = evaluator.equation(eqn, [w.base, *starts])
    return [w.moved(base, own) for base, own in zip(bases, factors, strict=True)]


def _convert(evaluator: Evaluator, eqn: jex_core.JaxprEqn, values: list[Any]) -> list[Any]:
    """A cast of the weight; the factors are cast in the product."""
    if not jnp.issubdtype(eqn.params["new_dtype"], jnp.floating):
        raise NoRuleError(f"an adapted weight is floating and cannot be cast to {eqn.params['new_dtype'].name}")
    return _moved(evaluator, eqn, values)


_NO_RULE = ("all_gather", "ppermute", "pvary", "reshard", "stage")
ADAPTED: dict[str, Rule] = {
    **PRODUCTS,
    **{name: _moved for name in LAYOUT_PRIMITIVES if name not in _NO_RULE},
    "gather": _gather,
    "convert_element_type": _convert,
    "stop_gradient": LAYOUT["stop_gradient"],
    "optimization_barrier": LAYOUT["optimization_barrier"],
}
"""The rule of each primitive with an adapted weight among its operands, by its name."""
