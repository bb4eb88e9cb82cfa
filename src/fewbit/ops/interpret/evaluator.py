"""The evaluator of jaxprs with array proxies."""

import dataclasses
import itertools
import operator
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.extend import core as jex_core
from jax.extend import source_info_util
from jaxtyping import PyTree

from ...array.qarray import QArray
from ...errors import UnsupportedError
from ...kernels.quantize.dispatch import dequantize
from .indices import Atom, open_jaxpr, shape_of
from .proxy import ArrayProxy, NoRuleError, is_proxy, is_proxy_type

_SOURCE = operator.attrgetter("source_info.traceback", "source_info.name_stack")


@dataclasses.dataclass(frozen=True)
class Decoded:
    """One place where a quantized array was decoded for lack of a rule.

    Attributes:
        primitive: the name of the primitive.
        array: the array's shape and scheme.
        source: the file and line of the user's code.
        reason: why it could not stay quantized.
    """

    primitive: str
    array: str
    source: str
    reason: str

    def __str__(self) -> str:
        return f"{self.source}: {self.primitive} decodes {self.array} ({self.reason})"


@dataclasses.dataclass(frozen=True)
class ChosenProducts:
    """Products without a parameter that follow a policy.

    Attributes:
        operands: the proxy (without array) of each right operand, by the ids of its equation and those around it.
        around: the ids of the equations that have one in their bodies, with those around them.
    """

    operands: Mapping[tuple[int, ...], Any]
    around: frozenset[tuple[int, ...]]


@dataclasses.dataclass(frozen=True)
class Equations:
    """A part of a jaxpr, with the attributes of a `Jaxpr` that an evaluator reads.

    Attributes:
        constvars: the variables of the jaxpr's constants.
        invars: all other variables that the equations read from outside.
        eqns: the equations, in order.
        outvars: the variables that are asked for.
    """

    constvars: Sequence[jex_core.Var]
    invars: Sequence[jex_core.Var]
    eqns: Sequence[jex_core.JaxprEqn]
    outvars: Sequence[Atom]


