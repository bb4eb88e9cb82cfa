"""Bit allocation: the best scheme for each weight under a budget of bytes."""

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Float, Int

from ..errors import QuantError

STATES = 2**14
"""How many partial assignments are extended at once."""


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

    This is the multiple-choice knapsack problem. A Lagrangian bound, with a price for each byte, rules out most choices; dynamic
    programming over the others finds the best assignment. Bytes are counted exactly, losses are added in float64. The same
    arguments give the same result.

    No other assignment has less loss, up to the rounding of the sums. The exception are inputs where more than `STATES` partial
    assignments remain, such as hundreds of items whose losses are proportional to their bytes. Only `STATES` of them are extended
    then, so that the time stays at seconds, and an assignment with slightly less loss may be missed.

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
    if empty := [name for name, choices in items.items() if not choices]:
        raise QuantError(f"{empty[0]} has no choice; every item needs one or more")
    useful = [_undominated(choices) for choices in items.values()]
    smallest = sum(choices[0].nbytes for choices in useful)
    if smallest > budget:
        raise QuantError(f"the smallest choices take {smallest:,} bytes, more than the budget of {budget:,}")
    nbytes = [np.array([choice.nbytes - choices[0].nbytes for choice in choices], np.int64) for choices in useful]
    loss = [np.array([choice.loss - choices[0].loss for choice in choices]) for choices in useful]
    taken = _taken(nbytes, loss, budget - smallest)
    return {name: choices[i] for name, choices, i in zip(items, useful, taken, strict=True)}


def _taken(nbytes: list[Int[np.ndarray, " _"]], loss: list[Float[np.ndarray, " _"]], room: int) -> list[int]:
    """The index of the best choice of each item. Bytes grow and losses fall along the choices; both start at 0."""
    small, large = [0] * len(loss), [len(one) - 1 for one in loss]
    if _total(nbytes, large) <= room:
        return large
    # The price of a byte is raised or lowered until assignments that minimize `loss + price * bytes` are on both sides of `room`.
    while True:
        saved = sum(one[i] - one[j] for one, i, j in zip(loss, small, large, strict=True))
        price = float(saved) / (_total(nbytes, large) - _total(nbytes, small))
        best = [int(np.argmin(losses + price * sizes)) for losses, sizes in zip(loss, nbytes, strict=True)]
        if not _total(nbytes, small) < _total(nbytes, best) < _total(nbytes, large):
            break
        if _total(nbytes, best) <= room:
            small = best
        else:
            large = best
    # No assignment that fits has less loss than `small` by more than the price of the bytes that `small` leaves over.
    room -= _total(nbytes, small)
    nbytes = [one - one[i] for one, i in zip(nbytes, small, strict=True)]
    loss = [one - one[i] for one, i in zip(loss, small, strict=True)]
    largest_gap = price * room
    gap = largest_gap / 4**10
    while 0 < gap <= largest_gap:
        if (found := _best_within(nbytes, loss, room, price, gap)) is not None:
            return [found.get(item, i) for item, i in enumerate(small)]
        gap *= 4
    return small


def _best_within(
    nbytes: list[Int[np.ndarray, " _"]], loss: list[Float[np.ndarray, " _"]], room: int, price: float, gap: float
) -> dict[int, int] | None:
    """The best assignment within a gap of the bound `-price * room`, as the choices of some items; the others keep theirs.

    Bytes and losses are differences from an assignment that minimizes `loss + price * bytes`. What an assignment adds to this
    minimum, and the price of the bytes that it leaves over, sum to its distance from the bound. None: no assignment is so close.
    """
    close = [np.flatnonzero(losses + price * sizes <= gap) for losses, sizes in zip(loss, nbytes, strict=True)]
    order = sorted(
        (item for item, some in enumerate(close) if len(some) > 1), key=lambda item: -np.ptp(nbytes[item][close[item]])
    )
    fewest = sum(int(nbytes[item][close[item]].min()) for item in order)
    most = sum(int(nbytes[item][close[item]].max()) for item in order)
    # A state is an assignment of the items so far. None has both fewer bytes and less loss than another one.
    state_bytes, state_loss, steps = np.zeros(1, np.int64), np.zeros(1), []
    for item in order:
        sizes, losses = nbytes[item][close[item]], loss[item][close[item]]
        fewest, most = fewest - int(sizes.min()), most - int(sizes.max())
        new_bytes = (state_bytes[:, None] + sizes).ravel()
        new_loss = (state_loss[:, None] + losses).ravel()
        unused = np.maximum(room - most - new_bytes, 0)
        kept = np.flatnonzero((new_bytes + fewest <= room) & (new_loss + price * (new_bytes + unused) <= gap))
        kept = kept[np.lexsort((new_loss[kept], new_bytes[kept]))]
        least = np.minimum.accumulate(new_loss[kept])
        kept = kept[np.append(True, least[1:] < least[:-1])[: len(kept)]]
        kept = kept[:: -(-len(kept) // STATES) or 1]
        state_bytes, state_loss = new_bytes[kept], new_loss[kept]
        steps.append((item, kept))
    if not len(state_loss) or state_loss[-1] + price * room > gap:
        return None
    state, found = len(state_loss) - 1, {}
    for item, kept in reversed(steps):
        state, choice = divmod(int(kept[state]), len(close[item]))
        found[item] = int(close[item][choice])
    return found


def _total(nbytes: list[Int[np.ndarray, " _"]], taken: Sequence[int]) -> int:
    """The bytes of an assignment."""
    return sum(int(one[i]) for one, i in zip(nbytes, taken, strict=True))


def _undominated(choices: Sequence[Choice]) -> list[Choice]:
    """The choices that no other one beats in bytes and in loss, the smallest first."""
    kept: list[Choice] = []
    for choice in sorted(choices, key=lambda choice: (choice.nbytes, choice.loss)):
        if not kept or choice.loss < kept[-1].loss:
            kept.append(choice)
    return kept
