"""Quantizing in several processes: the bytes of one process, each process its part, resumable."""

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest

import fewbit as fb
from fewbit import io, workflows
from fewbit.array.qarray import is_qarray
from fewbit.errors import QuantError
from fewbit.io.containers.container import Weight
from fewbit.io.containers.registry import container
from fewbit.io.containers.writer import ContainerWriter
from fewbit.io.gguf.imatrix import Importance, ImportanceMatrix, write_imatrix
from fewbit.io.orbax import OrbaxWriter
from fewbit.io.safetensors.file import array_bytes, file_header
from fewbit.workflows.distributed import quantize as module
from fewbit.workflows.distributed.quantize import output_files, quantize_distributed, shares
from tests import cluster

SHAPE = (128, 512)
"""Of each weight."""
FILE_BYTES = math.prod(SHAPE) * 5 // 4
"""The limit of a tensor file: two weights of 4 bits."""
RULES = {
    "rules": [
        {"path": "block.[0-3].*", "policy": "nvfp4", "axis": -1},
        {"path": "block.[4-6].*", "policy": "int4_g32", "axis": -1},
        {"path": "block.7.*", "policy": "nf4_dq", "axis": -1},
    ]
}


def write_checkpoint(path: Path) -> Path:
    """A safetensors file of eight bfloat16 weights and their norms, and the rules next to it."""
    random = np.random.default_rng(0)
    tensors = {}
    for i in range(8):
        tensors[f"block.{i}.weight"] = random.standard_normal(SHAPE).astype(ml_dtypes.bfloat16)
        tensors[f"norm.{i}"] = random.standard_normal(SHAPE[1]).astype(ml_dtypes.bfloat16)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join([file_header(tensors, {}), *map(array_bytes, tensors.values())]))
    (path.parent / "rules.json").write_text(json.dumps(RULES))
    return path


def opened(path: Path) -> tuple[workflows.Model, fb.Plan]:
    model = workflows.load(path)
    return model, workflows.plan_model(model, recipe=str(path.parent / "rules.json"))


def quantized(source: str, out: str, max_file_bytes: int, dies_at: int = -1) -> dict[str, object]:
    """One process: what it did, and the bytes of the checkpoint's tensors that it read.

    Args:
        source: the checkpoint; with the index of the process in place of `{}`.
        out: the output.
        max_file_bytes: the limit of a tensor file.
        dies_at: the number of the tensor after which process 1 dies.
    """
    index, done = jax.process_index(), []
    path = Path(source.format(index))

    def on_tensor(result: workflows.TensorResult) -> None:
        done.append(result.path)
        if index == 1 and len(done) == dies_at:
            os.kill(os.getpid(), signal.SIGKILL)

    with parts_read(path) as parts:
        model, plan = opened(path)
        outcome = quantize_distributed(model, plan, out, max_file_bytes=max_file_bytes, overwrite=True, on_tensor=on_tensor)
    return {
        "done": done,
        "read": sum(nbytes for begin, nbytes in parts.items() if begin > 8),
        "tensors": len(outcome.tensors),
        "bytes": outcome.file_bytes,
    }


@contextlib.contextmanager
def parts_read(path: Path) -> Iterator[dict[int, int]]:
    """Within it, what is mapped of a file: the bytes of each part by where it begins; up to 8 it is the header."""
    parts, real = {}, np.memmap

    def memmap(file: os.PathLike[str], dtype: type, mode: str, begin: int, shape: tuple[int]) -> np.memmap:
        if Path(file) == path:
            parts[begin] = shape[0]
        return real(file, dtype, mode, begin, shape)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(np, "memmap", memmap)
        yield parts


def hashes(directory: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in directory.iterdir()}


def by_one_process(source: Path, out: Path) -> dict[str, str]:
    """The hashes of what one process writes, with the same limit for a file."""
    model, plan = opened(source)
    with io.DirectoryWriter(out, max_shard_bytes=FILE_BYTES) as writer:
        for value, result in workflows.quantized_tensors(model, plan):
            writer.add(result.path, value)
    return hashes(out)


def assert_same_bytes(found: dict[str, str], expected: dict[str, str]) -> None:
    """The same tensor files and config.json; the manifests name the source in different ways."""
    assert {name for name in found if name.endswith(".safetensors")} == {n for n in expected if n.endswith(".safetensors")}
    assert len(found) > 4, "several files"
    assert {**found, "manifest.json": ""} == {**expected, "manifest.json": ""}


