"""`python -m bench`: every subject is there, all of them run, and a failure is not forgotten."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from bench import __main__ as bench

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.parametrize("subject", bench.SUBJECTS)
def test_every_subject_is_there(subject: str):
    assert importlib.util.find_spec(f"bench.{subject}")


def test_a_failure_is_told_when_all_have_run(monkeypatch):
    runs: list[list[str]] = []

    def run(command: list[str], check: bool) -> SimpleNamespace:
        runs.append(command[2:])
        return SimpleNamespace(returncode=len(runs) % 2)

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(sys, "argv", ["bench", "--save"])
    assert bench.main() == 1
    assert runs == [[f"bench.{subject}", "--save"] for subject in bench.SUBJECTS]
    monkeypatch.setattr(sys, "argv", ["bench", "--only", "qmatmul"])
    runs.clear()
    assert bench.main() == 1 and runs == [["bench.qmatmul"]]


def test_the_page_shows_the_saved_products():
    saved = {
        (r["m"], r["who"]): r["of_xla_float32"]
        for r in json.loads((ROOT / "bench/results/qmatmul.json").read_text())["rows"]
    }
    page = (ROOT / "docs" / "kernels.md").read_text()
    heading = "| weight | 1 row, `x @ w.T` | 1 row, `x @ w` | 256 rows, `x @ w.T` | 256 rows, `x @ w` |\n"
    lines = page.split(heading)[1].split("\n\n")[0].splitlines()[1:]
    assert len(lines) == len({who.split()[0] for _, who in saved if who.endswith(("K]", "N]"))})
    for name, *shown in ([cell.strip() for cell in line.strip("|").split("|")] for line in lines):
        places = [(m, f"{name} {layout}") for m in (1, 256) for layout in ("[N, K]", "[K, N]")]
        assert shown == [f"{saved[place]:.2f}" for place in places], name


def test_the_page_shows_the_saved_attention():
    rows = json.loads((ROOT / "bench/results/attention.json").read_text())["rows"]
    caches = list(dict.fromkeys(r["cache"] for r in rows))
    page = (ROOT / "docs" / "kernels.md").read_text()
    for task in dict.fromkeys(r["task"] for r in rows):
        cells = " | ".join(f"{r['ratio']:.2f}" for r in rows if r["task"] == task)
        assert f"\n| {task} | {cells} |\n" in page
    assert f"\n| one layer | {' | '.join(caches)} |\n" in page