@dataclasses.dataclass(frozen=True)
class Evaluator:
    """Evaluates jaxprs whose variables may be QArrays and other proxies.

    Attributes:
        fallback: as in `transparent`.
        report: as in `transparent`.
        pieces: a cache of the jitted functions of inner `jit`s, and of loops and branches outside a trace, by the jaxprs they
            were made from, so that JAX's own cache hits for the next equal equation or call.
        is_traced: whether the evaluation is being traced.
        rules: the rule of each primitive with a QArray operand.
        shared: the rules of equations with bodies, for operands of every kind.
        rules_around: the rules of equations with a chosen product in their bodies, where no operand has its own.
        chosen: the products without a parameter that follow a policy; None where there are none.
        around: the equations whose bodies are being evaluated, the innermost first.
    """

    fallback: str
    report: Callable[[Decoded], None] | None
    pieces: dict[Hashable, Callable[..., Any]]
    is_traced: bool
    rules: Mapping[str, "Rule"]
    shared: Mapping[str, "Rule"]
    rules_around: Mapping[str, "Rule"]
    chosen: ChosenProducts | None = None
    around: tuple[Any, ...] = ()

    def evaluate(self, jaxpr: jex_core.Jaxpr | Equations, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
        """The outputs of a jaxpr for values that may be proxies."""
        env: dict[jex_core.Var, Any] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))

        def read(atom: Atom) -> Any:
            if isinstance(atom, jex_core.Literal):
                return atom.val
            value = env[atom]
            if isinstance(value, ArrayProxy):
                value, env[atom] = value.forked()
            return value

        # Most equations have no proxy, and these loops are what tracing costs, so they make few calls.
        outer = source_info_util.current_name_stack()
        for ctx, in_context in itertools.groupby(jaxpr.eqns, key=operator.attrgetter("ctx")):
            with ctx.manager:
                for (traceback, name_stack), eqns in itertools.groupby(in_context, key=_SOURCE):
                    if outer.stack:
                        name_stack = outer + name_stack
                    with source_info_util.user_context(traceback, name_stack=name_stack):
                        for eqn in eqns:
                            values = [x.val if isinstance(x, jex_core.Literal) else env[x] for x in eqn.invars]
                            if self.chosen is not None or any(map(is_proxy_type, map(type, values))):
                                outputs = self.equation(eqn, self._operands(eqn, jaxpr, read))
                                env.update(zip(eqn.outvars, outputs, strict=True))
                                continue
                            primitive = eqn.primitive
                            outputs = primitive.bind(*values, **primitive.get_bind_params(eqn.params))
                            if primitive.multiple_results:
                                env.update(zip(eqn.outvars, outputs, strict=True))
                            else:
                                env[eqn.outvars[0]] = outputs
        return [read(atom) for atom in jaxpr.outvars]

    def _operands(self, eqn: jex_core.JaxprEqn, jaxpr: jex_core.Jaxpr | Equations, read: Callable[[Atom], Any]) -> list[Any]:
        """The operands of an equation."""
        values = [read(atom) for atom in eqn.invars]
        if eqn.primitive.name == "select_n" and _has_proxy(values):
            values[0] = _as_made(eqn.invars[0], jaxpr, read)
        return values

    def function(self, inner: jex_core.Jaxpr | jex_core.ClosedJaxpr) -> Callable[..., list[Any]]:
        """An equation's body as a function of values that may be proxies."""
        within = dataclasses.replace(self, is_traced=True)
        jaxpr, consts = open_jaxpr(inner), getattr(inner, "consts", ())
        return lambda *args: within.evaluate(jaxpr, consts, args)

    def has_chosen_inside(self) -> bool:
        """Whether a chosen product is in the body of the equation."""
        return self.chosen is not None and tuple(map(id, self.around)) in self.chosen.around

    def inside(self) -> list[ArrayProxy]:
        """The proxies (without array) of the chosen products in the body of the equation."""
        if self.chosen is None:
            return []
        return [self.chosen.operands[place] for place in self._places_inside()]

    def with_inside(self, stand_ins: Sequence[Any]) -> "Evaluator":
        """An evaluator with other proxies for those products."""
        if self.chosen is None or not stand_ins:
            return self
        operands = {**self.chosen.operands, **dict(zip(self._places_inside(), stand_ins, strict=True))}
        return dataclasses.replace(self, chosen=dataclasses.replace(self.chosen, operands=operands))

    def reusable(self) -> tuple["Evaluator", tuple[tuple[int, ...], ...]]:
        """An evaluator of the equation's body for later calls, and the places of the chosen products in the body.

        The evaluator has no proxies for these products; `with_inside` sets those of each call.
        """
        if not self.has_chosen_inside():
            return dataclasses.replace(self, is_traced=True, chosen=None), ()
        assert self.chosen is not None
        places = self._places_inside()
        chosen = dataclasses.replace(self.chosen, operands=dict.fromkeys(places))
        return dataclasses.replace(self, is_traced=True, chosen=chosen), tuple(p[: -len(self.around)] for p in places)

    def _places_inside(self) -> list[tuple[int, ...]]:
        """The places of the chosen products in the body of the equation whose rule is running."""
        assert self.chosen is not None
        around = tuple(map(id, self.around))
        return [place for place in self.chosen.operands if place[-len(around) :] == around and len(place) > len(around)]

    def equation(self, eqn: jex_core.JaxprEqn, values: list[Any]) -> list[Any]:
        """The results of one equation. They come from the rule of its primitive, where an operand is a proxy."""
        has_proxy = _has_proxy(values)
        is_around = False
        if self.chosen is not None and not has_proxy:
            place = (id(eqn), *map(id, self.around))
            if place in self.chosen.operands:
                values = [values[0], dataclasses.replace(self.chosen.operands[place], value=values[1]), *values[2:]]
                has_proxy = True
            is_around = place in self.chosen.around
        if not has_proxy and not is_around:
            return bound(eqn, values)
        name, rules = eqn.primitive.name, self.rules_around
        if has_proxy:
            rules = self.rules
            proxies = [value for value in values if isinstance(value, ArrayProxy)]
            if proxies:  # they have rules of their own
                values = [value.as_operand(name, values) if isinstance(value, ArrayProxy) else value for value in values]
                rules = next((value.rules for value in values if isinstance(value, ArrayProxy)), rules)
        rule = rules.get(name, self.shared.get(name))
        reason = "fewbit has no rule for it"
        if rule is not None:
            within = self
            if name in self.shared or name == "shard_map":  # it has a body
                within = dataclasses.replace(self, around=(eqn, *self.around))
            try:
                return rule(within, eqn, values)
            except NoRuleError as error:
                reason = str(error)
        values = [self.decoded(eqn, value, reason) for value in values]
        if name == "select_n":
            values[0] = jnp.broadcast_to(values[0], shape_of(eqn.invars[0]))  # as it was before `_as_made`
        return bound(eqn, values)

    def decoded(self, eqn: jex_core.JaxprEqn, value: PyTree, reason: str) -> Any:
        """The decoded value, where the fallback allows it."""
        if not is_proxy(value):
            return value
        place = Decoded(eqn.primitive.name, repr(value), _source_of(eqn, *self.around), reason)
        if self.fallback == "error":
            raise UnsupportedError(f"{place}; pass fallback='dequantize' to allow it, or leave this parameter a plain array")
        if self.report is not None:
            self.report(place)
        return array_of(value)


Rule: TypeAlias = Callable[[Evaluator, Any, list[Any]], list[Any]]
"""From the evaluator, an equation and its operands, at least one of them a proxy, to the results."""


def bound(eqn: jex_core.JaxprEqn, values: Sequence[Any]) -> list[Any]:
    """The equation as JAX computes it."""
    primitive = eqn.primitive
    outputs = primitive.bind(*values, **primitive.get_bind_params(eqn.params))
    if primitive.multiple_results:
        return list(outputs)
    return [outputs]


def array_of(x: QArray | ArrayProxy) -> jax.Array:
    """The array that a proxy replaces."""
    if isinstance(x, ArrayProxy):
        return x.array()
    return dequantize(x)


def _has_proxy(values: Sequence[Any]) -> bool:
    """Whether an operand is a proxy; without a call for each."""
    return any(map(is_proxy_type, map(type, values)))


def _as_made(predicate: Atom, jaxpr: jex_core.Jaxpr | Equations, read: Callable[[Atom], Any]) -> Any:
    """A predicate before its broadcast, with axes of length 1. `vmap` of `cond` broadcasts it."""
    for eqn in jaxpr.eqns:
        if predicate in eqn.outvars and eqn.primitive.name == "broadcast_in_dim":
            value, places = jnp.asarray(read(eqn.invars[0])), eqn.params["broadcast_dimensions"]
            lengths = dict(zip(places, value.shape, strict=True))
            return value.reshape([lengths.get(axis, 1) for axis in range(len(eqn.params["shape"]))])
    return jnp.asarray(read(predicate))  # a literal is a number of Python


def _source_of(*eqns: jex_core.JaxprEqn) -> str:
    """The file and line of an equation. Without a line outside JAX, they are those of the nearest one around it."""
    return next(filter(None, (source_info_util.summarize(eqn.source_info) for eqn in eqns)), "within JAX")
