"""Checkpoints larger than memory."""

import dataclasses
import json
import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import fewbit as fb
from fewbit import io
from fewbit.models import HUGGING_FACE
from fewbit.models.config import DecoderConfig
from fewbit.models.names import shapes
from fewbit.workflows.convert.hugging_face import llama_json

ROOT = Path(__file__).parent.parent.parent
SHAPE = (4096, 8192)
LIMIT = 1_500_000_000
WIDE = DecoderConfig(vocab=512, layers=4, width=512, heads=8, kv_heads=8, head_dim=64, hidden=1536, context=256)


def sharded(path: Path, files: int, per_file: int) -> Path:
    """A Hugging Face directory of bfloat16 matrices, the rows of each in another order."""
    path.mkdir()
    numbers = np.random.default_rng(0).standard_normal(SHAPE, np.float32) / 50
    rows = (numbers.view(np.uint32) >> 16).astype(np.uint16)  # bfloat16
    where = {}
    for file in range(files):
        names = [f"layers.{file * per_file + i}.weight" for i in range(per_file)]
        header = {
            name: {"dtype": "BF16", "shape": SHAPE, "data_offsets": [i * rows.nbytes, (i + 1) * rows.nbytes]}
            for i, name in enumerate(names)
        }
        text = json.dumps(header).encode()
        with (path / f"model-{file}.safetensors").open("wb") as stream:
            stream.write(struct.pack("<Q", len(text)) + text)
            for i in range(per_file):
                stream.write(np.roll(rows, file * per_file + i, axis=0).data)
        where |= dict.fromkeys(names, f"model-{file}.safetensors")
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return path


LIMITED = {"MALLOC_ARENA_MAX": "1", "JAX_CPU_ENABLE_ASYNC_DISPATCH": "0"}
# Peak memory is that of living arrays: freed blocks go back at once (glibc keeps those below a threshold that grows to 32 MB),
# and no program starts before the one before it ends. Otherwise the same run differs by up to 60 MB, more on a busy machine.
# Mapping all arrays anew is a third of the time of a large run.
STEADY = {**LIMITED, "MALLOC_MMAP_THRESHOLD_": str(2**18)}


def measured(source: Path, out: Path, method: str, allocation: dict[str, str]) -> dict[str, int]:
    """What a run in a process of its own took."""
    program = [sys.executable, "-m", "tests.workflows.memory_process", source, out, method, str(LIMIT)]
    path = os.pathsep.join(filter(None, sys.path))
    environment = {**os.environ, **allocation, "JAX_PLATFORMS": "cpu", "PYTHONPATH": path}
    done = subprocess.run(program, capture_output=True, text=True, env=environment, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    sys.stdout.write(f"{done.stdout}\n")
    return json.loads(done.stdout)


def decoder(path: Path, layers: int) -> Path:
    """A Hugging Face directory of a Llama of random weights, 13.6 MB a layer, and no tokenizer."""
    from safetensors.numpy import save_file

    config, draw = dataclasses.replace(WIDE, layers=layers), np.random.default_rng(0)
    arrays = {
        HUGGING_FACE.name(ours): draw.standard_normal(shape, np.float32) / 16 for ours, shape in shapes(config).items()
    }
    path.mkdir()
    save_file(arrays, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(llama_json(config)))
    return path


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="/proc of Linux")
def test_memory_does_not_grow_with_the_layers(tmp_path):
    """GPTQ on 2 and on 7 layers: 68 MB of weights more. Measured: 4 to 19 MB on top; half of the weights would be 34."""
    few, many = (
        measured(decoder(tmp_path / str(layers), layers), tmp_path / f"{layers}-out", "gptq", STEADY)["resident"]
        for layers in (2, 7)
    )
    assert many - few < 34e6


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="limits and /proc of Linux")
def test_six_gigabytes_in_one_and_a_half(tmp_path):
    """90 matrices of 67 MB in six files. Peak memory is that of one matrix: in float32, its codes and their errors."""
    if shutil.disk_usage(tmp_path).free < 12e9:
        pytest.skip("needs 12 GB of disk")
    source = sharded(tmp_path / "source", files=6, per_file=15)
    size = sum(file.stat().st_size for file in source.iterdir())
    assert size > 6e9
    found = measured(source, tmp_path / "out", "rtn", LIMITED)
    assert found["tensors"] == 90
    # Measured: 0.4 GB for the matrix, 0.3 GB for Python, JAX and its programs.
    assert found["resident"] < 1.0e9
    stored = io.read(tmp_path / "out").tensors
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == 2
    assert stored["layers.89.weight"].scheme == fb.scheme("int4_g64")
    first, last = np.asarray(stored["layers.0.weight"].codes), np.asarray(stored["layers.89.weight"].codes)
    np.testing.assert_array_equal(np.roll(first, 89, axis=0), last)
    shutil.rmtree(tmp_path / "source")
    shutil.rmtree(tmp_path / "out")
