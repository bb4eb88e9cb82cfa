"""Runs that were interrupted: they resume, and what they write has the same bytes as without an interruption."""

import contextlib
import errno
import os
import random
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import fewbit as fb
from fewbit import io, workflows
from tests.workflows.checkpoints import last_axis, llama_directory, needs_tokenizers
from tests.workflows.resuming import Deaths, Died, Job, content, npz_model

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def rounding(tmp_path_factory):
    """A job that rounds, and its output when nothing interrupts it."""
    place = tmp_path_factory.mktemp("rounding")
    job = Job(npz_model(place / "a.npz"), last_axis("int8"), "fewbit")
    return job, content(job.run(place / "whole").path)


def died(job, out, at) -> bool:
    """Whether the run reached its call numbered `at`, and died there."""
    deaths = Deaths()
    try:
        with deaths.counted(at):
            job.run(out)
    except Died:
        return True
    return False


def calls(job, out) -> int:
    """The system calls of a whole run."""
    deaths = Deaths()
    with deaths.counted():
        job.run(out)
    return deaths.count


@pytest.mark.slow
def test_a_run_that_dies_before_any_call_resumes_with_the_same_bytes(rounding, tmp_path):
    """Every fifth call, and a second death in the run that resumes."""
    job, whole = rounding
    count = calls(job, tmp_path / "count")
    assert count > 60
    for at in range(0, count, 5):
        out = tmp_path / str(at) / "m"
        assert died(job, out, at)
        if not out.exists():
            died(job, out, (at * 7) % count)
        if not out.exists():
            job.run(out)
        assert content(out) == whole, at


def test_what_is_finished_is_not_computed_again(rounding, tmp_path):
    job, whole = rounding
    done, again, found = [], [], []

    def stop(result):
        done.append(result)
        if len(done) == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        job.run(tmp_path / "m", on_tensor=stop)
    assert sorted(os.listdir(tmp_path)) == [".m.fewbit-partial", ".m.fewbit-work"]
    outcome = job.run(tmp_path / "m", on_tensor=again.append, on_resume=found.append)
    assert found == [tuple(done)] and [r.path for r in again] == ["w5", "norm"]
    assert [r.path for r in outcome.tensors] == [row.path for row in workflows.plan_model(job.model, recipe=job.recipe)]
    assert content(tmp_path / "m") == whole and os.listdir(tmp_path) == ["m"]


def test_another_job_starts_anew(rounding, tmp_path):
    job, _ = rounding
    deaths = Deaths()
    assert died(job, tmp_path / "m", 40)
    other = Job(job.model, last_axis("int4"), "fewbit")
    other.run(tmp_path / "m", on_resume=lambda results: pytest.fail("nothing of another recipe is taken"))
    assert io.read(tmp_path / "m").tensors["w0"].scheme == fb.scheme("int4") and deaths.count == 0
    assert os.listdir(tmp_path) == ["m"]


def test_a_full_disk_keeps_what_is_finished(rounding, tmp_path, monkeypatch):
    job, whole = rounding
    real, left = os.write, 9_000

    def filling(descriptor, data):
        nonlocal left
        if left < len(data):
            raise OSError(errno.ENOSPC, "No space left on device")
        left -= len(data)
        return real(descriptor, data)

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", filling)
        with pytest.raises(
            fb.QuantError, match=r"no space left for .*/m: .* Free some space and run it again: what is finished"
        ):
            job.run(tmp_path / "m")
    found = []
    job.run(tmp_path / "m", on_resume=found.append)
    assert found[0] and content(tmp_path / "m") == whole and os.listdir(tmp_path) == ["m"]


