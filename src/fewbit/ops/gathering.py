"""What is gathered before a product: codes, where XLA would gather the decoded array.

A fully-sharded layout splits a weight along the mesh axis that splits the batch, too. No device can multiply before it has
the weight whole along that axis, and XLA moves it at the last moment, when it is decoded: four or eight times the bytes.
Here the quantized operand gives way first. The shardings must be told: by arrays that are there, or by the types of an
explicit mesh. On an auto mesh tracing sees none, and `QArray.with_sharding` before the product says it.
"""

from collections.abc import Mapping
from typing import Any

from jax.sharding import NamedSharding, PartitionSpec

from ..array import QArray, is_qarray
from ..array.sharding import axis_names, held_sharding, spec_entries
from ..kernels.qmatmul.problem import DimensionNumbers


def with_gathered_codes(lhs: Any, rhs: Any, numbers: DimensionNumbers) -> tuple[Any, Any]:
    """The operands, the quantized one whole along every mesh axis that the other spends on an axis it does not meet.

    Args:
        lhs: the left operand.
        rhs: the right operand; of two quantized ones it gives way.
        numbers: as in `lax.dot_general`.

    Returns:
        Both operands.
    """
    left = (*numbers[0][0], *numbers[1][0])
    right = (*numbers[0][1], *numbers[1][1])
    if is_qarray(rhs):
        return lhs, _giving_way(rhs, lhs, dict(zip(right, left, strict=True)))
    return _giving_way(lhs, rhs, dict(zip(left, right, strict=True))), rhs


def _giving_way(q: QArray, other: Any, met: Mapping[int, int]) -> QArray:
    """`q` without the mesh axes that `other` uses, but for those on the axis that it meets (`met`: own axis to the other's)."""
    own, others = q.sharding, other.sharding if is_qarray(other) else held_sharding(other)
    if not isinstance(own, NamedSharding) or not isinstance(others, NamedSharding) or own.mesh != others.mesh:
        return q
    beside = [axis_names(entry) for entry in spec_entries(others.spec, other.ndim)]
    spent = {name for names in beside for name in names}

    def kept(axis: int, names: tuple[str, ...]) -> tuple[str, ...]:
        meets = beside[met[axis]] if axis in met else ()
        return tuple(name for name in names if name in meets or name not in spent)

    entries = [axis_names(entry) for entry in spec_entries(own.spec, q.ndim)]
    left = [kept(axis, names) for axis, names in enumerate(entries)]
    if left == entries:
        return q
    return q.with_sharding((own.mesh, PartitionSpec(*(names or None for names in left))))
