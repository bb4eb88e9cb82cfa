"""Trees of any framework come back leaf for leaf, and what does not fit is named."""

import dataclasses
import enum
import json
import math
import os
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import fewbit as fb
from fewbit import QuantError, io
from tests.io.examples import X, quantized

Q = quantized("nvfp4")


class Pair(NamedTuple):
    first: Any
    second: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Layer:
    kernel: Any
    rate: Any


@jax.tree_util.register_pytree_with_keys_class
class Twins(Pair):
    """Two leaves whose keys differ in type only."""

    def tree_flatten_with_keys(self):
        keys = jax.tree_util.DictKey("1"), jax.tree_util.SequenceKey(1)
        return list(zip(keys, self, strict=True)), None

    @classmethod
    def tree_unflatten(cls, static, leaves):
        return cls(*leaves)


def same(a, b) -> None:
    """Asserts that two trees are equal: structure, types of leaves, dtypes, bits."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert type(x) is type(y) or (callable(x) and x is y), (type(x), type(y))
        if hasattr(x, "dtype"):
            assert (x.dtype, x.shape) == (y.dtype, y.shape)
            if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
                x, y = jax.random.key_data(x), jax.random.key_data(y)
            assert np.asarray(x).tobytes() == np.asarray(y).tobytes()
        else:
            assert x == y or (x != x and y != y)


def abstract(tree):
    """The tree with abstract arrays."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype) if hasattr(x, "dtype") else x, tree)


TREES = {
    "nested dicts": {"a": {"b": jnp.arange(3), "c": Q}, "d": jnp.float32(3)},
    "sequences": [jnp.ones(2), (Q, {"x": jnp.zeros((0, 3))}), Pair(jnp.ones(1), quantized("nf4_dq"))],
    "a dataclass": Layer(quantized("q4_1"), 0.25),
    "one array": jnp.arange(4),
    "one QArray": Q,
    "numpy": {"wide": np.array([math.pi, 1e300]), "ids": np.array(2**40), "one": np.float64(0.1), "c": np.ones(2, "c16")},
    "dtypes": {
        name: np.array([[1, 2, 1]]).astype(name)
        for name in ("bfloat16", "bool", "int4", "uint2", "float4_e2m1fn", "float8_e4m3", "float8_e8m0fnu", "complex64")
    },
    "random keys": {"a": jax.random.key(1), "b": jax.random.split(jax.random.key(2, impl="rbg"), 3)},
    "scalars": {
        "t": True,
        "i": -(10**30),
        "f": 0.1,
        "nan": math.nan,
        "inf": -math.inf,
        "c": 1 - 2j,
        "s": "ü",
        "x": jnp.ones(1),
    },
    "odd keys": {"a/b": {"~": jnp.ones(1), "": jnp.zeros(1)}, "a": {"b": jnp.ones(2)}, "~2": jnp.ones(3), "w.codes": X},
    "policies": {"w": dataclasses.replace(quantized("int8"), policy=fb.recipe("w8a8").rules[-1].policy)},
    "none": {"a": None, "b": jnp.ones(1), "c": {}, "d": ()},
}


@pytest.mark.finding(14)
@pytest.mark.parametrize("name", TREES)
def test_a_tree_comes_back_into_its_like(tmp_path, name):
    tree = TREES[name]
    fb.save(tmp_path / "t", tree)
    same(fb.load(tmp_path / "t", like=tree), tree)
    if name != "numpy":
        like = abstract(tree)
        same(fb.load(tmp_path / "t", like), jax.tree.map(lambda x: jnp.asarray(x) if isinstance(x, np.ndarray) else x, tree))
    assert io.verify(tmp_path / "t") == [] and os.listdir(tmp_path) == ["t"]


@pytest.mark.finding(14)
def test_without_like_nested_dicts_come_back(tmp_path):
    for name in ("nested dicts", "one array", "one QArray", "random keys", "scalars", "odd keys", "policies"):
        same(
            fb.load(fb.save(tmp_path / name, TREES[name])),
            jax.tree.map(lambda x: jnp.asarray(x) if x is X else x, TREES[name]),
        )
    found = fb.load(fb.save(tmp_path / "sequence", TREES["sequences"]))
    assert found.keys() == {"0", "1", "2"} and found["1"].keys() == {"0", "1"} and found["2"].keys() == {"first", "second"}
    same(found["2"]["second"], TREES["sequences"][2].second)
    found = fb.load(fb.save(tmp_path / "numpy", TREES["numpy"]))
    assert isinstance(found["wide"], np.ndarray) and found["wide"].dtype == np.float64 and found["ids"] == 2**40
    found = fb.load(fb.save(tmp_path / "dtypes", TREES["dtypes"]))
    assert all(isinstance(x, jax.Array) and x.dtype == name for name, x in found.items())


