"""Control flow: the same primitive around a body that is evaluated with the rules."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex_core

from ...array import QArray, is_qarray
from ..indices import open_jaxpr, scan_counts
from ..standin import StandIn, stands_in
from ..take import taken_rows
from .joining import spread
from .rule import AbstractEvaluator, NoRuleError, Rule
from .turn import Turn, alone, left_in_place


def _jit(evaluator: AbstractEvaluator, eqn: Any, values: list[Any]) -> list[Any]:
    return evaluator.jitted(eqn)(*values)


def _call(evaluator: AbstractEvaluator, eqn: Any, values: list[Any]) -> list[Any]:
    """A call that stands for its body."""
    inner = eqn.params.get("call_jaxpr")
    return evaluator.function(eqn.params["jaxpr"] if inner is None else inner)(*values)


def _remat(evaluator: AbstractEvaluator, eqn: Any, values: list[Any]) -> list[Any]:
    params = eqn.params
    body = evaluator.function(params["jaxpr"])

    def kept_apart(*args: Any) -> list[Any]:
        # What was differentiated already computes again here; the barrier keeps XLA from sharing it with the first time.
        return body(*jax.lax.optimization_barrier(args))

    inner = kept_apart if params["differentiated"] and params["prevent_cse"] else body
    return jax.checkpoint(inner, prevent_cse=params["prevent_cse"], policy=params["policy"])(*values)


def _scan(evaluator: AbstractEvaluator, eqn: Any, values: list[Any]) -> list[Any]:
    params = eqn.params
    constants, carries = scan_counts(eqn)
    consts, carry, xs = values[:constants], values[constants : constants + carries], values[constants + carries :]
    body = evaluator.function(params["jaxpr"])
    xs = [stacked(x) if stands_in(x) else x for x in xs]
    in_place = [x if left_in_place(x) else None for x in xs]
    xs = [x if stack is None else None for x, stack in zip(xs, in_place, strict=True)]

    # What a stand-in that every turn reads keeps for each turn is scanned beside the rest; so for those that the body makes.
    hidden = evaluator.inside()
    own = [c.turns(params["length"]) if isinstance(c, StandIn) else () for c in (*consts, *hidden)]

    def scanned(x: Sequence[Any], index: Any) -> list[Any]:
        return [a if stack is None else Turn(stack, index) for a, stack in zip(x, in_place, strict=True)]

    def step(carry: Any, turn: tuple[Any, Any, Any]) -> tuple[Any, Any]:
        x, own, index = turn
        here = [c.in_turn(o) if isinstance(c, StandIn) else c for c, o in zip((*consts, *hidden), own, strict=True)]
        turned = evaluator.with_inside(here[constants:]).function(params["jaxpr"])
        outputs = list(map(alone, turned(*here[:constants], *carry, *scanned(x, index))))
        return tuple(outputs[:carries]), tuple(outputs[carries:])

    first = jax.tree.map(lambda leaf: leaf[0], xs) if any(map(stands_in, carry)) else []
    first = scanned(first, jnp.int32(0)) if first else []
    carry = _stable_carry(evaluator, eqn, lambda *c: body(*consts, *c, *first)[:carries], carry)
    carry, ys = jax.lax.scan(
        step,
        tuple(carry),
        (tuple(xs), tuple(own), jnp.arange(params["length"], dtype=jnp.int32)),
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
    )
    return [*carry, *ys]


def stacked(q: QArray | StandIn) -> Any:
    """The array with a scale for each element of its first axis, so that a loop can take one at a time."""
    if isinstance(q, StandIn):
        return q.stacked()
    if q.ndim == 1 or q.scheme.pack_axis == -q.ndim:
        raise NoRuleError("the loop runs along the packed axis")
    length = q.shape[0]
    if q.scale.shape[0] not in (1, length):
        q = taken_rows(q, jnp.arange(length), 0)
    scale = stacked(spread(q.scale, 0, length)) if is_qarray(q.scale) else spread(q.scale, 0, length)
    zero = None if q.zero_point is None else spread(q.zero_point, 0, length)
    tensor = None if q.tensor_scale is None else spread(q.tensor_scale, 0, length)
    # One element has no such axis, so its scheme must not name a tile there.
    tile = {axis: length for axis, length in q.scheme.tile.items() if axis != -q.ndim}
    scheme = dataclasses.replace(q.scheme, tile=tile) if len(tile) < len(q.scheme.tile) else q.scheme
    return QArray(q.codes, scale, zero, tensor, scheme, q.dtype, q.slack, q.policy)


def _stable_carry(evaluator: AbstractEvaluator, eqn: Any, step: Callable[..., Any], carry: Sequence[Any]) -> list[Any]:
    """The carry of a loop, with those QArrays decoded that one step does not give back as they are."""
    if not any(map(stands_in, carry)):
        return list(carry)
    after = jax.eval_shape(lambda *c: tuple(step(*c)), *carry)
    stays = [_is_alike(a, b) for a, b in zip(carry, after, strict=True)]
    decoded = [c if s else evaluator.decoded(eqn, c, "the loop changes it") for c, s in zip(carry, stays, strict=True)]
    return decoded if all(stays) else _stable_carry(evaluator, eqn, step, decoded)


def _is_alike(before: Any, after: Any) -> bool:
    """Whether a value has the form of another: both the same QArray in scheme and leaves' shapes, or both arrays."""

    def form(x: Any) -> Any:
        return jax.tree.structure(x), [leaf.shape for leaf in jax.tree.leaves(x)] if stands_in(x) else None

    return form(before) == form(after)


