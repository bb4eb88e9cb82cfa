"""Plans, inspections and comparisons at four widths, as committed; and whole numbers at every width."""

import re

import pytest

from fewbit.cli.render import inspection_table, plan_table
from tests.cli.tables import FOLDER, WIDTHS, comparison_of, inspection_of, path_of, plan_of, texts

TEXTS = {(name, width): text for name, width, text in texts()}


@pytest.mark.finding(16)
@pytest.mark.parametrize(("name", "width"), TEXTS, ids=[f"{name}-{width}" for name, width in TEXTS])
def test_a_table_is_as_committed(name, width):
    text = TEXTS[name, width]
    assert path_of(name, width).read_text(encoding="utf-8") == text + "\n", "python -m tests.cli.tables writes them anew"
    assert max(map(len, text.splitlines())) <= width


def test_no_committed_table_is_left_over():
    assert {path.name for path in FOLDER.iterdir()} == {path_of(name, width).name for name, width in TEXTS}


def tokens(text):
    """The numbers and shapes of a text, in any order."""
    return sorted(re.findall(r"[0-9][0-9,.]*(?:x[0-9]+)*", re.sub(r"\S*…\S*", "", text)))


@pytest.mark.finding(16)
@pytest.mark.parametrize("width", range(50, 201, 10))
def test_every_number_of_a_table_is_whole_at_every_width(width):
    shown = {
        "plan": plan_table(plan_of("paths"), full=False, width=width),
        "inspect": inspection_table(inspection_of("paths"), width=width),
        "compare": comparison_of("paths", width),
    }
    for kind, text in shown.items():
        wide = TEXTS[f"{kind}-paths", WIDTHS[-1]]
        missing = [token for token in tokens(wide) if token not in text]
        assert all("…" in text and len(token) == 1 for token in missing), (kind, missing)  # a digit of an elided name
        for row in ("8 x 4096x14336", "2x4x256x128") if kind == "plan" else ():
            assert row in text


@pytest.mark.finding(16)
def test_a_plan_is_printed_by_the_same_table():
    plan = plan_of("paths")
    lines = plan.text(width=80).splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[-2:] == "\n".join(plan_table(plan, full=True, width=80).splitlines()[-2:]).splitlines()
    assert str(plan) == plan.text(width=160)