@pytest.mark.finding(14)
def test_a_directory_of_named_tensors_is_a_tree_too(tmp_path):
    io.write(tmp_path / "m", {"layers/0/w": Q, "model.norm": X})
    same(fb.load(tmp_path / "m"), {"layers": {"0": {"w": Q}}, "model.norm": jnp.asarray(X)})
    io.write(tmp_path / "n", {"a": X, "a/b": X})
    with pytest.raises(QuantError, match=r"'a/b' is below another array; fewbit\.io\.read gives the arrays by name"):
        fb.load(tmp_path / "n")
    np.savez(tmp_path / "m.npz", x=X)
    with pytest.raises(QuantError, match=r"m\.npz is not a directory that fewbit wrote; fewbit\.io\.read opens other"):
        fb.load(tmp_path / "m.npz")


@pytest.mark.finding(14)
def test_equinox_modules(tmp_path, unchecked):
    eqx = pytest.importorskip("equinox")
    model = eqx.nn.MLP(64, 8, 32, 1, key=jax.random.key(0))
    model = eqx.tree_at(lambda m: m.layers[0].weight, model, fb.quantize(model.layers[0].weight, "int8"))
    fb.save(tmp_path / "m", model)
    same(fb.load(tmp_path / "m", model), model)
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype) if eqx.is_array(x) else x, model)
    same(fb.load(tmp_path / "m", like), model)
    assert fb.load(tmp_path / "m")["layers"]["1"].keys() == {"weight", "bias"}
    with pytest.raises(
        QuantError, match=r"tensors is a MLP; io\.write takes arrays and QArrays by name\. fb\.save writes any"
    ):
        io.write(tmp_path / "n", model)


@pytest.mark.finding(14)
def test_nnx_modules_and_states(tmp_path):
    nnx = pytest.importorskip("flax.nnx")
    model = nnx.Sequential(nnx.Linear(64, 8, rngs=nnx.Rngs(0)), nnx.Dropout(0.1, rngs=nnx.Rngs(1)))
    model.layers[0].kernel.set_value(fb.quantize(model.layers[0].kernel.get_value(), "int8", axis=0))
    same(fb.load(fb.save(tmp_path / "m", model), model), model)
    graph, state = nnx.split(model)
    found = fb.load(fb.save(tmp_path / "s", state), jax.eval_shape(lambda: state))
    same(found, state)
    same(nnx.merge(graph, found), model)


def test_tied_parameters_of_nnx_modules_are_tied_again(tmp_path):
    nnx = pytest.importorskip("flax.nnx")

    def tied(tie=True):
        model = nnx.Module()
        model.embed = nnx.Embed(16, 8, rngs=nnx.Rngs(0))
        model.head = model.embed if tie else nnx.Embed(16, 8, rngs=nnx.Rngs(1))
        model.table, model.drop = model.embed.embedding, nnx.Dropout(0.1, rngs=nnx.Rngs(1))
        model.drops = nnx.List([model.drop, nnx.Linear(8, 8, rngs=nnx.Rngs(2))])
        return model

    fb.save(tmp_path / "m", {"model": tied(), "none": None, "step": 3})
    for like in (tied(), nnx.eval_shape(tied)):
        found = fb.load(tmp_path / "m", {"model": like, "none": None, "step": 0})
        model = found["model"]
        assert model.head is model.embed and model.table is model.embed.embedding and model.drops[0] is model.drop
        same(found, {"model": tied(), "none": None, "step": 3})
    untied = fb.load(tmp_path / "m", {"model": tied(tie=False), "none": None, "step": 0})["model"]
    assert untied.head is not untied.embed
    fb.save(tmp_path / "untied", tied(tie=False))
    with pytest.raises(
        QuantError, match=r"embed/embedding/value and head/embedding/value have different values, and are one"
    ):
        fb.load(tmp_path / "untied", tied())


@pytest.mark.finding(14)
def test_linen_variables_in_boxes(tmp_path, unchecked):
    linen = pytest.importorskip("flax.linen")
    variables = {"params": {"w": linen.Partitioned(Q, ("a", None)), "b": jnp.ones(2)}, "batch_stats": {"mean": jnp.ones(2)}}
    same(fb.load(fb.save(tmp_path / "m", variables), abstract(variables)), variables)
    with pytest.raises(
        QuantError, match=r"tensor 'params' is a dict; expected an array or a QArray\. fb\.save writes any tree"
    ):
        io.write(tmp_path / "n", variables)


