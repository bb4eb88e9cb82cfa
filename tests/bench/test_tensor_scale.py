"""The table of the page on scales is that of the saved measurement, and the code still gives its rows."""

import json
from pathlib import Path

import pytest

from bench import tensor_scale

ROOT = Path(__file__).parents[2]
SAVED = json.loads((ROOT / "bench" / "results" / "tensor_scale.json").read_text())


def line(row: dict) -> str:
    """A row of the measurement as the page shows it."""
    ranges = [f"{row[f'least {key}']:.3f} to {row[f'most {key}']:.3f}" for key in ("one level", "largest")]
    return f"| {' | '.join([row['weights'], str(row['arrays']), *ranges])} |"


@pytest.mark.finding(39)
def test_the_page_shows_what_was_measured():
    page = (ROOT / "docs" / "scales.md").read_text()
    assert all(line(row) in page for row in SAVED["rows"])


@pytest.mark.finding(39)
def test_the_search_is_never_worse():
    # Errors equal to 16 bits count as equal, and are rounded to four digits here.
    assert all(row[f"most {key}"] <= 1.0 for row in SAVED["rows"] for key in ("one level", "largest"))


@pytest.mark.finding(39)
@pytest.mark.slow
def test_the_code_gives_what_is_saved():
    draw = tensor_scale.random_weights(0)
    for row in SAVED["rows"]:
        if row["weights"] in draw:
            for key, ratio in tensor_scale.ratios(draw[row["weights"]]).items():
                # The rows hold eight draws, to four digits.
                assert row[f"least {key}"] - 1e-3 <= ratio <= row[f"most {key}"] + 1e-3, (row["weights"], key)
