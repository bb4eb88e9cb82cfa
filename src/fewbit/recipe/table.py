"""The table of a plan, for `print(plan)` and the command line."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from .._table import Column, table
from .rows import PlanRow

if TYPE_CHECKING:
    from .plan import Plan

COLUMNS = (
    Column("parameter", kind="name"),
    Column("shape", align="right"),
    Column("as", kind="words", narrowest=12),
    Column("axis", align="right", rank=2),
    Column("before", "bytes before", align="right", rank=1),
    Column("after", "bytes after", align="right"),
    Column("why", kind="words", rank=3),
)


def plan_text(plan: "Plan", groups: Iterable[tuple[str, int, PlanRow]], *, width: int | None = None) -> str:
    """The table of a plan, with the totals below it.

    Args:
        plan: the plan.
        groups: the rows to show: a name, the number of parameters that the row summarises, and the row.
        width: how many characters a line has; None takes the terminal's width, or 160 without a terminal.
    """
    quantized = sum(row.policy is not None for row in plan)
    footer = (
        f"{quantized} of {len(plan.rows)} parameters quantized; {plan.bytes_before:,} -> {plan.bytes_after:,} bytes, "
        f"{plan.bits_per_weight:.3f} bits/weight"
    )
    records = [_record(*group) for group in groups]
    return table(records, COLUMNS, width=width, title=f"plan: recipe {plan.recipe}", footer=footer)


def shape_text(shape: tuple[int, ...], count: int = 1) -> str:
    """A shape, and how many arrays have it.

    >>> shape_text((4, 256, 128), 2)
    '2 x 4x256x128'
    """
    text = "x".join(map(str, shape)) or "scalar"
    if count == 1:
        return text
    return f"{count} x {text}"


def _record(name: str, count: int, row: PlanRow) -> dict[str, Any]:
    return {
        "parameter": name,
        "shape": shape_text(row.shape, count),
        "as": row.kind,
        "axis": ",".join(map(str, row.axis)),
        "before": count * row.bytes_before,
        "after": count * row.bytes_after,
        "why": row.reason,
    }
