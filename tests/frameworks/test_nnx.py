"""NNX models: quantized in their Variables, run through transparent with what they change, trained by unchanged optimizers."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fewbit as fb
from fewbit.frameworks import nnx as fx
from fewbit.methods import GPTQ, correct_biases

nnx = pytest.importorskip("flax.nnx")
optax = pytest.importorskip("optax")

X = jnp.asarray(np.random.default_rng(0).standard_normal((4, 16)), jnp.float32)
INT8 = fb.Recipe((fb.Rule(".*kernel", fb.Policy("int8", "int8", dlhs="int8", drhs="int8")),))


class Net(nnx.Module):
    """Three layers, batch statistics and dropout: parameters, and Variables that a call changes."""

    def __init__(self, rngs):
        self.wi = nnx.Linear(16, 32, rngs=rngs)
        self.norm = nnx.BatchNorm(32, momentum=0.5, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(32, 32, rngs=rngs), nnx.Linear(32, 16, rngs=rngs)])
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        x = self.drop(self.norm(self.wi(x)))
        return self.layers[1](jax.nn.silu(self.layers[0](x)))


def net():
    return Net(nnx.Rngs(0))


def serving(model):
    model.eval()
    return model


def call(model, x):
    return model(x)


def test_the_plan_has_a_row_for_each_param_and_changes_nothing():
    model = net()
    count = model.drop.rngs.count[...]
    plan = fx.plan(model, X, recipe="int8")
    assert [row.path for row in plan if row.policy] == ["layers/0/kernel", "layers/1/kernel", "wi/kernel"]
    assert plan["norm/scale"].policy is None
    assert model.drop.rngs.count[...] == count


EAGER = pytest.param(lambda f: f, id="eager", marks=pytest.mark.slow)


@pytest.mark.parametrize("jit", [EAGER, pytest.param(nnx.jit, id="nnx.jit"), pytest.param(jax.jit, id="jax.jit")])
def test_a_quantized_model_runs(jit):
    model = serving(net())
    quantized = fx.quantize(model, X, recipe="int8")
    assert fb.is_qarray(quantized.layers[0].kernel.get_raw_value())
    assert isinstance(quantized.layers[0].kernel, nnx.Param) and not fb.is_qarray(model.layers[0].kernel[...])
    got, want = jit(fx.transparent(call))(quantized, X), model(X)
    assert 0 < jnp.linalg.norm(got - want) < 0.05 * jnp.linalg.norm(want)


def test_a_graph_and_a_state_serve_as_well():
    graph, state = nnx.split(fx.quantize(serving(net()), X, recipe="int8"))
    run = jax.jit(lambda state, x: fx.transparent(call)(nnx.merge(graph, state), x))
    assert run(state, X).shape == X.shape
    assert fb.is_qarray(state["wi"]["kernel"].get_raw_value())


@pytest.mark.slow
@pytest.mark.parametrize("jit", [lambda f: f, nnx.jit], ids=["eager", "nnx.jit"])
def test_what_a_call_changes_is_written_back(jit):
    quantized, model = fx.quantize(net(), X, recipe="int8"), net()
    model(X)
    jit(fx.transparent(call))(quantized, X)
    np.testing.assert_allclose(quantized.norm.mean[...], model.norm.mean[...], rtol=0.02, atol=0.01)
    assert jnp.any(quantized.norm.mean[...] != 0)
    assert quantized.drop.rngs.count[...] == model.drop.rngs.count[...] == 1
    assert fb.is_qarray(quantized.wi.kernel.get_raw_value())


class Changing(nnx.Module):
    """A model that changes its attributes, Variables and submodules when it is called."""

    def __init__(self):
        self.wi = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
        self.drop = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
        self.first = self.second = nnx.Variable(jnp.zeros(2))
        self.removed = nnx.Variable(jnp.zeros(2))
        self.calls = 0

    def __call__(self, x):
        self.eval()
        self.calls += 1
        self.added = nnx.Linear(8, 8, rngs=nnx.Rngs(1))
        self.first = nnx.Cache(jnp.ones(2))
        if hasattr(self, "removed"):
            del self.removed
        return self.added(self.drop(self.wi(x)))


@pytest.mark.parametrize(
    "wrapped",
    [nnx.jit, fx.transparent, lambda f: nnx.jit(fx.transparent(f)), lambda f: fx.train(f, "int8")],
    ids=["of Flax", "transparent", "transparent, nnx.jit", "train"],
)
def test_another_structure_of_the_model_is_written_back_as_by_nnx_jit(wrapped):
    model, run, x = Changing(), wrapped(call), jnp.ones((1, 8))
    wi, second = model.wi, model.second
    run(model, x)
    run(model, x)
    assert model.wi is wi and model.second is second
    assert model.drop.deterministic and model.calls == 2 and not hasattr(model, "removed")
    assert isinstance(model.added, nnx.Linear) and isinstance(model.first, nnx.Cache)
    assert model.first[0] == 1 and model.second[0] == 0


def test_a_function_without_objects_runs():
    assert fx.transparent(lambda x: x + 1)(jnp.ones(2)).tolist() == [2, 2]


def test_objects_among_the_other_arguments_are_changed_too():
    quantized, rngs = fx.quantize(serving(net()), X, recipe="int8"), nnx.Rngs(3)
    run = nnx.jit(fx.transparent(lambda model, x, *, rngs: model(x) + jax.random.normal(rngs(), x.shape)))
    first, second = run(quantized, X, rngs=rngs), run(quantized, X, rngs=rngs)
    assert rngs.default.count[...] == 2 and not jnp.array_equal(first, second)


def test_quantizing_copies_no_array_and_can_free_each_source():
    model = net()
    quantized = fx.quantize(model, X, recipe="int8")
    assert quantized.wi.bias.get_raw_value() is model.wi.bias.get_raw_value()
    source = model.wi.kernel.get_raw_value()
    fx.quantize(model, X, recipe="int8", donate=True)
    assert source.is_deleted() and not model.wi.bias.get_raw_value().is_deleted()


def test_an_array_that_another_variable_has_too_is_not_freed():
    model = nnx.Linear(16, 4, rngs=nnx.Rngs(0))
    model.average = nnx.Variable(model.kernel.get_raw_value())
    quantized = fx.quantize(model, X, recipe="int8", donate=True)
    assert fb.is_qarray(quantized.kernel.get_raw_value()) and not quantized.average.get_raw_value().is_deleted()


def test_metadata_is_kept():
    init = nnx.with_partitioning(nnx.initializers.lecun_normal(), (None, "model"))
    with jax.set_mesh(jax.make_mesh((2,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))):
        model = nnx.Linear(16, 32, kernel_init=init, rngs=nnx.Rngs(0))
        quantized = fx.quantize(model, X, recipe="int8")
        assert quantized.kernel.get_metadata() == model.kernel.get_metadata()
        assert nnx.jit(fx.transparent(call))(quantized, X).shape == (4, 32)


@pytest.mark.slow
def test_an_optimizer_trains_the_float_model():
    model = net()
    target = jnp.roll(X, 1, axis=-1)
    structure = jax.tree.structure(nnx.state(model))
    optimizer = nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)
    loss = fx.train(lambda model, x: jnp.mean((model(x) - target) ** 2), INT8)

    @nnx.jit
    def step(model, optimizer, x):
        value, gradient = nnx.value_and_grad(loss)(model, x)
        optimizer.update(model, gradient)
        return value

    with jax.numpy_dtype_promotion("standard"):  # optax divides by integers
        losses = [step(model, optimizer, X) for _ in range(8)]
    assert losses[-1] < losses[0]
    assert jax.tree.structure(nnx.state(model)) == structure
    assert model.drop.rngs.count[...] == len(losses) and jnp.any(model.norm.mean[...] != 0)


def test_the_products_of_training_are_those_of_the_recipe():
    graph, params, rest = nnx.split(serving(net()), nnx.Param, ...)
    loss = fx.train(lambda model, x: jnp.mean(model(x) ** 2), INT8)
    text = str(jax.make_jaxpr(jax.grad(lambda params: loss(nnx.merge(graph, params, rest), X)))(params))
    assert len(re.findall("preferred_element_type=int32", text)) == 9  # each layer forwards, for its weights, for its input


def test_all_models_of_the_first_argument_are_trained():
    def through_both(models, x):
        return models["dec"](models["enc"](x))

    models = {"enc": nnx.Linear(16, 8, rngs=nnx.Rngs(0)), "dec": nnx.Linear(8, 4, rngs=nnx.Rngs(1))}
    served = fx.transparent(through_both)(fx.quantize(models, X, recipe="int4", fn=through_both), X)
    np.testing.assert_allclose(fx.train(through_both, "int4")(models, X), served, rtol=1e-6, atol=1e-6)


def test_the_first_argument_is_trained_also_by_keyword():
    def both(student, reference, x):
        return student(x), reference(x)

    student, reference = nnx.Linear(16, 4, rngs=nnx.Rngs(0)), nnx.Linear(16, 4, rngs=nnx.Rngs(1))
    trained = fx.train(both, "int4")
    by_keyword = trained(x=X, reference=reference, student=student)
    for given, expected in zip(by_keyword, trained(student, reference, X), strict=True):
        np.testing.assert_array_equal(given, expected)
    np.testing.assert_array_equal(by_keyword[1], reference(X))
    assert not jnp.array_equal(by_keyword[0], student(X))


def test_a_parameter_without_a_path_is_refused():
    param, x = nnx.Param(jnp.ones((8, 4))), jnp.ones((2, 8))
    for wrap in (fx.transparent, lambda fn: fx.train(fn, "int8")):
        with pytest.raises(fb.QuantError, match=r"the model is an nnx\.Param, which has no path"):
            wrap(lambda param, x: x @ param[...])(param, x)
    assert fx.plan({"w": param}, x, recipe="int8", fn=lambda tree, x: x @ tree["w"][...]).rows[0].path == "w"


def test_a_keyword_that_the_function_takes_too_is_refused():
    def noisy(model, x, key=None, dropout_key=None):
        return model(x)

    model, key = nnx.Linear(16, 4, rngs=nnx.Rngs(0)), jax.random.key(0)
    with pytest.raises(fb.QuantError, match=r"the function takes key= and so does nnx\.train"):
        fx.train(noisy, "int8")(model, X, key=key)
    with pytest.raises(fb.QuantError, match=r"the function takes dropout_key= and so does nnx\.lora_apply"):
        fx.lora_apply(noisy, dropout=0.5)(model, {}, X, dropout_key=key)
    fx.train(noisy, "int8")(model, X, key, key=key)


@pytest.mark.slow
def test_what_was_trained_is_what_is_served():
    model, recipe = serving(net()), fb.Recipe((fb.Rule(".*kernel", fb.Policy("int4", "int8")),))
    served = nnx.jit(fx.transparent(call))(fx.quantize(model, X, recipe=recipe), X)
    np.testing.assert_allclose(nnx.jit(fx.train(call, recipe))(model, X), served, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_sparse_parameters_are_served_as_they_were_trained():
    sparsity = fb.Sparsity(2, 4)
    model, recipe = serving(net()), fb.Recipe((fb.Rule(".*kernel", fb.Policy("int8", "int8"), sparsity=sparsity),))
    state = fx.update_sparsity(fx.sparsity_state(model, X, recipe=recipe), model, 0)
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    moved = nnx.merge(graph, jax.tree.map(lambda leaf: -leaf[::-1], params), rest)
    served = nnx.jit(fx.transparent(call))(fx.quantize(fx.pruned(moved, state), X, recipe=recipe), X)
    trained = nnx.jit(lambda model, x: fx.train(call, recipe)(model, x, sparsity=state))(moved, X)
    np.testing.assert_allclose(trained, served, rtol=1e-5, atol=1e-6)
    assert all((mask.sum() == mask.size // 2) for mask in state.masks.values())


def test_a_shared_variable_is_quantized_once():
    class Tied(nnx.Module):
        def __init__(self, rngs):
            self.embed = nnx.Embed(32, 16, rngs=rngs)
            self.head = nnx.Linear(16, 16, use_bias=False, rngs=rngs)
            self.again = self.head

        def __call__(self, ids):
            return self.embed.attend(self.again(self.head(self.embed(ids))))

    model, ids = Tied(nnx.Rngs(0)), jnp.arange(4)
    quantized = fx.quantize(model, ids, recipe="int8", donate=True)
    assert quantized.head is quantized.again and fb.is_qarray(quantized.head.kernel.get_raw_value())
    assert fx.transparent(call)(quantized, ids).shape == (4, 32)


@pytest.mark.slow
@pytest.mark.finding(40)
def test_adapters_go_by_the_paths_of_params_and_learn():
    model = fx.quantize(serving(net()), X, recipe="nf4")
    adapters = fx.lora_init(jax.random.key(0), model, X, match="layers/.*/kernel", rank=2, alpha=4.0)
    assert list(adapters) == ["layers/0/kernel", "layers/1/kernel"]
    adapted = fx.lora_apply(call)
    base = fx.transparent(call)(model, X)
    np.testing.assert_array_equal(adapted(model, adapters, X), base)
    gradient = jax.grad(lambda adapters: jnp.mean((adapted(model, adapters, X) - 1) ** 2))(adapters)
    moved = jax.tree.map(lambda p, g: p - 0.5 * g, adapters, gradient)
    assert jnp.mean((adapted(model, moved, X) - 1) ** 2) < jnp.mean((base - 1) ** 2)
    merged = fx.lora_merge(model, moved)
    assert not fb.is_qarray(merged.layers[0].kernel[...]) and fb.is_qarray(merged.wi.kernel.get_raw_value())
    # The sum of both terms is rounded once here and twice there: a few units of float32's last place.
    np.testing.assert_allclose(fx.transparent(call)(merged, X), adapted(model, moved, X), atol=1e-5)


class Stack(nnx.Module):
    """Layers as MaxText has them by default: float32 kernels stacked along their second axis, and bfloat16 products."""

    def __init__(self, rngs):
        @nnx.split_rngs(splits=3)
        @nnx.vmap(in_axes=0, out_axes=nnx.StateAxes({nnx.Param: 1}))
        def layers(rngs):
            return nnx.Linear(16, 16, use_bias=False, dtype=jnp.bfloat16, rngs=rngs)

        self.layers = layers(rngs)

    def __call__(self, x):
        @nnx.scan(in_axes=(nnx.Carry, nnx.StateAxes({nnx.Param: 1})), out_axes=nnx.Carry)
        def run(x, layer):
            return jnp.tanh(layer(x))

        return run(x, self.layers)


@pytest.mark.finding(26, 30)
@pytest.mark.parametrize("scheme", ["int8", pytest.param("nvfp4", marks=pytest.mark.slow)])
def test_bfloat16_layers_stacked_along_the_second_axis_are_served_as_trained(scheme):
    model, x = Stack(nnx.Rngs(0)), X.astype(jnp.bfloat16)
    row = fx.plan(model, x, recipe=scheme)["layers/kernel"]
    assert (row.shape, row.axis, row.stacked, row.casts) == ((16, 3, 16), (-3,), (-2,), ("bfloat16",))
    served = fx.transparent(call)(fx.quantize(model, x, recipe=scheme), x)
    assert jnp.array_equal(served, fx.train(call, scheme)(model, x))


class Layers(nnx.Module):
    """Layers with biases, stacked along the second axis."""

    def __init__(self, rngs):
        @nnx.split_rngs(splits=3)
        @nnx.vmap(in_axes=0, out_axes=nnx.StateAxes({nnx.Param: 1}))
        def layers(rngs):
            return nnx.Linear(16, 16, rngs=rngs)

        self.layers = layers(rngs)

    def __call__(self, x):
        @nnx.scan(in_axes=(nnx.Carry, nnx.StateAxes({nnx.Param: 1})), out_axes=nnx.Carry)
        def run(x, layer):
            return jnp.tanh(layer(x))

        return run(x, self.layers)


@pytest.mark.slow
def test_methods_learn_from_the_inputs_of_scanned_layers():
    rng = np.random.default_rng(1)
    x = jnp.asarray(rng.standard_normal((64, 16)) @ rng.standard_normal((16, 16)), jnp.float32)
    model = Layers(nnx.Rngs(0))
    plan = fx.plan(model, x, recipe="int4")
    stats = fx.observe(model, [x[:32], x[32:]], "int4", collect=("hessian", "sum"))
    rounded, quantized = fx.quantize(model, recipe=plan), fx.quantize(model, x, recipe="int4", method=GPTQ(), stats=stats)
    params = {"layers": {"kernel": model.layers.kernel[...], "bias": model.layers.bias[...]}}
    expected = fb.quantize_params(params, plan, method=GPTQ(), stats=stats)["layers"]["kernel"]
    jax.tree.map(np.testing.assert_array_equal, quantized.layers.kernel.get_raw_value(), expected)
    exact, run = model(x), nnx.jit(fx.transparent(call))
    lost, lost_by_rounding = (exact - run(q, x) for q in (quantized, rounded))
    assert jnp.linalg.norm(lost) < 0.8 * jnp.linalg.norm(lost_by_rounding)

    corrected = fx.correct_biases(model, rounded, plan, stats)
    expected = correct_biases(params, fb.quantize_params(params, plan), plan, stats)["layers"]["bias"]
    np.testing.assert_array_equal(corrected.layers.bias[...], expected)
    assert corrected.layers.kernel.get_raw_value().codes is rounded.layers.kernel.get_raw_value().codes
    with pytest.raises(fb.QuantError, match=r"gptq needs statistics of layers/kernel, and there are none; pass stats="):
        fx.quantize(model, x, recipe="int4", method=GPTQ())
