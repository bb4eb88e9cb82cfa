"""Facts about loop-counter indices and one-hot arrays.

An index that depends on the inputs looks up a row; one that only counts loop iterations selects an element of a stack, such
as a layer. A product with a one-hot array is a look-up, too.
"""

import dataclasses
from collections.abc import Sequence
from typing import TypeAlias, TypeVar

from jax.extend import core as jex_core

from ...array.axis_move import axis_moves

Atom: TypeAlias = jex_core.Var | jex_core.Literal
V = TypeVar("V")


@dataclasses.dataclass(frozen=True)
class Fact:
    """What is known about one value.

    Attributes:
        is_counted: whether it depends on no input or array: a number in the code, a loop counter, an iota.
        iota: the axes along which it is an iota.
        one_hot: the axes along which one element is true (1) and all others false (0): a comparison with an iota.
    """

    is_counted: bool = False
    iota: frozenset[int] = frozenset()
    one_hot: frozenset[int] = frozenset()

    def both(self, other: "Fact") -> "Fact":
        """What both facts have in common."""
        return Fact(self.is_counted and other.is_counted, self.iota & other.iota, self.one_hot & other.one_hot)


UNKNOWN, CONSTANT = Fact(), Fact(is_counted=True)


def fact_of(eqn: jex_core.JaxprEqn, inputs: Sequence[Fact]) -> Fact:
    """What is known about the results of an equation without a body."""
    is_counted = all(fact.is_counted for fact in inputs)
    if eqn.primitive.name == "iota":
        return Fact(True, frozenset({eqn.params["dimension"]}))
    if eqn.primitive.name == "eq" and inputs[0].is_counted != inputs[1].is_counted:
        return Fact(one_hot=inputs[0].iota | inputs[1].iota)
    if inputs and (inputs[0].iota or inputs[0].one_hot):
        for move in axis_moves(eqn)[:1]:
            if not move.slices and not move.flipped:
                places = move.places
                moved = [frozenset(places[a] for a in axes if a in places) for axes in (inputs[0].iota, inputs[0].one_hot)]
                return Fact(is_counted, *moved)
    return Fact(is_counted)


def shape_of(atom: Atom) -> tuple[int, ...]:
    """The shape of a variable or literal of a jaxpr."""
    return atom.aval.shape  # type: ignore[attr-defined]


def scan_operands(eqn: jex_core.JaxprEqn, values: Sequence[V]) -> tuple[list[V], list[V], list[V]]:
    """The constants, the carry and the stacks among the values of a scan's operands.

    Derived from the shapes, since JAX's versions store the numbers in different parameters: a stack has one axis more outside
    the body than inside.
    """
    body = eqn.params["jaxpr"].jaxpr

    def same_rank(outer: Sequence[Atom], inner: Sequence[Atom]) -> int:
        return sum(len(shape_of(o)) == len(shape_of(i)) for o, i in zip(outer, inner, strict=True))

    stacks, carries = same_rank(eqn.invars, body.invars), same_rank(eqn.outvars, body.outvars)
    return list(values[: stacks - carries]), list(values[stacks - carries : stacks]), list(values[stacks:])


def while_operands(eqn: jex_core.JaxprEqn, values: Sequence[V]) -> tuple[list[V], list[V], list[V]]:
    """The values of a while loop's operands, in three parts.

    These are the condition's constants, the body's constants and the carry.
    """
    first = eqn.params["cond_nconsts"]
    last = first + eqn.params["body_nconsts"]
    return list(values[:first]), list(values[first:last]), list(values[last:])


def open_jaxpr(closed: jex_core.Jaxpr | jex_core.ClosedJaxpr) -> jex_core.Jaxpr:
    """The jaxpr of a closed jaxpr."""
    return closed.jaxpr if isinstance(closed, jex_core.ClosedJaxpr) else closed


def inner_jaxpr(eqn: jex_core.JaxprEqn) -> jex_core.Jaxpr | None:
    """The one jaxpr that an equation calls with its own operands, or None."""
    for key in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        if key in eqn.params and eqn.primitive.name != "pallas_call":
            inner = open_jaxpr(eqn.params[key])
            if len(inner.invars) == len(eqn.invars) and len(inner.outvars) == len(eqn.outvars):
                return inner
    return None
