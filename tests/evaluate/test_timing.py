"""Timings: turns, medians, ratios turn by turn."""

import pytest

from fewbit.evaluate.timing import Timing, timed


def test_ratios_are_taken_turn_by_turn():
    mine, theirs = Timing((1.0, 4.0, 3.0)), Timing((2.0, 2.0, 12.0))
    assert mine.ratio(theirs) == (0.25, 0.5, 2.0)
    assert mine.quartiles(theirs) == (0.375, 0.5, 1.25)
    assert Timing((1.0,)).quartiles(Timing((2.0,))) == (0.5, 0.5, 0.5)
    assert mine.median == 3000.0
    with pytest.raises(ValueError, match="shorter"):
        mine.ratio(Timing((1.0,)))


def test_contenders_take_turns_after_a_warm_up():
    calls: list[str] = []
    times = timed({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, rounds=2)
    assert "".join(calls) == "ab" + "abab"
    assert [len(times[who].seconds) for who in "ab"] == [2, 2]


def test_a_pause_lies_before_each_turn_and_counts_for_none(monkeypatch):
    done: list[str] = []
    monkeypatch.setattr("fewbit.evaluate.timing.time.sleep", lambda seconds: done.append(f"{seconds} "))
    timed({"a": lambda: done.append("a")}, rounds=2, pause=0.5, clock=lambda: done.append("|") or 0.0)
    assert "".join(done) == "a" + "0.5 |a|" * 2
