"""MaxText's contract, as its layers and tools call it: train, convert, strip, serve. Small imitations ask what they ask.

`test_maxtext_real.py` asks it of MaxText itself, where that is installed.
"""

import enum
import types
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fewbit as fb

nn = pytest.importorskip("flax.linen")

from flax import nnx  # noqa: E402 - after the check that Flax is here

from fewbit.frameworks import maxtext  # noqa: E402
from fewbit.frameworks.maxtext import Quantization  # noqa: E402

INT8 = fb.Policy("int8", "int8", dlhs="int8", drhs="int8")


class Dense(nn.Module):
    """Calls `quant` as MaxText's DenseGeneral and MoE layers do."""

    quant: Quantization

    @nn.compact
    def __call__(self, x):
        kernel = self.param("kernel", nn.initializers.lecun_normal(), (x.shape[-1], 32), jnp.float32)
        x = self.quant.dot_general_cls(mesh_axes=("embed", "mlp"))()(
            x, kernel, (((x.ndim - 1,), (0,)), ((), ())), precision=None
        )
        experts = self.param("experts", nn.initializers.lecun_normal(), (3, 32, 16), jnp.float32)
        return self.quant.einsum(mesh_axes=("exp",))("bk,ekn->ebn", jnp.tanh(x), experts)


class QuantMode(enum.Enum):
    """AQT's, with whose members MaxText's layers compare `quant_mode`."""

    TRAIN = 1
    CONVERT = 3
    SERVE = 4


X = jnp.asarray(np.random.default_rng(0).standard_normal((4, 16)), jnp.float32)
PARAMS = {"params": jax.jit(Dense(Quantization(INT8)).init)(jax.random.key(0), X)["params"]}


def exact(params, x):
    return jnp.einsum("bk,ekn->ebn", jnp.tanh(x @ params["kernel"]), params["experts"])


def test_training_quantizes_every_product_and_its_gradients():
    quant = Quantization(INT8)
    assert (quant.quant_mode, quant.get_block_size(), quant.needs_apply_rngs) == (maxtext.QuantMode.TRAIN, 1, False)
    out = Dense(quant).apply(PARAMS, X)
    want = exact(PARAMS["params"], X)
    assert 0 < jnp.linalg.norm(out - want) < 0.05 * jnp.linalg.norm(want)
    trace = str(jax.make_jaxpr(jax.grad(lambda p: Dense(quant).apply(p, X).sum()))(PARAMS))
    assert trace.count("preferred_element_type=int32") >= 4  # two products; a gradient of an operand, and of both weights


def test_what_is_converted_serves_as_it_was_trained():
    trained = jax.jit(Dense(Quantization(INT8)).apply)(PARAMS, X)
    converted, stored = Dense(Quantization(INT8, "convert")).apply(PARAMS, X, mutable=["aqt"])
    np.testing.assert_allclose(converted, trained, rtol=1e-6, atol=1e-6)
    weights = jax.tree.leaves(stored["aqt"], is_leaf=fb.is_qarray)
    assert sorted(q.shape for q in weights) == [(3, 32, 16), (16, 32)]
    zeros = jax.tree.map(jnp.zeros_like, PARAMS)
    served = jax.jit(Dense(Quantization(INT8, "serve")).apply)({**zeros, **stored}, X)
    np.testing.assert_allclose(served, trained, rtol=1e-6, atol=1e-6)


@pytest.mark.slow
def test_stochastic_rounding_draws_from_the_modules_stream():
    policy = fb.Policy("int8", dlhs=fb.Arm("int8", rounding="stochastic"))
    model = Dense(Quantization(policy, rng="noise"))

    def gradient(seed):
        return jax.grad(lambda x: jnp.sum(jnp.sin(model.apply(PARAMS, x, rngs={"noise": jax.random.key(seed)}))))(X)

    assert np.array_equal(gradient(1), gradient(1))
    assert not np.array_equal(gradient(1), gradient(2))


@pytest.mark.slow
def test_delayed_scaling_is_overwritten_by_its_gradient():
    """Step by step what `fb.train` does, the state in Flax's collection."""
    recipe = fb.recipe("te_fp8_delayedscaling")
    model = Dense(Quantization(recipe.rules[-1].policy))

    def ours(params, x):
        return jnp.sum(jnp.sin(exact(params, x)))

    variables = model.init(jax.random.key(0), X)
    held, delayed = variables["_overwrite_with_gradient"], fb.delayed_state(ours, PARAMS["params"], X, recipe=recipe)
    step = jax.jit(jax.value_and_grad(lambda state, x: jnp.sum(jnp.sin(model.apply(state, x)))))
    expected = jax.jit(
        jax.value_and_grad(lambda p, d, x: fb.train(ours, recipe)(p, x, delayed=d), argnums=(0, 1)),
    )
    for scale in (1.0, 3.0, 0.5):
        value, gradients = step({**PARAMS, "_overwrite_with_gradient": held}, scale * X)
        want, (params_gradient, seen) = expected(PARAMS["params"], delayed, scale * X)
        np.testing.assert_allclose(value, want, rtol=1e-5)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4), gradients["params"], params_gradient
        )
        held, delayed = gradients["_overwrite_with_gradient"], delayed.advance(seen)
        for module, path in (("AqtDotGeneral_0", "kernel"), ("AqtEinsum_0", "experts")):
            product, kept = delayed.products[path], held[module]
            kept = kept.get("AqtDotGeneral_0", kept)
            np.testing.assert_allclose(kept["weight_scale"], product.weight.scale, rtol=1e-6)
            np.testing.assert_allclose(kept["activation_amax_history"], product.activation.amax_history, rtol=1e-3)
            np.testing.assert_allclose(kept["gradient_scale"], product.gradient.scale, rtol=1e-3)


