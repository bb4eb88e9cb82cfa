"""Layout operations on QArrays, which stay quantized."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex_core

from ....array import QArray, is_qarray
from ....array.layout import regrouped
from ....errors import QuantError
from ....kernels.quantize import dequantize
from ...take import taken_rows
from ..indices import shape_of
from ..lookup import Lookup
from .concatenate import broadcasted, is_packed_along, joined, repacked, reversed_along, untiled
from .rule import AbstractEvaluator, NoRuleError, Rule


def _transpose(_: AbstractEvaluator, eqn: jex_core.JaxprEqn, values: list[Any]) -> list[Any]:
    return [values[0].transpose(*eqn.params["permutation"])]


def reshaped(q: QArray, shape: Sequence[int]) -> QArray:
    """The array in another shape; NoRuleError when a tile or a byte would be cut."""
    try:
        return q.reshape(tuple(int(n) for n in shape))
    except QuantError as error:
        raise NoRuleError(str(error)) from error


def _refuse_sharding(eqn: jex_core.JaxprEqn) -> None:
    if eqn.params.get("sharding") is not None:
        raise NoRuleError("a sharding is requested for the result")


def _reshape(_: AbstractEvaluator, eqn: jex_core.JaxprEqn, values: list[Any]) -> list[Any]:
    """A reshape; where it would cut bytes, the codes are packed along an axis that it keeps.

    A reshape with a transpose is how JAX regroups the kernel for the gradient of a grouped convolution. It is not refused for
    tiles: merged axes get a scale per element.
    """
    _refuse_sharding(eqn)
    q, order, shape = values[0], eqn.params.get("dimensions"), shape_of(eqn.outvars[0])
    if order is not None:
        q = q.transpose(*order)
    try:
        return [q.reshape(shape)]
    except QuantError:
        groups = regrouped(q.shape, shape)
    kept = [old[0] for old, new in groups if [q.shape[a] for a in old] == [shape[a] for a in new]]
    for axis in range(q.ndim):
        if order is not None and axis not in kept:
            q = dataclasses.replace(untiled(q, axis), tensor_scale=q.tensor_scale)  # which stays one element
    if kept:
        q = repacked(q, max(kept, key=lambda axis: q.shape[axis]))
    return [reshaped(q, shape)]


def _unit_axes(_: AbstractEvaluator, eqn: jex_core.JaxprEqn, values: list[Any]) -> list[Any]:
    return [reshaped(values[0], shape_of(eqn.outvars[0]))]


def _broadcast_in_dim(_: AbstractEvaluator, eqn: jex_core.JaxprEqn, values: list[Any]) -> list[Any]:
    _refuse_sharding(eqn)
    q, shape, places = values[0], eqn.params["shape"], eqn.params["broadcast_dimensions"]
    of_axis = dict(zip(places, q.shape, strict=True))
    return [broadcasted(reshaped(q, [of_axis.get(a, 1) for a in range(len(shape))]), tuple(shape))]


def _convert(_: AbstractEvaluator, eqn: jex_core.JaxprEqn, values: list[Any]) -> list[Any]:
    _refuse_sharding(eqn)
    dtype = eqn.params["new_dtype"]
    if not jnp.issubdtype(dtype, jnp.floating):
        raise NoRuleError(f"a quantized array is floating point, not {dtype.name}")
    return [values[0].astype(dtype)]


def _on_leaves(_: AbstractEvaluator, eqn: jex_core.JaxprEqn, values: list[Any]) -> list[Any]:
    """A primitive that returns its operand, bound for each leaf of the QArray."""
    return [jax.tree.map(lambda leaf: eqn.primitive.bind(leaf, **eqn.params), values[0])]


def _stop_gradient(_: AbstractEvaluator, eqn: jex_core.JaxprEqn, values: list[Any]) -> list[Any]:
    return [jax.lax.stop_gradient(values[0])]


def _barrier(_: AbstractEvaluator, eqn: jex_core.JaxprEqn, values: list[Any]) -> list[Any]:
    return list(jax.lax.optimization_barrier(tuple(values)))


def _indexed(q: QArray, index: tuple[Any, ...]) -> QArray:
    try:
        return q[index]
    except QuantError as error:
        raise NoRuleError(str(error)) from error


def _slice(_: AbstractEvaluator, eqn: jex_core.JaxprEqn, values: list[Any]) -> list[Any]:
    strides = eqn.params["strides"] or (1,) * values[0].ndim
    steps = zip(eqn.params["start_indices"], eqn.params["limit_indices"], strides, strict=True)
    return [_indexed(values[0], tuple(slice(*step) for step in steps))]


def _split(_: AbstractEvaluator, eqn: jex_core.JaxprEqn, values: list[Any]) -> list[Any]:
    before = (slice(None),) * eqn.params["axis"]
    edges = [0, *(int(n) for n in np.cumsum(eqn.params["sizes"]))]
    return [_indexed(values[0], (*before, slice(start, stop))) for start, stop in itertools.pairwise(edges)]


def _unstack(_: AbstractEvaluator, eqn: jex_core.JaxprEqn, values: list[Any]) -> list[Any]:
    before = (slice(None),) * eqn.params["axis"]
    return [_indexed(values[0], (*before, i)) for i in range(values[0].shape[eqn.params["axis"]])]


def _dynamic_slice(_: AbstractEvaluator, eqn: jex_core.JaxprEqn, values: list[Any]) -> list[Any]:
    q, *starts = values
    if not is_qarray(q):
        raise NoRuleError("the index is quantized")
    sizes = eqn.params["slice_sizes"]
    cut = [a for a, (size, n) in enumerate(zip(sizes, q.shape, strict=True)) if size != n]
    if any(a == q.scheme.pack_axis + q.ndim for a in cut):
        raise NoRuleError("a slice at a run-time index would cut bytes of the packed axis")
    for axis in cut:
        # Like lax, clip the start so that the slice is within the array.
        start = jnp.clip(starts[axis], 0, q.shape[axis] - sizes[axis])
        q = taken_rows(q, start + jnp.arange(sizes[axis], dtype=start.dtype), axis)
    if Lookup.of(eqn) is not None:
        return [dequantize(q)]  # a looked-up row is no weight any more
    return [q]


def _all_quantized(values: Sequence[Any]) -> None:
    if not all(map(is_qarray, values)):
        raise NoRuleError("one of the operands is not quantized")


def _concatenate(_: AbstractEvaluator, eqn: jex_core.JaxprEqn, values: list[Any]) -> list[Any]:
    _all_quantized(values)
    axis = eqn.params["dimension"]
    return [joined(values, axis, lambda leaves: jnp.concatenate(leaves, axis))]


def _stack(_: AbstractEvaluator, eqn: jex_core.JaxprEqn, values: list[Any]) -> list[Any]:
    _all_quantized(values)
    axis = eqn.params["axis"]
    parts = [reshaped(q, (*q.shape[:axis], 1, *q.shape[axis:])) for q in values]
    return [joined(parts, axis, lambda leaves: jnp.concatenate(leaves, axis))]


def _tile(_: AbstractEvaluator, eqn: jex_core.JaxprEqn, values: list[Any]) -> list[Any]:
    q = values[0]
    for axis, times in enumerate(eqn.params["reps"]):
        if times > 1:
            q = joined([q] * times, axis, lambda leaves, axis=axis: jnp.concatenate(leaves, axis))
    return [q]


def _rev(_: AbstractEvaluator, eqn: jex_core.JaxprEqn, values: list[Any]) -> list[Any]:
    return [reversed_along(values[0], eqn.params["dimensions"])]


def _select_n(_: AbstractEvaluator, eqn: jex_core.JaxprEqn, values: list[Any]) -> list[Any]:
    """Selects whole tiles: the predicate is a scalar, or constant along tiled axes."""
    which, *cases = values
    _all_quantized(cases)
    if which.ndim == 0:
        which = which.reshape((1,) * cases[0].ndim)
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


LAYOUT: dict[str, Rule] = {
    "transpose": _transpose,
    "reshape": _reshape,
    "squeeze": _unit_axes,
    "expand_dims": _unit_axes,
    "broadcast_in_dim": _broadcast_in_dim,
    "convert_element_type": _convert,
    "copy": _on_leaves,
    "copy_p": _on_leaves,
    "name": _on_leaves,
    "stage": _on_leaves,
    "stop_gradient": _stop_gradient,
    "optimization_barrier": _barrier,
    "slice": _slice,
    "split": _split,
    "unstack": _unstack,
    "dynamic_slice": _dynamic_slice,
    "concatenate": _concatenate,
    "stack": _stack,
    "tile": _tile,
    "rev": _rev,
    "select_n": _select_n,
}
"""The rules of layout operations."""
