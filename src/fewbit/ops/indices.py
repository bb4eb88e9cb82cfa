"""What a trace knows of its indices: those that only loops count, and arrays that are one-hot.

An index that the inputs decide looks a row up; one that a loop counts picks an element of a stack, such as a layer. A product
with a one-hot array is a look-up, too.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

from jax.extend import core as jex_core

from ..array.layout import regrouped


@dataclasses.dataclass(frozen=True)
class Fact:
    """What is known of one value.

    Attributes:
        is_counted: whether no input decides it: a constant, a loop's counter, an iota.
        iota: the axes along which an iota runs.
        one_hot: the axes along which one element is true, or 1, and all others are false, or 0: a comparison with an iota.
    """

    is_counted: bool = False
    iota: frozenset[int] = frozenset()
    one_hot: frozenset[int] = frozenset()

    def both(self, other: "Fact") -> "Fact":
        """What is known of a value that is the one or the other."""
        return Fact(self.is_counted and other.is_counted, self.iota & other.iota, self.one_hot & other.one_hot)


UNKNOWN, _CONSTANT = Fact(), Fact(is_counted=True)


@dataclasses.dataclass(frozen=True)
class Facts:
    """What is known of the variables of a trace, those of inner jaxprs included.

    Attributes:
        of_variable: the facts; of a jaxpr that is called more than once, those that hold in every call.
    """

    of_variable: dict[Any, Fact]

    @classmethod
    def of(cls, jaxpr: Any) -> "Facts":
        """The facts of a trace of whose inputs nothing is known."""
        facts = cls({})
        facts._walk(jaxpr, [UNKNOWN] * len(jaxpr.invars))
        return facts

    def __getitem__(self, atom: Any) -> Fact:
        return _CONSTANT if isinstance(atom, jex_core.Literal) else self.of_variable.get(atom, UNKNOWN)

    def _walk(self, jaxpr: Any, inputs: Sequence[Fact]) -> list[Fact]:
        """Notes what is known of the variables of a jaxpr with these inputs, and gives that of its outputs."""
        own: dict[Any, Fact] = {}

        def note(variables: Sequence[Any], facts: Sequence[Fact]) -> None:
            for variable, fact in zip(variables, facts, strict=True):
                own[variable] = fact
                before = self.of_variable.get(variable, fact)
                self.of_variable[variable] = before.both(fact)

        def read(atom: Any) -> Fact:
            return _CONSTANT if isinstance(atom, jex_core.Literal) else own[atom]

        note(jaxpr.constvars, [_CONSTANT] * len(jaxpr.constvars))
        note(jaxpr.invars, inputs)
        for eqn in jaxpr.eqns:
            note(eqn.outvars, self._outputs(eqn, [read(atom) for atom in eqn.invars]))
        return [read(atom) for atom in jaxpr.outvars]

    def _outputs(self, eqn: Any, inputs: list[Fact]) -> list[Fact]:
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
            return outputs if which.is_counted else [UNKNOWN] * count
        if (inner := inner_jaxpr(eqn)) is not None:
            return self._walk(inner, inputs)
        if name == "iota":
            return [Fact(True, frozenset({params["dimension"]}))]
        if name == "eq":
            left, right = inputs
            one_hot = frozenset() if left.is_counted == right.is_counted else left.iota | right.iota
            return [Fact(left.is_counted and right.is_counted, one_hot=one_hot)]
        places = _places(eqn)
        if places is not None:
            moved = [frozenset(places[a] for a in axes if a in places) for axes in (inputs[0].iota, inputs[0].one_hot)]
            return [Fact(all(fact.is_counted for fact in inputs), *moved)] * count
        return [Fact(all(fact.is_counted for fact in inputs))] * count

    def _loop(self, body: Any, inputs: list[Fact], constants: int, carries: int) -> list[Fact]:
        """The outputs of a loop, after as many turns as it takes until what is known of its carry holds."""
        consts, carry, scanned = inputs[:constants], inputs[constants : constants + carries], inputs[constants + carries :]
        elements = [Fact(fact.is_counted) for fact in scanned]
        while True:
            outputs = self._walk(body, [*consts, *carry, *elements])
            after = [before.both(out) for before, out in zip(carry, outputs[:carries], strict=True)]
            if after == carry:
                return [*carry, *(Fact(fact.is_counted) for fact in outputs[carries:])]
            carry = after


def _places(eqn: Any) -> dict[int, int] | None:
    """For each axis of the operand where an equation that only moves elements puts it; None for any other equation."""
    name, params = eqn.primitive.name, eqn.params
    if name in ("convert_element_type", "copy", "copy_p", "stop_gradient", "sharding_constraint", "name"):
        return {axis: axis for axis in range(eqn.invars[0].aval.ndim)}
    if name == "broadcast_in_dim":
        return dict(enumerate(map(int, params["broadcast_dimensions"])))
    if name == "transpose":
        return {int(axis): place for place, axis in enumerate(params["permutation"])}
    if name in ("reshape", "squeeze", "expand_dims"):
        shape, new = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
        places: dict[int, int] = {}
        for old, after in regrouped(shape, new):
            long, new_long = [a for a in old if shape[a] > 1], [a for a in after if new[a] > 1]
            if len(long) == len(new_long) == 1:
                places[long[0]] = new_long[0]
        return places
    return None


def scan_counts(eqn: Any) -> tuple[int, int]:
    """How many operands of a scan are constants, and how many are carried.

    Told from the shapes, since JAX's versions hold the numbers in different parameters: what is scanned has one axis more
    outside the body than inside.
    """
    body = eqn.params["jaxpr"].jaxpr
    carries = sum(o.aval.ndim == i.aval.ndim for o, i in zip(eqn.outvars, body.outvars, strict=True))
    scanned = sum(o.aval.ndim != i.aval.ndim for o, i in zip(eqn.invars, body.invars, strict=True))
    return len(eqn.invars) - scanned - carries, carries


def open_jaxpr(closed: Any) -> Any:
    """The jaxpr of a closed one."""
    return getattr(closed, "jaxpr", closed)


def inner_jaxpr(eqn: Any) -> Any | None:
    """The one jaxpr that an equation calls with its own operands, if it does."""
    for key in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        if key in eqn.params and eqn.primitive.name != "pallas_call":
            inner = open_jaxpr(eqn.params[key])
            if len(inner.invars) == len(eqn.invars) and len(inner.outvars) == len(eqn.outvars):
                return inner
    return None
