"""Finished parts: whole or not at all, of one job, by one process."""

import jax.numpy as jnp
import numpy as np
import pytest

import fewbit as fb
from fewbit.io.parts import FinishedParts

JOB = {"recipe": "nf4", "layers": [1, 2]}


def tensors(seed: int = 0):
    x = jnp.asarray(np.random.default_rng(seed).standard_normal((4, 64)), jnp.float32)
    return {"q": fb.quantize(x, "nf4"), "norm": np.ones(3, np.float32)}


def test_parts_come_back_as_they_were(tmp_path):
    out = tmp_path / "new" / "model"
    with FinishedParts(out, JOB) as parts:
        assert parts.load("layer-0") is None
        parts.save("layer-0", tensors())
    with FinishedParts(out, dict(reversed(JOB.items()))) as parts:
        found = parts.load("layer-0")
        assert found is not None and list(found) == ["q", "norm"]
        np.testing.assert_array_equal(fb.dequantize(found["q"]), fb.dequantize(tensors()["q"]))
        parts.remove()
    assert not list(out.parent.iterdir())


def test_parts_of_another_job_are_removed(tmp_path):
    with FinishedParts(tmp_path / "model", JOB) as parts:
        parts.save("layer-0", tensors())
    with FinishedParts(tmp_path / "model", {**JOB, "recipe": "int4"}) as parts:
        assert parts.load("layer-0") is None
        assert not (parts.path / "layer-0").exists()


@pytest.mark.parametrize("file", ["fewbit.safetensors", "manifest.json"])
def test_a_damaged_part_is_removed(file, tmp_path):
    with FinishedParts(tmp_path / "model", JOB) as parts:
        parts.save("layer-0", tensors())
        path = parts.path / "layer-0" / file
        content = bytearray(path.read_bytes())
        content[-20] ^= 1
        path.write_bytes(content)
        assert parts.load("layer-0") is None
        assert not path.parent.exists()


def test_one_process_at_a_time(tmp_path):
    with FinishedParts(tmp_path / "model", JOB), pytest.raises(fb.QuantError, match="fewbit-work"):
        FinishedParts(tmp_path / "model", JOB).__enter__()
    assert not list(tmp_path.iterdir()), "a directory without parts goes"


def test_a_place_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(fb.QuantError, match="cannot be written"):
        FinishedParts(tmp_path / "file" / "model", JOB).__enter__()
