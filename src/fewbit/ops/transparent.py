"""Unchanged code on quantized leaves: trace it as if they were plain arrays, then evaluate the trace with rules for them.

`transparent(fn)` traces `fn` with the logical shape and dtype of every leaf, so the code under it sees ordinary arrays, and
evaluates the jaxpr. An equation without quantized operands is bound as it is. One with quantized operands goes to the rule
of its primitive: products to `fewbit.ops`, layout operations to the QArray, and control flow to itself with a body that is
evaluated in the same way, so `jit` stays jitted and `scan` stays a loop. A primitive without a rule follows `fallback`.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
from jax.extend import core as jex_core
from jax.extend import source_info_util

from ..array import QArray, dequantize, is_qarray
from ..errors import QuantError, UnsupportedError
from .dot import dot_general
from .take import take, taken_rows

P = ParamSpec("P")
R = TypeVar("R")


@dataclasses.dataclass(frozen=True)
class Decoded:
    """One place where a quantized array was decoded because its primitive has no rule.

    Attributes:
        primitive: the name of the primitive.
        array: which array, by its shape and scheme.
        source: the file and line of the user's code.
        reason: why it could not stay quantized.
    """

    primitive: str
    array: str
    source: str
    reason: str

    def __str__(self) -> str:
        return f"{self.source}: {self.primitive} decodes {self.array} ({self.reason})"


def transparent(
    fn: Callable[P, R],
    *,
    fallback: Literal["error", "dequantize"] = "error",
    report: Callable[[Decoded], None] | None = None,
) -> Callable[P, R]:
    """Makes a function take quantized leaves anywhere in its arguments, without changing its code.

    Matrix products, einsums and embedding look-ups compute from the QArrays; transposes, reshapes, casts and slices that
    keep tiles whole stay quantized; jit, scan, while, cond, remat, vmap and grad with respect to the float arguments work as
    ever. Leaves that are not arrays are passed as they are.

    Args:
        fn: any function of pytrees that JAX can trace.
        fallback: what happens to a quantized operand of a primitive without a rule: "error" raises, naming the primitive
            and the line; "dequantize" decodes it there.
        report: called with each place where an array is decoded by the fallback, while tracing.

    Returns:
        A function of the same arguments. Outputs that are quantized arrays come out as QArrays.

    Raises:
        UnsupportedError: under "error", for the first operation that would need the decoded array.

    >>> from fewbit.array import quantize
    >>> def layer(w, x):
    ...     return jnp.tanh(x @ w["kernel"].T)
    >>> w = {"kernel": quantize(jnp.ones((8, 4)), "int8")}
    >>> transparent(layer)(w, jnp.ones((2, 4))).shape
    (2, 8)
    """
    if fallback not in ("error", "dequantize"):
        raise QuantError(f"fallback is {fallback!r}; must be 'error' or 'dequantize'")
    inner_functions: dict[int, tuple[Any, Callable[..., Any]]] = {}
    call: Callable[..., Any] = fn

    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        leaves, treedef = jax.tree.flatten((args, kwargs), is_leaf=is_qarray)
        places = [i for i, leaf in enumerate(leaves) if is_qarray(leaf) or _is_array(leaf)]
        if not any(is_qarray(leaf) for leaf in leaves):
            return fn(*args, **kwargs)
        out_tree = None

        def flat(*arrays: Any) -> list[Any]:
            nonlocal out_tree
            filled = list(leaves)
            for place, array in zip(places, arrays, strict=True):
                filled[place] = array
            inner_args, inner_kwargs = jax.tree.unflatten(treedef, filled)
            outputs, out_tree = jax.tree.flatten(call(*inner_args, **inner_kwargs))
            return outputs

        dynamic = [leaves[i] for i in places]
        closed = jax.make_jaxpr(flat)(*map(_logical, dynamic))
        evaluator = _Evaluator(fallback, report, inner_functions)
        outputs = evaluator.evaluate(closed.jaxpr, closed.consts, dynamic)
        assert out_tree is not None
        return jax.tree.unflatten(out_tree, outputs)

    wrapped.__name__ = getattr(fn, "__name__", "transparent")
    wrapped.__doc__ = fn.__doc__
    return wrapped


def _is_array(x: Any) -> bool:
    """Whether a leaf is traced: arrays and numpy scalars are, Python scalars and everything else are not."""
    return hasattr(x, "shape") and hasattr(x, "dtype")


def _logical(x: Any) -> Any:
    """What the function sees of a leaf."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype) if is_qarray(x) else x


