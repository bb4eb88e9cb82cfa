"""Placement and collectives: quantized arrays over several devices.

A spec names an axis of the array. The leaves have the same axes, shorter where one scale serves many elements, so each leaf
takes the same spec; where a whole axis has one scale, it is first repeated for every shard.
"""

import math
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ...array import QArray, is_qarray
from ...array.sharding import placement
from ...errors import QuantError
from ..standin import StandIn
from .joining import broadcasted, is_packed_along, joined, spread, tile_length, unit_of
from .layout import reshaped
from .rule import AbstractEvaluator, NoRuleError, Rule


def _parts(entry: Any, mesh: Any) -> int:
    """Into how many shards an entry of a spec cuts its axis."""
    if entry is None:
        return 1
    names = entry if isinstance(entry, tuple) else (entry,)
    return math.prod(mesh.shape[name] for name in names)


def _entries(spec: Any, ndim: int) -> list[Any]:
    return [*spec, *([None] * (ndim - len(spec)))]


def leaf_shardings(q: QArray, sharding: Any) -> Any:
    """For each leaf its sharding under that of the array, as `fb.shardings_of` has it.

    Raises:
        NoRuleError: when the sharding has no spec or an open one, or would cut a tile or a byte.
    """
    if not isinstance(sharding, NamedSharding):
        raise NoRuleError(f"its sharding is a {type(sharding).__name__}; only a NamedSharding says which axis goes where")
    if PartitionSpec.UNCONSTRAINED in tuple(sharding.spec):
        raise NoRuleError(f"{sharding.spec} leaves axes to the compiler, which would place codes and scales apart")
    try:
        return placement(q, sharding)
    except QuantError as error:
        raise NoRuleError(str(error)) from error


def constrained(x: Any, sharding: Any) -> Any:
    """A value under a sharding constraint; a QArray's leaves each under theirs, other stand-ins where they are."""
    if isinstance(x, StandIn):
        return x
    return jax.lax.with_sharding_constraint(x, leaf_shardings(x, sharding) if is_qarray(x) else sharding)


def _sharding_constraint(_: AbstractEvaluator, eqn: Any, values: list[Any]) -> list[Any]:
    if eqn.params.get("layout") is not None:
        raise NoRuleError("a memory layout is asked of it")
    return [constrained(values[0], eqn.params["sharding"])]


def _reshard(_: AbstractEvaluator, eqn: Any, values: list[Any]) -> list[Any]:
    """`jax.reshard`: codes and scales go where the array goes."""
    q, target = values[0], eqn.params["dst_sharding"]
    leaves, structure = jax.tree.flatten(q)
    targets = jax.tree.leaves(leaf_shardings(q, target))
    moved = [eqn.primitive.bind(x, **eqn.params | {"dst_sharding": to}) for x, to in zip(leaves, targets, strict=True)]
    return [jax.tree.unflatten(structure, moved)]


def _device_put(_: AbstractEvaluator, eqn: Any, values: list[Any]) -> list[Any]:
    """Each array that the operands hold is put where its operand goes."""
    columns = list(zip(eqn.params["devices"], eqn.params["srcs"], eqn.params["copy_semantics"], strict=True))
    leaves, places = [], []
    for value, (device, source, copying) in zip(values, columns, strict=True):
        held = jax.tree.leaves(value)
        has_spec = is_qarray(value) and isinstance(device, jax.sharding.Sharding)
        targets = jax.tree.leaves(leaf_shardings(value, device)) if has_spec else [device] * len(held)
        leaves += held
        places += [(target, source, copying) for target in targets]
    devices, sources, copies = zip(*places, strict=True)
    params = eqn.params | {"devices": devices, "srcs": sources, "copy_semantics": copies}
    return jax.tree.unflatten(jax.tree.structure(values), eqn.primitive.bind(*leaves, **params))


# --- within shard_map ---


def _each_leaf(_: AbstractEvaluator, eqn: Any, values: list[Any]) -> list[Any]:
    """A collective that gives every shard one whole shard, bound for each array that the QArray holds."""

    def one(leaf: Any) -> Any:
        out = eqn.primitive.bind(leaf, **eqn.params)
        return out[0] if eqn.primitive.multiple_results else out

    return [jax.tree.map(one, values[0])]


