"""Linen modules: quantized in their collections, called by every method, trained with a float model's variables."""

import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fewbit as fb
from fewbit.frameworks import linen as fl
from fewbit.methods import GPTQ, correct_biases

flax = pytest.importorskip("flax")
nn = pytest.importorskip("flax.linen")
meta = pytest.importorskip("flax.core.meta")

X = jnp.asarray(np.random.default_rng(0).standard_normal((4, 16)), jnp.float32)


class Net(nn.Module):
    """Two layers with boxes around their kernels, batch statistics between them, and a second method."""

    def setup(self):
        init = nn.initializers.lecun_normal()
        self.wi = nn.Dense(32, kernel_init=nn.with_partitioning(init, (None, "model")))
        self.norm = nn.BatchNorm(momentum=0.5)
        self.wo = nn.Dense(16, kernel_init=nn.with_logical_partitioning(init, ("mlp", None)))
        self.drop = nn.Dropout(0.5)

    def __call__(self, x, train=False):
        hidden = self.norm(jax.nn.silu(self.wi(x)), use_running_average=not train)
        return self.wo(self.drop(hidden, deterministic=not train))

    def encode(self, x):
        return self.wi(x)


NET = Net()


@pytest.fixture(scope="module")
def variables():
    return NET.init(jax.random.key(0), X)


def test_the_plan_names_parameters_without_collection_and_box(variables):
    plan = fl.plan(NET, variables, X, recipe="int8")
    assert [row.path for row in plan if row.policy] == ["wi/kernel", "wo/kernel"]
    assert plan["wi/kernel"].axis == (-2,)
    shapes = jax.eval_shape(lambda: NET.init(jax.random.key(0), X))
    assert fl.plan(NET, shapes, jax.ShapeDtypeStruct(X.shape, X.dtype), recipe="int8").rows == plan.rows


def test_boxes_and_other_collections_are_kept(variables):
    quantized = fl.quantize(NET, variables, X, recipe="int8")
    box = quantized["params"]["wo"]["kernel"]
    assert isinstance(box, nn.LogicallyPartitioned) and box.names == ("mlp", None) and fb.is_qarray(box.value)
    assert quantized["batch_stats"] is variables["batch_stats"]
    assert quantized["params"]["wi"]["bias"] is variables["params"]["wi"]["bias"]
    assert nn.get_partition_spec(quantized)["params"]["wi"]["kernel"] == jax.P(None, "model")
    specs = fb.specs_of(
        meta.unbox(quantized["params"]["wi"]),
        jax.make_mesh((2,), ("model",)),
        {"kernel": jax.P(None, "model"), "bias": None},
    )
    assert specs["kernel"].codes == jax.P(None, "model")


@pytest.mark.parametrize(
    "jit", [pytest.param(lambda f, **kw: f, id="eager", marks=pytest.mark.slow), pytest.param(jax.jit, id="jit")]
)
def test_every_method_runs_on_the_quantized_variables(variables, jit):
    quantized = fl.quantize(NET, variables, X, recipe="int8")
    decoded = jax.tree.map(lambda x: fb.dequantize(x) if fb.is_qarray(x) else x, quantized, is_leaf=fb.is_qarray)
    apply = jit(fl.apply(NET), static_argnames=("method", "mutable", "train"))
    np.testing.assert_allclose(apply(quantized, X), NET.apply(decoded, X), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(
        apply(quantized, X, method="encode"), NET.apply(decoded, X, method="encode"), rtol=1e-4, atol=1e-5
    )
    given = {"train": True, "mutable": "batch_stats", "rngs": {"dropout": jax.random.key(1)}}
    got, want = apply(quantized, X, **given), NET.apply(decoded, X, **given)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), got, want)
    assert not jnp.array_equal(got[1]["batch_stats"]["norm"]["mean"], variables["batch_stats"]["norm"]["mean"])


def test_a_method_alone_decides_the_axes(variables):
    plan = fl.plan(NET, variables, X, recipe="int8", method="encode")
    assert [row.path for row in plan if row.policy] == ["wi/kernel"]


def test_frozen_variables_stay_frozen(variables):
    frozen = flax.core.freeze(variables)
    quantized = fl.quantize(NET, frozen, recipe=fl.plan(NET, frozen, X, recipe="int8"))
    assert isinstance(quantized, flax.core.FrozenDict)
    assert jax.tree.structure(flax.core.unfreeze(quantized)) == jax.tree.structure(
        fl.quantize(NET, variables, X, recipe="int8")
    )


