"""Bit allocation: the best scheme for each weight under a budget of bytes."""

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np

from ..errors import QuantError


@dataclasses.dataclass(frozen=True)
class Choice:
    """One way to store an item.

    Attributes:
        name: its name, such as a scheme's.
        nbytes: the bytes it takes.
        loss: what it costs in quality; the losses of all items are added.
    """

    name: str
    nbytes: int
    loss: float

    def __post_init__(self) -> None:
        if self.nbytes < 0 or not math.isfinite(self.loss):
            raise QuantError(f"choice {self.name} takes {self.nbytes} bytes and costs {self.loss}; both must be finite")


def allocate(items: Mapping[str, Sequence[Choice]], budget: int) -> dict[str, Choice]:
    """Takes one choice for each item, for the least total loss. Together they take at most `budget` bytes.

    This is the multiple-choice knapsack problem, solved exactly as a mixed-integer linear program by HiGHS. The same arguments
    give the same result.

    Args:
        items: the choices of each item, by its name.
        budget: how many bytes they may take together.

    Returns:
        The choice of each item.

    Raises:
        QuantError: when an item has no choice, or the smallest choices take more than the budget.

    >>> small, large = Choice("int4", 4, 1.0), Choice("int8", 8, 0.1)
    >>> chosen = allocate({"a": [small, large], "b": [dataclasses.replace(small, loss=3.0), large]}, 12)
    >>> chosen["a"].name, chosen["b"].name
    ('int4', 'int8')
    """
    from scipy.optimize import Bounds, LinearConstraint, milp  # its import takes longer than that of JAX

    if empty := [name for name, choices in items.items() if not choices]:
        raise QuantError(f"{empty[0]} has no choice; every item needs one or more")
    smallest = sum(min(choice.nbytes for choice in choices) for choices in items.values())
    if smallest > budget:
        raise QuantError(f"the smallest choices take {smallest:,} bytes, more than the budget of {budget:,}")
    if not items:
        return {}
    useful = {name: _undominated(choices) for name, choices in items.items()}
    every = [choice for choices in useful.values() for choice in choices]
    owner = np.repeat(np.arange(len(useful)), [len(choices) for choices in useful.values()])
    unit = math.gcd(*(choice.nbytes for choice in every)) or 1
    nbytes = np.array([choice.nbytes // unit for choice in every], np.float64)
    loss = np.array([choice.loss for choice in every])
    scale = np.ptp(loss) or 1.0
    one_each = (owner == np.arange(len(useful))[:, None]).astype(np.float64)
    limits = [LinearConstraint(one_each, 1, 1), LinearConstraint(nbytes[None], -np.inf, budget // unit)]
    # HiGHS stops within 1e-6 of the optimum; in these units that is 1e-12 of the losses' range.
    found = milp(loss * (1e6 / scale), integrality=1, bounds=Bounds(0, 1), constraints=limits, options={"mip_rel_gap": 0.0})
    assert found.success, found.message
    taken = np.flatnonzero(found.x > 0.5)
    result = {name: every[i] for name, i in zip(useful, taken, strict=True)}
    assert sum(choice.nbytes for choice in result.values()) <= budget
    return result


def _undominated(choices: Sequence[Choice]) -> list[Choice]:
    """The choices that no other one beats in bytes and in loss, the smallest first."""
    kept: list[Choice] = []
    for choice in sorted(choices, key=lambda choice: (choice.nbytes, choice.loss)):
        if not kept or choice.loss < kept[-1].loss:
            kept.append(choice)
    return kept
