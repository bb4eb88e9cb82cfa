"""Products on an explicit mesh whose contracted axis is sharded: `out_sharding` says where the result lies, as in JAX."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P
from jax.sharding import AxisType, NamedSharding

import fewbit as fb

NUMBERS = (((1,), (0,)), ((), ()))


@functools.cache
def mesh():
    return jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Explicit, AxisType.Explicit))


def normal(*shape, seed=0):
    return jax.device_put(np.float32(np.random.default_rng(seed).standard_normal(shape)))


def operands(scheme):
    """Both sharded along the contraction."""
    x = jax.device_put(normal(8, 64), NamedSharding(mesh(), P("data", "model")))
    return x, fb.quantize(normal(64, 16, seed=1), scheme, axis=0).with_sharding((mesh(), P("model", None)))


def alone(x):
    return jnp.asarray(jax.device_get(x))


CASES = {
    "weight-only": ("int4_g16", None),
    "codes": ("int8", fb.Policy("int8", "int8", dlhs="int8", drhs="int8")),
    "zero points": ("uint8", fb.Policy("uint8", "uint8")),
}


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("spec", [P("data", None), P("data", "model")], ids=["rows", "both"])
@pytest.mark.parametrize("name", CASES)
def test_the_result_lies_where_it_is_asked_to(name, spec):
    scheme, policy = CASES[name]
    x, q = operands(scheme)

    def product(x, q, sharding=None):
        return fb.dot_general(x, q, NUMBERS, policy=policy, out_sharding=sharding)

    def both(x, q, sharding=None):
        return product(x, q, sharding), jax.grad(lambda x: jnp.sum(product(x, q, sharding)))(x)

    out, gradient = jax.jit(functools.partial(both, sharding=NamedSharding(mesh(), spec)))(x, q)
    assert out.sharding.spec == spec
    assert gradient.sharding.spec == P("data", "model")
    wanted = both(alone(x), jax.tree.map(alone, q))
    # The same 64 products of magnitudes below 10, added up in another order.
    for got, want in zip((out, gradient), wanted, strict=True):
        np.testing.assert_allclose(alone(got), want, rtol=1e-5, atol=1e-4)


def test_it_is_needed_and_unchanged_code_can_ask_for_it():
    x, q = operands("int8")
    with pytest.raises(Exception, match="ambiguous how the output should be sharded"):
        jax.eval_shape(lambda x, q: fb.dot_general(x, q, NUMBERS), x, q)

    def unchanged(x, w):
        return jax.lax.dot_general(x, w, NUMBERS, out_sharding=NamedSharding(mesh(), P("data", None)))

    def einsum(x, q):
        return fb.einsum("bk,kn->bn", x, q, out_sharding=NamedSharding(mesh(), P("data", None)))

    np.testing.assert_array_equal(alone(jax.jit(einsum)(x, q)), alone(jax.jit(fb.transparent(unchanged))(x, q)))
    assert einsum(x, q).sharding.spec == P("data", None)
    out = jax.jit(fb.transparent(unchanged))(x, q)
    assert out.sharding.spec == P("data", None)
    np.testing.assert_allclose(alone(out), alone(x) @ fb.dequantize(jax.tree.map(alone, q)), rtol=1e-5, atol=1e-4)


LOOK_UPS = {
    "out_sharding": lambda e, ids: e.at[ids].get(out_sharding=P("data", None, "model")),
    "out_sharding of rows": lambda e, ids: e.at[ids].get(out_sharding=P("data")),
    "index array": lambda e, ids: e[ids],
    "take": lambda e, ids: jnp.take(e, ids, axis=0),
    "reshard, then index": lambda e, ids: jax.reshard(e, P())[jax.reshard(ids, P())],
}


def typed(fn, *args):
    """What JAX says of a program: the sharding in its result's type, or its error."""
    try:
        return jax.typeof(jax.eval_shape(fn, *args)).sharding
    except Exception as error:  # noqa: BLE001 - the errors of JAX have no class in common
        return type(error), str(error)[:80]


@pytest.mark.finding(11)
@pytest.mark.parametrize("table_spec", [P(), P("model"), P(None, "model")], ids=["whole", "rows", "columns"])
@pytest.mark.parametrize("ids_spec", [P(), P("data")], ids=["ids whole", "ids sharded"])
def test_look_ups_lie_where_those_of_the_float_program_do(table_spec, ids_spec):
    """Shards of 9 rows, or of 6 columns, which are no whole tiles of a power of two."""
    q = fb.quantize(normal(36, 24), "nf4")
    ids = jax.device_put(jnp.arange(16).reshape(4, 4) * 3 % 36, NamedSharding(mesh(), ids_spec))
    table = jax.device_put(fb.dequantize(q), NamedSharding(mesh(), table_spec))
    sharded = q.with_sharding((mesh(), table_spec))
    with jax.set_mesh(mesh()):
        for look_up in LOOK_UPS.values():
            expected = typed(look_up, table, ids)
            assert typed(fb.transparent(look_up), sharded, ids) == expected
        found = jax.jit(lambda e, ids: [fb.transparent(LOOK_UPS[name])(e, ids) for name in list(LOOK_UPS)[:2]])(sharded, ids)
    for rows in found:
        np.testing.assert_array_equal(alone(rows), alone(table)[alone(ids)])


@pytest.mark.finding(11)
def test_trained_look_ups_follow_a_resharded_table():
    params = {"e": jax.device_put(normal(36, 24), NamedSharding(mesh(), P("model")))}
    ids = jax.device_put(jnp.arange(16).reshape(4, 4), NamedSharding(mesh(), P("data")))
    recipe = fb.Recipe((fb.Rule("e", fb.Policy("nf4")),))

    def rows(p, ids):
        return p["e"].at[ids].get(out_sharding=P("data"))

    with jax.set_mesh(mesh()):
        served = fb.quantize_params(params, fb.plan(rows, params, ids, recipe=recipe))
        trained = jax.jit(fb.train(rows, recipe))(params, ids)
        np.testing.assert_array_equal(alone(trained), alone(jax.jit(fb.transparent(rows))(served, ids)))
        gradient = jax.jit(jax.grad(lambda p: fb.train(rows, recipe)(p, ids).sum()))(params)["e"]
    assert fb.is_qarray(served["e"])
    assert gradient.sharding.spec == P("model", None)
    np.testing.assert_array_equal(alone(gradient), np.repeat((np.arange(36) < 16)[:, None], 24, 1))