def test_donated_parameters_are_freed(variables):
    variables = jax.tree.map(jnp.copy, variables)
    kernel, bias = variables["params"]["wi"]["kernel"].value, variables["params"]["wi"]["bias"]
    quantized = fl.quantize(NET, variables, X, recipe="int8", donate=True)
    assert kernel.is_deleted() and not bias.is_deleted()
    assert fl.apply(NET)(quantized, X).shape == X.shape


@pytest.mark.slow
def test_training_keeps_the_structure_and_follows_the_recipe(variables):
    recipe = fb.Recipe((fb.Rule("w[io]/kernel", fb.Policy("int8", "int8", dlhs="int8", drhs="int8")),))
    apply = fl.train(NET, recipe)

    def loss(variables):
        out, new = apply(variables, X, train=True, mutable=["batch_stats"], rngs={"dropout": jax.random.key(1)})
        return jnp.mean(out**2), new

    (_, new), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(variables)
    assert jax.tree.structure(gradient) == jax.tree.structure(variables)
    assert jax.tree.structure(new["batch_stats"]) == jax.tree.structure(variables["batch_stats"])
    text = str(jax.make_jaxpr(jax.grad(lambda v: loss(v)[0]))(variables))
    assert len(re.findall("preferred_element_type=int32", text)) == 6  # each layer forwards, for its weights, for its input


def test_what_was_trained_is_what_is_served(variables):
    recipe = fb.Recipe((fb.Rule("w[io]/kernel", fb.Policy("int4", "int8")),))
    served = jax.jit(fl.apply(NET))(fl.quantize(NET, variables, X, recipe=recipe), X)
    np.testing.assert_allclose(jax.jit(fl.train(NET, recipe))(variables, X), served, rtol=1e-5, atol=1e-6)


def test_a_projection_out_of_heads_is_trained_as_it_is_served():
    """Linen keeps the kernel of attention's way out as [heads, head, out], and contracts two axes of it."""
    out, x = nn.DenseGeneral(8, axis=(-2, -1), use_bias=False), X.reshape(2, 2, 16)
    variables = out.init(jax.random.key(0), x)
    quantized = fl.quantize(out, variables, x, recipe="int4_g32")
    assert quantized["params"]["kernel"].shape == (2, 16, 8) and quantized["params"]["kernel"].scale.shape == (2, 1, 8)
    # One sum or the other of float32 numbers: 32 of them, each off by half a unit in the last place of at most 4.
    np.testing.assert_allclose(fl.apply(out)(quantized, x), fl.train(out, "int4_g32")(variables, x), atol=32 * 4 * 2.0**-24)


def test_sparse_parameters_are_served_as_they_were_trained(variables):
    policy = fb.Policy("int8", "int8")
    recipe = fb.Recipe((fb.Rule("wi/kernel", policy, sparsity=fb.Sparsity(2, 4)), fb.Rule("wo/kernel", None)))
    state = fl.update_sparsity(fl.sparsity_state(NET, variables, X, recipe=recipe), variables)
    moved = jax.tree.map(lambda leaf: -leaf[::-1], variables)  # after the update: the mask is no longer of its magnitudes
    sparse = fl.pruned(moved, state)
    assert isinstance(sparse["params"]["wi"]["kernel"], nn.Partitioned)
    assert (sparse["params"]["wi"]["kernel"].value != 0).sum() == X.shape[1] * 32 // 2
    served = jax.jit(fl.apply(NET))(fl.quantize(NET, sparse, X, recipe=recipe), X)
    trained = jax.jit(lambda v: fl.train(NET, recipe)(v, X, sparsity=state))(moved)
    np.testing.assert_allclose(trained, served, rtol=1e-5, atol=1e-6)


def test_lora_adapters_have_the_paths_of_the_plan_and_learn(variables):
    model = fl.quantize(NET, variables, X, recipe="nf4")
    adapters = fl.lora_init(jax.random.key(0), NET, model, X, match="w[io]/kernel", rank=2, alpha=4.0)
    assert list(adapters) == ["wi/kernel", "wo/kernel"] and adapters["wi/kernel"].alpha == 4
    assert list(
        fl.lora_init(jax.random.key(0), NET, model, X, match=".*kernel", rank=2, method="encode", without_product="skip")
    ) == ["wi/kernel"]
    adapted, base = jax.jit(fl.lora_apply(NET)), jax.jit(fl.apply(NET))(model, X)
    np.testing.assert_array_equal(adapted(model, adapters, X), base)
    gradient = jax.grad(lambda adapters: jnp.mean((adapted(model, adapters, X) - 1) ** 2))(adapters)
    moved = jax.tree.map(lambda p, g: p - 0.5 * g, adapters, gradient)
    learned = adapted(model, moved, X)
    assert jnp.mean((learned - 1) ** 2) < jnp.mean((base - 1) ** 2)
    merged = fl.lora_merge(model, {"wi/kernel": moved["wi/kernel"]})
    kernels = [merged["params"][layer]["kernel"] for layer in ("wi", "wo")]
    assert isinstance(kernels[0], nn.Partitioned) and not fb.is_qarray(kernels[0].value) and fb.is_qarray(kernels[1].value)
    assert merged["batch_stats"] is model["batch_stats"]
    # The sum of both terms is rounded once here and twice there: a few units of float32's last place.
    np.testing.assert_allclose(fl.apply(NET)(fl.lora_merge(model, moved), X), learned, atol=1e-5)


