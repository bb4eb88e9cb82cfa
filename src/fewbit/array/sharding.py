"""Sharding of QArrays: PartitionSpecs of codes and scales.

Codes and scales have as many axes as the array, so each leaf takes the array's spec; axes of one element are replicated.
Every shard must have whole tiles and whole bytes.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec, Sharding
from jax.tree_util import KeyPath
from jaxtyping import PyTree

from .._explicit_mesh import explicit_sharding
from ..errors import QuantError
from .layout import Axis
from .packing import codes_per_unit
from .qarray import QArray, is_qarray
from .scheme import Scheme

AnyMesh: TypeAlias = Mesh | AbstractMesh
Entries: TypeAlias = tuple[Any, ...]
"""The entries of a PartitionSpec: None, the name of a mesh axis, or several, for each axis."""
Misfit: TypeAlias = tuple[int, str]
"""An axis that would be cut wrongly, and why."""


def specs_of(tree: PyTree, mesh: AnyMesh, specs: PyTree) -> PyTree:
    """The PartitionSpec of every leaf of a pytree with QArrays, for `jax.shard_map`.

    Codes, scales, zero points and tensor scales take the spec of the array; axes along which a leaf has one element are
    replicated. Per-channel scales computed before sharding are thus right for every shard.

    Args:
        tree: a QArray, or a pytree of arrays and QArrays; leaves may be `jax.ShapeDtypeStruct`.
        mesh: the mesh whose axes the specs name.
        specs: the PartitionSpec of the (dequantized) array, or its NamedSharding on the mesh, or a pytree of them, a prefix of
            `tree`; None replicates.

    Returns:
        A pytree of the structure of `tree`, with a PartitionSpec for every leaf.

    Raises:
        QuantError: when a shard would cut a tile or a byte; names the parameter, the axis and specs that fit. For anything else
            in the place of a spec.

    >>> q = fb.quantize(jnp.ones((64, 128)), "nf4")
    >>> specs_of(q, jax.make_mesh((2,), ("model",)), jax.P(None, "model")).scale
    P(None, 'model')
    >>> specs_of(fb.quantize(jnp.ones((64, 128)), "int8"), jax.make_mesh((2,), ("model",)), jax.P(None, "model")).scale
    P(None, None)
    """
    shardings = shardings_of(tree, mesh, specs)
    return jax.tree.map(lambda sharding: sharding.spec, shardings)


def shardings_of(tree: PyTree, mesh: AnyMesh, specs: PyTree) -> PyTree:
    """`specs_of` as NamedShardings, for `device_put`, `jit` and checkpointers.

    Args:
        tree: as in `specs_of`.
        mesh: the mesh.
        specs: as in `specs_of`.

    Returns:
        A tree of the structure of `tree`, with a NamedSharding for every leaf.

    >>> params = {"w": fb.quantize(jnp.ones((64, 128)), "nf4"), "b": jnp.ones(64)}
    >>> mesh = jax.make_mesh((2,), ("model",))
    >>> placed = jax.device_put(params, shardings_of(params, mesh, {"w": jax.P("model"), "b": jax.P("model")}))
    >>> placed["w"].codes.addressable_shards[0].data.shape
    (32, 64)
    """

    def below(path: KeyPath, spec: object, subtree: PyTree) -> PyTree:
        if isinstance(spec, NamedSharding):
            if spec.mesh != mesh:
                raise QuantError(f"specs has a NamedSharding on {spec.mesh}, and mesh is {mesh}; pass a PartitionSpec")
            spec = spec.spec
        if spec is None:
            spec = PartitionSpec()
        if not isinstance(spec, PartitionSpec):
            raise QuantError(f"specs has {spec!r}; pass a PartitionSpec, a NamedSharding or None for each array or subtree")
        sharding = NamedSharding(mesh, spec)
        return jax.tree_util.tree_map_with_path(
            lambda rest, leaf: placement(leaf, sharding, (*path, *rest)), subtree, is_leaf=is_qarray
        )

    def is_spec(x: object) -> bool:
        return x is None or isinstance(x, PartitionSpec | NamedSharding)

    return jax.tree_util.tree_map_with_path(below, specs, tree, is_leaf=is_spec)


def placed(q: QArray, sharding: NamedSharding) -> QArray:
    """Moves the leaves to the shardings of `shardings_of`. Under jit it constrains them: codes are moved, not floats."""
    if not isinstance(sharding, NamedSharding):
        raise QuantError(f"sharding is {sharding!r}; pass a NamedSharding, or a mesh and a PartitionSpec as a tuple")
    shardings = placement(q, sharding)
    if not any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(q)):
        return jax.device_put(q, shardings)
    if AxisType.Explicit in sharding.mesh.axis_types:
        return jax.reshard(q, shardings)
    return jax.lax.with_sharding_constraint(q, shardings)


def logical_sharding(q: QArray) -> Sharding | None:
    """The sharding of a QArray as an array. None if its leaves' shardings are unknown or inconsistent."""
    leaves = jax.tree.leaves(q)
    shardings = [known_sharding(leaf) for leaf in leaves]
    codes = shardings[0]

    def fits(sharding: Sharding | None, leaf: Any) -> bool:
        if not isinstance(codes, NamedSharding):
            return sharding == codes
        return (
            isinstance(sharding, NamedSharding)
            and sharding.mesh == codes.mesh
            and spec_entries(sharding.spec, leaf.ndim) == spec_entries(_leaf_spec(codes.spec, leaf.shape), leaf.ndim)
        )

    if all(map(fits, shardings, leaves)):
        return codes
    return None


