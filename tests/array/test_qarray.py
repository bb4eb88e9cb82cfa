"""QArray as a JAX citizen: pytree, transformations, copies, repr, and the operations that it refuses."""

import copy
import operator
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import fewbit as fb
from fewbit.errors import QuantError

NAMES = ["int4", "uint4", "nvfp4_absmax", "nf4_dq"]
each = pytest.mark.parametrize("name", NAMES)


def make(name: str, shape: tuple[int, ...] = (4, 128)) -> fb.QArray:
    return _quantize(jax.random.normal(jax.random.key(0), shape), name)


_quantize = jax.jit(fb.quantize, static_argnums=1)
_dequantize = jax.jit(fb.dequantize)


@pytest.mark.slow
@each
def test_pytree_round_trip(name: str):
    q = make(name)
    leaves, treedef = jax.tree.flatten(q)
    assert all(isinstance(leaf, jax.Array) for leaf in leaves)
    back = jax.tree.unflatten(treedef, leaves)
    assert isinstance(back, fb.QArray) and back.scheme == q.scheme and back.shape == q.shape
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(q)]
    assert paths[0] == ".codes" and paths[1].startswith(".scale")
    assert hash(treedef) == hash(jax.tree.structure(make(name)))
    doubled = jax.tree.map(lambda leaf: leaf * 2 if leaf.dtype == jnp.float32 else leaf, q)
    assert isinstance(doubled, fb.QArray)


@each
def test_through_jit_and_donation(name: str):
    q = make(name)
    same = jax.jit(lambda q: q)(q)
    np.testing.assert_array_equal(_dequantize(same), _dequantize(q))
    expected = np.asarray(_dequantize(q))
    donated = jax.jit(lambda q: jax.tree.map(lambda leaf: leaf + leaf.dtype.type(0), q), donate_argnums=0)(same)
    np.testing.assert_array_equal(_dequantize(donated), expected)
    assert same.codes.is_deleted()


@each
def test_placement(name: str):
    q = make(name)
    moved = jax.device_put(q, jax.devices()[1])
    assert all(leaf.devices() == {jax.devices()[1]} for leaf in jax.tree.leaves(moved))
    mesh = jax.make_mesh((4,), ("rows",))

    def rows(leaf: jax.Array) -> NamedSharding:
        return NamedSharding(mesh, PartitionSpec("rows") if leaf.shape[0] == 4 else PartitionSpec())

    sharded = jax.device_put(q, jax.tree.map(rows, q))
    assert len(sharded.codes.sharding.device_set) == 4
    np.testing.assert_array_equal(_dequantize(sharded), _dequantize(q))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["nf4", "nvfp4", *(pytest.param(n, marks=pytest.mark.slow) for n in ("nf4_dq", "mxfp4", "q4_0", "int8"))]
)
def test_explicitly_sharded_arrays(name: str):
    # Under an explicit mesh, JAX refuses a gather whose sharding it cannot tell; tables and searches must tell it.
    mesh = jax.make_mesh((4,), ("rows",), axis_types=(AxisType.Explicit,))
    x = jax.random.normal(jax.random.key(0), (4, 128))
    sharded = _quantize(jax.device_put(x, NamedSharding(mesh, PartitionSpec("rows"))), name)
    assert jax.typeof(sharded.codes).sharding.spec[0] == "rows"
    np.testing.assert_array_equal(_dequantize(sharded), _dequantize(make(name)))


@each
def test_copies(name: str):
    q = make(name)
    for other in (copy.copy(q), copy.deepcopy(q), pickle.loads(pickle.dumps(q))):
        assert isinstance(other, fb.QArray) and other.scheme == q.scheme and other.slack == q.slack
        np.testing.assert_array_equal(_dequantize(other), _dequantize(q))


@each
def test_fields_are_frozen(name: str):
    with pytest.raises(AttributeError):
        make(name).codes = jnp.zeros(3, jnp.uint8)  # type: ignore[misc]


@each
def test_repr_shows_shape_scheme_and_bytes_never_data(name: str):
    q = make(name)
    assert repr(q).startswith(f"QArray({name}, float32[4, 128], {q.nbytes:,} bytes, {q.bits_per_weight:.3f} bits/weight)")
    assert "\n" not in repr(q) and "Array(" not in repr(q).replace("QArray(", "")
    abstract = jax.eval_shape(lambda q: q, q)
    assert repr(abstract) == repr(q), "an abstract QArray reads the same"
    assert "object" in repr(jax.tree.map(lambda _: object(), q))


def test_hashing_is_by_identity():
    a, b = make("int4"), make("int4")
    assert len({a, b, a}) == 2