def test_a_cluster_of_one(tmp_path):
    source = write_checkpoint(tmp_path / "in" / "a.safetensors")
    model, plan = opened(source)
    outcome = quantize_distributed(model, plan, tmp_path / "out", max_file_bytes=FILE_BYTES)
    assert_same_bytes(hashes(tmp_path / "out"), by_one_process(source, tmp_path / "expected"))
    assert io.verify(tmp_path / "out") == []
    assert [result.path for result in outcome.tensors] == list(model.info)
    expected = workflows.quantize(model, plan, tmp_path / "single")
    assert [r.sqnr_db for r in outcome.tensors] == [r.sqnr_db for r in expected.tensors]
    assert {path.name for path in tmp_path.iterdir()} == {"in", "out", "expected", "single"}, "nothing is left over"


def importance_file(path: Path, model: workflows.Model) -> workflows.ImportanceFile:
    """An importance matrix of a checkpoint's weights."""
    squares = np.random.default_rng(1).random((1, SHAPE[1]), np.float32)
    names = [name for name, info in model.info.items() if len(info.shape) == 2]
    write_imatrix(path, ImportanceMatrix(dict.fromkeys(names, Importance(squares, np.ones(1, np.float32)))))
    return workflows.ImportanceFile.read(path)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("method", [fb.methods.HQQ(rounds=3), fb.methods.IMatrix()], ids=lambda method: method.name)
def test_a_method_that_needs_no_run_of_the_model(tmp_path, method):
    source = write_checkpoint(tmp_path / "in" / "a.safetensors")
    model, plan = opened(source)
    calibration = importance_file(tmp_path / "imatrix.gguf", model) if method.collect else None
    quantize_distributed(model, plan, tmp_path / "out", method=method, calibration=calibration)
    workflows.quantize(model, plan, tmp_path / "single", method=method, calibration=calibration)
    found, expected = io.read(tmp_path / "out"), io.read(tmp_path / "single")
    assert found.facts["method"] == expected.facts["method"]
    assert hashes(tmp_path / "out")["fewbit.safetensors"] == hashes(tmp_path / "single")["fewbit.safetensors"]
    rounded = [value for value, _ in workflows.quantized_tensors(model, plan)]
    assert any(np.any(a.codes != b.codes) for a, b in zip(found.tensors.values(), rounded, strict=True) if is_qarray(b))


def test_methods_that_need_more_are_refused(tmp_path):
    model, plan = opened(write_checkpoint(tmp_path / "in" / "a.safetensors"))
    with pytest.raises(QuantError, match="method gptq runs the whole model"):
        quantize_distributed(model, plan, tmp_path / "out", method=fb.methods.GPTQ())
    calibration = importance_file(tmp_path / "imatrix.gguf", model)
    with pytest.raises(QuantError, match="method gptq needs hessian, and an importance matrix has squares only"):
        quantize_distributed(model, plan, tmp_path / "out", method=fb.methods.GPTQ(), calibration=calibration)
    with pytest.raises(QuantError, match="method hqq needs no data, and an importance matrix has squares only"):
        quantize_distributed(model, plan, tmp_path / "out", method=fb.methods.HQQ(), calibration=calibration)


def test_the_planned_files_are_those_of_the_bytes_written(tmp_path):
    """What is planned per row is what its arrays take, so files end where those of one process end."""
    model, plan = opened(write_checkpoint(tmp_path / "in" / "a.safetensors"))
    for row, (value, _) in zip(plan, workflows.quantized_tensors(model, plan), strict=True):
        assert row.bytes_after == sum(leaf.nbytes for leaf in jax.tree.leaves(value))
    files = output_files(plan, FILE_BYTES)
    assert [row for part in files for row in part] == list(plan.rows)
    assert all(sum(row.bytes_after for row in part) <= FILE_BYTES for part in files)