def test_the_mode_is_a_name_or_aqts(unchecked):
    assert Quantization(INT8, QuantMode.SERVE).quant_mode == QuantMode.SERVE
    for mode in QuantMode:
        assert Quantization(INT8, mode).quant_mode == mode == Quantization(INT8, mode.name.lower()).quant_mode
    converted, stored = Dense(Quantization(INT8, QuantMode.CONVERT)).apply(PARAMS, X, mutable=["aqt"])
    served = Dense(Quantization(INT8, QuantMode.SERVE)).apply({**jax.tree.map(jnp.zeros_like, PARAMS), **stored}, X)
    np.testing.assert_array_equal(served, converted)
    stochastic = fb.Policy("int8", dlhs=fb.Arm("int8", rounding="stochastic"))
    assert Quantization(stochastic).needs_apply_rngs and not Quantization(stochastic, "serve").needs_apply_rngs


class Mlp(nn.Module):
    """A tree like MaxText's: a gate, two products in a layer, and float weights in bfloat16 arithmetic."""

    quant: Quantization

    def product(self, name, x, width):
        return NamedDense(self.quant, width, name=name)(x)

    @nn.compact
    def __call__(self, x):
        layers = self.product("layers_query", x, 32)
        return self.product("layers_wo", jnp.tanh(layers), 16) + self.product("logits", x, 16)


class NamedDense(nn.Module):
    """DenseGeneral: the kernel cast to the dtype of the computation, then `quant`."""

    quant: Quantization
    width: int

    @nn.compact
    def __call__(self, x):
        kernel = self.param("kernel", nn.initializers.lecun_normal(), (x.shape[-1], self.width), jnp.float32)
        x = x.astype(jnp.bfloat16)
        return self.quant.dot_general_cls()()(x, kernel.astype(x.dtype), (((x.ndim - 1,), (0,)), ((), ())), precision=None)


MIXED = fb.Recipe((fb.Rule(".*query/kernel", "int4"), fb.Rule(".*layers.*", INT8)), "mixed")
MLP = {"params": jax.jit(Mlp(Quantization(INT8)).init)(jax.random.key(1), X)["params"]}


def strip_kernels(tree):
    """MaxText's `_strip_kernels_at_quantized_paths`, in the words of its documentation."""
    kept = {name: strip_kernels(x) if isinstance(x, dict) else x for name, x in tree.items()}
    return {name: x for name, x in kept.items() if name != "kernel" or "AqtDotGeneral_0" not in tree}


@pytest.mark.finding(24)
def test_maxengine_assigns_the_mode_of_a_model_that_is_built():
    quant = Quantization(INT8, QuantMode.TRAIN)
    model = Dense(quant)
    trained = model.apply(PARAMS, X)
    model.quant.quant_mode = QuantMode.CONVERT
    _, stored = model.apply({**PARAMS, "aqt": {}}, X, mutable=True)
    quant.quant_mode = QuantMode.SERVE
    assert quant.quant_mode == QuantMode.SERVE != QuantMode.CONVERT and hash(quant.quant_mode) == hash(QuantMode.SERVE)
    served = model.apply({"params": jax.tree.map(jnp.zeros_like, PARAMS["params"]), "aqt": stored["aqt"]}, X)
    np.testing.assert_allclose(served, trained, rtol=1e-6, atol=1e-6)
    with pytest.raises(fb.QuantError, match="no weight is stored in collection 'aqt'; run the model in 'convert' first"):
        model.apply(PARAMS, X)
    with pytest.raises(AttributeError, match="only quant_mode can be assigned"):
        quant.rng = "noise"


@pytest.mark.finding(25)
def test_what_is_stored_leaves_no_float_weight_behind():
    _, stored = Dense(Quantization(INT8, "convert")).apply({**PARAMS, "aqt": {}}, X, mutable=True)
    boxed = nn.LogicallyPartitioned(PARAMS["params"]["kernel"], ("embed", "mlp"))
    params = {**PARAMS["params"], "kernel": boxed, "bias": jnp.ones(32), "norm": {"scale": jnp.ones(16)}}
    left = maxtext.remove_quantized_params(params, stored["aqt"])
    assert (left["kernel"], left["experts"]) == ({}, {}) and {"bias", "norm"} < set(left)
    with pytest.raises(fb.QuantError, match=r"no parameter has the shape \(16, 32\) of the stored weight"):
        maxtext.remove_quantized_params({"experts": params["experts"]}, stored["aqt"])


@pytest.mark.finding(25)
def test_layerwise_quantization_strips_the_kernels_next_to_ours():
    _, stored = Mlp(Quantization(INT8, "convert")).apply({**MLP, "aqt": {}}, X, mutable=True)
    state = {name: {**MLP["params"][name], **stored["aqt"][name]} for name in MLP["params"]}
    frozen = {name: list(tree) for name, tree in strip_kernels(state).items()}
    assert set(frozen) == {"layers_query", "layers_wo", "logits"} and all(x == ["AqtDotGeneral_0"] for x in frozen.values())
    assert fb.is_qarray(state["logits"]["AqtDotGeneral_0"]["qrhs"]["frozen"].weight)