@pytest.mark.finding(14)
def test_leaves_come_back_on_the_shardings_of_like(tmp_path):
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("x", "y"))

    def on(*spec):
        return NamedSharding(mesh, PartitionSpec(*spec))

    tree = {"w": quantized("int8_g32"), "b": jnp.arange(8.0), "k": jax.random.key(0), "free": jnp.ones(3)}
    fb.save(tmp_path / "m", tree)
    struct = abstract(tree)
    shardings = {"w": on("x", "y"), "b": on("y"), "k": on()}
    like = {n: jax.tree.map(lambda x, n=n: x.update(sharding=shardings[n]), struct[n]) for n in shardings}
    found = fb.load(tmp_path / "m", like | {"free": struct["free"]})
    same(found, tree)
    assert found["w"].codes.sharding == on("x", "y") == found["w"].scale.sharding
    assert (found["b"].sharding, found["k"].sharding) == (on("y"), on())
    placed = jax.device_put(tree["b"], on("x"))
    again = fb.load(tmp_path / "m", like | {"free": tree["free"], "b": placed})
    assert again["b"].sharding == on("x") and not again["free"].committed


def test_like_of_eval_shape_on_an_explicit_mesh(tmp_path):
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])
    tree = {"w": quantized("int8_g32").with_sharding((mesh, PartitionSpec("x")))}
    like = jax.eval_shape(lambda tree: tree, tree)
    fb.save(tmp_path / "m", tree)
    with jax.set_mesh(mesh):
        found = fb.load(tmp_path / "m", like)
    same(found, tree)
    assert found["w"].sharding == tree["w"].sharding
    with pytest.raises(QuantError, match=r"P\('x', None\) on an abstract mesh.*; call fb.load within jax.set_mesh"):
        fb.load(tmp_path / "m", like)


@pytest.mark.finding(14)
def test_what_does_not_fit_like_is_named(tmp_path):
    tree = {"layers": [{"w": Q, "b": jnp.ones(3)}], "n": 3}
    fb.save(tmp_path / "m", tree)

    def fails(like, match):
        with pytest.raises(QuantError, match=match):
            fb.load(tmp_path / "m", like)

    fails(
        {"layers": [{"w": Q, "bias": jnp.ones(3)}], "n": 3},
        r"m does not match like: it lacks layers/0/bias \(did you mean 'lay.*like lacks layers/0/b$",
    )
    fails({"layers": [{"w": Q, "b": jnp.ones(4)}], "n": 3}, r"layers/0/b: the file has float32\[3\], like has float32\[4\]$")
    fails(
        {"layers": [{"w": Q, "b": jnp.ones(3, jnp.bfloat16)}], "n": 3},
        r"layers/0/b: the file has float32\[3\], like has bfloat16\[3\]",
    )
    fails(
        {"layers": [{"w": X, "b": jnp.ones(3)}], "n": 3},
        r"layers/0/w: the file has nvfp4 for float32\[8, 64\], like has float32\[8, 64\]",
    )
    fails(
        {"layers": [{"w": Q, "b": Q}], "n": 0.5},
        r"b: the file has float32\[3\], like has nvfp4.*, n: the file has a Python int, like has a Python float",
    )
    policy = fb.recipe("w8a8").rules[-1].policy
    fails({"layers": [{"w": dataclasses.replace(Q, policy=policy), "b": jnp.ones(3)}], "n": 3}, "with policies None and")
    fb.save(tmp_path / "wide", {"x": np.ones(2)})
    with pytest.raises(QuantError, match="x: JAX has float64 only with jax_enable_x64; switch it on, or put a numpy array"):
        fb.load(tmp_path / "wide", {"x": jax.ShapeDtypeStruct((2,), np.float64)})


