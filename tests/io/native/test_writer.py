"""What is written comes back, in the same bytes each time, and nothing is half-written whatever stops the run."""

import errno
import hashlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
import tracemalloc

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

import fewbit as fb
from fewbit import QuantError, io
from fewbit.io import atomic_directory as atomic
from tests.io.damage import content, leaves
from tests.io.examples import X, quantized, random_qarray

TENSORS = {"a": quantized("nf4"), "b": X, "c": quantized("nvfp4"), "d": quantized("nf4_dq")}


def bytes_of(path: pathlib.Path) -> dict[str, bytes]:
    return {name: (path / name).read_bytes() for name in sorted(os.listdir(path))}


@pytest.mark.slow
def test_every_scheme_comes_back(tmp_path):
    ways = {"": lambda q: q, ".T": lambda q: q.T, ".bfloat16": lambda q: q.astype(ml_dtypes.bfloat16)}
    tensors = {name + way: move(random_qarray(name)) for name in fb.SCHEMES.names() for way, move in ways.items()}
    found = io.read(io.write(tmp_path / "m", tensors)).tensors
    for key, q in tensors.items():
        assert jax.tree.structure(found[key]) == jax.tree.structure(q)
        assert leaves(found[key]) == leaves(q)
        assert found.info[key].shape == q.shape
        assert found.info[key].nbytes == q.nbytes


@pytest.mark.parametrize("has_links", [True, False])
def test_directories_are_joined_into_the_bytes_of_one(tmp_path, has_links, monkeypatch):
    """Linked tensor files, and schemes numbered anew; the second part has them in another order."""
    parts = [{"c": TENSORS["c"], "d": TENSORS["d"]}, {"e": TENSORS["d"], "b": X}, {"a": TENSORS["a"]}]
    with io.DirectoryWriter(tmp_path / "one", max_shard_bytes=1) as writer:
        for part in parts:
            for name, value in part.items():
                writer.add(name, value)

    def no_link(*args: object) -> None:
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))

    if not has_links:
        monkeypatch.setattr(os, "link", no_link)
    with io.DirectoryWriter(tmp_path / "joined", max_shard_bytes=1) as writer:
        writer.add("c", TENSORS["c"])
        for index, part in enumerate([{"d": TENSORS["d"]}, *parts[1:]]):
            writer.add_directory(io.write(tmp_path / f"part{index}", part, max_shard_bytes=1))
    assert bytes_of(tmp_path / "joined") == bytes_of(tmp_path / "one")
    assert (os.stat(tmp_path / "joined" / "fewbit-00005-of-00005.safetensors").st_nlink == 2) == has_links


def test_a_name_of_a_joined_directory_that_is_taken(tmp_path):
    part = io.write(tmp_path / "part", {"a": TENSORS["a"]})
    with io.DirectoryWriter(tmp_path / "m") as writer:
        writer.add("a.codes", X)
        with pytest.raises(QuantError, match=r"tensor name 'a.codes' of .*part is taken"):
            writer.add_directory(part)


def test_plain_arrays_of_any_dtype_and_order_come_back(tmp_path):
    tensors = {
        "fortran": np.asfortranarray(X),
        "strided": X[::2, ::3],
        "big-endian": X.astype(">f4"),
        "empty": X[:0],
        "scalar": np.array(3.5, np.float32),
        "whole": np.arange(5),
        "flags": X > 0,
        "jax": jnp.asarray(X, jnp.bfloat16),
    }
    found = io.read(io.write(tmp_path / "m", tensors)).tensors
    for name, want in tensors.items():
        assert found[name].dtype.newbyteorder("=") == np.asarray(want).dtype.newbyteorder("=")
        np.testing.assert_array_equal(found[name], want)


