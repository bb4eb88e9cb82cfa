"""Every JAX transformation around, and inside, code that meets quantized leaves; a row each.

A row is a function of quantized parameters and an activation, and the schemes it is run with. Its result is that of the same
code on the decoded parameters. `test_primitives.py` beside it has a row for each primitive.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import fewbit as fb

LAYERED = ("nf4", "nvfp4")  # one level of scales, and two
ALL_KINDS = ("nf4", "nvfp4", "nf4_dq", "q4_1", "int8")  # and quantized scales, zero points, one scale a row


def normal(*shape, seed=0):
    return jax.device_put(np.float32(np.random.default_rng(seed).normal(size=shape) / np.sqrt(shape[-1])))


def mesh():
    return jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])


def mapped(fn, in_specs, out_specs):
    return lambda *args: jax.shard_map(fn, mesh=mesh(), in_specs=in_specs, out_specs=out_specs)(*args)


@jax.custom_vjp
def own_vjp(x, w):
    return jnp.tanh(x) @ w.T


own_vjp.defvjp(lambda x, w: (own_vjp(x, w), (x, w)), lambda r, g: (3 * (g @ r[1]), g.T @ r[0]))


@jax.custom_jvp
def own_jvp(x, w):
    return jnp.tanh(x) @ w.T


own_jvp.defjvp(lambda p, t: (own_jvp(*p), 5 * (t[0] @ p[1].T) + p[0] @ t[1].T))


def through_pallas(p, x):
    """A kernel is left alone; what feeds it is computed from the quantized weight."""
    y = x @ p["w"].T

    def doubled(i, o):
        o[...] = i[...] * 2

    return pallas.pallas_call(doubled, out_shape=jax.ShapeDtypeStruct(y.shape, y.dtype), interpret=True)(y)


def grad_of_scan(p, x):
    layer = jax.checkpoint(lambda c, w: (jnp.tanh(c @ w.T), None))
    return jax.grad(lambda x: (lax.scan(layer, x, p["stack"])[0] ** 2).sum())(x)


def hvp(p, x):
    return jax.jvp(jax.grad(lambda x: (jnp.tanh(x @ p["w"].T) ** 2).sum()), (x,), (x,))[1]


def chosen_for_each(p, x):
    return jax.vmap(lambda c, x: x @ lax.cond(c > 0, lambda: p["w"], lambda: p["v"]).T)(x[:, 0], x)


def ring(x, w):
    return x @ lax.ppermute(w, "d", [(i, (i + 1) % 4) for i in range(4)]).T


INSIDE = {
    "jit": (lambda p, x: jax.jit(lambda w, x: x @ w.T)(p["w"], x), LAYERED),
    "jit with shardings": (
        lambda p, x: jax.jit(
            lambda x, w: x @ w.T,
            in_shardings=(NamedSharding(mesh(), P()), NamedSharding(mesh(), P("d"))),
            out_shardings=NamedSharding(mesh(), P(None, "d")),
        )(x, p["w"]),
        LAYERED,
    ),
    "remat": (lambda p, x: jax.checkpoint(lambda w, x: jnp.tanh(x @ w.T))(p["w"], x), LAYERED),
    "grad of remat": (
        lambda p, x: jax.grad(lambda x: jax.checkpoint(lambda x: jnp.tanh(x @ p["w"].T))(x).sum())(x),
        LAYERED,
    ),
    "scan closed over": (lambda p, x: lax.scan(lambda c, _: (c @ p["w"].T, None), x, None, length=3)[0], LAYERED),
    "scan carried": (lambda p, x: lax.scan(lambda c, _: ((c[0], c[1] @ c[0].T), None), (p["w"], x), None, 2)[0][1], LAYERED),
    "scan stacked": (lambda p, x: lax.scan(lambda c, w: (c @ w.T, None), x, p["stack"])[0], ALL_KINDS),
    "map over rows": (lambda p, x: lax.map(lambda row: p["w"] @ row, x), LAYERED),
    "while closed over": (lambda p, x: lax.while_loop(lambda c: c.sum() < 3, lambda c: c @ p["w"].T + 1, x), LAYERED),
    "while carried": (
        lambda p, x: lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, c[1], c[2] @ c[1].T), (0, p["w"], x))[2],
        LAYERED,
    ),
    "fori": (lambda p, x: lax.fori_loop(0, 3, lambda i, c: c @ p["stack"][i].T, x), LAYERED),
    "cond": (lambda p, x: lax.cond(x.sum() > 0, lambda w: x @ w.T, lambda w: x @ w, p["w"]), LAYERED),
    "cond on a constant": (lambda p, x: lax.cond(True, lambda w: x @ w.T, lambda w: x @ w, p["w"]), LAYERED),
    "cond gives a weight": (lambda p, x: x @ lax.cond(x.sum() > 0, lambda: p["w"], lambda: p["v"]).T, LAYERED),
    "switch": (lambda p, x: lax.switch(jnp.int32(1), [lambda w: x, lambda w: x @ w.T], p["w"]), LAYERED),
    "platform_dependent": (
        lambda p, x: lax.platform_dependent(x, p["w"], cpu=lambda x, w: x @ w.T, default=lambda x, w: x @ w),
        LAYERED,
    ),
    "random and scatter": (
        lambda p, x: (x + jax.random.normal(jax.random.key(0), x.shape)).at[0].set(1.0) @ p["w"].T,
        LAYERED,
    ),
    "custom_jvp": (lambda p, x: own_jvp(x, p["w"]), LAYERED),
    "grad of custom_jvp": (lambda p, x: jax.grad(lambda x: own_jvp(x, p["w"]).sum())(x), LAYERED),
    "custom_vjp": (lambda p, x: own_vjp(x, p["w"]), LAYERED),
    "grad of custom_vjp": (lambda p, x: jax.grad(lambda x: own_vjp(x, p["w"]).sum())(x), LAYERED),
    "custom_vjp in scan": (lambda p, x: lax.scan(lambda c, w: (own_vjp(c, w), None), x, p["stack"])[0], LAYERED),
    "composite": (lambda p, x: lax.composite(lambda x, w: x @ w.T, "fewbit.test")(x, p["w"]), LAYERED),
    "pallas_call": (through_pallas, LAYERED),
    "shard_map of rows": (
        lambda p, x: mapped(lambda x, w: x @ w.T, (P(), P("d")), P(None, "d"))(x, p["w"]),
        (*ALL_KINDS, "fp8_tensor"),
    ),
    "shard_map of what is contracted": (
        lambda p, x: mapped(lambda x, w: lax.psum(x @ w.T, "d"), (P(None, "d"), P(None, "d")), P())(x, p["w"]),
        ("nvfp4", "int8", "int8_g16", "fp8_tensor"),
    ),
    "shard_map of a replica": (lambda p, x: mapped(lambda x, w: x @ w.T, (P("d"), P()), P("d"))(x, p["w"]), LAYERED),
    "all_gather of rows": (
        lambda p, x: mapped(lambda x, w: x @ lax.all_gather(w, "d", tiled=True).T, (P("d"), P("d")), P("d"))(x, p["w"]),
        ALL_KINDS,
    ),
    "all_gather of what is contracted": (
        lambda p, x: mapped(lambda x, w: x @ lax.all_gather(w, "d", axis=1, tiled=True).T, (P("d"), P(None, "d")), P("d"))(
            x, p["w"]
        ),
        ("nvfp4", "int8"),
    ),
    "all_gather on a new axis": (
        lambda p, x: mapped(lambda x, w: jnp.einsum("bi,koi->bko", x, lax.all_gather(w, "d")), (P("d"), P("d")), P("d"))(
            x, p["w"]
        ),
        LAYERED,
    ),
    "ppermute": (lambda p, x: mapped(ring, (P(), P("d")), P(None, "d"))(x, p["w"]), LAYERED),
    "pmap": (lambda p, x: jax.pmap(lambda x, w: x @ w.T, in_axes=(0, None))(x[:, None], p["w"])[:, 0], LAYERED),
    "pmap over the stack": (lambda p, x: jax.pmap(lambda x, w: x @ w.T)(x[:, None], p["stack"])[:, 0], LAYERED),
    "vmap": (lambda p, x: jax.vmap(lambda row: p["w"] @ row)(x), LAYERED),
    "vmap over the stack": (lambda p, x: jax.vmap(lambda x, w: w @ x)(x, p["stack"]), ALL_KINDS),
    "vmap of a look-up": (lambda p, x: jax.vmap(lambda i: p["w"][i])(jnp.array([3, 60])), LAYERED),
    "vmap of cond": (
        lambda p, x: jax.vmap(lambda c, x: lax.cond(c > 0, lambda x: x @ p["w"].T, lambda x: -x @ p["w"].T, x))(x[:, 0], x),
        LAYERED,
    ),
    "vmap of cond gives a weight": (chosen_for_each, ALL_KINDS),
    "grad": (lambda p, x: jax.grad(lambda x: (jnp.tanh(x @ p["w"].T) ** 2).sum())(x), LAYERED),
    "jvp": (lambda p, x: jax.jvp(lambda x: jnp.tanh(x @ p["w"].T), (x,), (x,))[1], LAYERED),
    "hvp": (hvp, LAYERED),
    "grad of scan": (grad_of_scan, LAYERED),
    "concatenated rows": (lambda p, x: x @ jnp.concatenate([p["w"], p["v"]]).T, ALL_KINDS),
    "concatenated tiles": (
        lambda p, x: jnp.concatenate([x, x], 1) @ jnp.concatenate([p["w"], p["v"]], 1).T,
        ("nvfp4", "q4_1", "int8"),
    ),
    "stacked": (lambda p, x: jnp.einsum("bi,koi->kbo", x, jnp.stack([p["w"], p["v"]])), ALL_KINDS),
    "split": (lambda p, x: [x @ part.T for part in jnp.split(p["w"], 2)], ALL_KINDS),
    "split tiles": (lambda p, x: [x[:, :32] @ part.T for part in jnp.split(p["w"], 2, 1)], ("nvfp4", "q4_1")),
    "flipped": (lambda p, x: x @ jnp.flip(p["w"], 0).T, ALL_KINDS),
    "flipped bytes": (lambda p, x: x @ jnp.flip(p["w"], 1).T, LAYERED),
    "repeated": (lambda p, x: x @ jnp.repeat(p["w"], 2, axis=0).T, LAYERED),
    "broadcast": (lambda p, x: jnp.einsum("bi,boi->bo", x, jnp.broadcast_to(p["w"], (4, 64, 64))), ALL_KINDS),
    "both quantized": (lambda p, x: p["v"] @ p["w"].T, ALL_KINDS),
}


@functools.cache
def parameters(name):
    params = {"w": normal(64, 64), "v": normal(64, 64, seed=1)}
    quantized = {key: fb.quantize(value, name) for key, value in params.items()}
    quantized["stack"] = jax.vmap(lambda w: fb.quantize(w, name))(normal(4, 64, 64, seed=2))
    return quantized, jax.tree.map(fb.dequantize, quantized, is_leaf=fb.is_qarray)


X = normal(4, 64, seed=3)


def assert_same(found, expected):
    for got, want in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        # XLA may order a sum of 64 float32 products otherwise: 64 * 2**-24 of the largest summand, about 1.
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


CASES = [
    pytest.param(name, scheme, marks=() if i == 0 else pytest.mark.slow, id=f"{name}-{scheme}")
    for name, (_, schemes) in INSIDE.items()
    for i, scheme in enumerate(schemes)
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "scheme"), CASES)
def test_inside(name, scheme):
    piece = INSIDE[name][0]
    quantized, decoded = parameters(scheme)
    assert_same(jax.jit(fb.transparent(piece))(quantized, X), jax.jit(piece)(decoded, X))


def one_layer(p, x):
    return jnp.tanh(x @ p["w"].T)


run = fb.transparent(one_layer)

AROUND = {
    "jit": lambda net, p, x: jax.jit(net)(p, x),
    "eager": lambda net, p, x: net(p, x),
    "remat": lambda net, p, x: jax.checkpoint(net)(p, x),
    "scan": lambda net, p, x: lax.scan(lambda c, _: (net(p, c), None), x, None, length=2)[0],
    "scan stacked": lambda net, p, x: lax.scan(lambda c, w: (net({"w": w}, c), None), x, p["stack"])[0],
    "vmap": lambda net, p, x: jax.vmap(net, in_axes=(None, 0))(p, x),
    "vmap over the stack": lambda net, p, x: jax.vmap(lambda w, x: net({"w": w}, x))(p["stack"], x),
    "grad": lambda net, p, x: jax.grad(lambda x: net(p, x).sum())(x),
    "jit of grad": lambda net, p, x: jax.jit(jax.grad(lambda x: net(p, x).sum()))(x),
    "jvp": lambda net, p, x: jax.jvp(lambda x: net(p, x), (x,), (x,))[1],
    "hessian": lambda net, p, x: jax.hessian(lambda x: net(p, x).sum())(x[0]),
    "shard_map": lambda net, p, x: mapped(net, (P(), P("d")), P("d"))(p, x),
    "shard_map of the weight": lambda net, p, x: mapped(net, ({"w": P("d")}, P()), P(None, "d"))({"w": p["w"]}, x),
    "pmap": lambda net, p, x: jax.pmap(net, in_axes=(None, 0))(p, x[:, None]),
    "cond": lambda net, p, x: lax.cond(x.sum() > 0, net, lambda p, x: x, p, x),
}


@pytest.mark.slow
@pytest.mark.parametrize("around", AROUND.values(), ids=AROUND)
def test_around(around):
    quantized, decoded = parameters("nf4")
    assert_same(around(run, quantized, X), around(one_layer, decoded, X))


@pytest.mark.parametrize("own", [own_jvp, own_vjp])
@pytest.mark.parametrize("wrap", [jax.jit, lambda f: f], ids=["jit", "eager"])
def test_a_derivative_rule_is_kept_for_floats_and_carried_on_to_scales(own, wrap):
    q = parameters("nf4")[0]["w"]
    net = fb.transparent(lambda w, x: own(x, w))

    def scaled(scale):
        return dataclasses.replace(q, scale=scale)

    found = wrap(jax.grad(lambda x, s: (net(scaled(s), x) ** 2).sum(), argnums=(0, 1)))(X, q.scale)
    expected = jax.grad(lambda x, s: (own(x, fb.dequantize(scaled(s))) ** 2).sum(), argnums=(0, 1))(X, q.scale)
    for got, want in zip(found, expected, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


def equations(jaxpr):
    """Every equation of a jaxpr and of those within it."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")):
            if hasattr(inner, "eqns") or hasattr(inner, "jaxpr"):
                yield from equations(getattr(inner, "jaxpr", inner))


