"""How a quantized array lies on a mesh: the specs of its codes and scales follow from the spec of the array it stands for.

Codes and scales have as many axes as the array, so each leaf takes the array's own entries; an axis along which a leaf has
one element is replicated. What has to be checked is that every device gets whole tiles and whole bytes.
"""

import math
from collections.abc import Iterator
from typing import Any

import jax
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

from ..errors import QuantError
from .qarray import QArray, is_qarray

AnyMesh = Mesh | AbstractMesh


def specs_of(tree: Any, mesh: AnyMesh, specs: Any) -> Any:
    """The PartitionSpec of every leaf of a tree of arrays and QArrays: the `in_specs` of `jax.shard_map`.

    Codes take the spec of the array. Scales, zero points and tensor scales take it too, but for the axes along which they
    have one element, which every device holds: a scale of a whole axis was found before the array was sharded, so it is
    right for every shard.

    Args:
        tree: a QArray, or a tree of arrays and QArrays; `jax.ShapeDtypeStruct` leaves serve as well.
        mesh: the mesh whose axes the specs name.
        specs: the PartitionSpec of the array that a QArray stands for, or a tree of them, which may be a prefix of `tree`;
            None replicates.

    Returns:
        A tree of the structure of `tree`, with a PartitionSpec for every leaf.

    Raises:
        QuantError: when a shard would cut a tile or a byte: the parameter, the axis, the tile, the mesh axis, and specs
            that fit.

    >>> q = fb.quantize(jnp.ones((64, 128)), "nf4")
    >>> specs_of(q, jax.make_mesh((2,), ("model",)), jax.P(None, "model")).scale
    P(None, 'model')
    >>> specs_of(fb.quantize(jnp.ones((64, 128)), "int8"), jax.make_mesh((2,), ("model",)), jax.P(None, "model")).scale
    P(None, None)
    """
    shardings = shardings_of(tree, mesh, specs)
    return jax.tree.map(lambda sharding: sharding.spec, shardings)


def shardings_of(tree: Any, mesh: AnyMesh, specs: Any) -> Any:
    """The NamedSharding of every leaf of a tree of arrays and QArrays: for `device_put`, `jit` and checkpointers.

    Args:
        tree: as in `specs_of`.
        mesh: the mesh.
        specs: as in `specs_of`.

    Returns:
        A tree of the structure of `tree`, with a NamedSharding for every leaf.

    Raises:
        QuantError: as in `specs_of`.

    >>> params = {"w": fb.quantize(jnp.ones((64, 128)), "nf4"), "b": jnp.ones(64)}
    >>> mesh = jax.make_mesh((2,), ("model",))
    >>> placed = jax.device_put(params, shardings_of(params, mesh, {"w": jax.P("model"), "b": jax.P("model")}))
    >>> placed["w"].codes.addressable_shards[0].data.shape
    (32, 64)
    """

    def below(path: Any, spec: PartitionSpec | None, subtree: Any) -> Any:
        sharding = NamedSharding(mesh, PartitionSpec() if spec is None else spec)
        return jax.tree_util.tree_map_with_path(
            lambda rest, leaf: placement(leaf, sharding, (*path, *rest)), subtree, is_leaf=is_qarray
        )

    return jax.tree_util.tree_map_with_path(below, specs, tree, is_leaf=lambda x: x is None or isinstance(x, PartitionSpec))


def placed(q: QArray, sharding: NamedSharding) -> QArray:
    """The same array on the devices of a sharding; under jit, a constraint on every leaf, so that codes travel, not floats.

    Args:
        q: the array.
        sharding: that of the array that it stands for.
    """
    shardings = placement(q, sharding)
    if not any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(q)):
        return jax.device_put(q, shardings)
    if AxisType.Explicit in sharding.mesh.axis_types:
        return jax.reshard(q, shardings)
    return jax.lax.with_sharding_constraint(q, shardings)


def logical_sharding(q: QArray) -> Sharding | None:
    """The sharding of the array that `q` stands for, or None when its leaves do not tell one."""
    leaves = jax.tree.leaves(q)
    held = [held_sharding(leaf) for leaf in leaves]
    codes = held[0]
    if not isinstance(codes, NamedSharding):
        return codes if all(h == codes for h in held) else None
    is_told = all(
        isinstance(h, NamedSharding)
        and h.mesh == codes.mesh
        and spec_entries(h.spec, leaf.ndim) == spec_entries(_leaf_spec(codes.spec, leaf.shape), leaf.ndim)
        for h, leaf in zip(held, leaves, strict=True)
    )
    return codes if is_told else None


def held_sharding(x: Any) -> Sharding | None:
    """The sharding that an array tells: one being traced has it in its type if its mesh is explicit, and else tells none."""
    if not isinstance(x, Tracer):
        return getattr(x, "sharding", None)
    sharding = jax.typeof(x).sharding
    is_explicit = bool(sharding.mesh.axis_types) and all(t == AxisType.Explicit for t in sharding.mesh.axis_types)
    return sharding if is_explicit else None


