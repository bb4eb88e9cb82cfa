"""`fewbit bench`: what it prints and what it refuses."""

import json

import pytest
from typer.testing import CliRunner

from fewbit.cli import bench_report as times
from fewbit.cli.commands import app
from fewbit.kernels.extension import Extension
from fewbit.workflows.bench import roofline
from fewbit.workflows.bench.roofline import machine


def run(*arguments, status=0):
    """The result of `fewbit bench` with these arguments."""
    result = CliRunner().invoke(app, ["bench", *map(str, arguments)])
    assert result.exit_code == status, result.output
    return result


@pytest.fixture
def quick(monkeypatch):
    """A machine that is measured in no time."""
    monkeypatch.setattr(times, "machine", lambda: machine(nbytes=1 << 10, size=8, rounds=2))
    return ("--schemes", "int8", "--sizes", 32, "--rows", 2, "--rounds", 2)


@pytest.mark.slow
def test_what_is_measured_is_printed(quick):
    text = run(*quick).stdout
    assert all(said in text for said in ("copy ", " GFLOP/s", "M = 2, weight 32 x 32", "fastest at M = 2: int8"))
    form = json.loads(run(*quick, "--json").stdout)
    assert len(form["rows"]) >= 6
    assert form["fastest"][0]["by_bits"]["8"]["weight"] == "int8" and len(form["machine"]["copy"]) == 3


@pytest.mark.slow
def test_activations_are_quantized_where_it_is_asked_for(quick):
    arguments = ("--schemes", "nf4,fp8", *quick[2:], "--activations", "int8")
    form = json.loads(run(*arguments, "--json").stdout)
    found = {(row["weight"], row["layout"], row["activation"]) for row in form["rows"] if row["backend"] != "dense"}
    assert found == {
        ("nf4", "[N, K]", "int8"),
        ("nf4", "[K, N]", "int8"),
        ("fp8", "[N, K]", None),
        ("fp8", "[K, N]", None),
    }
    assert list(form["float_activations"]) == ["fp8 [N, K]", "fp8 [K, N]"]
    assert "in float32 for fp8 [N, K]: the codes of e4m3fn are not integers; fp8 [K, N]: " in run(*arguments).stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--activations", "fp8"), "activations 'fp8' are unknown"),
        (("--sizes", "0"), "--sizes is '0'; give integers above 0"),
        (("--rows", "1,1"), "--rows is '1,1'; give at least one, each once"),
        (("--schemes", "nf5"), "did you mean 'nf4'"),
    ],
)
def test_what_cannot_be_measured(quick, arguments, message):
    assert message in run(*arguments, status=2).stderr


@pytest.mark.slow
def test_missing_kernels_are_named(quick, monkeypatch):
    monkeypatch.setattr(roofline, "extension", lambda name: Extension(missing="not built"))
    said = "kernels: none; NOT built for this Python or older than their sources: dequant_gemm, int8_gemm, quantize, attention, so"
    assert said in run(*quick).stdout