def test_the_variables_of_a_trained_module_may_be_a_keyword_argument(variables):
    trained = fl.train(NET, "w8a8")
    np.testing.assert_array_equal(trained(variables=variables, x=X), trained(variables, X))


def test_a_keyword_that_the_module_takes_too_is_refused():
    class Noisy(nn.Module):
        @nn.compact
        def __call__(self, x, dropout_key=None):
            return nn.Dense(16)(x)

        def encode(self, x, key=None):
            return self(x) + (0 if key is None else 1)

    noisy = Noisy()
    variables, trained, key = noisy.init(jax.random.key(0), X), fl.train(noisy, "w8a8"), jax.random.key(0)
    plain = trained(variables, X, key=key)
    for method in ("encode", Noisy.encode, noisy.encode):
        np.testing.assert_allclose(trained(variables, X, key, key=key, method=method) - plain, 1, atol=1e-6)
        with pytest.raises(fb.QuantError, match=r"the function takes key= and so does linen\.train"):
            trained(variables, X, key=key, method=method)
    with pytest.raises(fb.QuantError, match=r"the function takes dropout_key= and so does linen\.lora_apply"):
        fl.lora_apply(noisy, dropout=0.5)(variables, {}, X, dropout_key=key)


def test_a_policy_that_draws_takes_a_key(variables):
    arm = fb.Arm("int8", rounding="stochastic")
    recipe = fb.Recipe((fb.Rule("w[io]/kernel", fb.Policy("int8", "int8", dlhs=arm, drhs=arm)),))

    apply = fl.train(NET, recipe)

    @jax.jit
    def gradient(key):
        return jax.grad(lambda v: jnp.mean(apply(v, X, key=key) ** 2))(variables)["params"]["wi"]["kernel"].value

    one, other = gradient(jax.random.key(0)), gradient(jax.random.key(1))
    assert jnp.array_equal(one, gradient(jax.random.key(0))) and not jnp.array_equal(one, other)


def test_scanned_layers_are_quantized_layer_by_layer():
    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return jnp.tanh(nn.Dense(16)(x)), None

    scanned = nn.scan(nn.remat(Layer), variable_axes={"params": 0}, split_rngs={"params": True}, length=3)(name="layers")
    variables = scanned.init(jax.random.key(0), X, None)
    plan = fl.plan(scanned, variables, X, None, recipe="int8")
    assert plan["Dense_0/kernel"].stacked == (-3,)
    quantized = fl.quantize(scanned, variables, X, None, recipe=plan)
    got, want = fl.apply(scanned)(quantized, X, None)[0], scanned.apply(variables, X, None)[0]
    assert 0 < jnp.linalg.norm(got - want) < 0.05 * jnp.linalg.norm(want)


def test_two_models_never_touch(variables):
    before = NET.apply(variables, X)
    fl.apply(NET)(fl.quantize(NET, variables, X, recipe="int4"), X)
    assert jnp.array_equal(NET.apply(variables, X), before)


def test_names_of_modules_stand_in_what_is_compiled(variables):
    """Profiles group by the scopes that Flax opens; every product keeps its own, forwards and backwards."""
    quantized = fl.quantize(NET, variables, X, recipe="int8")
    recipe = fb.Recipe((fb.Rule("w[io]/kernel", fb.Policy("int8", "int8", dlhs="int8", drhs="int8")),))
    trained = fl.train(NET, recipe)
    gradient = jax.grad(lambda variables, x: trained(variables, x).sum())
    for call, args, around in ((fl.apply(NET), quantized, "jit"), (gradient, variables, "transpose")):
        text = jax.jit(call).lower(args, X).compile().as_text()
        for layer in ("wi", "wo"):
            assert re.search(rf'op_name="[^"]*{around}[^"]*/{layer}/jit.quantized_dot_general', text)


def test_without_flax_the_error_says_what_brings_it(monkeypatch, variables):
    monkeypatch.setitem(sys.modules, "flax.core.meta", None)
    with pytest.raises(fb.UnsupportedError, match=r"flax is not installed; pip install fewbit\[flax\]"):
        fl.quantize(NET, variables, X, recipe="int8")