@pytest.mark.finding(14)
@pytest.mark.parametrize(
    ("tree", "match"),
    [
        ({"a": {"b": object()}}, "leaf 'a/b' is a object; fb.save writes arrays, QArrays, random keys, numbers and strings"),
        ({"a": jax.ShapeDtypeStruct((2,), np.float32)}, "leaf 'a' is an abstract array"),
        ({"a": abstract({"q": Q})}, "leaf 'a/q' is an abstract array"),
        (Twins(X, X), "two leaves of the tree have the path '1'"),
        ({"a": np.array(["text"])}, "tensor 'a' has dtype <U4"),
        ({"a": np.array([1], "m8[s]")}, "tensor 'a' has dtype timedelta64"),
        ({"a": 3}, "the tree has no arrays"),
        ({"a": np.ma.masked_array(np.ones(2), [0, 1])}, "leaf 'a' is a masked array, whose mask has no place in a file"),
        ({"w": Q, "w.codes": X}, "tensor name 'w.codes' is taken already"),
    ],
    ids=["object", "abstract", "abstract QArray", "two of one path", "text", "time", "no arrays", "masked", "taken"],
)
def test_leaves_without_a_form(tmp_path, tree, match):
    with pytest.raises(QuantError, match=match):
        fb.save(tmp_path / "m", tree)
    assert os.listdir(tmp_path) == []


def test_a_text_of_an_enum_comes_back_as_a_text(tmp_path):
    tree = {"w": np.ones(2, np.float32), "s": enum.StrEnum("Color", {"RED": "red"}).RED}
    assert fb.load(fb.save(tmp_path / "m", tree))["s"] == "red"


def test_a_donated_array_is_refused(tmp_path):
    x = jnp.ones(3)
    x.delete()
    with pytest.raises(QuantError, match="leaf 'x' was deleted or donated; save the tree before that"):
        fb.save(tmp_path / "m", {"x": x})


def test_save_within_jit_is_refused(tmp_path):
    with pytest.raises(QuantError, match=r"leaf 'w' is traced; call fb\.save outside jit"):
        jax.eval_shape(lambda x: fb.save(tmp_path / "m", {"w": x}), X)


def test_an_existing_directory_and_a_changed_byte(tmp_path):
    path = fb.save(tmp_path / "m", {"x": X})
    with pytest.raises(QuantError, match="m exists; choose another output"):
        fb.save(path, {"x": X})
    fb.save(path, {"x": X + 1}, overwrite=True)
    np.testing.assert_array_equal(fb.load(path)["x"], X + 1)
    data = bytearray((path / "fewbit.safetensors").read_bytes())
    data[-1] ^= 1
    (path / "fewbit.safetensors").write_bytes(data)
    with pytest.raises(QuantError, match="the bytes of tensor 'x' were changed"):
        fb.load(path)
    with pytest.raises(QuantError, match="does not exist"):
        fb.load(tmp_path / "nowhere")


@pytest.mark.parametrize("form", [["int", 3], ["float"], "x", ["list", []], ["complex", ["0x1p0"]]], ids=str)
def test_a_scalar_that_was_written_by_hand(tmp_path, form):
    section = {"scalars": {"n": form}, "keys": {}, "dtypes": {}}
    io.write(tmp_path / "m", {"x": X}, config={"tree": section})
    with pytest.raises(QuantError, match=r"section 'tree' of config\.json, 'n': .* is not a scalar that fb\.save wrote"):
        fb.load(tmp_path / "m")
    assert json.loads((tmp_path / "m" / "config.json").read_text())["tree"] == section


def test_bfloat16_bits_are_kept(tmp_path):
    x = np.arange(2**16, dtype=np.uint16).view(ml_dtypes.bfloat16)
    assert np.asarray(fb.load(fb.save(tmp_path / "m", [x]))["0"]).tobytes() == x.tobytes()


@pytest.mark.parametrize("dtype", [">f4", ">i2", np.longdouble])
def test_dtypes_that_jax_lacks(tmp_path, dtype):
    tree = {"a": np.arange(3).astype(dtype)}
    fb.save(tmp_path / "p", tree)
    found = fb.load(tmp_path / "p", tree)["a"]
    assert found.dtype == tree["a"].dtype
    np.testing.assert_array_equal(found, tree["a"])
    np.testing.assert_array_equal(fb.load(tmp_path / "p")["a"], tree["a"])


@pytest.mark.parametrize("name", ["float6_e2m3fn", "float6_e3m2fn", "float4_e2m1fn", "float8_e8m0fnu", "int2"])
def test_small_dtypes_come_back_in_numpy_where_jax_has_none(tmp_path, name):
    x = np.array([1, 0, 1], getattr(ml_dtypes, name))
    found = fb.load(fb.save(tmp_path / "x", {"a": x}))["a"]
    assert isinstance(found, np.ndarray) == name.startswith("float6_")
    assert found.dtype == x.dtype and np.asarray(found).tobytes() == x.tobytes()