def test_weights_of_an_awq_file_are_split_as_by_one_process(tmp_path):
    """Its zero points take half a byte each in the file and a byte each in a QArray."""
    weights = [Weight(f"block.{i}.weight", (64, 64), "float16", fb.scheme("uint4_f16_g32")) for i in range(4)]
    with ContainerWriter(tmp_path / "awq", container("awq"), weights=weights, config={"torch_dtype": "float16"}) as writer:
        for i, weight in enumerate(weights):
            writer.add(weight.name, fb.quantize(np.linspace(-i, 1, 4096, dtype=np.float16).reshape(64, 64), weight.scheme))
    model = workflows.load(tmp_path / "awq")
    plan = workflows.plan_model(model, recipe="keep")
    limit = 2 * model.info["block.0.weight"].nbytes
    quantize_distributed(model, plan, tmp_path / "out", max_file_bytes=limit)
    with io.DirectoryWriter(tmp_path / "one", config=model.metadata, max_shard_bytes=limit) as writer:
        for value, result in workflows.quantized_tensors(model, plan):
            writer.add(result.path, value)
    assert_same_bytes(hashes(tmp_path / "out"), hashes(tmp_path / "one"))


def test_shares_are_even_and_complete(tmp_path):
    _, plan = opened(write_checkpoint(tmp_path / "in" / "a.safetensors"))
    parts = dict(enumerate((row,) for row in plan if row.policy is not None))
    for count in (1, 2, 3, 8, 20):
        found = shares(parts, count)
        assert sorted(i for share in found for i in share) == list(parts)
        assert max(map(len, found)) == -(-len(parts) // count)


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
def test_processes_write_the_bytes_of_one_and_read_their_part(tmp_path, count):
    """Each process has a copy of the checkpoint in which the tensors of the others are NaN, which quantize refuses."""
    source = write_checkpoint(tmp_path / "in" / "a.safetensors")
    expected = by_one_process(source, tmp_path / "expected")
    model, plan = opened(source)
    parts = output_files(plan, FILE_BYTES)
    each = shares(dict(enumerate(parts)), count)
    owned = [[row.path for i in share for row in parts[i]] for share in each]
    for index, own in enumerate(owned):
        copy = tmp_path / f"copy-{index}" / "a.safetensors"
        shutil.copytree(source.parent, copy.parent)
        others = [path for path in model.info if path not in own]
        damage(copy, others)
    found = cluster.run(quantized, count, str(tmp_path / "copy-{}" / "a.safetensors"), str(tmp_path / "out"), FILE_BYTES)
    assert_same_bytes(hashes(tmp_path / "out"), expected)
    assert io.verify(tmp_path / "out") == []
    assert {process["tensors"] for process in found} == {len(plan.rows)}
    for own, process in zip(owned, found, strict=True):
        assert sorted(process["done"]) == sorted(own)
        assert process["read"] == sum(model.info[path].nbytes for path in own)
    assert not list(tmp_path.glob(".*")), "nothing is left over"


def damage(path: Path, names: list[str]) -> None:
    """Overwrites tensors of a safetensors file with NaN."""
    content = np.fromfile(path, np.uint8)
    start = 8 + int.from_bytes(content[:8].tobytes(), "little")
    header = json.loads(content[8:start].tobytes())
    for name in names:
        begin, end = (start + offset for offset in header[name]["data_offsets"])
        content[begin:end] = 0xFF
    content.tofile(path)


@pytest.mark.slow
def test_a_killed_process_leaves_the_output_and_another_number_resumes(tmp_path):
    source = write_checkpoint(tmp_path / "in" / "a.safetensors")
    expected = by_one_process(source, tmp_path / "expected")
    io.write(tmp_path / "out", {"old": np.ones(3, np.float32)})
    killed = cluster.outcomes(quantized, 2, str(source), str(tmp_path / "out"), FILE_BYTES, 6, seconds=200)
    assert killed[1].status == -signal.SIGKILL
    assert killed[0].status not in (0, -signal.SIGKILL), "JAX ended it, because the other one was gone"
    assert list(io.read(tmp_path / "out").tensors) == ["old"]
    finished = list((tmp_path / ".out.fewbit-work").glob("file-*"))
    assert len(finished) >= 2
    found = cluster.run(quantized, 4, str(source), str(tmp_path / "out"), FILE_BYTES)
    assert_same_bytes(hashes(tmp_path / "out"), expected)
    assert sum(len(process["done"]) for process in found) < 16, "finished files were not made again"
    assert not list(tmp_path.glob(".*")), "nothing is left over"


def stop_before_the_end(model: workflows.Model, plan: fb.Plan, out: Path, patch: pytest.MonkeyPatch) -> None:
    """Quantizes all parts, and fails when they are joined."""

    def refuse(*args: object, **kwargs: object) -> None:
        raise QuantError("stopped before the end")

    with patch.context() as within:
        within.setattr(module, "_join", refuse)
        with pytest.raises(QuantError, match="stopped before the end"):
            quantize_distributed(model, plan, out, max_file_bytes=FILE_BYTES)
    assert not out.exists()


def tensors_made(model: workflows.Model, plan: fb.Plan, out: Path) -> list[str]:
    """Quantizes, and gives the tensors that were not there yet."""
    done = []
    quantize_distributed(model, plan, out, max_file_bytes=FILE_BYTES, on_tensor=lambda result: done.append(result.path))
    return done


@pytest.mark.slow
def test_a_damaged_part_is_made_again(tmp_path, monkeypatch):
    source = write_checkpoint(tmp_path / "in" / "a.safetensors")
    model, plan = opened(source)
    stop_before_the_end(model, plan, tmp_path / "out", monkeypatch)
    file = tmp_path / ".out.fewbit-work" / "file-00002" / "fewbit.safetensors"
    content = bytearray(file.read_bytes())
    content[-9] ^= 1
    file.write_bytes(content)
    assert tensors_made(model, plan, tmp_path / "out") == [row.path for row in output_files(plan, FILE_BYTES)[1]]
    assert_same_bytes(hashes(tmp_path / "out"), by_one_process(source, tmp_path / "expected"))


@pytest.mark.slow
def test_a_plan_of_code_in_another_place_resumes(tmp_path, monkeypatch):
    source = write_checkpoint(tmp_path / "in" / "a.safetensors")
    model, plan = opened(source)
    stop_before_the_end(model, plan, tmp_path / "out", monkeypatch)
    elsewhere = tuple(dataclasses.replace(row, sites=("dot_general at /elsewhere/net.py:1:2",)) for row in plan)
    assert tensors_made(model, dataclasses.replace(plan, rows=elsewhere), tmp_path / "out") == []


@pytest.mark.slow
def test_a_source_that_changed_is_read_again(tmp_path, monkeypatch):
    source = write_checkpoint(tmp_path / "in" / "a.safetensors")
    model, plan = opened(source)
    stop_before_the_end(model, plan, tmp_path / "out", monkeypatch)
    os.utime(source, ns=(0, 0))
    assert sorted(tensors_made(model, plan, tmp_path / "out")) == sorted(model.info)


def test_an_orbax_source_that_changed_is_read_again(tmp_path, monkeypatch):
    pytest.importorskip("orbax.checkpoint")
    for scale in (1, 2):
        with OrbaxWriter(tmp_path / "in", overwrite=True) as writer:
            writer.add("w", np.full((4, 64), scale, np.float32))
        model = workflows.load(tmp_path / "in")
        plan = workflows.plan_model(model, recipe="keep")
        if scale == 1:
            stop_before_the_end(model, plan, tmp_path / "out", monkeypatch)
    assert tensors_made(model, plan, tmp_path / "out") == ["w"]
    assert (np.asarray(io.read(tmp_path / "out").tensors["w"]) == 2).all()


def failing(source: str, out: str) -> str:
    """One process's error: process 1 does not see the working directory of process 0."""
    model, plan = opened(Path(source))
    path = Path(out) / str(jax.process_index()) / "model"
    with pytest.raises(QuantError) as refusal:
        quantize_distributed(model, plan, path)
    return str(refusal.value)


@pytest.mark.slow
def test_an_output_that_is_not_shared(tmp_path):
    source = write_checkpoint(tmp_path / "in" / "a.safetensors")
    zero, one = cluster.run(failing, 2, str(source), str(tmp_path))
    assert zero.startswith("process 1 of 2 failed: QuantError: ") and one in zero
    assert "which process 0 made, is not there; write to a file system that all share" in one


def test_nan_is_refused_and_nothing_is_written(tmp_path):
    source = write_checkpoint(tmp_path / "in" / "a.safetensors")
    damage(source, ["block.5.weight"])
    model, plan = opened(source)
    with pytest.raises(QuantError, match=r"NaN or infinite values in block.5.weight"):
        quantize_distributed(model, plan, tmp_path / "out", max_file_bytes=FILE_BYTES)
    assert not (tmp_path / "out").exists()
