"""Interleaved timing: every contender runs once a round, so that a slow moment of the machine slows them all."""

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax

Who = TypeVar("Who")


@dataclasses.dataclass(frozen=True)
class Timing:
    """The seconds of one contender.

    Attributes:
        seconds: one figure a round.
    """

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """The median, in milliseconds."""
        return 1e3 * statistics.median(self.seconds)

    def ratio(self, other: "Timing") -> tuple[float, float, float]:
        """The lowest, median and highest ratio to another contender, round by round."""
        ratios = sorted(mine / theirs for mine, theirs in zip(self.seconds, other.seconds, strict=True))
        return ratios[0], statistics.median(ratios), ratios[-1]


def timed(
    contenders: Mapping[Who, Callable[[], Any]],
    *,
    rounds: int,
    calls: int = 1,
    pause: float = 0.0,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[Who, Timing]:
    """The timings of all contenders after one warm-up call each.

    Args:
        contenders: for each of them a function without arguments; what it returns is waited for.
        rounds: how many times each takes its turn.
        calls: how many times it runs in a turn, one call after the other; a turn's figure is the mean of these.
        pause: seconds to wait before each turn, until the threads of the contender before it sleep: those of torch look for work
            for some milliseconds more, on a core that the next one needs.
        clock: what time is; `time.process_time` on a machine that others use, too.
    """
    for run in contenders.values():
        jax.block_until_ready(run())
    seconds: dict[Who, list[float]] = {who: [] for who in contenders}
    for _ in range(rounds):
        for who, run in contenders.items():
            time.sleep(pause)
            start = clock()
            for _ in range(calls):
                jax.block_until_ready(run())
            seconds[who].append((clock() - start) / calls)
    return {who: Timing(tuple(s)) for who, s in seconds.items()}
