"""`fewbit quantize --distributed`: options, refusals, and two commands of one cluster."""

import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from fewbit import io
from fewbit.cli.commands import app
from tests import cluster
from tests.workflows.distributed.test_quantize import write_checkpoint

COMMAND = [sys.executable, "-c", "from fewbit.cli import main; main()"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--to", "gguf"],
            "writes the layout fewbit, but --to is gguf; `fewbit convert` writes the result in another layout",
        ),
        (
            ["--method", "gptq"],
            "method gptq runs the whole model, which processes that read a part of it cannot; take rtn, hqq, or imatrix",
        ),
        (["--method", "imatrix"], "method imatrix runs the whole model"),
        (["--method", "awq+hqq"], "method awq runs the whole model"),
        (["--rotate"], "--distributed cannot divide the work of --rotate"),
        (["--dry-run"], "--distributed cannot divide the work of --dry-run"),
        (
            ["--coordinator", "localhost", "--processes", "1", "--process-id", "0"],
            "--coordinator is 'localhost'; give the host and port of process 0, as in host0:1234",
        ),
    ],
)
def test_what_cannot_be_distributed_is_refused(options, message):
    done = CliRunner().invoke(app, ["quantize", "a.npz", "-o", "out", "-r", "nf4", "--distributed", *options])
    assert message in " ".join(done.output.split())


def test_without_a_cluster(monkeypatch):
    arguments = ["quantize", "a.npz", "-o", "out", "-r", "nf4", "--coordinator", "localhost:1234"]
    done = CliRunner().invoke(app, arguments)
    assert "pass --coordinator, --processes and --process-id in every process" in " ".join(done.output.split())


@pytest.mark.slow
def test_two_commands_write_one_directory(tmp_path):
    source = write_checkpoint(tmp_path / "in" / "a.safetensors")
    with cluster.reserved_port() as port:
        command = [*COMMAND, "quantize", str(source), "-o", str(tmp_path / "out"), "-r", str(tmp_path / "in" / "rules.json")]
        command += ["--method", "hqq"]
        cluster_of_two = ["--coordinator", f"127.0.0.1:{port}", "--processes", "2", "--process-id"]
        environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(cluster.ROOT / "src")}
        running = [
            subprocess.Popen(
                [*command, *cluster_of_two, str(i)],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=environment,
            )
            for i in range(2)
        ]
        try:
            ended = [process.communicate(timeout=200) for process in running]
        finally:
            for process in running:
                process.kill()
    assert [process.returncode for process in running] == [0, 0], ended
    assert "no process has read the whole model" in ended[0][0]
    assert ended[1][0] == ""
    read = io.read(tmp_path / "out")
    assert len(read.tensors) == 16
    assert read.facts["method"]["name"] == "hqq"
