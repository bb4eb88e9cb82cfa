"""The chart of quality against size."""

import re

import pytest

from fewbit.errors import QuantError
from fewbit.evaluate.chart import Point, save_chart
from fewbit.models import is_installed

pytestmark = pytest.mark.skipif(not is_installed("matplotlib"), reason="needs pip install fewbit[plot]")

POINTS = [Point("int8", 137_000_000, 18.42, 0.03), Point("nf4", 90_000_000, 21.6, 0.3)]


def test_the_same_points_give_the_same_svg(tmp_path):
    a, b = (save_chart(tmp_path / name, POINTS, reference=18.29, title="t") for name in ("a.svg", "b.svg"))
    assert a.read_bytes() == b.read_bytes()
    assert all(word in a.read_text() for word in ("int8", "nf4", "18.29", "perplexity"))


def test_png(tmp_path):
    assert save_chart(tmp_path / "a.png", POINTS, reference=18.29, title="t").read_bytes().startswith(b"\x89PNG")


def test_what_cannot_be_drawn_says_why(tmp_path):
    with pytest.raises(QuantError, match=r"must end in \.svg or \.png"):
        save_chart(tmp_path / "a.pdf", POINTS, reference=1.0, title="t")
    with pytest.raises(QuantError, match="no does not exist"):
        save_chart(tmp_path / "no" / "a.svg", POINTS, reference=1.0, title="t")
    with pytest.raises(QuantError, match="at least one point"):
        save_chart(tmp_path / "a.svg", [], reference=1.0, title="t")


def test_names_of_points_that_meet_stand_below_each_other(tmp_path):
    met = [*POINTS, Point("nvfp4", 90_000_000, 21.61, 0.3)]
    text = save_chart(tmp_path / "a.svg", met, reference=18.29, title="t").read_text()
    heights = {name: float(re.search(rf' y="(\S+)" [^<]*>{name}<', text).group(1)) for name in ("nf4", "nvfp4")}
    assert heights["nvfp4"] - heights["nf4"] > 10
