"""Statistics of a function whose parameters are quantized group by group.

What depends on parameters that are quantized already is computed once: each batch keeps the values that the rest of the trace
reads, and a group's statistics start from these. So all groups together cost about one run of the function, not one each.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend import core as jex_core
from jaxtyping import PyTree

from ..ops.interpret.evaluator import Decoded, Equations
from ..ops.interpret.observe import AbstractMeasure, Measurements, calibration_rules, observed
from ..ops.interpret.parameter_uses import array_paths
from ..ops.interpret.traced import Traced, array_leaves
from ..ops.interpret.transparent import evaluator
from .measure import Inputs, Measure, Statistic, with_cross
from .observe import StaticPart, refuse_missing, split_arrays
from .range_rules import AbsMaxRange


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """A trace, and which parameters each of its variables depends on.

    Attributes:
        traced: the function for inputs of certain shapes.
        needs: for each variable the parameters to quantize that it depends on.
        weights: the variables that depend on parameters alone, such as a transposed one.
    """

    traced: Traced
    needs: dict[jex_core.Var, frozenset[str]]
    weights: set[jex_core.Var]

    @classmethod
    def of(cls, fn: Callable[..., Any], params: PyTree, inputs: tuple[PyTree, ...], paths: Sequence[str]) -> "Program":
        """Traces a function of which `paths` will be quantized."""
        traced = Traced.of(fn, (params, *inputs), {})
        jaxpr = traced.closed.jaxpr
        needs = dict.fromkeys((*jaxpr.constvars, *jaxpr.invars), frozenset[str]())
        needs |= {var: frozenset({path}) & set(paths) for var, path in zip(jaxpr.invars, array_paths(params), strict=False)}
        weights = set(jaxpr.invars[: traced.first])
        for eqn in jaxpr.eqns:
            used = _variables(eqn)
            needs |= dict.fromkeys(eqn.outvars, frozenset[str]().union(*(needs[var] for var in used)))
            if used and weights.issuperset(used):
                weights.update(eqn.outvars)
        return cls(traced, needs, weights)

    def uses(self, eqn: jex_core.JaxprEqn, paths: frozenset[str]) -> bool:
        """Whether one of these parameters, perhaps after layout operations, is an operand."""
        return any(var in self.weights and self.needs[var] & paths for var in _variables(eqn))


@dataclasses.dataclass(frozen=True, eq=False)
class Progress:
    """How far a program was evaluated.

    Attributes:
        program: the program.
        left: the equations that were not, in order.
        known: the variables of the others that these read.
    """

    program: Program
    left: tuple[jex_core.JaxprEqn, ...]
    known: tuple[jex_core.Var, ...] = ()

    def after(self, group: frozenset[str], waiting: frozenset[str]) -> tuple["Progress", Equations]:
        """The progress once all is known that no parameter of `waiting` changes, and the equations up to the group's last use.

        Args:
            group: the parameters whose products are measured.
            waiting: those that are not quantized yet, the group among them.
        """
        jaxpr, needs, weights = self.program.traced.closed.jaxpr, self.program.needs, self.program.weights
        end = max((i + 1 for i, eqn in enumerate(self.left) if self.program.uses(eqn, group)), default=0)
        done = {
            id(eqn): eqn
            for eqn in self.left[:end]
            # what depends on parameters alone is not kept, so that biases may change until they are added
            if not weights.issuperset(eqn.outvars) and not any(needs[var] & waiting for var in eqn.outvars)
        }
        left = tuple(eqn for eqn in self.left if id(eqn) not in done)
        read = {var for eqn in left for var in _variables(eqn)}
        known = tuple(var for var in (*self.known, *(var for eqn in done.values() for var in eqn.outvars)) if var in read)
        needed, read = [], set(known)
        for eqn in reversed(self.left[:end]):
            if read.intersection(eqn.outvars) or self.program.uses(eqn, group):
                needed.append(eqn)
                read.update(_variables(eqn))
        piece = Equations(jaxpr.constvars, (*jaxpr.invars, *self.known), needed[::-1], known)
        return Progress(self.program, left, known), piece


@dataclasses.dataclass(frozen=True)
class Batch:
    """The inputs of one batch, and the values of its known variables.

    Attributes:
        inputs: the other arguments of the function.
        progress: how far the function was evaluated; batches of one shape share it.
        values: of the model that is quantized, and of the float model if it is compared with that.
    """

    inputs: tuple[PyTree, ...]
    progress: Progress
    values: tuple[list[jax.Array], ...]


@dataclasses.dataclass(frozen=True)
class Stepwise:
    """The batches of a function whose parameters are quantized group by group.

    Attributes:
        params: the float parameters.
        measure: what is measured.
        waiting: the parameters that are not quantized yet.
        batches: the batches, and what is known of them.
    """

    params: PyTree
    measure: Measure
    waiting: frozenset[str]
    batches: tuple[Batch, ...]

    @classmethod
    def of(
        cls,
        fn: Callable[..., Any],
        params: PyTree,
        batches: Sequence[PyTree],
        paths: Sequence[str],
        collect: Sequence[Statistic],
    ) -> "Stepwise":
        """The start, with all parameters floating.

        Args:
            fn: the function, `fn(params, *inputs)`.
            params: its parameters.
            batches: for each batch the tuple of the other arguments, or the one other argument.
            paths: the parameters that will be quantized.
            collect: the statistics, as for `fb.observe`.
        """
        models, begun, found = (2 if "cross" in collect else 1), dict[Any, Progress](), []
        for batch in batches:
            inputs = batch if isinstance(batch, tuple) else (batch,)
            others, arrays = split_arrays(inputs)
            shape = (others, tuple((x.shape, x.dtype) for x in arrays))
            if shape not in begun:
                program = Program.of(fn, params, inputs, paths)
                begun[shape] = Progress(program, tuple(program.traced.closed.jaxpr.eqns))
            found.append(Batch(inputs, begun[shape], ([],) * models))
        return cls(params, Measure(AbsMaxRange(), tuple(collect)), frozenset(paths), tuple(found))

    def measured(self, group: Sequence[str], now: PyTree) -> tuple[dict[str, Any], "Stepwise"]:
        """The statistics of a group of parameters, and how to go on once these are quantized.

        Args:
            group: their paths.
            now: all parameters, decoded where they are quantized.

        Raises:
            UnsupportedError: as `fb.observe`.
        """
        decoded: list[Decoded] = []
        steps = {each: each.after(frozenset(group), self.waiting) for each in {batch.progress for batch in self.batches}}
        runs = {each: _compiled(each.program, piece, group, self.measure, decoded) for each, (_, piece) in steps.items()}
        joined = jax.jit(lambda earlier, later: {path: self.measure.joined(earlier[path], later[path]) for path in earlier})
        found, batches = dict[str, Any](), []
        for batch in self.batches:
            here, values = runs[batch.progress](*split_arrays((now, self.params, batch.inputs)), batch.values)
            refuse_missing(set(group) - set(here), decoded)
            found = joined(found, here) if found else here
            batches.append(Batch(batch.inputs, steps[batch.progress][0], values))
        return found, dataclasses.replace(self, waiting=self.waiting - frozenset(group), batches=tuple(batches))


def _compiled(
    program: Program, piece: Equations, group: Sequence[str], measure: Measure, decoded: list[Decoded]
) -> Callable[[StaticPart, list[Any], tuple[list[jax.Array], ...]], tuple[dict[str, Any], tuple[list[jax.Array], ...]]]:
    """Evaluates a piece of a program: the statistics of the group, and the values that are known then."""

    @functools.partial(jax.jit, static_argnums=0)
    def run(
        others: StaticPart, arrays: list[Any], values: tuple[list[jax.Array], ...]
    ) -> tuple[dict[str, Any], tuple[list[jax.Array], ...]]:
        ours, params, inputs = others.merged(arrays)

        def of(tree: PyTree, before: list[jax.Array], measure: AbstractMeasure) -> tuple[dict[str, Any], list[jax.Array]]:
            notes = Measurements(measure)
            interpreter = evaluator("dequantize", decoded.append, calibration_rules(notes))
            leaves = array_leaves((observed(tree, group, notes), *inputs))
            known = interpreter.evaluate(piece, program.traced.closed.consts, [*leaves, *before])
            return notes.values, known

        found, known = of(ours, values[0], measure)
        if len(values) == 1:
            return found, (known,)
        exact, exactly = of(params, values[1], Inputs())
        return with_cross(found, exact, of(ours, values[0], Inputs())[0]), (known, exactly)

    return run


def _variables(eqn: jex_core.JaxprEqn) -> list[jex_core.Var]:
    """The operands that are no literals."""
    return [atom for atom in eqn.invars if isinstance(atom, jex_core.Var)]
