"""Which memory a waiting thread prefetches. A wrong guess changes times only, so no other test would see it."""

import shutil
import subprocess
from pathlib import Path

import jax.ffi
import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_what_threads_learn_and_prefetch(tmp_path):
    program = tmp_path / "thread_pool"
    source = Path(__file__).with_name("thread_pool.cc")
    folders = [f"-I{ROOT / 'src/fewbit/kernels'}", "-isystem", jax.ffi.include_dir()]
    subprocess.run(["g++", "-std=c++17", "-O1", "-pthread", *folders, str(source), "-o", str(program)], check=True)
    found = subprocess.run([program], capture_output=True, text=True, check=False)
    assert (found.returncode, found.stdout) == (0, "")