@pytest.mark.parametrize(
    ("damage", "kept"), [("a value that is not finite", ["w0", "w1", "w2"]), ("another value", ["w0", "w1"])]
)
def test_a_damaged_source_is_repaired_and_the_run_resumes(damage, kept, rounding, tmp_path):
    """Tensors before the damaged one are not computed again; one that changes after it was quantized is, with its file (w2)."""
    _, whole = rounding
    model = npz_model(tmp_path / "a.npz")
    good, bad = model.load("w3"), np.array(model.load("w3"))
    bad[2, 5] = np.nan if "finite" in damage else 7
    arrays = {path: model.load(path) for path in model.info}
    np.savez(tmp_path / "a.npz", **(arrays | {"w3": bad}))
    job, found = Job(workflows.load(tmp_path / "a.npz"), last_axis("int8"), "fewbit"), []

    def stop(result):
        if result.path == "w5":
            raise KeyboardInterrupt

    if "finite" in damage:
        with pytest.raises(fb.QuantError, match=r"NaN or infinite values in w3 \(1 of 1,024\)"):
            job.run(tmp_path / "m")
    else:
        with pytest.raises(KeyboardInterrupt):
            job.run(tmp_path / "m", on_tensor=stop)
    np.savez(tmp_path / "a.npz", **(arrays | {"w3": good}))
    Job(workflows.load(tmp_path / "a.npz"), job.recipe, "fewbit").run(tmp_path / "m", on_resume=found.append)
    assert [result.path for result in found[0]] == kept
    files = content(tmp_path / "m")
    assert {name: data for name, data in files.items() if "manifest" not in name} == {
        name: data for name, data in whole.items() if "manifest" not in name
    }, "the manifest has the hash of the source's file, which numpy compresses as it likes"


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return workflows.load(llama_directory(tmp_path_factory.mktemp("llama") / "hf"))


@needs_tokenizers
@pytest.mark.parametrize(("to", "recipe"), [("hf", "keep"), pytest.param("orbax", "keep", marks=pytest.mark.slow)])
def test_every_layout_resumes(to, recipe, llama, tmp_path):
    if to == "orbax":
        pytest.importorskip("orbax.checkpoint")
    job = Job(llama, recipe, to)
    count = calls(job, tmp_path / "whole")
    for at in (count // 3, 2 * count // 3, count - 12):
        out = tmp_path / f"m{at}"
        assert died(job, out, at)
        found = []
        if not out.exists():
            job.run(out, on_resume=found.append)
        if to != "orbax":
            assert content(out) == content(tmp_path / "whole")
        stored, expected = io.read(out).tensors, io.read(tmp_path / "whole").tensors
        assert all(np.array_equal(stored[name], expected[name]) for name in expected)
        assert found or out.exists()


class Runs:
    """Runs of a job in processes of their own."""

    def __init__(self) -> None:
        arguments = [sys.executable, "-m", "tests.workflows.run_process"]
        environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        self.process = subprocess.Popen(
            arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT
        )

    def status(self, source, out, to, *, killed_after: float | None = None) -> tuple[int, float]:
        """The exit status of a run and its seconds; it is killed after some."""
        assert self.process.stdin is not None and self.process.stdout is not None
        start = time.perf_counter()
        self.process.stdin.write(f"{source} {out} {to}\n")
        self.process.stdin.flush()
        child = int(self.process.stdout.readline())
        if killed_after is not None:
            select.select([self.process.stdout], [], [], killed_after)
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        return int(self.process.stdout.readline()), time.perf_counter() - start


@pytest.mark.slow
def test_fifty_random_kills(tmp_path):
    """SIGKILL at random moments of runs that resume one another; whenever one comes to its end, it has the same bytes."""
    runs, draw = Runs(), random.Random(0)
    npz_model(tmp_path / "a.npz", count=24)
    for name in ("first", "whole"):  # the first has to wait for the imports
        status, seconds = runs.status(tmp_path / "a.npz", tmp_path / name, "fewbit")
        assert status == 0
    shutil.rmtree(tmp_path / "first")
    whole, kills, resumed = content(tmp_path / "whole"), 0, 0
    while kills < 50:
        out, is_kept = tmp_path / "m", (tmp_path / ".m.fewbit-work").exists()
        status, _ = runs.status(tmp_path / "a.npz", out, "fewbit", killed_after=draw.uniform(0, seconds))
        kills += status == -signal.SIGKILL
        assert status in (0, -signal.SIGKILL)
        if out.exists():
            resumed += is_kept
            assert content(out) == whole
            shutil.rmtree(out)
            shutil.rmtree(tmp_path / ".m.fewbit-work", ignore_errors=True)
    status, _ = runs.status(tmp_path / "a.npz", out, "fewbit")
    assert status == 0 and content(out) == whole and resumed
    assert {path.name for path in tmp_path.iterdir()} == {"a.npz", "whole", "m"}
    runs.process.communicate()
