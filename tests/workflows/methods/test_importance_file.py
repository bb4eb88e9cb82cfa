"""Weights quantized by an importance matrix of a file, through `fewbit.workflows.quantize`."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

import fewbit as fb
from fewbit import io, workflows
from fewbit.io import Importance, ImportanceMatrix, write_imatrix
from fewbit.methods import GPTQ, IMatrix
from fewbit.workflows import ImportanceFile, importance_matrix
from tests.nets.random_decoder import SMALL
from tests.workflows.checkpoints import llama_directory, needs_tokenizers, text_file


@pytest.mark.slow
@needs_tokenizers
@pytest.mark.parametrize("suffix", [pytest.param(".gguf", marks=pytest.mark.slow), ".dat"])
def test_a_directory_from_a_file(tmp_path, suffix):
    """The same bytes each time, those of the method alone, and the file in the manifest; both layouts give the same weights."""
    model = workflows.load(llama_directory(tmp_path / "hf"))
    data = workflows.calibration_data(model, str(text_file(tmp_path)), windows=4)
    matrix, plan = importance_matrix(model, data), workflows.plan_model(model, recipe="int4_g32")
    file = ImportanceFile.read(write_imatrix(tmp_path / f"m{suffix}", matrix))
    results = []
    for name in ("a", "b"):
        workflows.quantize(model, plan, tmp_path / name, method=IMatrix(), calibration=file, on_tensor=results.append)
    assert (tmp_path / "a" / "fewbit.safetensors").read_bytes() == (tmp_path / "b" / "fewbit.safetensors").read_bytes()
    assert {r.method for r in results if "attn/q" in r.path} == {"imatrix"} and any(
        " by imatrix  " in str(r) for r in results
    )
    facts = json.loads((tmp_path / "a" / "manifest.json").read_text())["facts"]["method"]
    assert facts == {"name": "imatrix", "damping": 0.01, "calibration": file.facts}
    path = "layers/1/mlp/down"
    squares = jnp.asarray(matrix.entries["blk.1.ffn_down.weight"].squares[0])
    alone = IMatrix().quantized(
        jnp.asarray(model.load(path)), fb.scheme("int4_g32"), (-1,), fb.calibration.Observation(squares=squares)
    )
    stored = io.read(tmp_path / "a").tensors
    np.testing.assert_array_equal(
        stored[next(name for name in stored if name.endswith("1.mlp.down_proj.weight") or name == path)].codes, alone.codes
    )


@needs_tokenizers
def test_what_is_refused(tmp_path):
    model = workflows.load(llama_directory(tmp_path / "hf"))
    plan = workflows.plan_model(model, recipe="int4")

    def file(name, length, rows=1):
        entry = Importance(np.ones((rows, length), np.float32), np.ones(rows, np.float32))
        return ImportanceFile.read(write_imatrix(tmp_path / "m.gguf", ImportanceMatrix({name: entry}), overwrite=True))

    good = file("blk.0.attn_q.weight", SMALL.width)
    with pytest.raises(fb.QuantError, match="method gptq needs hessian, and an importance matrix has squares only"):
        workflows.quantize(model, plan, tmp_path / "q", method=GPTQ(), calibration=good)
    for shape, size in (((1, 7), r"\(1, 7\)"), ((2, SMALL.width // 2), r"\(2, 12\)")):
        matrix = file("blk.0.attn_q.weight", shape[1], shape[0])
        with pytest.raises(
            fb.QuantError, match=rf"blk.0.attn_q.weight has values {size}, and layers/0/attn/q .* needs \(1, 24\)"
        ):
            workflows.quantize(model, plan, tmp_path / "q", method=IMatrix(), calibration=matrix)
    with pytest.raises(fb.QuantError, match=r"m.gguf has no tensor of hf: it has blk.9.x, the model has"):
        workflows.quantize(model, plan, tmp_path / "q", method=IMatrix(), calibration=file("blk.9.x", 7))
    outcome = workflows.quantize(
        model, plan, tmp_path / "q", method=IMatrix(), calibration=file("blk.0.attn_q.weight", SMALL.width)
    )
    assert [r.path for r in outcome.tensors if r.method == "imatrix"] == ["layers/0/attn/q"]