def test_the_same_calls_give_the_same_bytes(tmp_path):
    """In this process, and in another whose hashes are seeded otherwise."""
    kwargs = {"config": {"b": 1, "a": [1.5]}, "files": {"tokenizer.json": b"{}"}, "facts": {"recipe": "nf4"}}
    first = bytes_of(io.write(tmp_path / "one", TENSORS, max_shard_bytes=2_000, **kwargs))
    time.sleep(0.01)
    assert bytes_of(io.write(tmp_path / "two", TENSORS, max_shard_bytes=2_000, **kwargs)) == first
    script = (
        "import sys\nfrom fewbit import io\n"
        f"io.write(sys.argv[2], io.read(sys.argv[1]).tensors, max_shard_bytes=2_000, **{kwargs!r})\n"
    )
    environment = os.environ | {"PYTHONHASHSEED": "7", "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(sys.path)}
    paths = [str(tmp_path / "one"), str(tmp_path / "three")]
    subprocess.run([sys.executable, "-c", script, *paths], check=True, env=environment)
    assert bytes_of(tmp_path / "three") == first


def test_the_manifest_has_the_hash_and_size_of_every_file(tmp_path):
    path = io.write(tmp_path / "m", TENSORS, files={"tokenizer.json": b"{}"})
    manifest = json.loads((path / "manifest.json").read_text())
    for name, data in bytes_of(path).items():
        if name != "manifest.json":
            assert manifest["files"][name] == {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    assert set(manifest["files"]) | {"manifest.json"} == set(os.listdir(path))
    assert set(manifest["tensors"]) == set(safetensors.numpy.load_file(path / "fewbit.safetensors"))


def test_the_config_keeps_what_it_was_given(tmp_path):
    path = io.write(tmp_path / "m", TENSORS, config={"model_type": "llama", "layers": 3})
    config = json.loads((path / "config.json").read_text())
    assert (config["model_type"], config["layers"]) == ("llama", 3)
    section = config["quantization_config"]
    assert section["quant_method"] == "fewbit"
    assert set(section["tensors"]) == {"a", "c", "d"}
    assert "scale" in section["tensors"]["d"]  # its scales are quantized themselves


def test_large_models_are_spread_over_files(tmp_path):
    tensors = {f"t{i}": np.full((100,), i, np.float32) for i in range(5)} | {"large": np.zeros(1_000, np.float32)}
    path = io.write(tmp_path / "m", tensors, max_shard_bytes=800)
    shards = sorted(path.glob("*.safetensors"))
    assert [file.name for file in shards] == [f"fewbit-0000{i}-of-00004.safetensors" for i in range(1, 5)]
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest["tensors"]["t2"]["file"] == "fewbit-00002-of-00004.safetensors"
    assert content(io.read(path)) == {name: leaves(value) for name, value in tensors.items()}


def test_memory_is_bounded_by_a_file_of_tensors(tmp_path):
    """40 tensors of 1 MB through files of 2 MB: at most a file, the tensor at hand and its copy are held."""
    tracemalloc.start()
    try:
        with io.DirectoryWriter(tmp_path / "m", max_shard_bytes=2 << 20) as writer:
            tracemalloc.reset_peak()
            before, _ = tracemalloc.get_traced_memory()
            for i in range(40):
                writer.add(str(i), np.full(1 << 18, i, np.float32))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak - before < 6 << 20


def test_what_is_changed_after_it_was_added_is_not_written(tmp_path):
    x = np.zeros(3, np.float32)
    with io.DirectoryWriter(tmp_path / "m") as writer:
        writer.add("x", x)
        x += 1
    assert not io.read(tmp_path / "m").tensors["x"].any()


def test_progress_is_reported(tmp_path):
    seen = []
    io.write(tmp_path / "m", TENSORS, progress=lambda *event: seen.append(event))
    assert [event[1:] for event in seen if event[0] == "write"] == [
        ("a", 288),
        ("b", 2048),
        ("c", 292),
        ("d", TENSORS["d"].nbytes),
    ]
    assert sum(nbytes for stage, _, nbytes in seen if stage == "verify") == sum(n for s, _, n in seen if s == "write")


# --- refused ---


def test_a_directory_that_exists_stays(tmp_path):
    io.write(tmp_path / "m", {"x": X})
    before = bytes_of(tmp_path / "m")
    with pytest.raises(QuantError, match=r"/m exists; choose another output, or allow it to be replaced"):
        io.write(tmp_path / "m", TENSORS)
    assert bytes_of(tmp_path / "m") == before


def test_overwrite_replaces_what_fewbit_wrote(tmp_path):
    io.write(tmp_path / "m", {"x": X}, files={"vocab.txt": b"x"})
    io.write(tmp_path / "m", TENSORS, overwrite=True)
    assert set(io.read(tmp_path / "m").tensors) == set(TENSORS)
    assert os.listdir(tmp_path) == ["m"]
    assert not (tmp_path / "m" / "vocab.txt").exists()


def test_overwrite_can_read_from_what_it_replaces(tmp_path):
    io.write(tmp_path / "m", TENSORS)
    want = content(io.read(tmp_path / "m"))
    io.write(tmp_path / "m", io.read(tmp_path / "m").tensors, overwrite=True)
    assert content(io.read(tmp_path / "m")) == want


@pytest.mark.parametrize("kind", ["directory", "file", "link"])
def test_overwrite_leaves_alone_what_fewbit_did_not_write(tmp_path, kind):
    target = tmp_path / "m"
    if kind == "directory":
        (target / "photos").mkdir(parents=True)
    elif kind == "file":
        target.write_text("mine")
    else:
        io.write(tmp_path / "real", TENSORS)
        target.symlink_to(tmp_path / "real")
    with pytest.raises(
        QuantError,
        match=r"m (was not written by fewbit as safetensors files|is a file|is a symbolic link), so it is not replaced",
    ):
        io.write(target, TENSORS, overwrite=True)
    assert os.path.lexists(target)


BAD = {
    "section": ({"config": {"quantization_config": {}}}, "config already has a 'quantization_config'"),
    "config": ({"config": {"a": float("nan")}}, "config cannot be written as JSON"),
    "facts": ({"facts": {"a": b""}}, "facts cannot be written as JSON"),
    "file": ({"files": {"config.json": b""}}, r"a file cannot be called 'config\.json'"),
    "path": ({"files": {"../x": b""}}, r"a file cannot be called '\.\./x'"),
    "tensor file": ({"files": {"x.safetensors": b""}}, r"a file cannot be called 'x\.safetensors'"),
    "shards": ({"max_shard_bytes": 0}, "max_shard_bytes is 0, must be at least 1"),
}


@pytest.mark.parametrize("name", BAD)
def test_arguments_are_checked_before_anything_is_written(tmp_path, name):
    kwargs, message = BAD[name]
    with pytest.raises(QuantError, match=message):
        io.DirectoryWriter(tmp_path / "m", **kwargs)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("a", X, "tensor name 'a' is taken already"),
        ("a.codes", X, r"tensor name 'a\.codes' is taken already"),
        ("", X, "tensor name '' is taken already, or reserved"),
        ("__metadata__", X, "reserved"),
        ("z", X.astype(np.complex128), "tensor 'z' has dtype complex128"),
        ("z", np.array(["text"]), "tensor 'z' has dtype <U4"),
    ],
)
def test_tensors_that_files_cannot_hold(tmp_path, name, value, message):
    def run() -> None:
        with io.DirectoryWriter(tmp_path / "m") as writer:
            writer.add("a", TENSORS["a"])
            writer.add(name, value)

    with pytest.raises(QuantError, match=message):
        run()
    assert os.listdir(tmp_path) == []


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("value", [[1.0], 3.0, None], ids=str)
def test_what_is_no_array(tmp_path, value):
    with pytest.raises(QuantError, match=r"tensor 'x' is a .*; expected an array or a QArray"):
        io.write(tmp_path / "m", {"x": value})
    assert os.listdir(tmp_path) == []