class Layer(nn.Module):
    """A layer as MaxText has it by default: bfloat16 products of float32 parameters."""

    @nn.compact
    def __call__(self, x, _):
        return jnp.tanh(nn.Dense(16, use_bias=False, dtype=jnp.bfloat16)(x)), None


class Stack(nn.Module):
    """Layers in a scan, stacked along the second axis of their kernels."""

    @nn.compact
    def __call__(self, x):
        layers = nn.scan(Layer, variable_axes={"params": 1}, split_rngs={"params": True}, length=3)
        return layers(name="layers")(x, None)[0]


@pytest.mark.slow
@pytest.mark.finding(26, 30)
@pytest.mark.parametrize("scheme", ["int8", "nvfp4"])
def test_bfloat16_layers_stacked_along_the_second_axis_are_served_as_trained(scheme):
    module, x = Stack(), X.astype(jnp.bfloat16)
    variables = module.init(jax.random.key(0), x)
    row = fl.plan(module, variables, x, recipe=scheme)["layers/Dense_0/kernel"]
    assert (row.shape, row.axis, row.stacked, row.casts) == ((16, 3, 16), (-3,), (-2,), ("bfloat16",))
    served = fl.apply(module)(fl.quantize(module, variables, x, recipe=scheme), x)
    assert jnp.array_equal(served, fl.train(module, scheme)(variables, x))


class BiasedLayer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        init = nn.with_partitioning(nn.initializers.lecun_normal(), (None, "model"))
        return jnp.tanh(nn.Dense(16, kernel_init=init)(x)), None


class BiasedStack(nn.Module):
    """Layers with biases in a scan, stacked along the second axis, in boxes."""

    @nn.compact
    def __call__(self, x, scale=1.0):
        stacking = {nn.PARTITION_NAME: "layers"}
        layers = nn.scan(
            BiasedLayer, variable_axes={"params": 1}, split_rngs={"params": True}, length=3, metadata_params=stacking
        )
        return scale * layers(name="layers")(x, None)[0]


def test_methods_learn_from_the_inputs_of_scanned_layers():
    rng = np.random.default_rng(1)
    x = jnp.asarray(rng.standard_normal((64, 16)) @ rng.standard_normal((16, 16)), jnp.float32)
    module = BiasedStack()
    variables = module.init(jax.random.key(0), x)
    plan = fl.plan(module, variables, x, recipe="int4")
    stats = fl.observe(module, variables, [x[:32], x[32:]], "int4", collect=("hessian", "sum"), scale=2.0)
    rounded = fl.quantize(module, variables, recipe=plan)
    quantized = fl.quantize(module, variables, x, recipe="int4", method=GPTQ(), stats=stats, scale=2.0)
    params = meta.unbox(variables["params"])
    expected = fb.quantize_params(params, plan, method=GPTQ(), stats=stats)["layers"]["Dense_0"]["kernel"]
    box = quantized["params"]["layers"]["Dense_0"]["kernel"]
    assert isinstance(box, nn.Partitioned)
    jax.tree.map(np.testing.assert_array_equal, box.value, expected)
    exact, run = module.apply(variables, x), jax.jit(fl.apply(module))
    lost, lost_by_rounding = (exact - run(q, x) for q in (quantized, rounded))
    assert jnp.linalg.norm(lost) < 0.8 * jnp.linalg.norm(lost_by_rounding)

    corrected = fl.correct_biases(variables, rounded, plan, stats)
    expected = correct_biases(params, fb.quantize_params(params, plan), plan, stats)["layers"]["Dense_0"]["bias"]
    np.testing.assert_array_equal(corrected["params"]["layers"]["Dense_0"]["bias"], expected)
    assert isinstance(corrected["params"]["layers"]["Dense_0"]["kernel"], nn.Partitioned)
    missing = r"gptq needs statistics of layers/Dense_0/kernel, and there are none; pass stats="
    with pytest.raises(fb.QuantError, match=missing):
        fl.quantize(module, variables, x, recipe="int4", method=GPTQ())


def test_a_method_of_the_module_is_chosen_in_the_plan(variables, unchecked):
    plan = fl.plan(NET, variables, X, recipe="int4", method="encode")
    stats = fl.observe(NET, variables, [X], "int4", collect=("hessian",), method="encode")
    quantized = fl.quantize(NET, variables, recipe=plan, method=GPTQ(), stats=stats)
    assert fb.is_qarray(quantized["params"]["wi"]["kernel"].value)
    assert quantized["params"]["wo"]["kernel"] == variables["params"]["wo"]["kernel"]
    with pytest.raises(fb.QuantError, match=r"method is 'encode'; .*For a method of the module, pass recipe=linen.plan"):
        fl.quantize(NET, variables, X, recipe="int4", method="encode")