def known_sharding(x: object) -> Sharding | None:
    """The sharding of an array. That of a tracer is known only over the Explicit axes of a mesh; None without such axes."""
    if isinstance(x, Tracer):
        return explicit_sharding(x)
    return getattr(x, "sharding", None)


def refuse_cut_tiles(x: jax.Array, scheme: Scheme) -> None:
    """Raises QuantError for an array on an explicit mesh whose shards cut tiles."""
    sharding = known_sharding(x)
    if not isinstance(sharding, NamedSharding) or AxisType.Explicit not in sharding.mesh.axis_types:
        return
    entries = spec_entries(sharding.spec, x.ndim)
    what = f"x is sharded as {_written(entries)}, which cuts tiles of {scheme.name}{list(x.shape)}; jax.reshard it first"
    unit = codes_per_unit(scheme.format.bits, scheme.packing)
    axes = [
        Axis(n, None if t is None or t >= n else t, unit if i == scheme.pack_axis + x.ndim else 1)
        for i, (n, t) in enumerate(zip(x.shape, scheme.tiles(x.ndim), strict=True))
    ]
    _refuse_misfit(what, entries, sharding.mesh, lambda near: _cut(axes, near, sharding.mesh))


def axis_names(entry: Any) -> tuple[str, ...]:
    """The mesh axes in one entry of a PartitionSpec."""
    if entry is None or entry is PartitionSpec.UNCONSTRAINED:
        return ()
    if isinstance(entry, tuple):
        return entry
    return (entry,)


# --- the leaves of one array ---


def placement(leaf: object, sharding: NamedSharding, path: KeyPath = ()) -> PyTree:
    """The sharding itself for an array, a QArray of checked shardings for a QArray."""
    if not isinstance(leaf, QArray):
        return sharding
    if sharding.spec.unreduced or sharding.spec.reduced:
        raise QuantError(
            f"{sharding.spec} has unreduced or reduced axes; codes cannot be summed, so shard or replicate them"
        )
    entries = spec_entries(sharding.spec, leaf.ndim)
    what = f"{_written(entries)} does not fit {leaf.scheme.name}{list(leaf.shape)}"
    if name := jax.tree_util.keystr(path, simple=True, separator="/"):
        what = f"{name}: {what}"
    _refuse_misfit(what, entries, sharding.mesh, lambda near: _misfit(leaf, near, sharding.mesh))

    def of(part: Any) -> NamedSharding:
        spec = _leaf_spec(sharding.spec, part.shape)
        return NamedSharding(sharding.mesh, spec, memory_kind=sharding.memory_kind)

    return jax.tree.map(of, leaf)


def spec_entries(spec: PartitionSpec, ndim: int) -> Entries:
    """A normalized entry for each of `ndim` axes: `()` becomes None, `("a",)` becomes `"a"`."""
    if len(spec) > ndim:
        raise QuantError(f"{_written(tuple(spec))} has {len(spec)} entries, but the array has {ndim} axes")
    entries = list(spec)
    for i, entry in enumerate(entries):
        if isinstance(entry, tuple) and len(entry) < 2:
            entries[i] = next(iter(entry), None)
    return (*entries, *[None] * (ndim - len(spec)))


def _leaf_spec(spec: PartitionSpec, shape: tuple[int, ...]) -> PartitionSpec:
    """The spec of a leaf of this shape: axes of one element are replicated."""
    return PartitionSpec(*(None if n == 1 else e for e, n in zip(spec_entries(spec, len(shape)), shape, strict=True)))


def _misfit(q: QArray, entries: Entries, mesh: AnyMesh) -> Misfit | None:
    """The first axis that the entries would cut wrongly, and why. None if the spec fits."""
    if (cut := _cut(q._axes, entries, mesh)) or not is_qarray(q.scale):
        return cut
    nested = _misfit(q.scale, spec_entries(_leaf_spec(PartitionSpec(*entries), q.scale.shape), q.ndim), mesh)
    if nested is None:
        return None
    return nested[0], f"of its scales, which are quantized too, {nested[1]}"


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
    """Raises QuantError if the entries do not fit, with similar ones that do."""
    if not (found := misfit(entries)):
        return
    axis, reason = found
    over = " and ".join(f"{n!r} (size {mesh.shape[n]})" for n in axis_names(entries[axis]))
    fitting = ", ".join(_written(near) for near in _near(entries, mesh, axis) if misfit(near) is None)
    raise QuantError(f"{what}: axis {axis} over mesh axis {over}: {reason}. Specs that fit: {fitting or 'no similar one'}")


def _written(entries: Entries) -> str:
    """The source text of a spec."""
    return f"P({', '.join(map(repr, entries))})"


def _near(entries: Entries, mesh: AnyMesh, axis: int) -> list[Entries]:
    """Specs with the entry of one axis moved, replaced or removed.

    It moves to a free axis, or another mesh axis replaces it.
    """
    without = _with(entries, axis, None)
    used = {name for e in without for name in axis_names(e)}
    moved = [_with(without, i, entries[axis]) for i, e in enumerate(entries) if e is None]
    replaced = [_with(without, axis, name) for name in mesh.shape if name not in used and mesh.shape[name] > 1]
    return [*moved, *replaced, without]


def _with(entries: Entries, axis: int, entry: Any) -> Entries:
    return (*entries[:axis], entry, *entries[axis + 1 :])