def largest_float(fn, *args):
    """The size of the largest float array that a trace computes anywhere."""
    avals = [v.aval for eqn in equations(jax.make_jaxpr(fn)(*args).jaxpr) for v in eqn.outvars]
    return max((a.size for a in avals if jnp.issubdtype(a.dtype, jnp.floating)), default=0)


STAYS_PACKED = {
    "a stack is decoded a layer at a time": (INSIDE["scan stacked"][0], 64 * 64),
    "a look-up decodes the rows it takes": (lambda p, x: p["stack"].reshape(256, 64)[jnp.array([3, 60])], 4 * 64),
    "a look-up under vmap": (lambda p, x: jax.vmap(lambda i: p["w"][i])(jnp.array([3, 60])), 4 * 64),
    "a layer at a run-time index": (lambda p, x: x @ p["stack"][jnp.argmax(x[0]) % 3].T, 64 * 64),
    "a gather moves codes": (
        lambda p, x: mapped(lambda x, w: x @ lax.all_gather(w, "d", tiled=True)[:16].T, (P(), P("d")), P("d"))(x, p["w"]),
        16 * 64,
    ),
    "layout moves codes": (lambda p, x: jnp.stack([p["w"], p["v"]]).transpose(1, 0, 2)[:2], 0),
}


@pytest.mark.parametrize(("piece", "bound"), STAYS_PACKED.values(), ids=STAYS_PACKED)
def test_only_what_is_used_is_decoded(piece, bound):
    quantized = parameters("nf4")[0]
    assert largest_float(fb.transparent(piece), quantized, X) <= max(bound, quantized["stack"].scale.size, X.size)


