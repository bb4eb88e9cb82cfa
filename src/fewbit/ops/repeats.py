"""Stretches of a trace that come again: a model of many layers makes the same equations for each of them.

Evaluating an equation costs half of what tracing it did. A stretch begins with a quantized operand and ends where the line of
code that it began with comes again. One that comes again is evaluated once as a function of its own, jitted, and called for
each layer. Two stretches are the same when primitives, parameters, literals, wiring, name stacks and
lines of code are; their operands' types are for `jit` to tell.
"""

import dataclasses
import types
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Self

import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex_core

from .standin import stands_in

_LONGEST = 512  # equations of one stretch; a longer one is cut
_VARIANTS = 3  # different stretches that begin at one line, after which it is given up: its layers differ by name, say
_SURE = ("dot_general", "transpose", "convert_element_type")  # primitives whose rules take nearly any operand


@dataclasses.dataclass(frozen=True)
class Stretch:
    """Consecutive equations as a function.

    Attributes:
        key: equal for stretches that are the same.
        eqns: the equations.
        inputs: the variables that come from before, in the order of their first use.
        outputs: the variables that are used after.
        comes_again: whether the line that it began with is the next.
    """

    key: Hashable
    eqns: tuple[Any, ...]
    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]
    comes_again: bool

    @property
    def jaxpr(self) -> Any:
        """What of a jaxpr the evaluator reads."""
        return types.SimpleNamespace(constvars=(), invars=self.inputs, outvars=self.outputs, eqns=self.eqns)


@dataclasses.dataclass
class Survey:
    """What is known of a trace while its stretches are looked for.

    Attributes:
        last: for each variable the index of the last equation that reads it; the number of equations for an output.
        lines: the lines of code that make a product, a transpose or a cast more than once, each with how many different
            stretches began there.
    """

    last: dict[Any, int]
    lines: dict[Hashable, int]

    @classmethod
    def of(cls, jaxpr: Any) -> Self:
        """The survey of a jaxpr."""
        last: dict[Any, int] = {}
        times: dict[Hashable, int] = {}
        for index, eqn in enumerate(jaxpr.eqns):
            last.update((atom, index) for atom in eqn.invars if not isinstance(atom, jex_core.Literal))
            if eqn.primitive.name in _SURE:
                line = eqn.source_info.traceback
                times[line] = times.get(line, 0) + 1
        last.update((atom, len(jaxpr.eqns)) for atom in jaxpr.outvars if not isinstance(atom, jex_core.Literal))
        return cls(last, {line: 0 for line, count in times.items() if count > 1})


def stretch_from(jaxpr: Any, start: int, env: Mapping[Any, Any], survey: Survey) -> Stretch | None:
    """The stretch that begins with an equation that has a quantized operand.

    Args:
        jaxpr: the trace.
        start: the index of the equation.
        env: the values of the variables so far.
        survey: that of the jaxpr.

    Returns:
        The stretch; None when its line does not come again or makes another stretch each time, when the equation may be left
        to the fallback, or when a parameter cannot be compared.
    """
    line = jaxpr.eqns[start].source_info.traceback
    if survey.lines.get(line, _VARIANTS) >= _VARIANTS:
        return None
    eqns, comes_again = _together(jaxpr.eqns[start : start + _LONGEST], env)
    stop = len(eqns)
    if not stop:
        return None
    place: dict[Any, int] = {}
    inputs: list[Any] = []
    rows: list[Hashable] = []
    outputs: list[Any] = []
    for eqn in eqns:
        operands: list[Hashable] = []
        for atom in eqn.invars:
            if isinstance(atom, jex_core.Literal):
                operands.append(_literal(atom))
                continue
            if atom not in place:
                place[atom] = len(place)
                inputs.append(atom)
            operands.append(place[atom])
        for var in eqn.outvars:
            place[var] = len(place)
            if survey.last.get(var, -1) >= start + stop:
                outputs.append(var)
        info = eqn.source_info
        params = [v if type(v) not in (tuple, float) else _exact(v) for v in eqn.params.values()]
        rows.append((eqn.primitive, *operands, *params, info.name_stack.stack, info.traceback, eqn.ctx))
    key = _Key((*rows, *[place[var] for var in outputs]))
    return None if key.hash is None else Stretch(key, tuple(eqns), tuple(inputs), tuple(outputs), comes_again)


class _Key:
    """A key that is hashed once; `hash` is None for one that cannot be."""

    __slots__ = ("hash", "parts")

    def __init__(self, parts: tuple[Any, ...]):
        self.parts = parts
        try:
            self.hash: int | None = hash(parts)
        except TypeError:
            self.hash = None

    def __hash__(self) -> int:
        assert self.hash is not None
        return self.hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and self.parts == other.parts


def _together(eqns: Sequence[Any], env: Mapping[Any, Any]) -> tuple[list[Any], bool]:
    """The first of some equations that can be one stretch, and whether the line that they began with follows.

    None of them has effects, or may be left to the fallback.
    """
    begin = eqns[0].source_info.traceback
    within: set[Any] = set()  # variables of the stretch that hold QArrays
    inside: list[Any] = []
    for eqn in eqns:
        atoms = [a for a in eqn.invars if not isinstance(a, jex_core.Literal)]
        is_quantized = not within.isdisjoint(atoms) or any(map(stands_in, map(env.get, atoms)))
        is_new = eqn.primitive.name.startswith("custom_")  # their functions are made anew for each layer
        if eqn.effects or is_new or (is_quantized and not _is_sure(eqn)):
            break
        if is_quantized and inside and eqn.source_info.traceback == begin and eqn.primitive is eqns[0].primitive:
            return inside, True
        if is_quantized and eqn.primitive.name != "dot_general":
            within.update(eqn.outvars)
        inside.append(eqn)
    return inside, False


def _is_sure(eqn: Any) -> bool:
    """Whether the rule of an equation takes any quantized operand."""
    params = eqn.params
    if eqn.primitive.name == "dot_general":
        return params.get("out_sharding") is None
    if eqn.primitive.name == "convert_element_type":
        return params.get("sharding") is None and jnp.issubdtype(params["new_dtype"], jnp.floating)
    return eqn.primitive.name == "transpose"


def _literal(atom: Any) -> Hashable:
    value = np.asarray(atom.val)
    return value.tobytes(), value.dtype, value.shape, atom.aval.weak_type


def _exact(value: Any) -> Hashable:
    """A parameter for comparison: -0.0 is not 0.0."""
    return tuple(map(_exact, value)) if isinstance(value, tuple) else repr(value) if isinstance(value, float) else value
