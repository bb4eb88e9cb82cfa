"""The losses of the example's runs: the page shows what the file says, and int8 and FP8 end near the float run in each framework.

tests/examples/test_examples.py trains the first 20 steps of these runs anew and compares their losses with the file.
"""

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
ROWS = json.loads((ROOT / "bench" / "results" / "training.json").read_text())["rows"]
FRAMEWORKS = ("tree", "linen", "nnx", "equinox")
RUNS = ("float", "bfloat16", "int8", "fp8", "nvfp4", "int4 weights (QAT)")


def row(framework, run):
    (found,) = [r for r in ROWS if (r["framework"], r["run"]) == (framework, run)]
    return found


@pytest.mark.parametrize("run", RUNS)
def test_the_page_shows_what_was_measured(run):
    cells = [f"{row(f, run)['final']:.3f} ({row(f, run)['beside_float']:+.2%})" for f in FRAMEWORKS]
    assert f"| {' | '.join([run, *cells])} |" in (ROOT / "docs" / "training.md").read_text()


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_int8_and_fp8_end_within_two_percent_of_float(framework):
    assert len(ROWS) == len(FRAMEWORKS) * len(RUNS)
    for run in ("int8", "fp8"):
        assert abs(row(framework, run)["final"] / row(framework, "float")["final"] - 1) < 0.02
    for run in RUNS:  # learned, and nowhere near where it began
        assert row(framework, run)["final"] < 0.5 * row(framework, run)["first"]
