"""The histograms of a report's page, as its script reads them."""

import base64
import json
import math

import numpy as np
import pytest

from fewbit.evaluate.report.facts import WORST, Histogram, ModelFacts, StoredModel
from fewbit.evaluate.report.histograms import histogram_data, histogram_section
from fewbit.models import is_installed

NF4 = (-1.0, -0.6961928009986877, 0.0, 1.0)


def histogram(path, *, counts=(0, 1, 1000, 300), numbers=NF4, sqnr_db=20.0):
    return Histogram(path, "nf4", "nf4", sqnr_db, 0.1234567, -1.1, 1.05, counts, numbers, 0.0)


def model(*histograms):
    return ModelFacts(StoredModel("m", "m", "fewbit", 1, 1, 1), "", "", "", None, "", (), histograms, ())


def test_the_data_has_each_weight_and_each_grid_once():
    two, other = (model(histogram("a"), histogram("b")), model(histogram("a", numbers=(0.0, 1.0))))
    form = json.loads(histogram_data([two, other], ["one", "</script>"]))
    assert form["models"] == ["one", "</script>"] and form["lines"] == 40
    assert form["grids"] == [[-1.0, -0.696193, 0.0, 1.0], [0.0, 1.0]]
    assert [(weight[0], weight[1], weight[4]) for weight in form["weights"]] == [(0, "a", 0), (0, "b", 0), (1, "a", 1)]
    _, _, stored, details, _, low, high, heights = form["weights"][0]
    assert (stored, details) == ("nf4", "20.00 dB, largest magnitude 0.1235, 4 numbers of nf4, 0 % clipped")
    assert (low, high) == (-1.1, 1.05)
    # 255 is the largest count; one element in a thousand is still seen.
    assert list(base64.b64decode(heights)) == [0, 1, 255, round(255 * 0.3)]


def test_the_data_ends_no_element():
    text = histogram_data([model(histogram("</script><!--<script>&\ud800"))], ["<b>"])
    assert "<" not in text and json.loads(text)["weights"][0][1] == "</script><!--<script>&\ud800"


def test_a_weight_without_elements():
    (weight,) = json.loads(histogram_data([model(histogram("a", counts=(0,) * 96))], ["m"]))["weights"]
    assert base64.b64decode(weight[-1]) == bytes(96)


def test_a_histogram_takes_few_bytes():
    draw = np.random.default_rng(0)
    counts = [tuple(draw.integers(0, 10**6, 96).tolist()) for _ in range(1000)]
    many = [histogram(f"layers/{i}/mlp/experts/down", counts=one) for i, one in enumerate(counts)]
    assert len(histogram_data([model(*many)], ["m"])) / len(many) < 300


@pytest.mark.skipif(not is_installed("matplotlib"), reason="needs pip install fewbit[plot]")
def test_the_section_shows_the_worst():
    levels = [20.0, 19.0, math.inf, 30.0, 18.5, math.nan, 21.0, 22.0, -math.inf]
    found = model(*(histogram(f"w{i}", sqnr_db=level) for i, level in enumerate(levels)))
    assert [one.path for one in found.worst] == ["w4", "w1", "w0", "w6", "w7"] and len(found.worst) == WORST
    text = histogram_section([found], ["m"])
    assert text.count("<h4>") == WORST and text.index("<h4>w4<") < text.index("<h4>w1<") and 'id="chosen-chart"' in text
