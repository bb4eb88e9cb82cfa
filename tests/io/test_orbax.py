"""Orbax writes trees with QArrays, and restores them into abstract trees on another mesh."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import fewbit as fb

from .examples import quantized

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