def test_a_model_without_tensors(tmp_path):
    with pytest.raises(QuantError, match="m would have no tensors"):
        io.write(tmp_path / "m", {})
    assert os.listdir(tmp_path) == []


def test_tensors_are_added_within_the_block(tmp_path):
    with pytest.raises(QuantError, match=r"tensors are added within the block: with DirectoryWriter"):
        io.DirectoryWriter(tmp_path / "m").add("a", X)


def test_two_runs_do_not_write_the_same_directory(tmp_path):
    with io.DirectoryWriter(tmp_path / "m") as first:
        first.add("a", X)
        with (
            pytest.raises(QuantError, match=r"m is being written by process \d+ on \S+; wait until it has ended"),
            io.DirectoryWriter(tmp_path / "m"),
        ):
            raise AssertionError("not reached")
    assert set(io.read(tmp_path / "m").tensors) == {"a"}


# --- stopped ---


def test_an_error_in_the_block_leaves_nothing(tmp_path):
    def run() -> None:
        with io.DirectoryWriter(tmp_path / "m", max_shard_bytes=10) as writer:
            writer.add("a", X)
            writer.add("b", X)
            assert sorted(os.listdir(tmp_path)) == [".m.fewbit-lock", ".m.fewbit-partial"]
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("after", range(0, 9_000, 1_500))
def test_no_space_left_at_any_point(tmp_path, monkeypatch, after):
    """The disk takes some bytes and then no more: the old directory stands, nothing is left, one sentence."""
    io.write(tmp_path / "m", {"x": X})
    before = bytes_of(tmp_path / "m")
    real, left = os.write, after

    def failing(descriptor, data):
        nonlocal left
        if left < len(data):
            raise OSError(errno.ENOSPC, "No space left on device")
        left -= len(data)
        return real(descriptor, data)

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", failing)
        with pytest.raises(
            QuantError, match=r"no space left for .*/m: (the file being written needs [\d,]+ bytes, )?[\d,]+ are free"
        ):
            io.write(tmp_path / "m", TENSORS, max_shard_bytes=1_000, overwrite=True)
    assert bytes_of(tmp_path / "m") == before
    assert os.listdir(tmp_path) == ["m"]
    io.write(tmp_path / "m", TENSORS, overwrite=True)  # there is space again