@pytest.mark.finding(27)
def test_rules_by_layer_follow_the_paths_of_the_tree():
    quant = Quantization(MIXED, "convert")
    out, stored = Mlp(quant).apply({**MLP, "aqt": {}}, X, mutable=True)
    found = {name: tree["AqtDotGeneral_0"]["qrhs"]["frozen"].weight for name, tree in stored["aqt"].items()}
    assert [found[name].scheme.format.bits for name in ("layers_query", "layers_wo")] == [4, 8]
    assert found["logits"].dtype == jnp.bfloat16 and not fb.is_qarray(found["logits"])  # no rule: stored as it is
    trained = Mlp(Quantization(MIXED)).apply(MLP, X)
    quant.quant_mode = "serve"
    zeros = jax.tree.map(jnp.zeros_like, MLP["params"])
    served = Mlp(quant).apply({"params": zeros, "aqt": stored["aqt"]}, X)
    np.testing.assert_array_equal(served, trained)
    np.testing.assert_array_equal(out, trained)


class Bridged(nnx.Module):
    """DenseGeneral of MaxText 0.2.5: an NNX module that makes ours a part of itself, and calls it once to build it."""

    def __init__(self, quant, shape, rngs):
        self.shape, self.quant = shape, quant
        if quant.quant_mode != QuantMode.SERVE:
            self.kernel = nnx.Param(jax.random.normal(rngs.params(), shape))
        linen = quant.dot_general_cls(mesh_axes=("embed", "mlp"))()
        self.name = f"{type(linen).__name__}_0"
        setattr(self, self.name, nnx.bridge.ToNNX(linen, rngs=rngs))
        self(jnp.zeros((1, shape[0])), initializing=True)

    def __call__(self, x, initializing=False):
        kernel = jnp.zeros(self.shape) if self.quant.quant_mode == QuantMode.SERVE else self.kernel[...]
        args = x, kernel, (((x.ndim - 1,), (0,)), ((), ()))
        product = getattr(self, self.name)
        if initializing:
            product.lazy_init(*args, precision=None)
        return product(*args, precision=None, mutable=["aqt"])


class Layer(nnx.Module):
    def __init__(self, quant, rngs):
        self.query, self.wo = Bridged(quant, (16, 32), rngs), Bridged(quant, (32, 16), rngs)

    def __call__(self, x):
        return self.wo(jnp.tanh(self.query(x)))


def bridged(quant, layers=2):
    """Layers stacked along their first axis, as MaxText's scan builds them, in a model that MaxText then hands over."""

    class Model(nnx.Module):
        def __init__(self):
            build = nnx.vmap(lambda rngs: Layer(quant, rngs), in_axes=0, out_axes=0)
            self.layers = build(nnx.Rngs(0).fork(split=layers))

        def __call__(self, x):
            graph, state = nnx.split(self.layers)

            def body(x, state):
                layer = nnx.merge(graph, state)
                return layer(x), nnx.state(layer)

            x, state = jax.lax.scan(body, x, state)
            nnx.update(self.layers, state)
            return x

    return Model()


def tell_paths(model):
    return maxtext.maybe_quantize_model(model, None)


@pytest.mark.slow
@pytest.mark.finding(26, 27)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_rules_by_layer_in_nnx_and_in_stacked_layers():
    """Layers get their paths once the model is built; before that nothing but building the model may call them."""
    models = {mode: tell_paths(bridged(Quantization(MIXED, mode))) for mode in ("train", "convert", "serve")}
    out = models["train"](X)
    np.testing.assert_array_equal(models["convert"](X), out)
    state = nnx.to_pure_dict(nnx.state(models["convert"], nnx.Not(nnx.RngState)))
    query = state["layers"]["query"]["AqtDotGeneral_0"]["qrhs"]["frozen"].weight
    assert (query.shape, query.scheme.format.bits) == ((2, 16, 32), 4)
    stripped = strip_kernels(state)
    kept = nnx.to_pure_dict(nnx.state(models["serve"], nnx.Not(nnx.RngState)))
    assert jax.tree.structure(kept) == jax.tree.structure(stripped)  # what `from_pretrained` asks the checkpoint for
    nnx.update(models["serve"], stripped)
    np.testing.assert_array_equal(models["serve"](X), out)


@pytest.mark.finding(27)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_rules_by_layer_are_never_dropped_in_silence():
    layer = Layer(Quantization(MIXED), nnx.Rngs(0))
    with pytest.raises(
        fb.QuantError, match="this layer's path is unknown; in addition to configure_quantization, assign maxtext"
    ):
        layer(X)
    missing = fb.Recipe((fb.Rule(".*key/kernel", "int4"), fb.Rule(".*", INT8)))
    with pytest.raises(fb.QuantError, match=r"rule 1 of recipe 'recipe' \(.*key/kernel -> int4\) matches no layer.*query"):
        tell_paths(Layer(Quantization(missing), nnx.Rngs(0)))
    axis = fb.Recipe((fb.Rule(".*", "int4", axis=0),))
    with pytest.raises(fb.UnsupportedError, match="tiles run along the contraction axes"):
        Mlp(Quantization(axis)).apply(MLP, X)
    assert maxtext.maybe_quantize_model(Mlp(Quantization(MIXED)), None) == Mlp(Quantization(MIXED))


KERNEL, GATE, EXPERTS = (
    "decoder/layers/mlp/wi_0/kernel",
    "decoder/layers/MoeBlock_0/gate/kernel",
    "decoder/layers/MoeBlock_0",
)


