"""The command as a process: its entry point, and Ctrl-C and SIGTERM in the middle of the work."""

import os
import re
import signal
import subprocess
import sys

import numpy as np
import pytest

from fewbit import io

# A shell starts background processes with SIGINT ignored, and so what they start; Ctrl-C is switched on again.
PROGRAM = """
import signal
from fewbit.cli import main
signal.signal(signal.SIGINT, signal.default_int_handler)
main()
"""
COMMAND = [sys.executable, "-c", PROGRAM]
ENVIRONMENT = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_ENABLE_COMPILATION_CACHE": "0"}


@pytest.mark.slow
def test_a_process_ends_with_the_status_and_one_line(tmp_path):
    done = subprocess.run(
        [*COMMAND, "inspect", "nothing.npz"], capture_output=True, text=True, env=ENVIRONMENT, cwd=tmp_path, check=False
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: nothing.npz does not exist")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.slow
def test_a_reader_that_has_exited_ends_the_command_quietly():
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as closed:
        done = subprocess.run(
            [*COMMAND, "schemes"], stdout=closed, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT, check=False
        )
    assert (done.returncode, done.stderr) == (2, "")


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["Ctrl-C", "SIGTERM"])
def test_a_stopped_run_leaves_what_stood_and_a_second_run_finishes(tmp_path, kind, status):
    shapes = [(8, 32 * (i + 1)) for i in range(20)]  # each compiles anew, so there is time to interrupt
    np.savez(tmp_path / "a.npz", **{f"w{i:02}": np.ones(shape, np.float32) for i, shape in enumerate(shapes)})
    (tmp_path / "rules.json").write_text('{"rules": [{"path": ".*", "policy": "nvfp4", "axis": -1}]}')
    arguments = [*COMMAND, "quantize", "a.npz", "-o", "out", "-r", "rules.json", "--overwrite"]
    io.write(tmp_path / "out", {"old": np.ones(3, np.float32)})
    process = subprocess.Popen(
        arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT, cwd=tmp_path
    )
    assert process.stderr is not None
    first = process.stderr.readline()
    assert first.startswith("w00")
    process.send_signal(kind)
    _, rest = process.communicate(timeout=120)
    assert process.returncode == status
    assert "interrupted after" in rest
    assert "out is unchanged" in rest
    assert "Traceback" not in rest
    assert list(io.read(tmp_path / "out").tensors) == ["old"]
    assert {path.name for path in tmp_path.iterdir() if path.name[0] != "."} == {"a.npz", "out", "rules.json"}
    if kind == signal.SIGTERM:
        return
    done = subprocess.run(arguments, capture_output=True, text=True, env=ENVIRONMENT, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^resuming: \d+ of 20 tensors, \d+ MB, were finished by an earlier run$", done.stderr, re.MULTILINE)
    assert len(io.read(tmp_path / "out").tensors) == 20
    assert {path.name for path in tmp_path.iterdir()} == {"a.npz", "out", ".out.fewbit-source", "rules.json"}