def _all_gather(_: AbstractEvaluator, eqn: Any, values: list[Any]) -> list[Any]:
    params, (q,) = eqn.params, values
    axis = params["all_gather_dimension"]
    if not params["tiled"]:
        q = reshaped(q, (*q.shape[:axis], 1, *q.shape[axis:]))

    def gathered(leaves: list[Any]) -> Any:
        groups = params["axis_index_groups"]
        return jax.lax.all_gather(leaves[0], params["axis_name"], axis_index_groups=groups, axis=axis, tiled=True)

    return [joined([q], axis, gathered, params["axis_size"])]


def sharded_ready(q: QArray, spec: Any, mesh: Any) -> QArray:
    """The array with leaves that a spec cuts exactly where it cuts the array.

    Raises:
        NoRuleError: when a tile or a byte would hold elements of two shards.
    """
    for axis, entry in enumerate(_entries(spec, q.ndim)):
        parts = _parts(entry, mesh)
        if parts > 1:
            q = _cut_ready(q, axis, parts)
    return q


def _cut_ready(q: QArray, axis: int, parts: int) -> QArray:
    n, count = q.shape[axis], q.scale.shape[axis]
    part = n // parts
    if n % parts or (count > 1 and part % tile_length(q, axis)):
        raise NoRuleError(f"an axis of {n} with tiles of {tile_length(q, axis)} cannot be cut in {parts}")
    if is_packed_along(q, axis) and (q.slack or part % unit_of(q)):
        raise NoRuleError(f"codes share bytes in runs of {unit_of(q)}; {parts} shards would cut one")

    def ready(leaf: Any) -> Any:
        if isinstance(leaf, QArray):
            return _cut_ready(broadcasted(leaf, _grown(leaf, axis, parts)) if leaf.shape[axis] == 1 else leaf, axis, parts)
        return spread(leaf, axis, parts) if leaf.shape[axis] == 1 else leaf

    count = parts if count == 1 else count
    tiles = list(q.tiles)
    tiles[axis] = n // count
    zero = None if q.zero_point is None else ready(q.zero_point)
    tensor = None if q.tensor_scale is None else ready(q.tensor_scale)
    scheme = q.scheme.with_tiles(tuple(tiles), q.scheme.pack_axis)
    return QArray(q.codes, ready(q.scale), zero, tensor, scheme, q.dtype, q.slack, q.policy)


def _grown(q: QArray, axis: int, count: int) -> tuple[int, ...]:
    return tuple(count if a == axis else n for a, n in enumerate(q.shape))


def _shard_map(evaluator: AbstractEvaluator, eqn: Any, values: list[Any]) -> list[Any]:
    """The same map over a body that is evaluated with the rules; results that would be quantized are decoded inside."""
    params = eqn.params
    mesh, names = params["mesh"], set(params["newly_manual_axes"])
    lengths = {name: mesh.shape[name] for name in mesh.axis_names if name in names}

    def ready(value: Any, spec: Any) -> tuple[Any, Any]:
        if isinstance(value, StandIn):
            return value.shards(spec, lengths)
        return sharded_ready(value, spec, mesh) if is_qarray(value) else value, spec

    hidden = [(stand_in, PartitionSpec()) for stand_in in evaluator.inside()]
    every = [*zip(values, params["in_specs"], strict=True), *hidden]
    cut, specs = zip(*(ready(*pair) for pair in every), strict=True)

    def mapped(*args: Any) -> tuple[Any, ...]:
        reason = "shard_map gives its results back as arrays"
        here = [x.on_device() if isinstance(x, StandIn) else x for x in args]
        body = evaluator.with_inside(here[len(values) :]).function(params["jaxpr"])
        return tuple(evaluator.decoded(eqn, out, reason) for out in body(*here[: len(values)]))

    return list(
        jax.shard_map(
            mapped,
            mesh=mesh if isinstance(mesh, Mesh) else None,
            in_specs=tuple(specs),
            out_specs=tuple(params["out_specs"]),
            axis_names=names,
            check_vma=params["check_vma"],
        )(*cut)
    )


SHARDING: dict[str, Rule] = {
    "sharding_constraint": _sharding_constraint,
    "reshard": _reshard,
    "device_put": _device_put,
    "pvary": _each_leaf,
    "ppermute": _each_leaf,
    "all_gather": _all_gather,
    "shard_map": _shard_map,
}
"""The rules of placement and collectives."""