@pytest.mark.slow
def test_stack_vmap_and_scan():
    q = make("nvfp4_absmax", (3, 4, 32))
    layers = [make("nvfp4_absmax", (4, 32)) for _ in range(3)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)
    assert stacked.shape == (3, 4, 32) == q.shape and stacked.tensor_scale.shape == (3, 1, 1)
    expected = np.stack([_dequantize(layer) for layer in layers])
    np.testing.assert_array_equal(_dequantize(stacked), expected)
    np.testing.assert_array_equal(jax.vmap(fb.dequantize)(stacked), expected)
    np.testing.assert_array_equal(_dequantize(stacked[1]), expected[1])
    np.testing.assert_array_equal(_dequantize(stacked.mT), expected.mT)
    with pytest.raises(QuantError, match="stacked arrays with a tensor scale each cannot be reshaped"):
        stacked.reshape(12, 32)


def test_astype_changes_what_it_stands_for_only():
    q = make("int4")
    half = q.astype(jnp.bfloat16)
    assert half.dtype == jnp.bfloat16 and half.codes is q.codes and q.dtype == jnp.float32
    np.testing.assert_array_equal(_dequantize(half), _dequantize(q).astype(jnp.bfloat16))
    assert q.astype(np.float64).dtype == jnp.zeros(1, jax.dtypes.canonicalize_dtype(np.float64)).dtype
    for dtype in (jnp.int8, jnp.complex64, bool):
        with pytest.raises(QuantError, match=r"a QArray has a floating dtype; astype\(.*\) needs fb.dequantize first"):
            q.astype(dtype)


def test_a_scalar_is_refused():
    q = make("uint4", (1, 1))
    for compute in (lambda: q.reshape(()), lambda: q.reshape(), lambda: q[0].reshape(())):
        with pytest.raises(QuantError, match=r"cannot reshape \(1.*\) into a scalar; a QArray has at least one axis"):
            compute()


def test_dequantize_to_a_dtype():
    q = make("int4")
    np.testing.assert_array_equal(fb.dequantize(q, jnp.float16), _dequantize(q).astype(jnp.float16))
    with pytest.raises(QuantError, match="dequantize returns a floating dtype, not int32"):
        fb.dequantize(q, jnp.int32)


@pytest.mark.usefixtures("unchecked")
def test_what_is_no_qarray_is_not_dequantized():
    with pytest.raises(QuantError, match="dequantize takes a QArray, not ndarray"):
        fb.dequantize(np.ones((2, 2)))


BINARY = [operator.add, operator.sub, operator.mul, operator.truediv, operator.pow, operator.lt, operator.le]
BINARY += [operator.gt, operator.ge, operator.eq, operator.ne]


@pytest.mark.parametrize("op", BINARY, ids=lambda op: op.__name__)
@pytest.mark.parametrize("other", [2.0, np.ones((4, 128), np.float32), None], ids=["float", "numpy", "qarray"])
def test_arithmetic_and_comparisons_are_refused_both_ways(op, other):
    q = make("int4")
    other = q if other is None else other
    for left, right in ((q, other), (other, q)):
        with pytest.raises(TypeError, match=r"run the code through fb.transparent\(fn\), or call fb.dequantize\(q\) first"):
            op(left, right)


@pytest.mark.parametrize(
    "convert",
    [operator.neg, abs, bool, float, int, np.asarray, np.sum, lambda q: np.add(q, 1), lambda q: np.float32(1) * q],
    ids=["neg", "abs", "bool", "float", "int", "asarray", "sum", "np.add", "np-scalar"],
)
def test_conversions_are_refused(convert):
    with pytest.raises(TypeError, match=r"fb.transparent|not support ufuncs"):
        convert(make("int4"))


@pytest.mark.parametrize("op", [operator.floordiv, operator.mod, operator.and_, operator.invert], ids=lambda op: op.__name__)
def test_other_operators_do_not_exist(op):
    q = make("int4")
    with pytest.raises(TypeError):
        op(q) if op is operator.invert else op(q, q)


def test_a_jax_array_operand_is_refused():
    q = make("int4")
    for compute in (
        lambda: jnp.ones((4, 128)) + q,
        lambda: q * jnp.ones((4, 128)),
        lambda: jnp.sum(q),
        lambda: jnp.asarray(q),
    ):
        with pytest.raises(TypeError):
            compute()


def test_is_qarray():
    q = make("int4")
    assert fb.is_qarray(q) and not fb.is_qarray(jnp.ones(2))
    assert jax.tree.leaves({"a": q, "b": 1}, is_leaf=fb.is_qarray)[0] is q
