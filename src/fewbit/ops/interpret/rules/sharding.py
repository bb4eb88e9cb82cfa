"""Sharding and collectives on QArrays.

The leaves have the array's axes, shorter where elements share a scale, so each leaf takes the array's PartitionSpec; one scale
of a whole axis is first repeated for every shard.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import jax
from jax.extend import core as jex_core
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from ...._explicit_mesh import explicit_sharding
from ....array.leaves import with_leaves
from ....array.qarray import QArray, is_qarray
from ....array.sharding import AnyMesh, axis_names, placement, spec_entries
from ....errors import QuantError
from ..evaluator import Evaluator, Rule
from ..proxy import ArrayProxy, NoRuleError
from .concatenate import is_packed_along, joined, reshaped, spread, tile_length, unit_of


def leaf_shardings(q: QArray, sharding: object) -> PyTree:
    """The sharding of each leaf, from that of the array.

    NoRuleError without a definite spec, or when it cuts a tile or byte.
    """
    if not isinstance(sharding, NamedSharding):
        raise NoRuleError(f"its sharding is a {type(sharding).__name__}; only a NamedSharding names the axes")
    if PartitionSpec.UNCONSTRAINED in tuple(sharding.spec):
        raise NoRuleError(f"{sharding.spec} is unconstrained, so the compiler would place codes and scales differently")
    try:
        return placement(q, sharding)
    except QuantError as error:
        raise NoRuleError(str(error)) from error


def constrained(x: PyTree, sharding: PyTree) -> PyTree:
    """A value with a sharding constraint, on every leaf of a QArray. Other proxies are unchanged."""
    if isinstance(x, ArrayProxy):
        return x
    if isinstance(x, QArray):
        sharding = leaf_shardings(x, sharding)
    return jax.lax.with_sharding_constraint(x, sharding)


def _sharding_constraint(_: Evaluator, eqn: jex_core.JaxprEqn, values: list[Any]) -> list[Any]:
    if eqn.params.get("layout") is not None:
        raise NoRuleError("a memory layout is requested")
    return [constrained(values[0], eqn.params["sharding"])]


def _reshard(_: Evaluator, eqn: jex_core.JaxprEqn, values: list[Any]) -> list[Any]:
    """`jax.reshard` of every leaf."""
    q, target = values[0], eqn.params["dst_sharding"]
    leaves, structure = jax.tree.flatten(q)
    targets = jax.tree.leaves(leaf_shardings(q, target))
    moved = [eqn.primitive.bind(x, **eqn.params | {"dst_sharding": to}) for x, to in zip(leaves, targets, strict=True)]
    return [jax.tree.unflatten(structure, moved)]


def _device_put(_: Evaluator, eqn: jex_core.JaxprEqn, values: list[Any]) -> list[Any]:
    """`jax.device_put` of every leaf of the operands."""
    columns = list(zip(eqn.params["devices"], eqn.params["srcs"], eqn.params["copy_semantics"], strict=True))
    leaves, places = [], []
    for value, (device, source, copying) in zip(values, columns, strict=True):
        parts = jax.tree.leaves(value)
        targets = [device] * len(parts)
        if is_qarray(value) and isinstance(device, jax.sharding.Sharding):
            targets = jax.tree.leaves(leaf_shardings(value, device))
        leaves += parts
        places += [(target, source, copying) for target in targets]
    devices, sources, copies = zip(*places, strict=True)
    params = eqn.params | {"devices": devices, "srcs": sources, "copy_semantics": copies}
    return jax.tree.unflatten(jax.tree.structure(values), eqn.primitive.bind(*leaves, **params))


# --- within shard_map ---


def _all_gather(_: Evaluator, eqn: jex_core.JaxprEqn, values: list[Any]) -> list[Any]:
    params, (q,) = eqn.params, values
    axis = params["all_gather_dimension"]
    if not params["tiled"]:
        q = reshaped(q, (*q.shape[:axis], 1, *q.shape[axis:]))

    def gathered(leaves: list[Any]) -> jax.Array:
        groups = params["axis_index_groups"]
        return jax.lax.all_gather(leaves[0], params["axis_name"], axis_index_groups=groups, axis=axis, tiled=True)

    return [joined([q], axis, gathered, params["axis_size"])]


def sharded_ready(q: QArray, spec: PartitionSpec, mesh: Mapping[str, int]) -> QArray:
    """The array, ready to be cut by a PartitionSpec.

    The spec cuts the leaves where it cuts the array. NoRuleError for a tile or byte of two shards.

    Args:
        q: the array.
        spec: of the array.
        mesh: the number of devices along each mesh axis.
    """
    for axis, entry in enumerate(spec_entries(spec, q.ndim)):
        parts = math.prod(mesh[name] for name in axis_names(entry))
        if parts > 1:
            q = _cut_ready(q, axis, parts)
    return jax.tree.map(lambda leaf: _on_explicit_axes(leaf, spec, mesh), q)


def _on_explicit_axes(leaf: jax.Array, spec: PartitionSpec, manual: Iterable[str], mesh: AnyMesh | None = None) -> jax.Array:
    """The leaf by the spec where `shard_map` demands it: on a mesh with explicit axes. Other axes than `manual` stay.

    `mesh` is that of a leaf on none.
    """
    sharding = explicit_sharding(leaf)
    if sharding is None and mesh is not None and AxisType.Explicit in mesh.axis_types:
        sharding = NamedSharding(mesh, PartitionSpec())
    if sharding is None:
        return leaf
    before, after = spec_entries(sharding.spec, leaf.ndim), spec_entries(spec, leaf.ndim)
    entries = [
        (*axis_names(entry), *(name for name in axis_names(old) if name not in manual))
        for old, entry in zip(before, after, strict=True)
    ]
    return jax.reshard(leaf, NamedSharding(sharding.mesh, PartitionSpec(*(names or None for names in entries))))


def _is_spec(x: object) -> bool:
    return isinstance(x, PartitionSpec)


def _cut_ready(q: QArray, axis: int, parts: int) -> QArray:
    n, count = q.shape[axis], q.scale.shape[axis]
    part = n // parts
    if n % parts or (count > 1 and part % tile_length(q, axis)):
        raise NoRuleError(f"an axis of {n} with tiles of {tile_length(q, axis)} cannot be cut in {parts}")
    if is_packed_along(q, axis) and (q.slack or part % unit_of(q)):
        raise NoRuleError(f"codes share bytes in runs of {unit_of(q)}; {parts} shards would cut one")

    def ready(leaf: jax.Array | QArray) -> jax.Array | QArray:
        if leaf.shape[axis] == 1:
            leaf = spread(leaf, axis, parts)
        return _cut_ready(leaf, axis, parts) if isinstance(leaf, QArray) else leaf

    tiles = list(q.tiles)
    tiles[axis] = n // max(count, parts)
    return with_leaves(q, ready, scheme=q.scheme.with_tiles(tuple(tiles), q.scheme.pack_axis))


def _joinable(q: QArray, spec: PartitionSpec) -> QArray:
    """One shard with explicit tiles on the axes of a PartitionSpec. The leaves of all shards then make one array.

    Raises:
        NoRuleError: when a tile or a byte would contain elements of two shards.
    """
    for axis, entry in enumerate(spec_entries(spec, q.ndim)):
        if axis_names(entry):
            q = _joinable_along(q, axis)
    return q


def _joinable_along(q: QArray, axis: int) -> QArray:
    n, length = q.shape[axis], tile_length(q, axis)
    if n % length or (is_packed_along(q, axis) and (q.slack or n % unit_of(q))):
        raise NoRuleError(f"a tile of {length} or a byte of codes would extend over two shards of {n}")

    def joinable(leaf: jax.Array | QArray) -> jax.Array | QArray:
        leaf = spread(leaf, axis, q.scale.shape[axis])
        return _joinable_along(leaf, axis) if isinstance(leaf, QArray) else leaf

    tiles = list(q._named_tiles)  # an axis that is joined already has a tile as long as the shard
    tiles[axis] = length
    return with_leaves(q, joinable, scheme=q.scheme.with_tiles(tuple(tiles), q.scheme.pack_axis))


def _shard_map(evaluator: Evaluator, eqn: jex_core.JaxprEqn, values: list[Any]) -> list[Any]:
    """`shard_map` over an interpreted body. Quantized results stay quantized, such as weights kept for a backward pass."""
    params = eqn.params
    mesh, names = params["mesh"], set(params["newly_manual_axes"])
    lengths = {name: mesh.shape[name] for name in mesh.axis_names if name in names}
    varying = lengths
    if params["check_vma"]:  # then results are known to be equal along mesh axes that no operand has
        used = {name for spec in params["in_specs"] for entry in spec for name in axis_names(entry)}
        varying = {name: length for name, length in lengths.items() if name in used}

    def placed(spec: PartitionSpec, part: PyTree) -> PyTree:
        return jax.tree.map(lambda leaf: _on_explicit_axes(leaf, spec, lengths, mesh), part)

    def ready(value: PyTree, spec: PartitionSpec) -> tuple[Any, Any]:
        if isinstance(value, ArrayProxy):
            proxy, proxy_specs = value.shards(spec, varying)
            return jax.tree.map(placed, proxy_specs, proxy, is_leaf=_is_spec), proxy_specs
        if isinstance(value, QArray):
            value = sharded_ready(value, spec, lengths)
        return value, spec

    hidden = [(proxy, PartitionSpec()) for proxy in evaluator.inside()]
    every = [*zip(values, params["in_specs"], strict=True), *hidden]
    cut, specs = zip(*(ready(*pair) for pair in every), strict=True)

    def returned(out: PyTree, spec: PartitionSpec) -> PyTree:
        reason = "shard_map returns it as an array"
        if isinstance(out, QArray):
            try:
                return _joinable(out, spec)
            except NoRuleError as error:
                reason = str(error)
        return evaluator.decoded(eqn, out, reason)

    def mapped(*args: PyTree) -> tuple[Any, ...]:
        here = [x.on_device() if isinstance(x, ArrayProxy) else x for x in args]
        body = evaluator.with_inside(here[len(values) :]).function(params["jaxpr"])
        return tuple(map(returned, body(*here[: len(values)]), params["out_specs"]))

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
    "all_gather": _all_gather,
    "shard_map": _shard_map,
}
"""The rules of sharding and collectives."""
