"""How a quantized array lies on a mesh: the specs of its codes and scales follow from the spec of the array it stands for.

Codes and scales have as many axes as the array, so each leaf takes the array's own entries; an axis along which a leaf has
one element is replicated. What has to be checked is that every device gets whole tiles and whole bytes.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

from ..errors import QuantError
from .layout import Axis
from .packing import codes_per_unit
from .qarray import QArray, is_qarray
from .scheme import Scheme

AnyMesh: TypeAlias = Mesh | AbstractMesh
Entries: TypeAlias = tuple[Any, ...]
"""What a PartitionSpec says of each axis: None, the name of a mesh axis, or several."""
Misfit: TypeAlias = tuple[int, str]
"""The axis that would be cut wrongly, and how."""


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

    Returns:
        The array; its leaves' shardings are those of `shardings_of`.

    Raises:
        QuantError: when a shard would cut a tile or a byte, or `sharding` is none.
    """
    if not isinstance(sharding, NamedSharding):
        raise QuantError(f"sharding is {sharding!r}; pass a NamedSharding, or a mesh and a PartitionSpec as a tuple")
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


def refuse_cut_tiles(x: jax.Array, scheme: Scheme) -> None:
    """Raises QuantError for an array whose devices hold parts of tiles, where JAX leaves no freedom: on an explicit mesh."""
    sharding = held_sharding(x)
    if not isinstance(sharding, NamedSharding) or AxisType.Explicit not in sharding.mesh.axis_types:
        return
    entries = spec_entries(sharding.spec, x.ndim)
    what = f"x is sharded as {_written(entries)}, but {scheme.name} cuts {list(x.shape)} otherwise; jax.reshard it first"
    unit = codes_per_unit(scheme.format.bits, scheme.packing)
    axes = [
        Axis(n, None if t is None or t >= n else t, unit if i == scheme.pack_axis + x.ndim else 1)
        for i, (n, t) in enumerate(zip(x.shape, scheme.tiles(x.ndim), strict=True))
    ]
    _refuse_misfit(what, entries, sharding.mesh, lambda near: _cut(axes, near, sharding.mesh))


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
    if sharding.spec.unreduced or sharding.spec.reduced:
        raise QuantError(
            f"{sharding.spec} speaks of sums over mesh axes; codes are not summed, so only cut or replicate them"
        )
    entries = spec_entries(sharding.spec, leaf.ndim)
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    what = f"{name + ': ' if name else ''}{_written(entries)} does not fit {leaf.scheme.name}{list(leaf.shape)}"
    _refuse_misfit(what, entries, sharding.mesh, lambda near: _misfit(leaf, near, sharding.mesh))

    def of(part: Any) -> NamedSharding:
        spec = _leaf_spec(sharding.spec, part.shape)
        return NamedSharding(sharding.mesh, spec, memory_kind=sharding.memory_kind)

    return jax.tree.map(of, leaf)


def spec_entries(spec: PartitionSpec, ndim: int) -> Entries:
    """An entry for each of `ndim` axes, alike entries written alike."""
    if len(spec) > ndim:
        raise QuantError(f"{_written(tuple(spec))} has {len(spec)} entries, but the array has {ndim} axes")
    short = (*spec, *[None] * (ndim - len(spec)))
    return tuple(e if not isinstance(e, tuple) else None if not e else e[0] if len(e) == 1 else e for e in short)


def _leaf_spec(spec: PartitionSpec, shape: tuple[int, ...]) -> PartitionSpec:
    """The spec of codes or scales of this shape: axes of one element are replicated."""
    return PartitionSpec(*(None if n == 1 else e for e, n in zip(spec_entries(spec, len(shape)), shape, strict=True)))


def _misfit(q: QArray, entries: Entries, mesh: AnyMesh) -> Misfit | None:
    """The first axis that the entries would cut wrongly, and what would be cut; None when all is whole."""
    if (cut := _cut(q._axes, entries, mesh)) or not is_qarray(q.scale):
        return cut
    nested = _misfit(q.scale, spec_entries(_leaf_spec(PartitionSpec(*entries), q.scale.shape), q.ndim), mesh)
    return nested and (nested[0], f"of its scales, which are quantized too, {nested[1]}")


def _cut(axes: Sequence[Axis], entries: Entries, mesh: AnyMesh) -> Misfit | None:
    for i, (axis, entry) in enumerate(zip(axes, entries, strict=True)):
        shards = math.prod(mesh.shape[name] for name in axis_names(entry))
        length = axis.length // shards
        if axis.length % shards:
            return i, f"{axis.length} elements do not divide into {shards} shards"
        if shards > 1 and axis.tile is not None and length % axis.tile:
            return i, f"shards of {length} elements cut tiles of {axis.tile}"
        if shards > 1 and length % axis.unit:
            return i, f"shards of {length} elements cut bytes, which hold runs of {axis.unit} codes"
    return None


# --- the message ---


def _refuse_misfit(what: str, entries: Entries, mesh: AnyMesh, misfit: Callable[[Entries], Misfit | None]) -> None:
    """Raises QuantError when the entries do not fit, with the ones near them that do."""
    if not (found := misfit(entries)):
        return
    axis, reason = found
    over = " and ".join(f"{n!r} (size {mesh.shape[n]})" for n in axis_names(entries[axis]))
    fitting = ", ".join(_written(near) for near in _near(entries, mesh, axis) if misfit(near) is None)
    raise QuantError(f"{what}: axis {axis} over mesh axis {over}: {reason}. Specs that fit: {fitting or 'none near it'}")


def _written(entries: Entries) -> str:
    """A spec as one types it."""
    return f"P({', '.join(map(repr, entries))})"


def _near(entries: Entries, mesh: AnyMesh, axis: int) -> list[Entries]:
    """Specs with the entry of an axis moved to a free one, with another mesh axis in its place, and without it."""
    without = _with(entries, axis, None)
    used = {name for e in without for name in axis_names(e)}
    moved = [_with(without, i, entries[axis]) for i, e in enumerate(entries) if e is None]
    replaced = [_with(without, axis, name) for name in mesh.shape if name not in used and mesh.shape[name] > 1]
    return [*moved, *replaced, without]


def _with(entries: Entries, axis: int, entry: Any) -> Entries:
    return tuple(entry if i == axis else e for i, e in enumerate(entries))