@dataclasses.dataclass(frozen=True)
class _Evaluator:
    """Evaluates jaxprs whose variables may hold QArrays.

    Attributes:
        fallback: as in `transparent`.
        report: as in `transparent`.
        inner_functions: for each jaxpr of an inner `jit` that was met, the jitted function that evaluates it, so that JAX's
            own cache serves the next call.
    """

    fallback: str
    report: Callable[[Decoded], None] | None
    inner_functions: dict[int, tuple[Any, Callable[..., Any]]]

    def evaluate(self, jaxpr: Any, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
        """The outputs of a jaxpr."""
        env: dict[Any, Any] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))

        def read(atom: Any) -> Any:
            return atom.val if isinstance(atom, jex_core.Literal) else env[atom]

        for eqn in jaxpr.eqns:
            values = [read(atom) for atom in eqn.invars]
            is_quantized = any(map(is_qarray, values))
            with _context_of(eqn):
                outputs = self._quantized_equation(eqn, values) if is_quantized else _bound(eqn, values)
            env.update(zip(eqn.outvars, outputs, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def function(self, closed: Any) -> Callable[..., list[Any]]:
        """A closed jaxpr as a function of values that may be QArrays."""
        return lambda *args: self.evaluate(closed.jaxpr, closed.consts, args)

    def _quantized_equation(self, eqn: Any, values: list[Any]) -> list[Any]:
        rule = RULES.get(eqn.primitive.name)
        if rule is None:
            return self.decode_and_bind(eqn, values, "fewbit has no rule for it")
        try:
            return rule(self, eqn, values)
        except _NoRuleError as reason:
            return self.decode_and_bind(eqn, values, str(reason))

    def decode_and_bind(self, eqn: Any, values: list[Any], reason: str) -> list[Any]:
        """The equation on decoded operands, where the fallback allows it."""
        return _bound(eqn, [self.decoded(eqn, value, reason) for value in values])

    def decoded(self, eqn: Any, value: Any, reason: str) -> Any:
        """The array that a value stands for, where the fallback allows it."""
        if not is_qarray(value):
            return value
        place = Decoded(eqn.primitive.name, repr(value), _source_of(eqn), reason)
        if self.fallback == "error":
            raise UnsupportedError(
                f"{place}; pass fallback='dequantize' to fb.transparent to allow it, or leave this parameter unquantized"
            )
        if self.report is not None:
            self.report(place)
        return dequantize(value)


@contextlib.contextmanager
def _context_of(eqn: Any) -> Iterator[None]:
    """The name stack and the settings under which an equation was traced."""
    info = eqn.source_info
    stack = source_info_util.current_name_stack() + info.name_stack
    with source_info_util.user_context(info.traceback, name_stack=stack), eqn.ctx.manager:
        yield


def _source_of(eqn: Any) -> str:
    """The file and line of an equation, as far as JAX knows one outside itself."""
    return source_info_util.summarize(eqn.source_info) or "within JAX"


class _NoRuleError(Exception):
    """Why a rule cannot keep the result of an equation quantized."""


def _bound(eqn: Any, values: list[Any]) -> list[Any]:
    """The equation as JAX computes it."""
    outputs = eqn.primitive.bind(*values, **eqn.primitive.get_bind_params(eqn.params))
    return list(outputs) if eqn.primitive.multiple_results else [outputs]


# --- products and look-ups ---


def _dot_general(_: _Evaluator, eqn: Any, values: list[Any]) -> list[Any]:
    params = eqn.params
    if params.get("out_sharding") is not None:
        raise _NoRuleError("an out_sharding is asked of the product")
    lhs, rhs = values
    return [dot_general(lhs, rhs, params["dimension_numbers"], params["precision"], params["preferred_element_type"])]


def _gather(_: _Evaluator, eqn: Any, values: list[Any]) -> list[Any]:
    """A gather of whole rows along one axis, as `jnp.take` and `x[ids]` make them."""
    q, indices = values
    numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    axes = numbers.start_index_map
    takes_rows = (
        is_qarray(q)
        and len(axes) == 1
        and tuple(numbers.collapsed_slice_dims) == tuple(axes)
        and not numbers.operand_batching_dims
        and all(size == (1 if a == axes[0] else n) for a, (size, n) in enumerate(zip(sizes, q.shape, strict=True)))
    )
    if not takes_rows:
        raise _NoRuleError("only whole rows along one axis are gathered from a quantized array")
    axis, at = axes[0], indices[..., 0]
    rows = take(q, at, axis, mode="clip")
    rows = jnp.moveaxis(rows, range(axis, axis + at.ndim), [a for a in range(rows.ndim) if a not in numbers.offset_dims])
    if eqn.params["mode"] in (None, jax.lax.GatherScatterMode.FILL_OR_DROP):
        fill = eqn.params.get("fill_value")
        is_inside = (at >= 0) & (at < q.shape[axis])  # lax counts no negative index from the end
        is_inside = jnp.expand_dims(is_inside, numbers.offset_dims)
        rows = jnp.where(is_inside, rows, jnp.full_like(rows, jnp.nan if fill is None else fill))
    return [rows]


# --- layout ---


def _transpose(_: _Evaluator, eqn: Any, values: list[Any]) -> list[Any]:
    return [values[0].transpose(*eqn.params["permutation"])]


def _reshaped(q: QArray, shape: Sequence[int]) -> QArray:
    try:
        return q.reshape(tuple(shape))
    except QuantError as error:
        raise _NoRuleError(str(error)) from error


def _reshape(_: _Evaluator, eqn: Any, values: list[Any]) -> list[Any]:
    if eqn.params.get("dimensions") is not None:
        raise _NoRuleError("the reshape permutes axes")
    return [_reshaped(values[0], eqn.outvars[0].aval.shape)]


def _unit_axes(_: _Evaluator, eqn: Any, values: list[Any]) -> list[Any]:
    return [_reshaped(values[0], eqn.outvars[0].aval.shape)]


def _broadcast_in_dim(_: _Evaluator, eqn: Any, values: list[Any]) -> list[Any]:
    q, shape = values[0], eqn.params["shape"]
    kept = [n for n in shape if n != 1]
    if [n for n in q.shape if n != 1] != kept:
        raise _NoRuleError("only unit axes are added to a quantized array")
    return [_reshaped(q, shape)]


def _convert(_: _Evaluator, eqn: Any, values: list[Any]) -> list[Any]:
    dtype = eqn.params["new_dtype"]
    if not jnp.issubdtype(dtype, jnp.floating):
        raise _NoRuleError(f"it stands for floating numbers, not {dtype.name}")
    return [values[0].astype(dtype)]


def _same(_: _Evaluator, eqn: Any, values: list[Any]) -> list[Any]:
    return list(values)


def _barrier(_: _Evaluator, eqn: Any, values: list[Any]) -> list[Any]:
    return list(jax.lax.optimization_barrier(tuple(values)))


def _slice(_: _Evaluator, eqn: Any, values: list[Any]) -> list[Any]:
    strides = eqn.params["strides"] or (1,) * values[0].ndim
    steps = zip(eqn.params["start_indices"], eqn.params["limit_indices"], strides, strict=True)
    try:
        return [values[0][tuple(slice(*step) for step in steps)]]
    except QuantError as error:
        raise _NoRuleError(str(error)) from error


def _dynamic_slice(_: _Evaluator, eqn: Any, values: list[Any]) -> list[Any]:
    q, *starts = values
    sizes = eqn.params["slice_sizes"]
    cut = [a for a, (size, n) in enumerate(zip(sizes, q.shape, strict=True)) if size != n]
    if any(a == q.scheme.pack_axis + q.ndim for a in cut):
        raise _NoRuleError("a slice at a run-time index would cut bytes of the packed axis")
    for axis in cut:
        # As lax does, the start is moved so that the slice lies within the array.
        start = jnp.clip(starts[axis], 0, q.shape[axis] - sizes[axis])
        q = taken_rows(q, start + jnp.arange(sizes[axis], dtype=start.dtype), axis)
    return [q]


# --- control flow: the same primitive around a body that is evaluated with the rules ---


def _jit(evaluator: _Evaluator, eqn: Any, values: list[Any]) -> list[Any]:
    closed = eqn.params["jaxpr"]
    known = evaluator.inner_functions.get(id(closed))
    if known is None:

        def inner(*args: Any) -> list[Any]:
            return evaluator.evaluate(closed.jaxpr, closed.consts, args)

        inner.__name__ = eqn.params["name"]
        known = (closed, jax.jit(inner, inline=eqn.params.get("inline", False)))
        if not closed.consts:
            evaluator.inner_functions[id(closed)] = known
    return known[1](*values)


def _call(evaluator: _Evaluator, eqn: Any, values: list[Any]) -> list[Any]:
    return evaluator.function(eqn.params["call_jaxpr"])(*values)


def _remat(evaluator: _Evaluator, eqn: Any, values: list[Any]) -> list[Any]:
    jaxpr = eqn.params["jaxpr"]

    def body(*args: Any) -> list[Any]:
        return evaluator.evaluate(jaxpr, getattr(jaxpr, "consts", ()), args)

    return jax.checkpoint(body, prevent_cse=eqn.params["prevent_cse"], policy=eqn.params["policy"])(*values)


def _scan(evaluator: _Evaluator, eqn: Any, values: list[Any]) -> list[Any]:
    params = eqn.params
    constants, carries = scan_counts(eqn)
    consts, carry, xs = values[:constants], values[constants : constants + carries], values[constants + carries :]
    body = evaluator.function(params["jaxpr"])
    xs = [_stacked(x) if is_qarray(x) else x for x in xs]

    def step(carry: Any, x: Any) -> tuple[Any, Any]:
        outputs = body(*consts, *carry, *x)
        return tuple(outputs[:carries]), tuple(outputs[carries:])

    first = [jax.tree.map(lambda leaf: leaf[0], x) for x in xs]
    carry = _stable_carry(evaluator, eqn, lambda *c: body(*consts, *c, *first)[:carries], carry)
    carry, ys = jax.lax.scan(
        step, tuple(carry), tuple(xs), length=params["length"], reverse=params["reverse"], unroll=params["unroll"]
    )
    return [*carry, *ys]


def scan_counts(eqn: Any) -> tuple[int, int]:
    """How many operands of a scan are constants, and how many are carried.

    Told from the shapes, since JAX's versions hold the numbers in different parameters: what is scanned has one axis more
    outside the body than inside.
    """
    body = eqn.params["jaxpr"].jaxpr
    carries = sum(o.aval.ndim == i.aval.ndim for o, i in zip(eqn.outvars, body.outvars, strict=True))
    scanned = sum(o.aval.ndim != i.aval.ndim for o, i in zip(eqn.invars, body.invars, strict=True))
    return len(eqn.invars) - scanned - carries, carries


def _stacked(q: QArray) -> QArray:
    """The array with a scale for each element of its first axis, so that a loop can take one at a time."""
    if q.ndim == 1 or q.scheme.pack_axis == -q.ndim:
        raise _NoRuleError("the loop runs along the packed axis")

    def spread(leaf: Any) -> Any:
        if is_qarray(leaf):
            return _stacked(leaf)
        return jnp.broadcast_to(leaf, (q.shape[0], *leaf.shape[1:])) if leaf.shape[0] == 1 else leaf

    if q.scale.shape[0] not in (1, q.shape[0]):
        q = taken_rows(q, jnp.arange(q.shape[0]), 0)
    zero = None if q.zero_point is None else spread(q.zero_point)
    tensor = None if q.tensor_scale is None else spread(q.tensor_scale)
    return dataclasses.replace(q, scale=spread(q.scale), zero_point=zero, tensor_scale=tensor)


def _stable_carry(evaluator: _Evaluator, eqn: Any, step: Callable[..., Any], carry: Sequence[Any]) -> list[Any]:
    """The carry of a loop, with those QArrays decoded that one step does not give back as they are."""
    if not any(map(is_qarray, carry)):
        return list(carry)
    after = jax.eval_shape(lambda *c: tuple(step(*c)), *carry)
    stays = [
        jax.tree.structure(a) == jax.tree.structure(b)
        for a, b in zip(carry, jax.tree.leaves(after, is_leaf=is_qarray), strict=True)
    ]
    decoded = [c if s else evaluator.decoded(eqn, c, "the loop changes it") for c, s in zip(carry, stays, strict=True)]
    return decoded if all(stays) else _stable_carry(evaluator, eqn, step, decoded)


def _while(evaluator: _Evaluator, eqn: Any, values: list[Any]) -> list[Any]:
    params = eqn.params
    in_cond, in_body = params["cond_nconsts"], params["body_nconsts"]
    cond_consts, body_consts, carry = values[:in_cond], values[in_cond : in_cond + in_body], values[in_cond + in_body :]
    cond, body = evaluator.function(params["cond_jaxpr"]), evaluator.function(params["body_jaxpr"])
    carry = _stable_carry(evaluator, eqn, lambda *c: body(*body_consts, *c), carry)
    return list(
        jax.lax.while_loop(lambda c: cond(*cond_consts, *c)[0], lambda c: tuple(body(*body_consts, *c)), tuple(carry))
    )


def _cond(evaluator: _Evaluator, eqn: Any, values: list[Any]) -> list[Any]:
    index, *operands = values
    branches = [evaluator.function(branch) for branch in eqn.params["branches"]]
    shapes = [jax.eval_shape(lambda *args, b=branch: tuple(b(*args)), *operands) for branch in branches]
    agree = [len({jax.tree.structure(s) for s in column}) == 1 for column in zip(*shapes, strict=True)]

    def uniform(branch: Callable[..., list[Any]]) -> Callable[..., tuple[Any, ...]]:
        def run(*args: Any) -> tuple[Any, ...]:
            reason = "the branches give it back in different forms"
            outputs = branch(*args)
            return tuple(o if a else evaluator.decoded(eqn, o, reason) for o, a in zip(outputs, agree, strict=True))

        return run

    return list(jax.lax.switch(index, [uniform(branch) for branch in branches], *operands))


RULES: dict[str, Callable[[_Evaluator, Any, list[Any]], list[Any]]] = {
    "dot_general": _dot_general,
    "gather": _gather,
    "transpose": _transpose,
    "reshape": _reshape,
    "squeeze": _unit_axes,
    "expand_dims": _unit_axes,
    "broadcast_in_dim": _broadcast_in_dim,
    "convert_element_type": _convert,
    "copy": _same,
    "copy_p": _same,
    "stop_gradient": _same,
    "optimization_barrier": _barrier,
    "slice": _slice,
    "dynamic_slice": _dynamic_slice,
    "jit": _jit,
    "pjit": _jit,
    "closed_call": _call,
    "core_call": _call,
    "remat2": _remat,
    "checkpoint": _remat,
    "scan": _scan,
    "while": _while,
    "cond": _cond,
}
"""For each primitive, by its name, how an equation with quantized operands is computed."""
