"""Control flow around an interpreted body."""

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex_core
from jax.typing import ArrayLike
from jaxtyping import PyTree

from ....array.leaves import taken_rows, with_leaves
from ....array.qarray import QArray, is_qarray
from ..evaluator import Evaluator, Rule
from ..indices import Atom, open_jaxpr, scan_operands, while_operands
from ..proxy import ArrayProxy, NoRuleError, is_proxy
from .concatenate import is_packed_along, spread
from .scan_slice import ScanSlice, alone, is_sliced_lazily
from .sharding import constrained

_PIECES = 1024  # the size of a transparent function's cache of jitted pieces; code with new bodies in each call fills it


def _jit(evaluator: Evaluator, eqn: jex_core.JaxprEqn, values: list[Any]) -> list[Any]:
    """An inner `jit`, which stays jitted; the same function for the same body."""
    params = eqn.params
    closed = params["jaxpr"]
    within, places = evaluator.reusable()

    def inner(chosen: PyTree, *args: PyTree) -> list[Any]:
        outputs = within.with_inside(chosen).function(closed)(*map(_placed, args, params["in_shardings"]))
        return list(map(_placed, outputs, params["out_shardings"]))

    inner.__name__ = params["name"]
    settings = {"inline": params["inline"], "keep_unused": params["keep_unused"]}
    if options := dict(params["compiler_options_kvs"]):
        settings["compiler_options"] = options

    if closed.consts or options:
        return jax.jit(inner, **settings)(evaluator.inside(), *values)
    key = ("jit", closed, params["in_shardings"], params["out_shardings"], tuple(settings.items()), places)
    return _cached(evaluator, key, lambda: jax.jit(inner, **settings))(evaluator.inside(), *values)


def _cached(evaluator: Evaluator, key: Hashable, jitted: Callable[[], Callable[..., Any]]) -> Callable[..., Any]:
    """The jitted function of a key, which contains its jaxprs: they have no equality but identity."""
    pieces = evaluator.pieces
    if key not in pieces:
        if len(pieces) >= _PIECES:
            pieces.pop(next(iter(pieces)))
        pieces[key] = jitted()
    return pieces[key]


def _compiled_once(rule: Rule) -> Rule:
    """The rule of a loop or of branches, jitted outside a trace: JAX would compile the new body of each call."""

    def run(evaluator: Evaluator, eqn: jex_core.JaxprEqn, values: list[Any]) -> list[Any]:
        if evaluator.is_traced:
            return rule(evaluator, eqn, values)
        within, places = evaluator.reusable()
        key = (eqn.primitive.name, places, *eqn.params.items())

        def jitted() -> Callable[..., list[Any]]:
            return jax.jit(lambda chosen, *values: rule(within.with_inside(chosen), eqn, list(values)))

        return _cached(evaluator, key, jitted)(evaluator.inside(), *values)

    return run


def _placed(x: PyTree, sharding: object) -> PyTree:
    """A value with the sharding that an inner `jit` asks for, if any."""
    return constrained(x, sharding) if isinstance(sharding, jax.sharding.Sharding) else x


def inlined(evaluator: Evaluator, eqn: jex_core.JaxprEqn, values: list[Any]) -> list[Any]:
    """Inlines the body of a call."""
    inner = eqn.params.get("call_jaxpr") or eqn.params["jaxpr"]
    return evaluator.function(inner)(*values)


def _remat(evaluator: Evaluator, eqn: jex_core.JaxprEqn, values: list[Any]) -> list[Any]:
    params = eqn.params
    body = evaluator.function(params["jaxpr"])

    def recomputed(*args: PyTree) -> list[Any]:
        if params["differentiated"] and params["prevent_cse"]:
            # This is a recomputation; the barrier keeps XLA from merging it with the forward pass.
            args = jax.lax.optimization_barrier(args)
        return body(*args)

    return jax.checkpoint(recomputed, prevent_cse=params["prevent_cse"], policy=params["policy"])(*values)


