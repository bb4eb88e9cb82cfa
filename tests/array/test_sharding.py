"""Shardings of QArrays: what every device holds, what is refused, and that nothing that moves an array loses its sharding."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P
from jax.sharding import AxisType, Mesh, NamedSharding

import fewbit as fb
from fewbit.errors import QuantError
from tests.conformance import array_laws as laws
from tests.conformance.test_schemes import schemes

SHAPE = (64, 512)
SPECS = [
    P("model"),
    P(None, "model"),
    P("data", "model"),
    P("model", "data"),
    P(("data", "model")),
    P(None, ("data", "model")),
]


def mesh_of(kind: AxisType = AxisType.Auto) -> Mesh:
    return jax.make_mesh((2, 4), ("data", "model"), axis_types=(kind, kind))


each_mesh = pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])


@functools.cache
def make(name: str, axis: int = -1, shape: tuple[int, ...] = SHAPE) -> fb.QArray:
    scheme = fb.scheme(name).along(axis, len(shape))
    every_code_means_something = len(scheme.format.values()) == 2**scheme.format.bits
    if every_code_means_something and not isinstance(scheme.scale, fb.Scheme):
        return laws.random_qarray(scheme, shape)
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    return jax.device_get(jax.jit(lambda x: fb.quantize(x, name, axis=axis))(x))


def shards(q: fb.QArray, spec: P) -> bool:
    """Whether the array can be laid out so."""
    try:
        fb.specs_of(q, mesh_of(), spec)
    except QuantError:
        return False
    return True


# --- what a device holds ---


@pytest.mark.slow
@pytest.mark.parametrize("axis", [-1, -2], ids=["rows", "columns"])
@schemes([*fb.SCHEMES.names(), "int4_g32", "int3_g32"])
def test_every_device_holds_the_qarray_of_its_part(name: str, axis: int):
    rows, columns = SHAPE
    block = fb.scheme(name).tile.get(-1) or 1
    columns = max(columns, 4 * block)  # a block at least for each device of the longer axis of the mesh
    q, mesh = make(name, axis, (rows, columns) if axis == -1 else (columns, rows)), mesh_of()
    dense = laws.numpy_dequantize(q)
    fitting = [spec for spec in SPECS if shards(q, spec)]
    assert P("model") in fitting
    for spec in fitting:
        there = q.with_sharding((mesh, spec))
        indices = NamedSharding(mesh, spec).devices_indices_map(q.shape)
        for d, device in enumerate(mesh.devices.flat):
            part = jax.tree.map(lambda leaf, d=d: np.asarray(leaf.addressable_shards[d].data), there)
            assert part.shape == dense[indices[device]].shape
            np.testing.assert_array_equal(laws.numpy_dequantize(part), dense[indices[device]])


CASES = [
    ("int8", -1, P("data", "model"), [P("data", "model"), P("data", None)]),
    ("int8", -2, P("data", "model"), [P("data", "model"), P(None, "model")]),
    ("int4_g32", -1, P(None, "model"), [P(None, "model")] * 2),
    ("uint4", -1, P(("data", "model"), None), [P(("data", "model"), None)] * 3),
    ("q4_1", -1, P(None, "data"), [P(None, "data")] * 3),
    ("nvfp4", -1, P("data", "model"), [P("data", "model"), P("data", "model"), P(None, None)]),
    ("fp8_block128", -1, P(None, "model"), [P(None, "model")] * 2),
    ("fp8_tensor", -1, P("data", "model"), [P("data", "model"), P(None, None)]),
    ("nf4_dq", -1, P("data", "model"), [P("data", "model")] * 2 + [P(None, None)] * 2),
]


@pytest.mark.parametrize(("name", "axis", "spec", "expected"), CASES, ids=str)
def test_specs_of_the_leaves(name: str, axis: int, spec: P, expected: list[P]):
    specs = fb.specs_of(make(name, axis), mesh_of(), spec)
    assert isinstance(specs, fb.QArray)
    assert jax.tree.leaves(specs) == expected


def test_a_stack_with_a_tensor_scale_each_is_cut_between_them():
    layers = [make("nvfp4", shape=(8, 64)) for _ in range(4)]
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *layers)
    assert fb.specs_of(stacked, mesh_of(), P("model")).tensor_scale == P("model", None, None)
    assert fb.specs_of(stacked, mesh_of(), P(None, "model")).tensor_scale == P(None, None, None)


# --- what is refused ---


REFUSED = [
    (
        "int4_g32",
        (64, 96),
        P(None, "model"),
        "axis 1 over mesh axis 'model' (size 4): shards of 24 elements cut tiles of 32",
    ),
    (
        "fp8_block128",
        (256, 128),
        P("model"),
        "axis 0 over mesh axis 'model' (size 4): shards of 64 elements cut tiles of 128",
    ),
    ("int8", (6, 64), P("model"), "axis 0 over mesh axis 'model' (size 4): 6 elements do not divide into 4 shards"),
    ("int4", (64, 12), P(None, "model"), "shards of 3 elements cut bytes, which hold runs of 2 codes"),
    ("int3", (64, 96), P(None, ("data", "model")), "'data' (size 2) and 'model' (size 4): shards of 12 elements cut bytes"),
    ("int4", (64, 7), P(None, "data"), "7 elements do not divide into 2 shards"),
]


@pytest.mark.parametrize(("name", "shape", "spec", "message"), REFUSED, ids=str)
def test_cutting_a_tile_or_a_byte_is_refused_with_what_fits(name: str, shape: tuple[int, ...], spec: P, message: str):
    q, mesh = make(name, shape=shape), mesh_of()
    with pytest.raises(QuantError, match=re.escape(message)) as refusal:
        q.with_sharding((mesh, spec))
    head, _, fitting = str(refusal.value).partition(" Specs that fit: ")
    assert f"does not fit {q.scheme.name}{list(shape)}" in head
    offered = eval(f"[{fitting}]", {"P": P})
    assert P(None, None) in offered
    for other in offered:
        fb.specs_of(q, mesh, other)


def test_the_message_in_full_names_the_parameter():
    params = {"mlp": {"up": make("int4_g32", shape=(64, 96))}}
    with pytest.raises(QuantError) as refusal:
        fb.shardings_of(params, mesh_of(), {"mlp": P(None, "model")})
    assert str(refusal.value) == (
        "mlp/up: P(None, 'model') does not fit int4_g32[64, 96]: axis 1 over mesh axis 'model' (size 4): shards of 24 elements "
        "cut tiles of 32. Specs that fit: P('model', None), P(None, None)"
    )


def test_scales_that_are_quantized_are_checked_too():
    nested = fb.Scheme(fb.FORMATS["int8"], {-1: 4, -2: 1})
    scheme = fb.Scheme(fb.FORMATS["nf4"], {-1: 32, -2: 1}, scale=nested)
    q = jax.jit(lambda x: fb.quantize(x, scheme))(jnp.ones((8, 256)))
    assert fb.specs_of(q, mesh_of(), P(None, "data")).scale.scale == P(None, "data")
    with pytest.raises(QuantError, match="of its scales, which are quantized too, shards of 2 elements cut tiles of 4"):
        fb.specs_of(q, mesh_of(), P(None, "model"))


def test_quantizing_on_an_explicit_mesh_refuses_cut_tiles():
    x = jax.device_put(jnp.ones((64, 96)), NamedSharding(mesh_of(AxisType.Explicit), P(None, "model")))
    message = (
        "x is sharded as P(None, 'model'), which cuts tiles of int4_g32[64, 96]; jax.reshard it first: axis 1 over mesh axis "
        "'model' (size 4): shards of 24 elements cut tiles of 32. Specs that fit: P('model', None), P(None, None)"
    )
    with pytest.raises(QuantError, match=re.escape(message)):
        fb.quantize(x, "int4_g32")
    with pytest.raises(QuantError, match=re.escape(message)):
        _quantize(x, "int4_g32")


@pytest.mark.usefixtures("unchecked")
def test_a_spec_without_a_mesh_is_refused():
    for wrong in (P("model"), P("data", "model"), None):
        with pytest.raises(QuantError, match="pass a NamedSharding, or a mesh and a PartitionSpec as a tuple"):
            make("int8").with_sharding(wrong)


def test_specs_of_sums_are_refused():
    with pytest.raises(
        QuantError, match="has unreduced or reduced axes; codes cannot be summed, so shard or replicate them"
    ):
        fb.specs_of(make("int8"), mesh_of(AxisType.Explicit), P("model", unreduced={"data"}))


def test_a_spec_of_too_many_axes_or_unknown_ones_is_refused():
    with pytest.raises(QuantError, match=r"P\(None, None, 'model'\) has 3 entries, but the array has 2 axes"):
        fb.specs_of(make("int8"), mesh_of(), P(None, None, "model"))
    with pytest.raises(ValueError, match="tensor"):
        fb.specs_of(make("int8"), mesh_of(), P("tensor"))


def test_what_is_no_spec_is_refused():
    for wrong in ("model", 3):
        with pytest.raises(QuantError, match=f"specs has {wrong!r}; pass a PartitionSpec, a NamedSharding or None"):
            fb.specs_of({"w": make("int8")}, mesh_of(), {"w": wrong})


# --- trees ---


def test_a_named_sharding_on_the_mesh_is_its_spec():
    q, mesh = fb.quantize(jnp.ones((64, 128)), "nf4"), mesh_of()
    sharding = NamedSharding(mesh, P(None, mesh.axis_names[0]))
    found, wanted = (jax.tree.leaves(fb.shardings_of(q, mesh, spec)) for spec in (sharding, sharding.spec))
    assert found == wanted
    other = jax.make_mesh((1,), ("alone",), devices=jax.devices()[:1])
    with pytest.raises(fb.QuantError, match=r"specs has a NamedSharding on .*; pass a PartitionSpec"):
        fb.shardings_of({"w": q}, other, {"w": sharding})


def test_a_tree_of_parameters():
    mesh = mesh_of()
    params = {"a": make("int8"), "b": np.ones(8, np.float32), "c": [make("nf4_dq"), None]}
    specs = {"a": P(None, "model"), "b": P("data"), "c": P("model")}
    shardings = fb.shardings_of(params, mesh, specs)
    assert jax.tree.structure(shardings) == jax.tree.structure(params)
    there = jax.device_put(params, shardings)
    assert there["a"].sharding == NamedSharding(mesh, P(None, "model"))
    assert there["b"].sharding == NamedSharding(mesh, P("data"))
    assert there["c"][0].sharding.spec == P("model", None)
    replicated = fb.shardings_of(params, mesh, None)
    assert all(sharding.is_fully_replicated for sharding in jax.tree.leaves(replicated))


def test_shapes_are_enough_and_jit_takes_what_comes():
    mesh = mesh_of()
    x = jnp.ones((64, 128))
    abstract = jax.eval_shape(lambda x: fb.quantize(x, "int4_g32"), x)
    shardings = fb.shardings_of(abstract, mesh, P("data", "model"))
    q = jax.jit(lambda x: fb.quantize(x, "int4_g32"), out_shardings=shardings)(x)
    assert q.sharding == NamedSharding(mesh, P("data", "model"))
    dense = jax.jit(fb.dequantize, in_shardings=(shardings,))(q)
    assert dense.sharding.is_equivalent_to(q.sharding, 2)


def test_memory_kinds_are_kept():
    sharding = NamedSharding(mesh_of(), P("model"), memory_kind="unpinned_host")
    kinds = {leaf.memory_kind for leaf in jax.tree.leaves(fb.array.sharding.placement(make("nvfp4"), sharding))}
    assert kinds == {"unpinned_host"}


# --- the sharding is told back ---


def test_the_sharding_of_the_array():
    q, mesh = jax.tree.map(jnp.asarray, make("int4_g32")), mesh_of()
    assert q.sharding == q.codes.sharding
    there = q.with_sharding(NamedSharding(mesh, P("data")))
    assert there.sharding == NamedSharding(mesh, P("data", None))
    assert make("int4_g32").sharding is None, "NumPy arrays are nowhere"
    torn = jax.device_put(q, jax.tree.map(lambda leaf: NamedSharding(mesh, P("data" if leaf is q.codes else None)), q))
    assert torn.sharding is None


@each_mesh
def test_under_jit_only_an_explicit_mesh_tells_it(kind: AxisType):
    told = []
    q = make("int4_g32").with_sharding((mesh_of(kind), P("data", "model")))
    jax.jit(lambda q: told.append(q.sharding))(q)
    assert told[0] is None if kind is AxisType.Auto else told[0].spec == P("data", "model")


# --- what keeps it ---


@pytest.mark.slow
@each_mesh
@pytest.mark.parametrize("name", ["int8", "int4_g32", "nvfp4_absmax", "nf4_dq"])
def test_quantizing_and_decoding_keep_the_sharding_and_every_bit(name: str, kind: AxisType):
    sharding = NamedSharding(mesh_of(kind), P("data", "model"))
    x = jax.random.normal(jax.random.key(0), (32, 256))
    plain = _quantize(x, name)
    q = _quantize(jax.device_put(x, sharding), name)
    assert q.sharding == sharding
    if name != "nf4_dq":  # the mean of its scales is a sum, and shards add it up in another order
        for leaf, other in zip(jax.tree.leaves(q), jax.tree.leaves(plain), strict=True):
            np.testing.assert_array_equal(leaf, other)
    dense = _dequantize(q)
    assert dense.sharding.is_equivalent_to(sharding, 2)
    np.testing.assert_array_equal(dense, laws.numpy_dequantize(jax.device_get(q)))


_quantize = jax.jit(fb.quantize, static_argnums=1)
_dequantize = jax.jit(fb.dequantize)

MOVES = {
    "T": (lambda q: q.T, P("model", "data")),
    "swapaxes": (lambda q: q.swapaxes(0, 1), P("model", "data")),
    "merge": (lambda q: q.reshape(2, 32, 512).reshape(64, 512), P("data", "model")),
    "split rows": (lambda q: q.reshape(8, 8, 512), P("data", None, "model")),
    "split columns": (lambda q: q.reshape(64, 8, 64), P("data", "model", None)),
    "unit axis": (lambda q: q.reshape(1, 64, 512), P(None, "data", "model")),
    "astype": (lambda q: q.astype(jnp.bfloat16), P("data", "model")),
    "rows": (lambda q: q[16:48], P("data", "model")),
    "columns": (lambda q: q[:, 256:], P("data", "model")),
    "new axis": (lambda q: q[None], P(None, "data", "model")),
}


@pytest.mark.slow
@each_mesh
@pytest.mark.parametrize("move", MOVES)
def test_layout_operations_keep_the_sharding(move: str, kind: AxisType):
    change, spec = MOVES[move]
    whole = make("int4_g32")
    there = whole.with_sharding((mesh_of(kind), P("data", "model")))
    moved = jax.jit(change)(there)
    if kind is AxisType.Explicit or move not in ("rows", "columns"):  # XLA is free where a cut axis is sharded
        assert moved.sharding.is_equivalent_to(NamedSharding(mesh_of(kind), spec), moved.ndim)
    np.testing.assert_array_equal(
        laws.numpy_dequantize(jax.device_get(moved)), laws.numpy_dequantize(change(jax.tree.map(jnp.asarray, whole)))
    )


@pytest.mark.parametrize("index", [(slice(None), slice(128, 384)), (slice(16, 32),), (3,)], ids=str)
def test_slices_of_other_axes_keep_the_sharding(index: tuple):
    q = make("int4_g32")
    cut = 1 if len(index) == 2 else 0
    spec = P("model", None) if cut else P(None, "model")
    part = q.with_sharding((mesh_of(), spec))[index]
    assert part.sharding.spec == (spec if part.ndim == 2 else P("model"))
    np.testing.assert_array_equal(laws.numpy_dequantize(jax.device_get(part)), laws.numpy_dequantize(q)[index])


@each_mesh
def test_with_sharding_under_jit_moves_codes(kind: AxisType):
    mesh = mesh_of(kind)
    q = make("nf4_dq").with_sharding((mesh, P("data", "model")))
    compiled = jax.jit(lambda q: q.with_sharding((mesh, P(None, "model")))).lower(q).compile()
    assert set(re.findall(r"(\w+)\[[\d,]*\]\S* all-gather\(", compiled.as_text())) == {"u8"}
    moved = compiled(q)
    assert moved.sharding.spec == P(None, "model")
    np.testing.assert_array_equal(laws.numpy_dequantize(jax.device_get(moved)), laws.numpy_dequantize(jax.device_get(q)))


# --- shard_map ---


@pytest.mark.slow
@each_mesh
@pytest.mark.parametrize("name", ["int8", "int4_g32", "nvfp4", "q4_0"])
@pytest.mark.parametrize("split", ["out", "in"])
def test_shard_map_sees_local_arrays(name: str, split: str, kind: AxisType):
    mesh, q = mesh_of(kind), make(name, -2, (128, 64))
    x = np.random.default_rng(1).standard_normal((8, 128)).astype(np.float32)
    is_out = split == "out"
    spec, x_spec = (P(None, "model"), P("data")) if is_out else (P("model"), P("data", "model"))
    local_shape = (128, 16) if is_out else (32, 64)

    def body(x: jax.Array, q: fb.QArray) -> jax.Array:
        assert q.shape == local_shape
        assert fb.dequantize(q).shape == local_shape
        return x @ q if is_out else jax.lax.psum(x @ q, "model")

    specs = fb.specs_of(q, mesh, spec)
    out_spec = P("data", "model") if is_out else P("data")
    product = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=(x_spec, specs), out_specs=out_spec))
    result = product(jax.device_put(x, NamedSharding(mesh, x_spec)), q.with_sharding((mesh, spec)))
    expected = x.astype(np.float64) @ laws.numpy_dequantize(q)
    # A sum of 128 float32 products: each rounding is at most 2**-24 of the sum of magnitudes.
    bound = 128 * 2.0**-24 * (np.abs(x).astype(np.float64) @ np.abs(laws.numpy_dequantize(q)))
    assert (np.abs(result - expected) <= bound).all()


def test_shard_map_gives_qarrays_out():
    mesh, x = mesh_of(), jax.random.normal(jax.random.key(0), (32, 128))
    spec = P("data", "model")
    specs = fb.specs_of(jax.eval_shape(lambda x: fb.quantize(x, "int4_g32"), x), mesh, spec)
    q = jax.jit(jax.shard_map(lambda x: fb.quantize(x, "int4_g32"), mesh=mesh, in_specs=spec, out_specs=specs))(x)
    assert q.sharding == NamedSharding(mesh, spec)
    for leaf, other in zip(jax.tree.leaves(q), jax.tree.leaves(_quantize(x, "int4_g32")), strict=True):
        np.testing.assert_array_equal(leaf, other)
