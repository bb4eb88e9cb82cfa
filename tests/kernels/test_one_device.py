"""A process with one CPU device takes the compiled kernels unasked: one process makes all the checks of `one_device.py`.

The tests run with eight devices, where no kernel is taken that is not named.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fewbit.kernels.extension import extension
from tests.kernels.one_device import CHECKS

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(
    extension("fewbit.kernels.qmatmul.cpu._dequant_gemm").missing is not None, reason="the C++ extension is not built"
)


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str]:
    """What came of each check; empty where it passed."""
    paths = os.pathsep.join([str(ROOT), *sys.path])
    settings = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", "PYTHONPATH": paths}
    command = [sys.executable, "-m", "tests.kernels.one_device"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=settings)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow_after(2)
@pytest.mark.finding(36)
@pytest.mark.parametrize("name", CHECKS)
def test_it_is_taken_unasked(outcomes: dict[str, str], name: str):
    assert not outcomes[name], outcomes[name]
