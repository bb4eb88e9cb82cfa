"""Products of sharded QArrays: their values, and that between devices no weight moves decoded."""

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P
from jax.sharding import AxisType, Mesh, NamedSharding

import fewbit as fb
from tests.conformance import array_laws as laws

K, N = 256, 128
COLLECTIVE = re.compile(r" = (.*?) (all-gather|all-to-all|collective-permute|all-reduce|reduce-scatter)(?:-start)?\(")
ARRAY = re.compile(r"(\w+)\[([\d,]*)\]")

each_mesh = pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
each_scheme = pytest.mark.parametrize("name", ["int8", "int4_g32", "nvfp4", "nf4_dq"])


def mesh_of(kind: AxisType) -> Mesh:
    return jax.make_mesh((2, 4), ("data", "model"), axis_types=(kind, kind))


@functools.cache
def weight(name: str) -> fb.QArray:
    x = jax.random.normal(jax.random.key(0), (K, N))
    return jax.device_get(jax.jit(lambda x: fb.quantize(x, name, axis=-2))(x))


def activation(mesh: Mesh, spec: P) -> jax.Array:
    return jax.device_put(jax.random.normal(jax.random.key(1), (8, K)), NamedSharding(mesh, spec))


def moved(fn, *args) -> set[tuple[str, str, int]]:
    """The collectives of a compiled function: which, of what dtype, and of how many elements."""
    found = COLLECTIVE.findall(jax.jit(fn).lower(*args).compile().as_text())
    arrays = [(which, dtype, shape) for results, which in found for dtype, shape in ARRAY.findall(results)]
    return {(which, dtype, math.prod(map(int, filter(None, shape.split(","))))) for which, dtype, shape in arrays}


def gathers_no_decoded_weight(moves: set[tuple[str, str, int]], q: fb.QArray) -> bool:
    """Whether what is gathered or exchanged are bytes, and float scales at most."""
    scales = jax.tree.leaves(q.scale)[0].size
    return all(dtype in ("u8", "s8") or size <= scales for which, dtype, size in moves if which != "all-reduce")


def assert_product(result: jax.Array, x: jax.Array, q: fb.QArray) -> None:
    x, w = np.asarray(x, np.float64), laws.numpy_dequantize(weight(q.scheme.name)).astype(np.float64)
    # A sum of K float32 products: each rounding is at most 2**-24 of the sum of magnitudes.
    assert (np.abs(result - x @ w) <= K * 2.0**-24 * (np.abs(x) @ np.abs(w))).all()


def product(x: jax.Array, q: fb.QArray) -> jax.Array:
    return x @ q


@pytest.mark.slow
@each_mesh
@each_scheme
@pytest.mark.parametrize(
    ("spec", "x_spec"), [(P(None, "model"), P("data")), (P("model"), P("data"))], ids=["out axis", "contraction"]
)
def test_tensor_parallel_products_move_no_weight(name: str, spec: P, x_spec: P, kind: AxisType):
    mesh = mesh_of(kind)
    q, x = weight(name).with_sharding((mesh, spec)), activation(mesh, x_spec)
    moves = moved(product, x, q)
    assert {which for which, _, _ in moves} == ({"all-reduce"} if spec == P("model") else set())
    assert all(size <= 8 * N for _, _, size in moves), "only the result is summed"
    result = jax.jit(product)(x, q)
    assert_product(result, x, q)
    assert result.sharding.is_equivalent_to(NamedSharding(mesh, P("data", "model" if spec != P("model") else None)), 2)


@pytest.mark.slow
@each_scheme
@pytest.mark.parametrize(
    "spec", [P("data", "model"), P("model", "data"), P(("data", "model")), P(None, ("data", "model"))], ids=str
)
def test_fully_sharded_weights_are_gathered_as_codes(name: str, spec: P):
    mesh = mesh_of(AxisType.Explicit)
    if name == "nf4_dq" and spec == P(("data", "model")):
        spec = P("data")  # 8 shards would cut its tiles of 64
    q, x = weight(name).with_sharding((mesh, spec)), activation(mesh, P("data"))
    moves = moved(product, x, q)
    assert "all-gather" in {which for which, _, _ in moves} and gathers_no_decoded_weight(moves, q)
    result = jax.jit(product)(x, q)
    assert_product(result, x, q)
    assert jax.typeof(result).sharding.spec[0] == "data"


