"""All-gathers a quantized operand's codes before a product.

A fully-sharded layout shards a weight along the mesh axis that shards the batch, too. Every device needs the whole weight
along that axis, and XLA gathers it after decoding: four or eight times the bytes. Here the codes are gathered first. The
shardings must be known: from committed arrays, or from the types of an explicit mesh. On an auto mesh tracing sees none; call
`QArray.with_sharding` before the product.
"""

from collections.abc import Mapping

import jax
from jax.sharding import NamedSharding, PartitionSpec

from ..array.qarray import QArray, is_qarray
from ..array.sharding import axis_names, known_sharding, spec_entries
from ..kernels.qmatmul.problem import DimensionNumbers


def with_gathered_codes(
    lhs: jax.Array | QArray, rhs: jax.Array | QArray, numbers: DimensionNumbers
) -> tuple[jax.Array | QArray, jax.Array | QArray]:
    """All-gathers the codes of the quantized operand.

    It does so along mesh axes that the other operand uses for another axis. Mesh axes that shard the same contraction or
    batch axis of both operands stay.

    Args:
        lhs: the left operand.
        rhs: the right operand; of two quantized ones it is gathered.
        numbers: as in `lax.dot_general`.

    Returns:
        Both operands.
    """
    left = (*numbers[0][0], *numbers[1][0])
    right = (*numbers[0][1], *numbers[1][1])
    if isinstance(rhs, QArray):
        return lhs, _gathered(rhs, lhs, dict(zip(right, left, strict=True)))
    if isinstance(lhs, QArray):
        return _gathered(lhs, rhs, dict(zip(left, right, strict=True))), rhs
    return lhs, rhs


def _gathered(q: QArray, other: jax.Array | QArray, paired: Mapping[int, int]) -> QArray:
    """`q` without the mesh axes of `other`.

    Axes paired with the same mesh axis keep it. `paired` maps own axes to those of `other`.
    """
    others = other.sharding if is_qarray(other) else known_sharding(other)
    if not isinstance(others, NamedSharding):
        return q
    own = q.sharding
    if not isinstance(own, NamedSharding) or own.mesh != others.mesh:
        return q
    other_names = [axis_names(entry) for entry in spec_entries(others.spec, other.ndim)]
    used = {name for names in other_names for name in names}
    entries = [axis_names(entry) for entry in spec_entries(own.spec, q.ndim)]
    shared = {axis: other_names[place] for axis, place in paired.items()}
    kept = [
        tuple(name for name in names if name in shared.get(axis, ()) or name not in used)
        for axis, names in enumerate(entries)
    ]
    if kept == entries:
        return q
    return q.with_sharding((own.mesh, PartitionSpec(*(names or None for names in kept))))