def test_a_disk_that_changes_bytes_is_caught(tmp_path, monkeypatch):
    real = os.write

    def lying(descriptor, data):
        return real(descriptor, bytes(data).replace(X.tobytes(), bytes(X.nbytes)))

    monkeypatch.setattr(os, "write", lying)
    with pytest.raises(QuantError, match="tensor 'b' reads back differently from what was written; the disk may be failing"):
        io.write(tmp_path / "m", TENSORS)
    monkeypatch.setattr(os, "write", lambda descriptor, data: real(descriptor, bytes(data).replace(b"format", b"formal")))
    with pytest.raises(QuantError, match=r"the header of fewbit-00001\.safetensors reads back differently"):
        io.write(tmp_path / "m", TENSORS)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("moment", ["before", "after"])
def test_an_interruption_at_the_rename_tells_which_model_stands(tmp_path, monkeypatch, moment):
    io.write(tmp_path / "m", {"x": X})
    real = atomic.exchange

    def interrupted(staged, target):
        if moment == "after":
            real(staged, target)
            monkeypatch.setattr(atomic.shutil, "rmtree", stopped)
        else:
            raise KeyboardInterrupt

    def stopped(path, **kwargs):
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(atomic, "exchange", interrupted)
    with pytest.raises(KeyboardInterrupt, match=r"^$" if moment == "before" else r"m is already complete"):
        io.write(tmp_path / "m", TENSORS, overwrite=True)
    assert set(io.read(tmp_path / "m").tensors) == ({"x"} if moment == "before" else set(TENSORS))
    assert os.listdir(tmp_path) == ["m"]


# A shell starts background processes with SIGINT ignored, and so what they start; Ctrl-C is switched on again.
RUN = """
import signal, sys, time, numpy as np
signal.signal(signal.SIGINT, signal.default_int_handler)
from fewbit import io
with io.DirectoryWriter(sys.argv[1], max_shard_bytes=1, overwrite=True) as writer:
    for i in range(1000):
        writer.add(str(i), np.full(100, i, np.float32))
        if i == 5:
            print("midway", flush=True)
        time.sleep(0.02)
"""


@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGKILL], ids=lambda s: s.name)
def test_a_run_that_is_stopped_midway(tmp_path, kind):
    """What stood before stands, Ctrl-C leaves nothing behind, and after either a second run finishes."""
    io.write(tmp_path / "m", {"x": X})
    before = bytes_of(tmp_path / "m")
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, "-c", RUN, str(tmp_path / "m")], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment
    ) as process:
        assert process.stdout.readline() == b"midway\n"
        assert len(os.listdir(tmp_path / ".m.fewbit-partial")) > 2
        process.send_signal(kind)
        assert process.wait(60) != 0
    assert bytes_of(tmp_path / "m") == before
    if kind == signal.SIGINT:
        assert os.listdir(tmp_path) == ["m"]
    io.write(tmp_path / "m", TENSORS, overwrite=True)
    assert os.listdir(tmp_path) == ["m"]
    assert set(io.read(tmp_path / "m").tensors) == set(TENSORS)
