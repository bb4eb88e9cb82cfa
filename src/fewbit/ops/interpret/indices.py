"""Finds loop-counter indices and one-hot arrays in a jaxpr.

An index that depends on the inputs looks up a row; one that only counts loop iterations selects an element of a stack, such
as a layer. A product with a one-hot array is a look-up, too.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import TypeAlias

from jax.extend import core as jex_core

from ...array.axis_move import axis_moves

Atom: TypeAlias = jex_core.Var | jex_core.Literal


@dataclasses.dataclass(frozen=True)
class Fact:
    """What is known about one value.

    Attributes:
        is_counted: whether it depends on no input: a constant, a loop counter, an iota.
        iota: the axes along which it is an iota.
        one_hot: the axes along which one element is true (1) and all others false (0): a comparison with an iota.
    """

    is_counted: bool = False
    iota: frozenset[int] = frozenset()
    one_hot: frozenset[int] = frozenset()

    def both(self, other: "Fact") -> "Fact":
        """What both facts have in common."""
        return Fact(self.is_counted and other.is_counted, self.iota & other.iota, self.one_hot & other.one_hot)


UNKNOWN, _CONSTANT = Fact(), Fact(is_counted=True)


@dataclasses.dataclass(frozen=True)
class Facts:
    """What is known about the variables of a jaxpr and its inner jaxprs.

    Attributes:
        of_variable: the facts; of a jaxpr that is called more than once, those true in every call.
    """

    of_variable: dict[jex_core.Var, Fact]

    @classmethod
    def of(cls, jaxpr: jex_core.Jaxpr) -> "Facts":
        """The facts of a jaxpr with unknown inputs."""
        facts = cls({})
        facts._walk(jaxpr, [UNKNOWN] * len(jaxpr.invars))
        return facts

    def __getitem__(self, atom: Atom) -> Fact:
        return _CONSTANT if isinstance(atom, jex_core.Literal) else self.of_variable.get(atom, UNKNOWN)

    def _walk(self, jaxpr: jex_core.Jaxpr, inputs: Sequence[Fact]) -> list[Fact]:
        """Records the facts of a jaxpr's variables, and returns those of its outputs."""
        own: dict[jex_core.Var, Fact] = {}

        def note(variables: Sequence[jex_core.Var], facts: Sequence[Fact]) -> None:
            for variable, fact in zip(variables, facts, strict=True):
                own[variable] = fact
                before = self.of_variable.get(variable, fact)
                self.of_variable[variable] = before.both(fact)

        def read(atom: Atom) -> Fact:
            if isinstance(atom, jex_core.Literal):
                return _CONSTANT
            return own[atom]

        note(jaxpr.constvars, [_CONSTANT] * len(jaxpr.constvars))
        note(jaxpr.invars, inputs)
        for eqn in jaxpr.eqns:
            note(eqn.outvars, self._outputs(eqn, [read(atom) for atom in eqn.invars]))
        return [read(atom) for atom in jaxpr.outvars]

    def _outputs(self, eqn: jex_core.JaxprEqn, inputs: list[Fact]) -> list[Fact]:
        name, params, count = eqn.primitive.name, eqn.params, len(eqn.outvars)
        if name == "scan":
            return self._loop(open_jaxpr(params["jaxpr"]), inputs, *scan_counts(eqn))
        if name == "while":
            in_cond, in_body = params["cond_nconsts"], params["body_nconsts"]
            consts, carry = inputs[in_cond : in_cond + in_body], inputs[in_cond + in_body :]
            outputs = self._loop(open_jaxpr(params["body_jaxpr"]), [*consts, *carry], in_body, len(carry))
            self._walk(open_jaxpr(params["cond_jaxpr"]), [*inputs[:in_cond], *outputs])
            return outputs
        if name == "cond":
            which, *operands = inputs
            branches = [self._walk(open_jaxpr(branch), operands) for branch in params["branches"]]
            outputs = [functools.reduce(Fact.both, column) for column in zip(*branches, strict=True)]
            if which.is_counted:
                return outputs
            return [UNKNOWN] * count
        if (inner := inner_jaxpr(eqn)) is not None:
            return self._walk(inner, inputs)
        if name == "iota":
            return [Fact(True, frozenset({params["dimension"]}))]
        if name == "eq":
            left, right = inputs
            if left.is_counted == right.is_counted:
                return [Fact(left.is_counted)]
            return [Fact(one_hot=left.iota | right.iota)]
        moves = axis_moves(eqn)
        moved: list[frozenset[int]] = []
        if moves and not moves[0].slices and not moves[0].flipped:
            places = moves[0].places
            moved = [frozenset(places[a] for a in axes if a in places) for axes in (inputs[0].iota, inputs[0].one_hot)]
        return [Fact(all(fact.is_counted for fact in inputs), *moved)] * count

    def _loop(self, body: jex_core.Jaxpr, inputs: list[Fact], constants: int, carries: int) -> list[Fact]:
        """The facts of a loop's outputs: a fixed point over its carry."""
        consts, carry, scanned = inputs[:constants], inputs[constants : constants + carries], inputs[constants + carries :]
        elements = [Fact(fact.is_counted) for fact in scanned]
        while True:
            outputs = self._walk(body, [*consts, *carry, *elements])
            after = [before.both(out) for before, out in zip(carry, outputs[:carries], strict=True)]
            if after == carry:
                return [*carry, *(Fact(fact.is_counted) for fact in outputs[carries:])]
            carry = after


def shape_of(atom: Atom) -> tuple[int, ...]:
    """The shape of a variable or literal of a jaxpr."""
    return atom.aval.shape  # type: ignore[attr-defined]


def scan_counts(eqn: jex_core.JaxprEqn) -> tuple[int, int]:
    """The number of a scan's constants, and of its carries.

    Derived from the shapes, since JAX's versions store the numbers in different parameters: a scanned operand has one axis
    more outside the body than inside.
    """
    body = eqn.params["jaxpr"].jaxpr

    def kept_axes(outer: Sequence[Atom], inner: Sequence[Atom]) -> int:
        return sum(len(shape_of(o)) == len(shape_of(i)) for o, i in zip(outer, inner, strict=True))

    carries = kept_axes(eqn.outvars, body.outvars)
    return kept_axes(eqn.invars, body.invars) - carries, carries


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
