"""Orbax writes trees with QArrays, and restores them into abstract trees on another mesh."""

import shutil
import types

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import fewbit as fb
from fewbit import io
from fewbit.errors import QuantError, UnsupportedError
from fewbit.io.orbax import OrbaxWriter
from tests import cluster
from tests.io.examples import X, quantized

orbax = pytest.importorskip("orbax.checkpoint")


@pytest.mark.finding(14)
def test_a_tree_is_restored_into_an_abstract_tree_on_another_mesh(tmp_path):
    devices = np.array(jax.devices()[:4])
    old, new = Mesh(devices, ("data",)), Mesh(devices.reshape(2, 2), ("data", "model"))
    tree = {"w": quantized("int8_g32"), "nested": quantized("nf4_dq"), "b": jax.numpy.arange(8.0)}
    specs = {"w": PartitionSpec("data", None), "nested": None, "b": PartitionSpec("data")}
    saved = jax.device_put(tree, fb.shardings_of(tree, old, specs))
    with orbax.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "step", saved)
    specs = {"w": PartitionSpec("data", "model"), "nested": None, "b": PartitionSpec("model")}
    like = jax.tree.map(
        lambda leaf, s: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=s), tree, fb.shardings_of(tree, new, specs)
    )
    with orbax.StandardCheckpointer() as checkpointer:
        found = checkpointer.restore(tmp_path / "step", like)
    assert jax.tree.structure(found) == jax.tree.structure(tree)
    jax.tree.map(np.testing.assert_array_equal, found, tree)
    assert found["w"].codes.sharding == NamedSharding(new, specs["w"]) == found["w"].scale.sharding
    assert found["b"].sharding == NamedSharding(new, specs["b"])


def restart_tree() -> tuple[dict[str, object], dict[str, PartitionSpec | None]]:
    """A tree, and how it is sharded over the axis "d"."""
    tree = {"w": quantized("int8_g32"), "nested": quantized("nf4_dq"), "b": np.arange(8.0, dtype=np.float32)}
    return tree, {"w": PartitionSpec("d", None), "nested": None, "b": PartitionSpec("d")}


def save_in_a_cluster(path: str) -> None:
    """Each process makes and saves its shards."""
    tree, specs = restart_tree()
    shardings = fb.shardings_of(tree, Mesh(np.array(jax.devices()), ("d",)), specs)

    def placed(leaf: jax.Array, sharding: NamedSharding) -> jax.Array:
        return jax.make_array_from_callback(leaf.shape, sharding, lambda index: np.asarray(leaf)[index])

    with orbax.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, jax.tree.map(placed, tree, shardings))


def restore_in_a_cluster(path: str) -> int:
    """Compares this process's shards with the tree; the number of shards."""
    tree, specs = restart_tree()
    shardings = fb.shardings_of(tree, Mesh(np.array(jax.devices()), ("d",)), specs)
    like = jax.tree.map(lambda leaf, s: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=s), tree, shardings)
    with orbax.StandardCheckpointer() as checkpointer:
        found = checkpointer.restore(path, like)
    assert jax.tree.structure(found) == jax.tree.structure(tree)
    for leaf, expected in zip(jax.tree.leaves(found), jax.tree.leaves(tree), strict=True):
        for shard in leaf.addressable_shards:
            np.testing.assert_array_equal(shard.data, np.asarray(expected)[shard.index])
    return len(found["w"].codes.sharding.device_set)


@pytest.mark.slow
@pytest.mark.parametrize(("saving", "restoring"), [(2, 4), pytest.param(4, 1, marks=pytest.mark.long)])
def test_another_number_of_processes_restores(tmp_path, saving, restoring):
    cluster.run(save_in_a_cluster, saving, str(tmp_path / "step"))
    assert cluster.run(restore_in_a_cluster, restoring, str(tmp_path / "step")) == [restoring] * restoring


TENSORS = {"layers/0/up": quantized("nvfp4"), "model.norm.weight": X, "model.down.weight": quantized("nf4_dq")}


def write(path, **options):
    with OrbaxWriter(path, config={"model_type": "demo"}, files={"tokenizer.json": b"{}"}, **options) as writer:
        for name, value in TENSORS.items():
            writer.add(name, value)
    return path


def test_a_relative_path_is_read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write("m")
    np.testing.assert_array_equal(io.read("m").tensors["model.norm.weight"], X)


