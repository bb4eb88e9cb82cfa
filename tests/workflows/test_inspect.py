"""Inspecting stored models without loading their tensors."""

import numpy as np

import fewbit as fb
from fewbit import io, workflows


def test_tensors_bytes_and_facts(tmp_path):
    q = fb.quantize(np.ones((4, 64), np.float32), "nf4")
    io.write(tmp_path / "q", {"w": q, "gain": np.ones(4, np.float16)}, config={"model_type": "x"}, facts={"recipe": "nf4"})
    found = workflows.inspect(tmp_path / "q")
    assert (found.kind, found.architecture, found.facts) == ("fewbit", "unknown", {"recipe": "nf4"})
    by_path = {t.path: t for t in found.tensors}
    assert (by_path["w"].stored, by_path["w"].nbytes, by_path["w"].bits_per_weight) == ("nf4", q.nbytes, q.bits_per_weight)
    assert (by_path["gain"].stored, by_path["gain"].is_quantized) == ("F16", False)
    assert found.tensor_bytes == q.nbytes + 8
    assert found.bits_per_weight == 8 * (q.nbytes + 8) / 260
    assert found.file_bytes == sum(f.stat().st_size for f in (tmp_path / "q").iterdir())
    assert "'x'" in found.why_not_run