def _scan(evaluator: Evaluator, eqn: jex_core.JaxprEqn, values: list[Any]) -> list[Any]:
    params = eqn.params
    consts, carry, xs = scan_operands(eqn, values)
    constants, carries = len(consts), len(carry)
    if params["length"] == 0:  # no element could be sliced
        return [*carry, *(jnp.zeros(var.aval.shape, var.aval.dtype) for var in eqn.outvars[carries:])]  # type: ignore[attr-defined]
    body = evaluator.function(params["jaxpr"])
    xs = list(map(stacked, xs))
    stacks = {i: x for i, x in enumerate(xs) if is_sliced_lazily(x)}  # sliced lazily, in the body
    xs = [None if i in stacks else x for i, x in enumerate(xs)]

    # Proxies that every iteration reads, of constants and of products in the body, may have leaves to scan.
    hidden = evaluator.inside()
    own = [c.turns(params["length"]) if isinstance(c, ArrayProxy) else () for c in (*consts, *hidden)]

    def scanned(x: Sequence[Any], index: jax.Array) -> list[Any]:
        return [ScanSlice(stacks[i], index) if i in stacks else a for i, a in enumerate(x)]

    def step(carry: PyTree, sliced: tuple[Any, Any, Any]) -> tuple[PyTree, PyTree]:
        x, own, index = sliced
        here = [c.in_turn(o) if isinstance(c, ArrayProxy) else c for c, o in zip((*consts, *hidden), own, strict=True)]
        inner = evaluator.with_inside(here[constants:]).function(params["jaxpr"])
        outputs = list(map(alone, inner(*here[:constants], *carry, *scanned(x, index))))
        return _next_carry(evaluator, eqn, outputs[:carries], carry), tuple(outputs[carries:])

    first = []
    if any(map(is_proxy, carry)):
        first = scanned(jax.tree.map(lambda leaf: leaf[0], xs), jnp.int32(0))
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


def stacked(q: PyTree) -> PyTree:
    """A value whose leaves a loop can slice along its first axis.

    The leaves have an element for each of that axis; a QArray gets separate scales.
    """
    if isinstance(q, ArrayProxy):
        return q.stacked()
    if not isinstance(q, QArray):
        return q
    if q.ndim == 1:
        raise NoRuleError("the loop runs along the only axis")
    if is_packed_along(q, 0):
        raise NoRuleError("the loop runs along the axis whose codes share bytes")
    length = q.shape[0]
    if q.scale.shape[0] not in (1, length):
        q = taken_rows(q, jnp.arange(length), 0)

    # An element has no such axis, so its scheme must not name it.
    tile = {axis: n for axis, n in q.scheme.tile.items() if axis != -q.ndim}
    pack_axis = q.scheme.pack_axis if q.scheme.pack_axis > -q.ndim else -1
    scheme = dataclasses.replace(q.scheme, tile=tile, pack_axis=pack_axis)
    return with_leaves(q, lambda leaf: stacked(spread(leaf, 0, length)), scheme=scheme)


def _stable_carry(evaluator: Evaluator, eqn: jex_core.JaxprEqn, step: Callable[..., Any], carry: Sequence[Any]) -> list[Any]:
    """The carry before a loop. Proxies that one step returns in another form are decoded."""
    if not any(map(is_proxy, carry)):
        return list(carry)
    after = jax.eval_shape(lambda *c: tuple(step(*c)), *carry)
    stays = [not is_proxy(a) or _is_alike(a, b) for a, b in zip(carry, after, strict=True)]
    decoded = [c if s else evaluator.decoded(eqn, c, "the loop changes it") for c, s in zip(carry, stays, strict=True)]
    if all(stays):
        return decoded
    return _stable_carry(evaluator, eqn, step, decoded)


def _next_carry(
    evaluator: Evaluator, eqn: jex_core.JaxprEqn, outputs: Sequence[Any], carry: Sequence[Any]
) -> tuple[Any, ...]:
    """The carry after one step. Proxies are decoded where the loop carries an array."""
    reason = "the loop carries it as an array"
    return tuple(o if is_proxy(c) else evaluator.decoded(eqn, o, reason) for o, c in zip(outputs, carry, strict=True))


def _is_alike(before: PyTree, after: PyTree) -> bool:
    """Whether both are arrays, or proxies with the same structure and shapes of leaves."""
    if jax.tree.structure(before) != jax.tree.structure(after) or is_proxy(before) != is_proxy(after):
        return False
    leaves = zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True)
    return not is_proxy(before) or all(a.shape == b.shape for a, b in leaves)


