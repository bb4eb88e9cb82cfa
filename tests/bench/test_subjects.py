"""`python -m bench`: every subject is there, all of them run, and a failure is not forgotten."""

import importlib.util
import subprocess
import sys
from types import SimpleNamespace

import pytest

from bench import __main__ as bench


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
    monkeypatch.setattr(sys, "argv", ["bench", "--only", "integers", "--isa", "avx2", "--machine", "small", "--save"])
    runs.clear()
    assert bench.main() == 1 and runs == [["bench.integers", "--isa", "avx2", "--machine", "small", "--save"]]
