"""Arrays on meshes with Explicit axes: the same results as on one device, with the shardings that JAX's types promise."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P
from jax.sharding import AxisType, NamedSharding

import fewbit as fb
from fewbit._explicit_mesh import explicit_sharding, with_auto_axes
from fewbit.calibration import PercentileRange
from fewbit.methods import HQQ
from fewbit.ops.hadamard import rotated

EXPLICIT, MIXED = (AxisType.Explicit,) * 2, (AxisType.Explicit, AxisType.Auto)


@functools.cache
def mesh(kinds=EXPLICIT):
    return jax.make_mesh((2, 2), ("a", "b"), axis_types=kinds, devices=jax.devices()[:4])


def normal(*shape, seed=0):
    return jax.device_put(np.float32(np.random.default_rng(seed).standard_normal(shape)))


def put(x, spec, kinds=EXPLICIT):
    return jax.device_put(x, NamedSharding(mesh(kinds), spec))


def equal(got, wanted, rtol=1e-6):
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        a, b = (np.asarray(jax.device_get(x), np.float64) for x in (a, b))
        np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol * np.abs(b).max())


X = normal(256, 256)


def on_meshes(fn, *, rtol=1e-6):
    """Compares a function of `X` on meshes with that on one device, eager and jitted."""
    wanted = fn(X)
    for kinds, specs in ((EXPLICIT, (P("a", "b"), P(None, ("a", "b")))), (MIXED, (P("a", None),))):
        with jax.set_mesh(mesh(kinds)):
            equal(fn(put(X, specs[0], kinds)), wanted, rtol)
            for spec in specs:
                equal(jax.jit(fn)(put(X, spec, kinds)), wanted, rtol)


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("int4_g64", "uint4", "nf4_dq", "nvfp4_16x16", "nvfp4")]


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("name", ["fp8_block128", "mxfp4", *SLOW])
def test_quantizing_in_place_gives_what_one_device_gives(name):
    def values(x):
        return fb.dequantize(fb.quantize(x, name))

    wanted, stack = values(X), jnp.stack([X, 2 * X, 3 * X, X])
    for kinds, spec in ((EXPLICIT, P("a", "b")), (MIXED, P("a", None))):
        for program in (values, jax.jit(values)):  # means are summed in another order
            equal(program(put(X, spec, kinds)), wanted, 2e-5)
        with jax.set_mesh(mesh(kinds)):
            each = jax.jit(jax.vmap(values))(put(stack, P("a", "b") if kinds is EXPLICIT else P("a"), kinds))
        equal(np.asarray(each)[1], values(2 * X), 2e-5)


@pytest.mark.slow
def test_percentiles():
    for tile in ({"*": 1, "-1": 64}, {"*": None}):
        form = {"format": "int8", "tile": tile, "scale": "float32", "calibration": "percentile,98"}
        scheme = fb.Scheme.from_json(form)
        on_meshes(lambda x, scheme=scheme: fb.dequantize(fb.quantize(x, scheme)))
    for axes in ((), (-1,)):
        on_meshes(lambda x, axes=axes: PercentileRange(axes=axes, percent=98.0).init(x.shape).update(x))


@pytest.mark.slow
def test_gradients_of_fake_quantization():
    for gradient in ("identity", "clipped"):
        fn = functools.partial(fb.fake_quant, scheme="int4_g64", gradient=gradient)
        on_meshes(jax.grad(lambda x, fn=fn: jnp.sum(fn(x) ** 2)))


@pytest.mark.slow
def test_masks_of_sparsity():
    for axis in (0, 1):
        rule = fb.Sparsity(2, 4, axis=axis)
        on_meshes(lambda x, rule=rule: (rule.update(rule.init(x), x).mask, rule.pruned(x)))


@pytest.mark.slow
def test_rotations_and_methods():
    words = jnp.arange(1, dtype=jnp.uint32) + 12345
    for axis in (0, 1):
        on_meshes(lambda x, axis=axis: rotated(x, 2 * x, axis, axis, 16, words), rtol=1e-5)
    on_meshes(lambda x: fb.dequantize(HQQ(rounds=3).quantized(x, fb.scheme("int4_g64"), (-1,), None)))


@pytest.mark.slow
def test_statistics_of_activations():
    wanted = fb.observe(lambda p, x: x @ p["w"], {"w": X}, [(X,)], recipe="int8", collect=("absmax", "squares", "hessian"))

    def fn(p, x):
        return jnp.einsum("bi,io->bo", x, p["w"], out_sharding=P("a", None))

    for kinds, spec in ((EXPLICIT, P("a", "b")), (MIXED, P("a", None))):
        with jax.set_mesh(mesh(kinds)):
            params, batches = {"w": put(X, spec, kinds)}, [(put(X, P("a", None), kinds),)]
            equal(fb.observe(fn, params, batches, recipe="int8", collect=("absmax", "squares", "hessian")), wanted, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kinds", [EXPLICIT, MIXED], ids=["explicit", "mixed"])
@pytest.mark.parametrize("recipe", ["int8", "w8a8", "mxfp4", "fp8_w8a8", "nvfp4_16x16"])
def test_training_and_serving_of_sharded_parameters(kinds, recipe):
    first, second = normal(256, 256), normal(256, 256, seed=1)

    def net(p, x, out=None):
        hidden = jnp.tanh(jnp.einsum("bi,io->bo", x, p["in"], out_sharding=out))
        return jnp.einsum("bi,io->bo", hidden, p["out"], out_sharding=out)

    def loss(p, x, out=None):
        return jnp.mean(net(p, x, out) ** 2)

    x, key = normal(64, 256, seed=2), jax.random.key(0)
    params = {"in": first, "out": second}
    wanted = jax.jit(jax.grad(lambda p: fb.train(loss, recipe)(p, x, key=key)))(params)
    served = fb.transparent(net)(fb.quantize_params(params, fb.plan(net, params, x, recipe=recipe)), x)
    specs = (P("a", "b"), P("b", "a")) if kinds is EXPLICIT else (P("a", None), P(None, "a"))
    params = {"in": put(first, specs[0], kinds), "out": put(second, specs[1], kinds)}
    x = put(x, P("a", None), kinds)
    with jax.set_mesh(mesh(kinds)):
        inside = functools.partial(net, out=P("a", None))
        for program in (lambda f: f, jax.jit):
            gradient = program(jax.grad(lambda p: fb.train(loss, recipe)(p, x, P("a", None), key=key)))(params)
            equal(gradient, wanted, 0.02)
            assert all(gradient[path].sharding.is_equivalent_to(w.sharding, 2) for path, w in params.items())
            quantized = fb.quantize_params(params, fb.plan(inside, params, x, recipe=recipe))
            equal(program(fb.transparent(inside))(quantized, x), served, 0.01)


@pytest.mark.slow
@pytest.mark.parametrize("kinds", [EXPLICIT, MIXED], ids=["explicit", "mixed"])
def test_adapters_with_dropout_train_on_a_sharded_weight(kinds):
    def fn(p, x):
        return jnp.einsum("bi,io->bo", x, p["w"], out_sharding=P("a", None))

    with jax.set_mesh(mesh(kinds)):
        params = {"w": fb.quantize(put(X, P("a", "b") if kinds is EXPLICIT else P(None, "a"), kinds), "nf4", axis=0)}
        x = put(X, P("a", None), kinds)
        adapters = fb.lora.init(jax.random.key(0), fn, params, x, match="w", rank=4)
        adapted = fb.lora.apply(fn, dropout=0.1)
        gradient = jax.jit(jax.grad(lambda a: jnp.mean(adapted(params, a, x, dropout_key=jax.random.key(1)) ** 2)))(adapters)
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(jax.device_get(gradient)))


def test_auto_axes_within_a_function():
    def rolled(x):
        return jnp.sort(x, axis=1)[:, ::-1]

    assert explicit_sharding(X) is None
    assert explicit_sharding(put(X, P("a"), (AxisType.Auto,) * 2)) is None
    for x in (put(X, P("a", "b")), put(X, P("a", None), MIXED)):
        assert explicit_sharding(x).spec == x.sharding.spec
        out = with_auto_axes(rolled, x, reduced=(1,))
        equal(out, rolled(X))
        assert out.sharding.is_equivalent_to(NamedSharding(x.sharding.mesh, P("a")), 2)
    assert explicit_sharding(put(X, P("a", "b"), MIXED)).spec == P("a", None)  # without the automatic axis