def _while(evaluator: Evaluator, eqn: jex_core.JaxprEqn, values: list[Any]) -> list[Any]:
    params = eqn.params
    cond_consts, body_consts, carry = while_operands(eqn, values)
    cond, body = evaluator.function(params["cond_jaxpr"]), evaluator.function(params["body_jaxpr"])
    carry = _stable_carry(evaluator, eqn, lambda *c: body(*body_consts, *c), carry)

    def step(carry: tuple[Any, ...]) -> tuple[Any, ...]:
        return _next_carry(evaluator, eqn, body(*body_consts, *carry), carry)

    return list(jax.lax.while_loop(lambda c: cond(*cond_consts, *c)[0], step, tuple(carry)))


def _cond(evaluator: Evaluator, eqn: jex_core.JaxprEqn, values: list[Any]) -> list[Any]:
    index, *operands = values
    bodies = [evaluator.function(branch) for branch in eqn.params["branches"]]
    shapes = [jax.eval_shape(lambda *args, b=body: tuple(b(*args)), *operands) for body in bodies]
    blanks = [_blank_outputs(open_jaxpr(branch)) for branch in eqn.params["branches"]]
    forms = [_common_form(*columns) for columns in zip(zip(*shapes, strict=True), zip(*blanks, strict=True), strict=True)]

    def uniform(body: Callable[..., list[Any]], are_blank: Sequence[bool]) -> Callable[..., tuple[Any, ...]]:
        def in_form(output: PyTree, is_blank: bool, form: PyTree) -> PyTree:
            if form is None:
                return evaluator.decoded(eqn, output, "the branches return it in different forms")
            if is_blank and is_qarray(form):
                return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), form)
            return output

        def run(*args: PyTree) -> tuple[Any, ...]:
            return tuple(map(in_form, body(*args), are_blank, forms))

        return run

    return list(switched(eqn, index, list(map(uniform, bodies, blanks)), operands))


def switched(eqn: jex_core.JaxprEqn, index: ArrayLike, branches: list[Callable[..., Any]], operands: list[Any]) -> Any:
    """The results of the branch that the index of a `cond` chooses, or the platform that the code is compiled for."""
    platforms = eqn.params.get("branches_platforms")
    if platforms is None:
        return jax.lax.switch(index, branches, *operands)
    named: dict[str, Any] = {}
    default = None
    for names, branch in zip(platforms, branches, strict=True):
        if names is None:
            default = branch
        else:
            named |= dict.fromkeys(names, branch)
    return jax.lax.platform_dependent(*operands, default=default, **named)


def _common_form(outputs: Sequence[Any], are_blank: Sequence[bool]) -> Any:
    """The abstract value that every branch can return for one output, or None where they differ."""
    written = [output for output, is_blank in zip(outputs, are_blank, strict=True) if not is_blank] or list(outputs)
    first = written[0]
    if not is_qarray(first):
        written = outputs  # only a QArray can be filled in for a blank output
    if not all(_is_alike(first, other) for other in written):
        return None
    return first


def _blank_outputs(jaxpr: jex_core.Jaxpr) -> list[bool]:
    """For each output of a branch, whether it is an unused residual.

    The gradient of a cond makes every branch return the residuals of all; JAX fills those of the others with zeros or leaves
    them uninitialized, depending on its version.
    """
    makers = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}

    def is_blank(atom: Atom) -> bool:
        if isinstance(atom, jex_core.Literal):
            return False
        eqn = makers.get(atom)
        if eqn is None or eqn.primitive.name != "broadcast_in_dim":
            return False
        filling = eqn.invars[0]
        if isinstance(filling, jex_core.Literal):
            return not np.any(filling.val)
        return filling in makers and makers[filling].primitive.name in ("empty", "empty2")

    return list(map(is_blank, jaxpr.outvars))


CONTROL: dict[str, Rule] = {
    "jit": _jit,
    "pjit": _jit,
    "closed_call": inlined,
    "eval_jaxpr": inlined,
    "composite": inlined,
    "remat2": _remat,
    "checkpoint": _remat,
    "scan": _compiled_once(_scan),
    "while": _compiled_once(_while),
    "cond": _compiled_once(_cond),
}
"""The rules of calls, loops and branches."""