def test_a_pallas_call_is_not_rewritten():
    calls = list(equations(jax.make_jaxpr(fb.transparent(through_pallas))(parameters("nf4")[0], X).jaxpr))
    kernel = next(e for e in calls if e.primitive.name == "pallas_call")
    dense = jax.make_jaxpr(through_pallas)(parameters("nf4")[1], X)
    expected = next(e for e in equations(dense.jaxpr) if e.primitive.name == "pallas_call")
    assert str(kernel.params["jaxpr"]) == str(expected.params["jaxpr"])


REFUSED = {
    "a tile over two shards": (
        lambda p, x: mapped(lambda x, w: lax.psum(x @ w.T, "d"), (P(None, "d"), P(None, "d")), P())(x, p["w"]),
        "nf4_g32",
        "shard_map decodes .*an axis of 64 with tiles of 32 cannot be cut in 4",
    ),
    "a loop that changes its weight": (
        lambda p, x: lax.fori_loop(0, 2, lambda i, w: w * 0.5, p["w"]),
        "nf4",
        "mul decodes",
    ),
    "schemes that differ": (lambda p, x: jnp.concatenate([p["w"], p["other"]]), "nf4", "concatenate decodes .*schemes"),
    "a weight that is not quantized": (lambda p, x: jnp.concatenate([p["w"], x]), "nf4", "one of the operands is not"),
    "bytes that would be cut": (lambda p, x: p["w"][:, 1:33], "nf4", "slice decodes .*cuts bytes that 2 codes share"),
}


@pytest.mark.parametrize(("piece", "scheme", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_stay_quantized_says_why(piece, scheme, message):
    other = fb.quantize(normal(64, 64, seed=5), "int4")
    quantized, decoded = (
        each | {"other": one} for each, one in zip(parameters(scheme), (other, fb.dequantize(other)), strict=True)
    )
    with pytest.raises(fb.UnsupportedError, match=message) as caught:
        jax.eval_shape(fb.transparent(piece), quantized, X)
    assert "test_transformations.py:" in str(caught.value)
    found = jax.jit(fb.transparent(piece, fallback="dequantize"))(quantized, X)
    assert_same(found, jax.jit(piece)(decoded, X))
