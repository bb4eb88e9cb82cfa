"""Layout operations on QArrays, which stay quantized."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core as jex_core

from ....array.axis_move import LAYOUT_PRIMITIVES, UNMOVED, AxisMove, axis_moves
from ....array.leaves import taken_rows
from ....array.qarray import QArray, is_qarray
from ....errors import QuantError
from ....kernels.quantize.dispatch import dequantize
from ..evaluator import Evaluator, Rule, bound
from ..lookup import Lookup, widened
from ..proxy import NoRuleError
from .concatenate import broadcasted, is_cut_along, is_packed_along, joined, repacked, reshaped, reversed_along, untiled


def _moved(_: Evaluator, eqn: jex_core.JaxprEqn, values: list[Any]) -> list[Any]:
    """A layout operation that the QArray has itself."""
    _refuse_sharding(eqn)
    return [moved(values[0], move) for move in axis_moves(eqn)]


def moved(q: QArray, move: AxisMove) -> QArray:
    """The array after a layout operation. NoRuleError when a tile or a byte would be cut."""
    try:
        if move.is_transposed:
            q = q.transpose(*move.order)
        if move.slices:
            q = q[move.slices]
    except QuantError as error:
        raise NoRuleError(str(error)) from error
    q = _regrouped(q, move)
    if move.result != move.units:
        q = broadcasted(q, move.result)
    return reversed_along(q, move.flipped)


def _regrouped(q: QArray, move: AxisMove) -> QArray:
    """The result of a reshape. Where it would cut bytes, the codes are packed along an axis that it keeps.

    A reshape with a transpose is how JAX regroups the kernel for the gradient of a grouped convolution. It is not refused for
    tiles: merged axes get a scale per element.
    """
    try:
        return q.reshape(move.units)
    except QuantError:
        kept = [old[0] for old, new in move.groups if old and [q.shape[a] for a in old] == [move.units[a] for a in new]]
    for axis in range(q.ndim):
        if move.is_transposed and axis not in kept:
            q = dataclasses.replace(untiled(q, axis), tensor_scale=q.tensor_scale)  # which stays one element
    if kept:
        q = repacked(q, max(kept, key=lambda axis: q.shape[axis]))
    return reshaped(q, move.units)


def _refuse_sharding(eqn: jex_core.JaxprEqn) -> None:
    if eqn.params.get("sharding") is not None:
        raise NoRuleError("a sharding is requested for the result")


def _convert(_: Evaluator, eqn: jex_core.JaxprEqn, values: list[Any]) -> list[Any]:
    _refuse_sharding(eqn)
    dtype = eqn.params["new_dtype"]
    if not jnp.issubdtype(dtype, jnp.floating):
        raise NoRuleError(f"a quantized array is floating point, not {dtype.name}")
    return [values[0].astype(dtype)]


def _on_leaves(_: Evaluator, eqn: jex_core.JaxprEqn, values: list[Any]) -> list[Any]:
    """A primitive that returns its operand, or another device's, bound for each leaf of the QArray."""
    return [jax.tree.map(lambda leaf: bound(eqn, [leaf])[0], values[0])]


def _stop_gradient(_: Evaluator, eqn: jex_core.JaxprEqn, values: list[Any]) -> list[Any]:
    return [jax.lax.stop_gradient(values[0])]


def _barrier(_: Evaluator, eqn: jex_core.JaxprEqn, values: list[Any]) -> list[Any]:
    return list(jax.lax.optimization_barrier(tuple(values)))


def _unstack(_: Evaluator, eqn: jex_core.JaxprEqn, values: list[Any]) -> list[Any]:
    q, before = values[0], (slice(None),) * eqn.params["axis"]
    try:
        return [q[(*before, i)] for i in range(q.shape[eqn.params["axis"]])]
    except QuantError as error:
        raise NoRuleError(str(error)) from error


def _dynamic_slice(_: Evaluator, eqn: jex_core.JaxprEqn, values: list[Any]) -> list[Any]:
    q, *starts = values
    if not is_qarray(q):
        raise NoRuleError("the index is quantized")
    sizes = eqn.params["slice_sizes"]
    cut = [a for a, (size, n) in enumerate(zip(sizes, q.shape, strict=True)) if size != n]
    if any(is_cut_along(q, a) for a in cut):
        raise NoRuleError("a slice at a run-time index would cut bytes of the packed axis")
    for axis in cut:
        # Like lax, clip the start so that the slice is within the array.
        start = jnp.clip(widened(starts[axis]), 0, q.shape[axis] - sizes[axis])
        q = taken_rows(q, start + jnp.arange(sizes[axis], dtype=start.dtype), axis)
    if Lookup.of(eqn) is not None:
        return [dequantize(q)]  # a looked-up row is no weight any more
    return [q]


def _all_quantized(values: Sequence[Any]) -> None:
    if not all(map(is_qarray, values)):
        raise NoRuleError("one of the operands is not quantized")


def _concatenate(_: Evaluator, eqn: jex_core.JaxprEqn, values: list[Any]) -> list[Any]:
    _all_quantized(values)
    axis = eqn.params["dimension"]
    return [joined(values, axis, lambda leaves: jnp.concatenate(leaves, axis))]


def _stack(_: Evaluator, eqn: jex_core.JaxprEqn, values: list[Any]) -> list[Any]:
    _all_quantized(values)
    axis = eqn.params["axis"]
    parts = [reshaped(q, (*q.shape[:axis], 1, *q.shape[axis:])) for q in values]
    return [joined(parts, axis, lambda leaves: jnp.concatenate(leaves, axis))]


def _tile(_: Evaluator, eqn: jex_core.JaxprEqn, values: list[Any]) -> list[Any]:
    q = values[0]
    for axis, times in enumerate(eqn.params["reps"]):
        if times == 0:
            raise NoRuleError(f"no copy is taken along axis {axis}, so the result has no elements")
        if times > 1:
            q = joined([q] * times, axis, lambda leaves, axis=axis: jnp.concatenate(leaves, axis))
    return [q]


def _select_n(_: Evaluator, eqn: jex_core.JaxprEqn, values: list[Any]) -> list[Any]:
    """Selects whole tiles: the predicate is a scalar, or constant along tiled axes."""
    which, *cases = values
    _all_quantized(cases)
    for axis in [a for a, n in enumerate(which.shape) if n > 1]:
        if any(is_packed_along(q, axis) for q in cases):
            raise NoRuleError("the predicate differs between codes that share bytes")
        cases = [untiled(q, axis) for q in cases]
    if len({(jax.tree.structure(q), *(leaf.shape for leaf in jax.tree.leaves(q))) for q in cases}) > 1:
        raise NoRuleError("the schemes of the cases differ")

    def chosen(*leaves: jax.Array) -> jax.Array:
        # No leaf has one element along an axis of the predicate: those axes were untiled above.
        return jax.lax.select_n(jnp.broadcast_to(which, leaves[0].shape), *leaves)

    return [jax.tree.map(chosen, *cases)]


LAYOUT: dict[str, Rule] = dict.fromkeys(LAYOUT_PRIMITIVES, _moved) | {
    **dict.fromkeys(UNMOVED, _on_leaves),
    "convert_element_type": _convert,
    "stop_gradient": _stop_gradient,
    "optimization_barrier": _barrier,
    "unstack": _unstack,
    "dynamic_slice": _dynamic_slice,
    "concatenate": _concatenate,
    "stack": _stack,
    "tile": _tile,
    "select_n": _select_n,
}
"""The rules of layout operations."""
