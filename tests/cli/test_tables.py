"""Plans, inspections and comparisons at four widths, as committed; and whole numbers at every width."""

import re

import pytest

from fewbit.cli.render import plan_lines, plan_table
from fewbit.workflows import plan_model
from tests.cli.tables import FOLDER, NAMES, TABLES, WIDTHS, path_of, plan_of, text_of
from tests.workflows.checkpoints import last_axis
from tests.workflows.resuming import npz_model


@pytest.mark.finding(16)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", NAMES)
def test_a_table_is_as_committed(name, width):
    text = text_of(name, width)
    assert path_of(name, width).read_text(encoding="utf-8") == text + "\n", "python -m tests.cli.tables writes them anew"
    assert max(map(len, text.splitlines())) <= width


def test_no_committed_table_is_left_over():
    assert {path.name for path in FOLDER.iterdir()} == {path_of(name, width).name for name in NAMES for width in WIDTHS}


def tokens(text):
    """The numbers and shapes of a text, in any order."""
    return sorted(re.findall(r"[0-9][0-9,.]*(?:x[0-9]+)*", re.sub(r"\S*…\S*", "", text)))


@pytest.mark.finding(16)
@pytest.mark.parametrize("width", range(50, 201, 10))
def test_every_number_of_a_table_is_whole_at_every_width(width):
    for kind in TABLES:
        text, wide = text_of(f"{kind}-paths", width), text_of(f"{kind}-paths", WIDTHS[-1])
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


def test_a_plan_says_that_its_weights_are_written_dequantized(tmp_path):
    model = npz_model(tmp_path / "a.npz")
    plan = plan_model(model, recipe=last_axis("int8"))
    for to, end in (
        ("hf", "bytes of arrays, whose weights are written dequantized, in bfloat16"),
        ("gguf", "bytes of arrays"),
    ):
        assert plan_lines(model, plan, full=False, to=to)[-1].endswith(end)