def _while(evaluator: AbstractEvaluator, eqn: Any, values: list[Any]) -> list[Any]:
    params = eqn.params
    in_cond, in_body = params["cond_nconsts"], params["body_nconsts"]
    cond_consts, body_consts, carry = values[:in_cond], values[in_cond : in_cond + in_body], values[in_cond + in_body :]
    cond, body = evaluator.function(params["cond_jaxpr"]), evaluator.function(params["body_jaxpr"])
    carry = _stable_carry(evaluator, eqn, lambda *c: body(*body_consts, *c), carry)
    return list(
        jax.lax.while_loop(lambda c: cond(*cond_consts, *c)[0], lambda c: tuple(body(*body_consts, *c)), tuple(carry))
    )


def _cond(evaluator: AbstractEvaluator, eqn: Any, values: list[Any]) -> list[Any]:
    index, *operands = values
    bodies = [evaluator.function(branch) for branch in eqn.params["branches"]]
    shapes = [jax.eval_shape(lambda *args, b=body: tuple(b(*args)), *operands) for body in bodies]
    blanks = [_blank_outputs(open_jaxpr(branch)) for branch in eqn.params["branches"]]
    forms = [_common_form(*columns) for columns in zip(zip(*shapes, strict=True), zip(*blanks, strict=True), strict=True)]

    def uniform(body: Callable[..., list[Any]], are_blank: Sequence[bool]) -> Callable[..., tuple[Any, ...]]:
        def in_form(output: Any, is_blank: bool, form: Any) -> Any:
            if form is None:
                return evaluator.decoded(eqn, output, "the branches give it back in different forms")
            if is_blank and is_qarray(form):
                return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), form)
            return output

        def run(*args: Any) -> tuple[Any, ...]:
            return tuple(map(in_form, body(*args), are_blank, forms))

        return run

    branches = list(map(uniform, bodies, blanks))
    platforms = eqn.params.get("branches_platforms")
    if platforms is None:
        return list(jax.lax.switch(index, branches, *operands))
    return list(_platform_dependent(platforms, branches, operands))


def _common_form(outputs: Sequence[Any], are_blank: Sequence[bool]) -> Any:
    """The abstract value that every branch can give for one output, or None where they differ."""
    written = [output for output, is_blank in zip(outputs, are_blank, strict=True) if not is_blank] or list(outputs)
    first, *others = written
    is_common = all(_is_alike(first, other) for other in others)
    return first if is_common and (is_qarray(first) or all(_is_alike(first, output) for output in outputs)) else None


def _blank_outputs(jaxpr: Any) -> list[bool]:
    """For each output of a branch, whether nothing reads it.

    The gradient of a cond gives every branch the residuals of all of them; JAX fills those of the others with zeros or leaves
    them uninitialized, by its version.
    """
    makers = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}

    def is_blank(atom: Any) -> bool:
        eqn = None if isinstance(atom, jex_core.Literal) else makers.get(atom)
        if eqn is None or eqn.primitive.name != "broadcast_in_dim":
            return False
        filling = eqn.invars[0]
        if isinstance(filling, jex_core.Literal):
            return not np.any(filling.val)
        return filling in makers and makers[filling].primitive.name in ("empty", "empty2")

    return list(map(is_blank, jaxpr.outvars))


def _platform_dependent(platforms: Any, branches: list[Callable[..., Any]], operands: list[Any]) -> Any:
    """The branch of the platform that the code is compiled for, as `jax.lax.platform_dependent` has it."""
    named: dict[str, Any] = {}
    default = None
    for names, branch in zip(platforms, branches, strict=True):
        if names is None:
            default = branch
        else:
            named |= dict.fromkeys(names, branch)
    return jax.lax.platform_dependent(*operands, default=default, **named)


CONTROL: dict[str, Rule] = {
    "jit": _jit,
    "pjit": _jit,
    "closed_call": _call,
    "eval_jaxpr": _call,
    "composite": _call,
    "remat2": _remat,
    "checkpoint": _remat,
    "scan": _scan,
    "while": _while,
    "cond": _cond,
}
"""The rules of calls, loops and branches."""
