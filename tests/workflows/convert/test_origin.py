"""Where the source of a model is: the record next to the output."""

import os

import numpy as np
import pytest

from fewbit.errors import QuantError
from fewbit.io.orbax import OrbaxWriter
from fewbit.workflows import load, plan_model, quantize
from fewbit.workflows.convert.origin import record_source, recorded_source, source_of
from fewbit.workflows.load import INSTALLED
from tests.workflows.checkpoints import last_axis


def written(directory, name="source", seed=0):
    """The path of a source, and of a model that was quantized from it."""
    path, out = directory / f"{name}.npz", directory / f"{name}-int8"
    np.savez(path, w=np.random.default_rng(seed).normal(size=(4, 32)).astype(np.float32))
    source = load(path)
    quantize(source, plan_model(source, recipe=last_axis("int8")), out)
    record_source(out, path)
    return path, out


def test_a_source_next_to_the_output_moves_with_it(tmp_path):
    (tmp_path / "a").mkdir()
    path, out = written(tmp_path / "a")
    assert recorded_source(out) == str(path)
    moved = (tmp_path / "a").rename(tmp_path / "b")
    assert recorded_source(moved / out.name) == str(moved / path.name)
    assert source_of([load(moved / out.name)]).path == moved / path.name


def test_a_source_elsewhere_has_an_absolute_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    record_source("runs/../out", "models/hf")
    assert recorded_source(tmp_path / "out") == str(tmp_path / "models" / "hf")
    (tmp_path / "deep").mkdir()
    record_source("deep/out", "models/hf\n")
    (tmp_path / "deep").rename(tmp_path / "moved")
    assert recorded_source("moved/out") == f"{tmp_path}/models/hf\n"
    assert os.listdir("moved") == [".out.fewbit-source"]
    record_source("moved/out", None)
    record_source("moved/out", None)
    assert recorded_source("moved/out") is None and os.listdir("moved") == []


def test_an_installed_model_is_recorded_by_its_name(tmp_path, monkeypatch):
    path, out = written(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(INSTALLED, "smollm2", lambda: path)
    record_source(out, "smollm2")
    assert recorded_source(out) == "smollm2"
    assert source_of([load(out)]).path == path
    (tmp_path / "smollm2").mkdir()  # what a user types is then this directory
    record_source(out, "smollm2")
    assert recorded_source(out) == str(tmp_path / "smollm2")
    (tmp_path / "smollm2").rmdir()
    with pytest.raises(
        QuantError, match=r"smollm2, from which .*source-int8 was quantized, does not exist; pass the source: --against"
    ):
        source_of([load(out)])


def test_a_source_that_is_not_known(tmp_path):
    path, out = written(tmp_path)
    _, other = written(tmp_path, "other", seed=1)
    assert source_of([load(out), load(out)]).path == path
    with pytest.raises(
        QuantError, match=r"different sources: .*source-int8 from .*source\.npz, .*other-int8 from .*; pass the source"
    ):
        source_of([load(out), load(other)])
    with pytest.raises(
        QuantError, match=r"source\.npz has no record of its source, which `fewbit quantize` leaves.*--against SOURCE"
    ):
        source_of([load(out), load(path)])
    np.savez(path, w=np.ones((4, 32), np.float32))
    with pytest.raises(
        QuantError, match=r"source\.npz is not what .*source-int8 was quantized from: its bytes have changed; pass"
    ):
        source_of([load(out)])
    record_source(out, tmp_path / "other.npz")
    with pytest.raises(QuantError, match=r"other\.npz is not what .*source-int8 was quantized from"):
        source_of([load(out)])


def test_a_record_that_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(
        QuantError, match=r"out is complete, but .*\.out\.fewbit-source, .*, cannot be written: Not a directory"
    ):
        record_source(tmp_path / "file" / "out", "source.npz")


def test_an_orbax_source_that_changed_is_refused(tmp_path):
    pytest.importorskip("orbax.checkpoint")
    for scale in (1, 2):
        with OrbaxWriter(tmp_path / "source", overwrite=True) as writer:
            writer.add("w", np.full((4, 32), scale, np.float32))
        if scale == 1:
            source = load(tmp_path / "source")
            quantize(source, plan_model(source, recipe=last_axis("int8")), tmp_path / "out")
            record_source(tmp_path / "out", tmp_path / "source")
            assert source_of([load(tmp_path / "out")]).path == tmp_path / "source"
    with pytest.raises(QuantError, match="its bytes have changed"):
        source_of([load(tmp_path / "out")])
