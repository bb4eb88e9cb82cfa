"""Finished parts: whole or not at all, of one job."""

import jax.numpy as jnp
import numpy as np
import pytest

import fewbit as fb
from fewbit.io.journal import Journal
from fewbit.io.parts import FinishedParts

JOB = {"recipe": "nf4", "layers": [1, 2]}


def tensors(seed: int = 0):
    x = jnp.asarray(np.random.default_rng(seed).standard_normal((4, 64)), jnp.float32)
    return {"q": fb.quantize(x, "nf4"), "norm": np.ones(3, np.float32)}


def test_parts_come_back_as_they_were(tmp_path):
    out = tmp_path / "new" / "model"
    with Journal(out, JOB) as journal:
        assert FinishedParts(journal).load("layer-0") is None
        FinishedParts(journal).save("layer-0", tensors().items())
    with Journal(out, dict(reversed(JOB.items()))) as journal:
        found = FinishedParts(journal).load("layer-0")
        assert found is not None and list(found) == ["q", "norm"]
        np.testing.assert_array_equal(fb.dequantize(found["q"]), fb.dequantize(tensors()["q"]))
        journal.remove()
    assert not list(out.parent.iterdir())


def test_parts_of_another_job_are_removed(tmp_path):
    with Journal(tmp_path / "model", JOB) as journal:
        FinishedParts(journal).save("layer-0", tensors().items())
    with Journal(tmp_path / "model", {**JOB, "recipe": "int4"}) as journal:
        assert FinishedParts(journal).load("layer-0") is None
        assert not (journal.path / "layer-0").exists()


@pytest.mark.parametrize("file", ["fewbit.safetensors", "manifest.json"])
def test_a_damaged_part_is_removed(file, tmp_path):
    with Journal(tmp_path / "model", JOB) as journal:
        parts = FinishedParts(journal)
        parts.save("layer-0", tensors().items())
        path = journal.path / "layer-0" / file
        content = bytearray(path.read_bytes())
        content[-20] ^= 1
        path.write_bytes(content)
        assert parts.load("layer-0") is None
        assert not path.parent.exists()
