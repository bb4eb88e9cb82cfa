"""Two writers of one output, and writers that die: whatever the moment, one complete model stands and nothing else."""

import os
import random
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from fewbit import io

from .writer_process import Writer

SOURCES = Path(io.__file__).parent.parent.parent


def bytes_of(path: Path) -> dict[str, bytes]:
    return {name: (path / name).read_bytes() for name in sorted(os.listdir(path))}


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    """Three tiny models: the one that stands first, and those of the two writers."""
    path = tmp_path_factory.mktemp("models")
    return {name: io.write(path / name, {name: np.full(3, i, np.float32)}) for i, name in enumerate(("old", "a", "b"))}


@pytest.fixture(scope="module")
def writers():
    """Two processes that write."""
    both = [Writer(SOURCES), Writer(SOURCES)]
    yield both
    for writer in both:
        writer.close()


def call_count(writer: Writer, models, place: Path) -> int:
    """How many system calls a write makes that replaces a model."""
    shutil.copytree(models["old"], place / "m")
    found = re.fullmatch(r"done: calls=(\d+)", writer.start(place / "m", models["a"]))
    assert found
    shutil.rmtree(place / "m")
    return int(found[1])


def race(writers, models, place: Path, stops: tuple[int, int], first: int) -> None:
    """Both write; each stops before one of its calls, then the one numbered `first` ends, then the other."""
    shutil.copytree(models["old"], place / "m")
    answers = [w.start(place / "m", models[name], stop) for w, name, stop in zip(writers, "ab", stops, strict=True)]
    for i in (first, 1 - first):
        answers[i] = writers[i].go_on(answers[i])
    what = f"stops={stops} first={first}: {answers}"
    winners = [name for name, answer in zip("ab", answers, strict=True) if answer.startswith("done")]
    assert winners, what
    for answer in answers:
        assert answer.startswith("done") or re.search(r"is being written by (process \d+ on \S|another process)", answer), (
            what
        )
    assert os.listdir(place) == ["m"], f"{what}, left {os.listdir(place)}"
    found = bytes_of(place / "m")
    assert found in [bytes_of(models[name]) for name in winners], what
    assert io.verify(place / "m") == [], what
    shutil.rmtree(place / "m")


@pytest.mark.finding(2)
def test_two_writers_end_with_one_complete_model(writers, models, tmp_path):
    """30 rounds: the first writer stops before each of its calls in turn, and the second one writes meanwhile."""
    calls = call_count(writers[0], models, tmp_path)
    for i in range(30):
        race(writers, models, tmp_path, (i * calls // 30, -1 if i % 3 else (7 * i) % calls), first=i % 2)


@pytest.mark.long
@pytest.mark.finding(2)
def test_two_writers_end_with_one_complete_model_long(writers, models, tmp_path):
    draw, calls = random.Random(0), call_count(writers[0], models, tmp_path)
    for _ in range(300):
        race(writers, models, tmp_path, (draw.randrange(calls), draw.randrange(-1, calls)), first=draw.randrange(2))


def check_after_death(writers, models, place: Path, in_two: bool) -> None:
    """What a death leaves is a complete model, and the next writer ends with its own and nothing else."""
    known = [bytes_of(models["old"]), bytes_of(models["a"])]
    assert bytes_of(place / "m" if (place / "m").exists() or not in_two else place / ".m.fewbit-old") in known
    assert writers[1].start(place / "m", models["b"], in_two=in_two).startswith("done")
    assert os.listdir(place) == ["m"] and bytes_of(place / "m") == bytes_of(models["b"])


@pytest.mark.finding(2)
@pytest.mark.parametrize("in_two", [False, True], ids=["one exchange", "two renames"])
def test_a_writer_that_dies_before_any_call_blocks_nobody(writers, models, tmp_path, in_two):
    shutil.copytree(models["old"], tmp_path / "m")
    for call in range(1000):
        answer = writers[0].start(tmp_path / "m", models["a"], call, dies=True, in_two=in_two)
        if answer != "died":
            break
        check_after_death(writers, models, tmp_path, in_two)
        shutil.rmtree(tmp_path / "m")
        shutil.copytree(models["old"], tmp_path / "m")
    assert answer == f"done: calls={call}" and call > 20