def test_on_an_auto_mesh_the_code_says_what_is_gathered():
    mesh = mesh_of(AxisType.Auto)
    q, x = weight("int4_g32").with_sharding((mesh, P("data", "model"))), activation(mesh, P("data"))
    moves = moved(lambda x, q: x @ q.with_sharding((mesh, P(None, "model"))), x, q)
    assert {which for which, _, _ in moves} == {"all-gather"} and gathers_no_decoded_weight(moves, q)
    assert not gathers_no_decoded_weight({("all-gather", "f32", K * N // 4)}, q)
    assert_product(jax.jit(lambda x, q: x @ q.with_sharding((mesh, P(None, "model"))))(x, q), x, q)


@each_mesh
def test_arrays_that_are_there_tell_their_sharding(kind: AxisType):
    mesh = mesh_of(kind)
    q, x = weight("int8").with_sharding((mesh, P("data", "model"))), activation(mesh, P("data"))
    gathered = fb.ops.all_gather.with_gathered_codes(x, q, (((1,), (0,)), ((), ())))[1]
    assert gathered.sharding.spec == P(None, "model")
    assert_product(x @ q, x, q)


@pytest.mark.parametrize(
    ("q_spec", "x_spec", "expected"),
    [
        (P("data", "model"), P("data", None), P(None, "model")),
        (P("data", "model"), P(None, "data"), P("data", "model")),
        (P("data", "model"), P(None, None), P("data", "model")),
        (P(("data", "model"), None), P("data", None), P("model", None)),
        (P("model", "data"), P("data", "model"), P("model", None)),
        (P(None, "data"), P(("data", "model"), None), P(None, None)),
    ],
    ids=str,
)
@pytest.mark.parametrize("is_left", [True, False])
def test_the_quantized_operand_gives_way(q_spec: P, x_spec: P, expected: P, is_left: bool):
    mesh = mesh_of(AxisType.Auto)
    q, x = weight("int8").with_sharding((mesh, q_spec)), activation(mesh, x_spec)
    if is_left:
        left, right = fb.ops.all_gather.with_gathered_codes(q, x, (((0,), (1,)), ((), ())))
    else:
        right, left = fb.ops.all_gather.with_gathered_codes(x, q, (((1,), (0,)), ((), ())))
    assert right is x and left.sharding.is_equivalent_to(NamedSharding(mesh, expected), 2)
    assert left is q or q_spec != expected, "what is right already is not touched"


def test_of_two_quantized_operands_the_right_one_gives_way():
    mesh = mesh_of(AxisType.Explicit)
    left = fb.quantize(activation(mesh, P("data")), "int8")
    right = weight("int8").with_sharding((mesh, P("data", "model")))
    moves = moved(product, left, right)
    assert moves == {("all-gather", "u8", K * N // 4)} or moves == {("all-gather", "s8", K * N // 4)}
    expected = laws.numpy_dequantize(jax.device_get(left)).astype(np.float64) @ laws.numpy_dequantize(weight("int8"))
    np.testing.assert_allclose(jax.jit(product)(left, right), expected, rtol=1e-5, atol=1e-4)


def test_gradients_gather_codes_too():
    mesh = mesh_of(AxisType.Explicit)
    q, x = weight("int4_g32").with_sharding((mesh, P("data", "model"))), activation(mesh, P("data"))

    def loss(x: jax.Array, q: fb.QArray, policy: fb.Policy | None = None) -> jax.Array:
        return jnp.sum(fb.dot_general(x, q, (((1,), (0,)), ((), ())), policy=policy))

    expected = np.tile(laws.numpy_dequantize(weight("int4_g32")).sum(1), (8, 1))
    for policy in (None, fb.Policy("int4_g32", activation="int8")):
        gradient = jax.grad(functools.partial(loss, policy=policy))
        assert gathers_no_decoded_weight(moved(gradient, x, q), q)
        np.testing.assert_allclose(jax.jit(gradient)(x, q), expected, rtol=1e-5, atol=1e-4)


BLOCKS = fb.Policy("int8_g128", "int8_g128")


def test_products_of_blocks_move_no_weight():
    mesh, numbers = mesh_of(AxisType.Auto), (((1,), (0,)), ((), ()))
    w, x = jax.random.normal(jax.random.key(0), (4 * 128, N)), jax.random.normal(jax.random.key(1), (8, 4 * 128))
    q = dataclasses.replace(fb.quantize(w, BLOCKS.weight, axis=-2), policy=BLOCKS)

    def fn(x: jax.Array, q: fb.QArray) -> jax.Array:
        return fb.dot_general(x, q, numbers)

    there = jax.device_put(x, NamedSharding(mesh, P("data", "model"))), q.with_sharding((mesh, P("model")))
    assert {which for which, _, _ in moved(fn, *there)} == {"all-reduce"}
    np.testing.assert_allclose(jax.jit(fn)(*there), fn(x, q), rtol=1e-5, atol=1e-4)


def test_products_of_blocks_have_one_accumulator_where_several_are_larger_than_the_operands():
    w, x = jnp.ones((8 * 128, 4 * 128)), jnp.ones((8 * 128, 8 * 128))
    fn = functools.partial(fb.dot_general, dimension_numbers=(((1,), (0,)), ((), ())), policy=BLOCKS)
    assert "f32[8,1024,512]" not in str(jax.make_jaxpr(fn)(x, w))
    assert "f32[8,8,512]" in str(jax.make_jaxpr(fn)(x[:8], w))


def test_products_of_blocks_on_an_explicit_mesh():
    mesh, numbers = mesh_of(AxisType.Explicit), (((1,), (0,)), ((), ()))
    w, x = jax.random.normal(jax.random.key(0), (K, N)), jax.random.normal(jax.random.key(1), (8, K))

    def fn(x: jax.Array, w: jax.Array) -> jax.Array:
        return fb.dot_general(x, w, numbers, policy=BLOCKS)

    there = jax.device_put((x, w), (NamedSharding(mesh, P("data")), NamedSharding(mesh, P(None, "model"))))
    with jax.set_mesh(mesh):
        y = fn(*there)
    assert y.sharding.spec == P("data", "model")
    np.testing.assert_allclose(y, fn(x, w), rtol=1e-5, atol=1e-4)
