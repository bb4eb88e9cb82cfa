"""Bit allocation: never worse than any other assignment within the budget."""

import itertools

import numpy as np
import pytest

import fewbit as fb
from fewbit.methods import Choice, allocate


def random_items(seed: int, items: int = 6, choices: int = 4) -> dict[str, list[Choice]]:
    rng = np.random.default_rng(seed)
    sizes = rng.choice([3, 4, 8, 100], items)
    return {
        f"w{i}": [Choice(f"s{j}", int(size * bits) + int(rng.integers(3)), float(rng.exponential() * 4.0**-bits)) for j, bits in
                  enumerate(rng.permutation(8)[:choices] + 1)]
        for i, size in enumerate(sizes)
    }  # fmt: skip


@pytest.mark.parametrize("seed", range(20))
def test_it_is_the_best_of_all_assignments(seed):
    items = random_items(seed)
    smallest = sum(min(c.nbytes for c in choices) for choices in items.values())
    largest = sum(max(c.nbytes for c in choices) for choices in items.values())
    for part in (0.0, 0.3, 0.7, 1.0):
        budget = int(smallest + part * (largest - smallest))
        chosen = allocate(items, budget)
        assert all(choice in items[name] for name, choice in chosen.items())
        assert list(chosen) == list(items)
        assert sum(choice.nbytes for choice in chosen.values()) <= budget
        feasible = (some for some in itertools.product(*items.values()) if sum(c.nbytes for c in some) <= budget)
        best = min(sum(c.loss for c in some) for some in feasible)
        assert sum(choice.loss for choice in chosen.values()) == pytest.approx(best, rel=1e-9)


def test_losses_of_any_size():
    items = {name: [Choice("a", 1, 1e-12 * i), Choice("b", 2, 0.0)] for i, name in enumerate("xyz", 1)}
    assert {name: choice.name for name, choice in allocate(items, 4).items()} == {"x": "a", "y": "a", "z": "b"}


def test_hundreds_of_weights():
    """As many as a real model has: the result is at most one item away from the bound of the linear program."""
    rng, items = np.random.default_rng(0), {}
    for i in range(400):
        size, sensitivity = int(rng.choice([186_624, 497_664, 1_327_104])), rng.exponential()
        items[f"w{i}"] = [
            Choice(str(bits), size * bits // 4 + 4 * (bits == 4), sensitivity * 4.0**-bits) for bits in (2, 3, 4, 6, 8)
        ]
    budget = int(1.05 * sum(choices[2].nbytes for choices in items.values()))
    chosen = allocate(items, budget)
    total = sum(choice.nbytes for choice in chosen.values())
    assert budget - 1_327_104 < total <= budget
    uniform = sum(choices[2].loss for choices in items.values())
    assert sum(choice.loss for choice in chosen.values()) < 0.8 * uniform
    assert allocate(items, budget) == chosen


@pytest.mark.parametrize("seed", range(5))
def test_weights_of_an_8b_model_at_each_of_its_totals(seed):
    """A budget that is attained gives the same assignment; a byte less gives one that fits and has more loss.

    A solver that accepts 0.999999 of a choice breaks such a budget: 1e-6 of the largest weight is 400 bytes.
    """
    rng = np.random.default_rng(seed)
    sizes = [4096**2, 4096 * 1024, 4096 * 1024, 4096**2, *[4096 * 14336] * 3] * 32 + [128256 * 4096]
    items = {}
    for i, size in enumerate(sizes):
        low, high = size * rng.lognormal(size=2) * (1e-3, 1e-4)
        items[f"w{i}"] = [Choice("nvfp4", size * 9 // 16 + 4, low), Choice("mxfp8", size * 33 // 32, high)]
    chosen = allocate(items, int(6.5 * sum(sizes) / 8))
    attained, loss = (sum(getattr(choice, name) for choice in chosen.values()) for name in ("nbytes", "loss"))
    assert allocate(items, attained) == chosen
    for short in (1, 4, 5, 16):
        less = allocate(items, attained - short)
        assert sum(choice.nbytes for choice in less.values()) <= attained - short
        assert sum(choice.loss for choice in less.values()) > loss


def test_losses_proportional_to_the_bytes():
    """Each choice has the same loss per byte, so that no bound rules one out: the search is limited, and nearly fills the budget."""
    rng = np.random.default_rng(0)
    items = {}
    for i in range(24):
        size = int(rng.integers(10**6, 10**8))
        items[f"w{i}"] = [Choice(str(bits), size * bits, -float(size * bits)) for bits in (2, 3, 4, 6, 8)]
    budget = int(1.1 * sum(choices[2].nbytes for choices in items.values()))
    chosen = allocate(items, budget)
    assert (1 - 1e-6) * budget < sum(choice.nbytes for choice in chosen.values()) <= budget


def test_what_it_refuses():
    with pytest.raises(fb.QuantError, match="the smallest choices take 3 bytes, more than the budget of 2"):
        allocate({"a": [Choice("x", 3, 0.0)]}, 2)
    with pytest.raises(fb.QuantError, match="a has no choice"):
        allocate({"a": []}, 2)
    with pytest.raises(fb.QuantError, match="choice x takes 1 bytes and costs nan"):
        Choice("x", 1, float("nan"))
    assert allocate({}, 0) == {}
