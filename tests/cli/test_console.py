"""Results as JSON, and where lines go."""

import json
import math

from fewbit.cli.console import plain
from fewbit.evaluate import Estimate
from fewbit.recipe import recipe


def test_records_become_json():
    form = plain({"e": Estimate(1.0, math.nan), "r": recipe("int8"), 3: (1, [True, None])})
    assert form["e"] == {"value": 1.0, "error": None}
    assert form["r"] == recipe("int8").to_json()
    assert form["3"] == [1, [True, None]]
    json.dumps(form, allow_nan=False)