@pytest.mark.parametrize("name", fb.RECIPES.names())
def test_kernels_and_experts_follow_the_rule_of_their_role(name):
    kernels = (KERNEL, *(f"decoder/layers/{one}/kernel" for one in ("wo", "query", "key", "value", "out")))
    shapes = dict.fromkeys(kernels, jax.ShapeDtypeStruct((256, 32), jnp.float32))
    shapes |= {EXPERTS: jax.ShapeDtypeStruct((2, 256, 32), jnp.float32)}
    roles = dict.fromkeys(kernels, fb.TensorRole("matmul", -2)) | {EXPERTS: fb.TensorRole("experts", -2)}
    planned = {row.path: row.policy for row in fb.plan(None, shapes, recipe=name, roles=roles)}
    quant = Quantization(name)
    rules = {path: quant.rule(path) for path in kernels}
    assert {path: rule and rule.policy for path, rule in rules.items()} == {path: planned[path] for path in kernels}
    if all(rule.roles for rule in quant.rules):
        assert quant.rule(EXPERTS, fb.Role.EXPERTS).policy == planned[EXPERTS]
        assert quant.rule(GATE) is None and quant.needs_path
    else:  # as for MaxText's own values
        assert quant.rule(GATE) is quant.rule(GATE.replace("gate", "dense")) is not None


def test_a_router_has_a_rule_of_its_own():
    rules = fb.Rule(".*", None, roles="router", optional=True), fb.Rule(".*", "int8")
    quant = Quantization(fb.Recipe(rules))
    assert quant.rule(KERNEL) is rules[1] and quant.rule("decoder/layers/moe", fb.Role.EXPERTS) is rules[1]
    assert (
        quant.rule(GATE) is quant.rule("mlp/shared_expert_gate/kernel") is rules[0] and quant.rule("gate/kernel") is rules[0]
    )
    experts = Quantization(fb.Recipe((fb.Rule(".*", "int4", roles="experts"), *rules[1:])))
    assert (experts.rule(None, fb.Role.EXPERTS), experts.rule(None)) == experts.rules and not experts.needs_path