def test_weights_come_back_and_orbax_restores_their_components(tmp_path):
    found = io.read(write(tmp_path / "m", facts={"recipe": "r"}))
    assert (found.kind, found.metadata, found.facts) == ("orbax", {"model_type": "demo"}, {"recipe": "r"})
    assert list(found.tensors) == list(TENSORS) and found.files == {"tokenizer.json": b"{}"}
    for name, value in TENSORS.items():
        assert jax.tree.structure(found.tensors[name]) == jax.tree.structure(value)
        jax.tree.map(np.testing.assert_array_equal, found.tensors[name], value)
    with orbax.StandardCheckpointer() as checkpointer:
        tree = checkpointer.restore(tmp_path / "m" / "params")
    np.testing.assert_array_equal(tree["layers"]["0"]["up"]["codes"], TENSORS["layers/0/up"].codes)
    assert io.verify(tmp_path / "m") == []


def test_a_tree_that_others_wrote_is_read(tmp_path):
    with orbax.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "step", {"dense": {"kernel": X, "bias": np.arange(3, dtype=np.int64)}})
    found = io.read(tmp_path / "step")
    assert {name: info.dtype for name, info in found.tensors.info.items()} == {
        "dense/bias": "int64",
        "dense/kernel": "float32",
    }
    np.testing.assert_array_equal(found.tensors["dense/kernel"], X)


def test_what_cannot_be_a_tree_or_was_changed_is_refused(tmp_path):
    def refuse(first, name, message):
        with OrbaxWriter(tmp_path / "a") as writer:
            writer.add(first, TENSORS["layers/0/up"])
            with pytest.raises(QuantError, match=message):  # at once, not after all work
                writer.add(name, X)
            raise InterruptedError

    for first, name, message in (
        ("x", "x.codes", r"'x\.codes' is taken already"),
        ("x.y", "x/y/codes", "'x/y/codes' is taken already"),
        ("x", "x.codes.z", r"'x\.codes\.z' is below another tensor"),
        ("x.y", "x", "'x' is above another tensor"),
    ):
        with pytest.raises(InterruptedError):
            refuse(first, name, message)
    assert not list(tmp_path.iterdir())
    io.write(tmp_path / "a", {"x": X})
    with pytest.raises(QuantError, match=r"was not written by fewbit as an Orbax checkpoint.*\(it has no fewbit\.json\)"):
        OrbaxWriter(tmp_path / "a", overwrite=True)
    path = write(tmp_path / "m")
    write(path, overwrite=True)
    (path / "notes.txt").write_text("mine")
    with pytest.raises(QuantError, match="contains files that fewbit did not write"):
        write(path, overwrite=True)
    data = next((path / "params").glob("ocdbt.process_0/d/*"))
    data.write_bytes(data.read_bytes()[:-1] + bytes([data.read_bytes()[-1] ^ 1]))
    assert "was changed since it was written" in str(io.verify(path)[0])


def test_trees_that_are_not_arrays_alone(tmp_path):
    with orbax.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "text", {"w": np.ones(2, np.float32), "name": "abc"})
        checkpointer.save(tmp_path / "twice", {"a/b": np.ones(2, np.float32), "a": {"b": np.zeros(3, np.float32)}})
    with pytest.raises(UnsupportedError, match=r"'name' is .*, not an array; save the arrays alone"):
        io.read(tmp_path / "text")
    with pytest.raises(QuantError, match=r"two leaves of the tree have the path 'a/b'"):
        io.read(tmp_path / "twice")


@pytest.mark.parametrize(("name", "shape"), [("z", (0, 3)), (".", (2,))])
def test_a_tensor_that_orbax_cannot_store(tmp_path, name, shape):
    writer = OrbaxWriter(tmp_path / "m")
    with pytest.raises(QuantError, match=r"cannot be stored: Orbax needs a name and one or more elements"), writer:
        writer.add(name, np.zeros(shape, np.float32))


@pytest.mark.parametrize("free", [100, 1 << 40], ids=["before", "while it writes"])
def test_a_full_disk_is_one_clear_message(tmp_path, monkeypatch, free):
    """Orbax reports it as another error of another thread."""

    def full(*_, **__):
        try:
            raise ValueError("RESOURCE_EXHAUSTED: Failed to write file")
        finally:
            raise RuntimeError("Event loop is closed")

    monkeypatch.setattr(shutil, "disk_usage", lambda _: types.SimpleNamespace(free=free))
    monkeypatch.setattr(orbax.StandardCheckpointer, "save", full)
    with pytest.raises(QuantError, match=r"no space left for .*/m: the file being written needs [\d,]+ bytes"):
        write(tmp_path / "m")
    monkeypatch.setattr(orbax.StandardCheckpointer, "save", lambda *_: (tmp_path / "no" / "such").touch())
    if free > 100:
        with pytest.raises(QuantError, match=r"Orbax cannot write the tree: .*No such file"):
            write(tmp_path / "m")
