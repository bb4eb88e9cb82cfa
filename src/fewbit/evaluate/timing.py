"""Interleaved timing: every contender runs once per round."""

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
        seconds: one figure per round.
    """

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """The median, in milliseconds."""
        return 1e3 * statistics.median(self.seconds)

    def ratio(self, other: "Timing") -> tuple[float, float, float]:
        """The lowest, median and highest ratio to another contender, round by round."""
        ratios = self._ratios(other)
        return ratios[0], statistics.median(ratios), ratios[-1]

    def quartiles(self, other: "Timing") -> tuple[float, float, float]:
        """The quartiles of the ratios to another contender: a quarter of the rounds is below the first, half below the second."""
        ratios = self._ratios(other)
        if len(ratios) == 1:
            return ratios[0], ratios[0], ratios[0]
        low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
        return low, middle, high

    def _ratios(self, other: "Timing") -> list[float]:
        """The ratios to another contender, round by round, in order of size."""
        return sorted(mine / theirs for mine, theirs in zip(self.seconds, other.seconds, strict=True))


def timed(
    contenders: Mapping[Who, Callable[[], Any]],
    *,
    rounds: int,
    calls: int = 1,
    pause: float = 0.0,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[Who, Timing]:
    """Times all contenders in interleaved rounds, after one warm-up call each.

    A slow moment of the machine then slows all of them.

    Args:
        contenders: functions without arguments; their results are blocked on.
        rounds: the number of rounds.
        calls: the calls of each contender per round; the figure is their mean.
        pause: seconds to sleep before each contender, until the threads of the previous one sleep: torch's spin for some
            milliseconds on a core that the next one needs.
        clock: the clock; `time.process_time` on a shared machine.
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