def test_a_recipe_by_role_trains_and_stores_what_it_names():
    floats = exact(PARAMS["params"], X)
    trained = Dense(Quantization("w8a8")).apply(PARAMS, X)
    assert 0 < jnp.max(jnp.abs(trained - floats)) < 0.2
    model = NamedDense(Quantization("nf4", "convert"), 32)
    _, stored = model.apply({"params": MLP["params"]["layers_query"], "aqt": {}}, X, mutable=["aqt"])
    assert stored["aqt"]["AqtDotGeneral_0"]["qrhs"]["frozen"].weight.scheme.name == "nf4"
    _, stored = Dense(Quantization("nf4", "convert")).apply({**PARAMS, "aqt": {}}, X, mutable=["aqt"])
    weights = jax.tree.leaves(stored["aqt"], is_leaf=lambda leaf: isinstance(leaf, maxtext.StoredWeight))
    assert [one.weight.scheme.name for one in weights] == ["nf4", "nf4"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_recipe_by_role_leaves_the_router_of_an_nnx_model():
    class Model(nnx.Module):
        def __init__(self):
            self.moe_block = Experts(Quantization("w8"), nnx.Rngs(0))

    model = tell_paths(Model())
    x = X.reshape(2, 2, 16)
    np.testing.assert_array_equal(model.moe_block.gate(x), x @ model.moe_block.gate.kernel[...])
    assert maxtext.configure_quantization(config(), recipe="w8").rule("moe_block", fb.Role.EXPERTS).policy == fb.Policy(
        "int8"
    )


def test_a_recipe_without_a_rule_for_matmuls_is_refused():
    products = (fb.Rule(".*", fb.Policy("int8", "int8")),)
    for rules in ((), (fb.Rule(".*", "int8"),)):
        with pytest.raises(
            fb.UnsupportedError, match=r"rules of products[^$]*product \.\* -> int8 x int8: MaxText computes"
        ):
            maxtext.configure_quantization(config(), recipe=fb.Recipe(rules, products=products))
    for fields in ({"roles": "embedding"}, {"ops": "take"}):
        with pytest.raises(fb.QuantError, match="has no rule for MaxText's matmuls"):
            maxtext.configure_quantization(config(), recipe=fb.Recipe((fb.Rule(".*", "int8", **fields),)))
    assert maxtext.configure_quantization(config(), recipe="maxtext/te_no_quant") is None


SPARSE = fb.Recipe((fb.Rule(".*", INT8, sparsity=fb.Sparsity(2, 4, start_step=1, update_step=2)),))


@pytest.mark.finding(28)
def test_sparsity_is_trained_on_its_schedule_and_served_by_its_mask():
    quant = Quantization(SPARSE)
    model = NamedDense(quant, 32)
    variables = {"params": MLP["params"]["layers_query"]}
    kept = model.init(jax.random.key(0), X)["aqt"]
    dense = NamedDense(Quantization(INT8), 32).apply(variables, X)
    seen = []
    for scale in (1.0, 2.0, -1.0):
        weights = jax.tree.map(
            lambda w, scale=scale: w * scale + float(scale < 0), variables
        )  # other weights are the largest then
        out, new = model.apply({**weights, "aqt": kept}, X, mutable=["aqt"])
        kept = new["aqt"]
        seen.append((kept["AqtDotGeneral_0"]["mask"], out))
    masks = [np.asarray(mask) for mask, _ in seen]
    np.testing.assert_array_equal(seen[0][1], dense)  # before `start_step`
    assert [mask.mean() for mask in masks] == [1.0, 0.5, 0.5] and np.array_equal(masks[1], masks[2])  # renewed at 1, 3, ...
    assert (masks[1].reshape(4, 4, 32).sum(1) == 2).all()  # along what the product contracts
    converted = NamedDense(Quantization(SPARSE, "convert"), 32)
    _, stored = converted.apply({**weights, "aqt": kept}, X, mutable=["aqt"])
    decoded = np.asarray(fb.dequantize(stored["aqt"]["AqtDotGeneral_0"]["qrhs"]["frozen"].weight), np.float32)
    np.testing.assert_array_equal(decoded != 0, masks[2])
    served = NamedDense(Quantization(SPARSE, "serve"), 32).apply({"params": {"kernel": jnp.zeros((16, 32))}, **stored}, X)
    np.testing.assert_array_equal(served, seen[2][1])


@pytest.mark.finding(28)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_sparsity_and_delayed_scales_have_their_state_where_the_rules_are_by_layer():
    delayed = fb.recipe("te_fp8_delayedscaling").rules[-1].policy
    rules = fb.Rule(".*query/kernel", INT8, sparsity=fb.Sparsity(2, 4)), fb.Rule(".*wo/kernel", delayed)
    model = tell_paths(bridged(Quantization(fb.Recipe(rules))))
    state = nnx.to_pure_dict(nnx.state(model, nnx.Not(nnx.RngState)))["layers"]
    query, wo = state["query"]["AqtDotGeneral_0"], state["wo"]["AqtDotGeneral_0"]
    assert (query["mask"].shape, query["step"].shape, wo["weight_scale"].shape) == ((2, 16, 32), (2,), (2,))
    model(X)
    assert np.asarray(model.layers.query.AqtDotGeneral_0.mask[...]).mean() == 0.5
    built = Layer(Quantization(SPARSE), nnx.Rngs(0)).wo.AqtDotGeneral_0
    assert (int(built.step[...]), np.asarray(built.mask[...]).mean()) == (0, 1.0)  # building is no step of training


@pytest.mark.finding(29)
def test_the_grouped_matmul_reads_its_dtypes():
    """`quant_dg.fwd.dg_quantizer.lhs.numerics.get_dtype()`, as the MoE layers of MaxText have it."""

    def dtypes(policy):
        quantizer = Quantization(policy).quant_dg.fwd.dg_quantizer
        return tuple(side.numerics.get_dtype() for side in (quantizer.lhs, quantizer.rhs))

    assert dtypes(fb.recipe("maxtext/int8").rules[0].policy) == (jnp.int8, jnp.int8)
    assert dtypes(fb.Policy("int4_aqt")) == (None, jnp.int4)
    assert dtypes(fb.recipe("maxtext/fp8").rules[0].policy) == (jnp.float8_e4m3fn, jnp.float8_e4m3fn)
    for policy, reason in (
        (fb.Policy("nf4"), "rhs: nf4 is not"),
        (fb.Policy("int8_g32"), "rhs: .* is not"),
        (SPARSE, "sparsity"),
    ):
        with pytest.raises(fb.UnsupportedError, match="grouped matmul does not support") as caught:
            _ = Quantization(policy).quant_dg
        assert caught.match(reason)


@pytest.mark.finding(29)
def test_an_einsum_works_outside_of_a_module():
    """As `RoutedMoE.dense_matmul` calls it; and through `apply_einsum_in_nnx`, which makes it a part of the layer."""
    equation, x, experts = "BTD,EDF->BTEF", X.reshape(2, 2, 16), PARAMS["params"]["experts"].reshape(3, 16, 32)
    want = fb.einsum(equation, x, experts, policy=INT8)
    einsum = Quantization(INT8).einsum(mesh_axes=("exp", None, "mlp"))
    np.testing.assert_array_equal(einsum(equation, x, experts), want)
    wrapper = nnx.bridge.ToNNX(einsum, rngs=nnx.Rngs(0)).lazy_init(equation, x, experts)
    np.testing.assert_array_equal(wrapper(equation, x, experts, mutable=["aqt"]), want)
    mask = experts > 0  # of tokens that experts take, in MaxText's dispatch: no weight
    np.testing.assert_array_equal(einsum(equation, x, mask), jnp.einsum(equation, x, mask.astype(x.dtype)))
    for quant in (Quantization(SPARSE), Quantization(INT8, "convert")):
        with pytest.raises(fb.UnsupportedError, match="a matmul outside of a Flax module keeps no state"):
            quant.einsum()(equation, x, experts)
    for quant in (Quantization(SPARSE), Quantization(INT8, "convert"), Quantization(INT8, "serve")):
        with pytest.raises(fb.UnsupportedError, match="which would reset its state"):
            nnx.bridge.ToNNX(quant.einsum(), rngs=nnx.Rngs(0)).lazy_init(equation, x, experts)


class Experts(nnx.Module):
    """RoutedMoE of MaxText 0.2.5 with `sparse_matmul=false`: float weights of its own, zeros in their place where it serves."""

    def __init__(self, quant, rngs):
        self.quant, self.rngs, self.dtype = quant, rngs, jnp.bfloat16
        for name, shape in (("wi_0", (3, 16, 32)), ("wi_1", (3, 16, 32)), ("wo", (3, 32, 16))):
            is_served = quant.quant_mode == QuantMode.SERVE
            setattr(self, name, jnp.zeros(shape) if is_served else nnx.Param(jax.random.normal(rngs.params(), shape)))
        self.gate = Bridged(quant, (16, 3), rngs)

    def get_einsum(self, einsum_name):
        """`apply_einsum_in_nnx`."""

        def einsum(*args):
            attribute = f"quant_einsum_{einsum_name}"
            if not hasattr(self, attribute):
                setattr(self, attribute, nnx.bridge.ToNNX(self.quant.einsum(), rngs=self.rngs).lazy_init(*args))
            return getattr(self, attribute)(*args, mutable=["aqt"])

        return einsum

    def __call__(self, x):
        def expert(name, equation, x):
            return self.get_einsum(name)(equation, x, getattr(self, name)[...].astype(self.dtype))

        gated = expert("wi_0", "bsm,emh->bseh", x) * expert("wi_1", "bsm,emh->bseh", x)
        return jnp.einsum(
            "bsem,bse->bsm", expert("wo", "bseh,ehm->bsem", gated), self.gate(x.astype(jnp.float32)).astype(x.dtype)
        )


@pytest.mark.finding(29)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("recipe", [INT8, fb.Recipe((fb.Rule(".*gate/kernel", None), fb.Rule(".*experts", "int4")))])
def test_experts_are_converted_and_served(recipe):
    """MaxText's two static methods, replaced by ours: parameters copied, converted by a call, stripped, loaded, served."""

    class Model(nnx.Module):
        def __init__(self, mode, seed):
            self.experts = Experts(Quantization(recipe, mode), nnx.Rngs(seed))

        def __call__(self, x):
            return self.experts(x)

    def state(model):
        return nnx.to_pure_dict(nnx.state(model, nnx.Not(nnx.RngState)))

    trained, converted, served = (tell_paths(Model(*built)) for built in (("train", 0), ("convert", 1), ("serve", 2)))
    x = X.reshape(2, 2, 16).astype(jnp.bfloat16)
    with pytest.raises(fb.UnsupportedError, match="assign maybe_quantize_model, and copy_parameters and strip_quantized"):
        converted(x)  # random values, as long as the parameters are not copied
    maxtext.copy_parameters(converted, trained)
    out = trained(x)
    np.testing.assert_array_equal(converted(x), out)
    saved = maxtext.strip_quantized(state(converted))
    assert {name: saved["experts"][name].shape for name in ("wi_0", "wo")} == {"wi_0": (3, 1, 1), "wo": (3, 1, 1)}
    leaves, structure = jax.tree.flatten(saved)
    asked, structure_asked = jax.tree.flatten(state(served))  # what `from_pretrained` asks the checkpoint for
    assert structure == structure_asked and list(map(jnp.shape, leaves)) == list(map(jnp.shape, asked))
    weight = saved["experts"]["quant_einsum_wi_0"]["AqtDotGeneral_0"]["qrhs"]["frozen"].weight
    assert weight.scheme.format.bits == (8 if recipe is INT8 else 4)
    nnx.update(served, saved)
    np.testing.assert_array_equal(served(x), out)


@pytest.mark.finding(30)
def test_training_and_serving_share_one_cast():
    """bfloat16 arithmetic over float32 weights, MaxText's default: the codes are those of the cast in every mode."""
    kernel = MLP["params"]["layers_query"]["kernel"]
    converted, stored = NamedDense(Quantization(INT8, "convert"), 32).apply(
        {"params": {"kernel": kernel}, "aqt": {}}, X, mutable=True
    )
    q = stored["aqt"]["AqtDotGeneral_0"]["qrhs"]["frozen"].weight
    of_cast, of_master = (fb.quantize(w, INT8.weight, axis=0) for w in (kernel.astype(jnp.bfloat16), kernel))
    np.testing.assert_array_equal(q.codes, of_cast.codes)
    assert not np.array_equal(q.codes, of_master.codes)  # which is why the cast matters
    trained = NamedDense(Quantization(INT8), 32).apply({"params": {"kernel": kernel}}, X)
    served = NamedDense(Quantization(INT8, "serve"), 32).apply({"params": {"kernel": 0 * kernel}, **stored}, X)
    np.testing.assert_array_equal(trained, converted)
    np.testing.assert_array_equal(served, converted)


@pytest.mark.finding(26)
def test_layers_stacked_along_an_axis_that_is_not_the_first():
    """`param_scan_axis=1`, MaxText's default: kernels `[in, layers, out]`, what is stored `[layers, in, out]`."""
    stack = jnp.stack([MLP["params"]["layers_query"]["kernel"][:, :16] * scale for scale in (1.0, 2.0)], 1)

    def run(mode, kernels, aqt=None):
        model = NamedDense(Quantization(INT8, mode), 16)

        def body(x, layer):
            kernel, kept = layer
            out, new = model.apply({"params": {"kernel": kernel}, "aqt": kept}, x, mutable=["aqt"])
            return out.astype(jnp.float32), new.get("aqt", {})

        return jax.lax.scan(body, X, (jnp.moveaxis(kernels, 1, 0), {} if aqt is None else aqt))

    trained, _ = run("train", stack)
    converted, stored = run("convert", stack)
    assert stored["AqtDotGeneral_0"]["qrhs"]["frozen"].weight.shape == (2, 16, 16)
    served, _ = run("serve", jnp.zeros_like(stack), stored)
    np.testing.assert_array_equal(converted, trained)
    np.testing.assert_array_equal(served, trained)


@pytest.mark.finding(31)
@pytest.mark.parametrize("tiled_axis", ["first", pytest.param("last", marks=pytest.mark.slow)])
def test_the_local_shard_count_cuts_the_weights_gradient(tiled_axis):
    """Each part of the batch (AQT) or of the sequence (Qwix) has scales of its own, and the parts are added in floating point."""
    x, w = X.reshape(2, 4, 8), PARAMS["params"]["kernel"][:8]
    policy = fb.Policy("int8", "int8", drhs=fb.Arm("int8", tiled_axis=tiled_axis))
    numbers = (((2,), (0,)), ((), ()))
    product = Quantization(policy, shards=2).dot_general_cls()()
    y, pull = jax.vjp(lambda w: product.apply({}, x, w, numbers), w)
    np.testing.assert_array_equal(y, fb.dot_general(x, w, numbers, policy=policy))
    g = jnp.cos(y)
    axis = 0 if tiled_axis == "first" else 1
    cut = [jnp.split(a, 2, axis) for a in (x, g)]
    each = [
        jax.vjp(lambda w, part=part: fb.dot_general(part, w, numbers, policy=policy), w)[1](c)[0]
        for part, c in zip(*cut, strict=True)
    ]
    np.testing.assert_allclose(pull(g)[0], sum(each), rtol=1e-6, atol=1e-6)
    y, pull = jax.vjp(
        lambda w: product.apply({}, x[:1, :1], w, numbers), w
    )  # decoding one token works, its gradient does not
    with pytest.raises(fb.QuantError, match="quantization_local_shard_count=2 does not divide"):
        pull(y)


def config(**fields):
    """MaxText's fields at their defaults, as its `types.py` has them."""
    defaults = {
        "quantization": "int8",
        "quant_cfg_path": "",
        "quantization_local_shard_count": -1,
        "use_qwix_quantization": False,
        "replicate_quant_scale": False,
        "constant_bound_config": "",
        "weight_quantization_calibration_method": "absmax",
        "act_quantization_calibration_method": "absmax",
        "bwd_quantization_calibration_method": "absmax",
        "drhs_grad_quantization_calibration_method": None,
        "weight_sparsity_n": None,
        "weight_sparsity_m": None,
        "weight_sparsity_start_step": 50,
        "weight_sparsity_update_step": 10,
        "use_batch_split_schedule": False,
        "use_manual_quantization": False,
        "quantize_mtp": False,
        "quantize_router_proj": True,
        "quantize_logits_proj": False,
        "logits_proj_quant_calibration_method": "",
        "weight_dtype": jnp.float32,
        "weight_block_size": None,
        "unquantized_modules": [],
        "te_comm_gemm_overlap": "disabled",
        "quantize_kvcache": False,
        "kv_quant_dtype": "int8",
        "kv_quant_axis": "heads_and_dkv",
        "num_experts": 1,
        "sparse_matmul": True,
        "megablox": True,
    }
    return types.SimpleNamespace(**{**defaults, **fields})


@pytest.mark.parametrize(("is_qwix", "count", "shards"), [(False, 0, 1), (False, 2, 1), (False, -1, 1), (True, 2, 2)])
def test_fp8_reads_the_local_shard_count_only_with_qwix(is_qwix, count, shards):
    fields = {"use_qwix_quantization": is_qwix, "quantization_local_shard_count": count}
    assert maxtext.configure_quantization(config(quantization="fp8", **fields)).shards == shards


@pytest.mark.finding(31)
def test_the_configuration_names_the_object():
    """MaxText's signature: `configure_quantization(config, quant_mode_str="train")`, at all of its defaults."""
    quant = maxtext.configure_quantization(config())
    assert (quant.quant_mode, quant.shards, quant.needs_path) == (QuantMode.TRAIN, jax.local_device_count(), False)
    assert quant.recipe.rules[0].policy == fb.recipe("maxtext/int8").rules[0].policy
    assert maxtext.configure_quantization(config(), quant_mode_str="serve").quant_mode == QuantMode.SERVE
    assert maxtext.configure_quantization(config(quantization="")) is None
    assert maxtext.configure_quantization(config(quantization="te_no_quant")) is None
    float_gradient = maxtext.configure_quantization(config(quantization_local_shard_count=0))
    assert (float_gradient.shards, float_gradient.recipe.rules[0].policy.drhs.gradient) == (1, None)
    for value in (
        "int4",
        "fp4",
        "fp8",
        "nanoo_fp8",
        "fp8_e4m3",
        "fp8_e5m2",
        "fp8_full",
        "fp8_gpu",
        "fp8_nanoo",
        "aqt_fp8_full",
    ):
        quant = maxtext.configure_quantization(config(quantization=value))
        assert not quant.needs_path and quant.recipe.rules[0].policy == fb.recipe(f"maxtext/{value}").rules[-1].policy
    text = maxtext.configure_quantization(config(quantization="aqt_fp8_full", constant_bound_config="6, 3, 1, 3, 1, 6"))
    bounds = fb.maxtext_recipe("aqt_fp8_full", constant_bound_config=[6.0, 3.0, 1.0, 3.0, 1.0, 6.0])
    assert text.recipe.rules[0].policy == bounds.rules[0].policy
    mine = maxtext.configure_quantization(config(), recipe="maxtext/int8_qwix")
    assert mine == Quantization("maxtext/int8_qwix")


@pytest.mark.finding(27, 28, 31)
def test_the_configuration_names_rules_by_layer_and_sparsity(tmp_path):
    qwix = maxtext.configure_quantization(config(quantization="int8", use_qwix_quantization=True))
    assert qwix.needs_path and qwix.recipe == fb.recipe("maxtext/int8_qwix")
    router = maxtext.configure_quantization(
        config(quantization="fp8_e4m3", use_qwix_quantization=True, quantize_router_proj=False)
    )
    assert router.rule("decoder/layers/moe/gate/kernel").policy is None
    assert router.rule("decoder/layers/mlp/wi_0/kernel").policy is not None
    mtp = maxtext.configure_quantization(config(quantization="fp8_full", use_qwix_quantization=True, quantize_mtp=True))
    assert mtp.rule("mtp_block/mtp_layer_1/proj/kernel") is mtp.rule("decoder/layers/mlp/wi_0/kernel") is not None
    spared = maxtext.configure_quantization(config(quantization="fp8_full", mtp_num_layers=1))
    assert spared.rule("mtp_block/mtp_layer_1/proj/kernel").policy is None
    path = tmp_path / "mixed.json"
    path.write_text('{"__default__": {"w_bits": 8}, ".*/query": {"w_bits": 4, "w_scale": 0.8}}')
    mixed = maxtext.configure_quantization(config(quantization="intmp", quant_cfg_path=str(path)))
    bits = [mixed.rule(f"decoder/layers/{name}/kernel").policy.weight.format.bits for name in ("query", "out")]
    assert bits == [4, 8]
    for name in ("int8_weight_only", "int4_weight_only", "dense_llm_weight_only_scale", "dense_llm_subchannel"):
        assert Quantization(f"maxtext/intmp/{name}").rule("decoder/layers/mlp/wi_1/kernel") is not None
    sparse = maxtext.configure_quantization(config(quantization="fp8_full", weight_sparsity_n=2, weight_sparsity_m=4))
    assert sparse.recipe.rules[0].sparsity == fb.Sparsity(2, 4, start_step=50, update_step=10)


@pytest.mark.finding(31)
@pytest.mark.parametrize(
    ("fields", "error", "text"),
    [
        ({"quantization": "int9"}, fb.QuantError, "unknown quantization 'int9'"),
        ({"quant_cfg_path": "a.json"}, fb.QuantError, "does not read quant_cfg_path"),
        ({"weight_sparsity_n": 2}, fb.QuantError, "does not read weight_sparsity_n"),
        ({"act_quantization_calibration_method": "fixed,6"}, fb.QuantError, "does not read act_quantization"),
        ({"constant_bound_config": "1,1,1,1,1,1"}, fb.QuantError, "does not read constant_bound_config"),
        (
            {"quantization": "aqt_fp8_full", "constant_bound_config": "[1,2,3,4,5,6]"},
            fb.QuantError,
            r"constant_bound_config is '\[1,2,3,4,5,6\]', must be six numbers",
        ),
        (
            {"quantization": "fp4", "quantization_local_shard_count": 0},
            fb.UnsupportedError,
            "quantization_local_shard_count=0",
        ),
        (
            {"quantize_logits_proj": True},
            fb.UnsupportedError,
            "quantize_logits_proj=True: MaxText builds logits_dense without",
        ),
        ({"use_batch_split_schedule": True}, fb.UnsupportedError, "use_batch_split_schedule=True"),
        ({"weight_dtype": jnp.float8_e4m3fn}, fb.UnsupportedError, "weight_dtype=.*float8_e4m3fn"),
        ({"weight_block_size": 128}, fb.UnsupportedError, "weight_block_size=128"),
        ({"unquantized_modules": ["gate"]}, fb.UnsupportedError, "unquantized_modules=.*a rule with policy null"),
        ({"te_comm_gemm_overlap": "mlp"}, fb.UnsupportedError, "te_comm_gemm_overlap='mlp'"),
        ({"quantization": "serve_fp8_weight"}, fb.UnsupportedError, "serve_fp8_weight.*keep its configure_quantization"),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, dict) else None,
)
def test_a_field_that_cannot_be_honoured_is_refused(fields, error, text):
    with pytest.raises(error, match=text):
        maxtext.configure_quantization(config(**fields))


@pytest.mark.finding(29, 31)
def test_experts_are_trained_and_neither_dropped_nor_served_in_silence():
    experts = config(num_experts=8)
    assert maxtext.configure_quantization(experts) is not None
    with pytest.warns(UserWarning, match="so they stay in floating point; set megablox=true or sparse_matmul=false"):
        maxtext.configure_quantization(config(num_experts=8, megablox=False))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        maxtext.configure_quantization(config(num_experts=8, megablox=False, sparse_matmul=False))
    maxtext.configure_quantization(config(num_experts=8, use_qwix_quantization=True))
    with pytest.raises(fb.UnsupportedError, match="set use_qwix_quantization=false or sparse_matmul=false"):
        maxtext.configure_quantization(config(quantization="fp8_full", num_experts=8, use_qwix_quantization=True))
    with pytest.raises(
        fb.UnsupportedError, match=r"MaxText cannot serve experts[^$]*sparse_matmul=True[^$]*scan_layers=True"
    ):
        maxtext.configure_quantization(experts, "serve")
    unscanned = config(num_experts=8, sparse_matmul=False, scan_layers=False)
    assert maxtext.configure_quantization(unscanned, "serve").quant_mode == maxtext.QuantMode.SERVE
    with pytest.raises(fb.UnsupportedError, match="delayed scaling cannot serve"):
        maxtext.configure_quantization(config(quantization="fp8"), "serve")


def test_messages(unchecked):
    with pytest.raises(fb.QuantError, match="quant_mode is 'eval'; must be one of train, convert, serve"):
        Quantization(INT8, "eval")
    with pytest.raises(fb.QuantError, match="must name both operands and the result"):
        Quantization(INT8).einsum().apply({}, "...k,kn->...n", X, PARAMS["params"]["kernel"])
    delayed = fb.recipe("te_fp8_delayedscaling").rules[-1].policy
    with pytest.raises(fb.UnsupportedError, match="delayed scaling cannot serve"):
        Quantization(delayed, "serve")