def axis_names(entry: Any) -> tuple[str, ...]:
    """The mesh axes that one entry of a PartitionSpec names."""
    if entry is None or entry is PartitionSpec.UNCONSTRAINED:
        return ()
    return entry if isinstance(entry, tuple) else (entry,)


# --- the leaves of one array ---


def placement(leaf: Any, sharding: NamedSharding, path: Any = ()) -> Any:
    """The sharding of an array as it is, or those of the leaves of a QArray, checked."""
    if not is_qarray(leaf):
        return sharding
    entries = spec_entries(sharding.spec, leaf.ndim)
    if misfit := _misfit(leaf, entries, sharding.mesh):
        raise QuantError(_refusal(leaf, entries, sharding.mesh, misfit, path))

    def of(part: Any) -> NamedSharding:
        spec = _leaf_spec(sharding.spec, part.shape)
        return NamedSharding(sharding.mesh, spec, memory_kind=sharding.memory_kind)

    return jax.tree.map(of, leaf)


def spec_entries(spec: PartitionSpec, ndim: int) -> tuple[Any, ...]:
    """An entry for each of `ndim` axes, alike entries written alike."""
    if len(spec) > ndim:
        raise QuantError(f"{_written(tuple(spec))} has {len(spec)} entries, but the array has {ndim} axes")
    short = (*spec, *[None] * (ndim - len(spec)))
    return tuple(e if not isinstance(e, tuple) else None if not e else e[0] if len(e) == 1 else e for e in short)


def _leaf_spec(spec: PartitionSpec, shape: tuple[int, ...]) -> PartitionSpec:
    """The spec of codes or scales of this shape: axes of one element are replicated."""
    return PartitionSpec(*(None if n == 1 else e for e, n in zip(spec_entries(spec, len(shape)), shape, strict=True)))


def _shards(entry: Any, mesh: AnyMesh) -> int:
    """Into how many shards an entry cuts an axis."""
    return math.prod(mesh.shape[name] for name in axis_names(entry))


def _misfit(q: QArray, entries: tuple[Any, ...], mesh: AnyMesh) -> tuple[int, str] | None:
    """The first axis that the entries would cut wrongly, and what would be cut; None when all is whole."""
    for i, (axis, entry) in enumerate(zip(q._axes, entries, strict=True)):
        shards = _shards(entry, mesh)
        length = axis.length // shards
        if shards == 1:
            continue
        if axis.length % shards:
            return i, f"{axis.length} elements do not divide into {shards} shards"
        if axis.tile is not None and length % axis.tile:
            return i, f"shards of {length} elements cut tiles of {axis.tile}"
        if length % axis.unit:
            return i, f"shards of {length} elements cut bytes, which hold runs of {axis.unit} codes"
    if not is_qarray(q.scale):
        return None
    nested = _misfit(q.scale, spec_entries(_leaf_spec(PartitionSpec(*entries), q.scale.shape), q.ndim), mesh)
    return nested and (nested[0], f"of its scales, which are quantized too, {nested[1]}")


# --- the message ---


def _refusal(q: QArray, entries: tuple[Any, ...], mesh: AnyMesh, misfit: tuple[int, str], path: Any) -> str:
    axis, reason = misfit
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    over = " and ".join(f"{n!r} (size {mesh.shape[n]})" for n in axis_names(entries[axis]))
    fitting = ", ".join(map(_written, _near(q, entries, mesh, axis)))
    return (
        f"{name + ': ' if name else ''}{_written(entries)} does not fit {q.scheme.name}{list(q.shape)}: axis {axis} over mesh "
        f"axis {over}: {reason}. Specs that fit: {fitting or 'none near it; replicate the array'}"
    )


def _written(entries: tuple[Any, ...]) -> str:
    """A spec as one types it."""
    return f"P({', '.join(map(repr, entries))})"


def _near(q: QArray, entries: tuple[Any, ...], mesh: AnyMesh, axis: int) -> Iterator[tuple[Any, ...]]:
    """Specs that fit: with the entry moved to a free axis, with another mesh axis in its place, and without it."""
    without = tuple(None if i == axis else e for i, e in enumerate(entries))
    used = {name for e in without for name in axis_names(e)}
    candidates = [_with(without, i, entries[axis]) for i, e in enumerate(entries) if e is None]
    candidates += [_with(without, axis, name) for name in mesh.shape if name not in used and mesh.shape[name] > 1]
    for candidate in [*candidates, without]:
        if _misfit(q, candidate, mesh) is None:
            yield candidate


def _with(entries: tuple[Any, ...], axis: int, entry: Any) -> tuple[Any, ...]:
    return tuple(entry if i == axis else e for i, e in enumerate(entries))
