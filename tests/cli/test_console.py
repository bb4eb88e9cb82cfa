"""Results as JSON, and where lines go."""

import json
import math
import subprocess
import sys

from fewbit.cli.console import plain
from fewbit.evaluate import Estimate
from fewbit.recipe import recipe


def test_records_become_json():
    form = plain({"e": Estimate(1.0, math.nan), "r": recipe("int8"), 3: (1, [True, None])})
    assert form["e"] == {"value": 1.0, "error": None}
    assert form["r"] == recipe("int8").to_json()
    assert form["3"] == [1, [True, None]]
    json.dumps(form, allow_nan=False)


def test_what_c_prints_goes_to_stderr():
    code = """
import ctypes
from fewbit.cli.console import results_only, say

say("before")
with results_only():
    ctypes.CDLL(None).puts(b"noise")
say("after")
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (found.stdout, found.stderr) == ("before\nafter\n", "noise\n")


def test_a_closed_stdout_gets_nothing():
    code = "import sys; sys.argv = ['fewbit', 'formats']; sys.stdout = None; from fewbit.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
