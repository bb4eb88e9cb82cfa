"""`fewbit bench`: what it prints, the table that it keeps, what it refuses."""

import json

import jax.numpy as jnp
import pytest
from typer.testing import CliRunner

import fewbit as fb
from fewbit.cli import bench_report as times
from fewbit.cli.commands import app
from fewbit.kernels.extension import Extension
from fewbit.workflows.bench import roofline
from fewbit.workflows.bench.roofline import machine
from fewbit.workflows.bench.tune import table_path


def run(*arguments, status=0):
    """The result of `fewbit bench` with these arguments."""
    result = CliRunner().invoke(app, ["bench", *map(str, arguments)])
    assert result.exit_code == status, result.output
    return result


@pytest.fixture
def quick(tmp_path, monkeypatch):
    """A machine that is measured in no time, and a cache of its own."""
    monkeypatch.setenv("FEWBIT_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(times, "machine", lambda: machine(nbytes=1 << 10, size=8, rounds=2))
    return ("--schemes", "int8", "--sizes", 32, "--rows", 2, "--rounds", 2)


@pytest.mark.slow
def test_what_is_tuned_is_what_explain_tells(quick):
    text = run(*quick).stdout
    assert all(said in text for said in ("copy ", " GFLOP/s", "M = 2, weight 32 x 32", "fastest at M = 2: int8"))
    assert not table_path().exists()
    form = json.loads(run(*quick, "--tune", "--json").stdout)
    assert form["table"] == str(table_path()) and len(form["rows"]) >= 6
    assert form["fastest"][0]["by_bits"]["8"]["weight"] == "int8" and len(form["machine"]["copy"]) == 3
    assert "  time: about " in fb.explain(jnp.ones((2, 32)), fb.quantize(jnp.ones((32, 32)), "int8").T)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--output", "here"), "it needs --tune"),
        (("--sizes", "0"), "--sizes is '0'; give whole numbers above 0"),
        (("--rows", "1,1"), "--rows is '1,1'; give at least one, each once"),
        (("--schemes", "nf5"), "did you mean 'nf4'"),
    ],
)
def test_what_cannot_be_measured(quick, arguments, message):
    assert message in run(*arguments, status=2).stderr


def test_a_directory_that_cannot_be_written_is_said_before_anything_is_measured(quick, tmp_path):
    (tmp_path / "file").write_text("")
    assert "cannot be written" in run("--tune", "--output", tmp_path / "file", status=2).stderr


@pytest.mark.slow
def test_missing_kernels_are_named(quick, monkeypatch):
    monkeypatch.setattr(roofline, "extension", lambda name: Extension(missing="not built"))
    assert "kernels: not built, the slower reference computes; fewbit " in run(*quick).stdout
