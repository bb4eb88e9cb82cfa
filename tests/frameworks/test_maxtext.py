"""MaxText's contract, as its layers call it: train, convert, serve. A stand-in for its DenseGeneral asserts what it asks; where
MaxText is installed, its own layers do.
"""

import enum
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fewbit as fb

nn = pytest.importorskip("flax.linen")

from fewbit.frameworks.maxtext import Quantization  # noqa: E402 - after the check that Flax is here

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
PARAMS = {"params": Dense(Quantization(INT8)).init(jax.random.key(0), X)["params"]}


def exact(params, x):
    return jnp.einsum("bk,ekn->ebn", jnp.tanh(x @ params["kernel"]), params["experts"])


def test_training_quantizes_every_product_and_its_gradients():
    quant = Quantization(INT8)
    assert (quant.quant_mode, quant.get_block_size(), quant.needs_apply_rngs) == (QuantMode.TRAIN, 1, False)
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


@pytest.mark.oracle
@pytest.mark.filterwarnings("ignore:'sharding' is deprecated")  # MaxText's, in Flax
def test_maxtexts_own_layers_train_convert_and_serve():
    """Its DenseGeneral makes our module part of itself, and holds no float kernel where it serves."""
    linears = pytest.importorskip("maxtext.layers.linears", reason="MaxText needs Python 3.12")
    nnx, modes = pytest.importorskip("flax.nnx"), pytest.importorskip("maxtext.layers.quantizations").get_quant_mode

    def layer(mode):
        with nnx.use_eager_sharding(False):
            quant = Quantization(INT8, modes(mode))
            return linears.DenseGeneral((4, 4), (2, 16), axis=(-2, -1), quant=quant, rngs=nnx.Rngs(0))

    def loss(layer, x):
        return jnp.sum(jnp.sin(layer(x)))

    x, numbers = X.reshape(4, 4, 4), (((1, 2), (0, 1)), ((), ()))
    with jax.numpy_dtype_promotion("standard"):
        trained, converted, served = layer("train"), layer("convert"), layer("serve")
        found, gradient = nnx.jit(nnx.value_and_grad(loss))(trained, x)
        kernel = trained.kernel[...]

        def expected(kernel):
            return jnp.sum(jnp.sin(fb.dot_general(x, kernel, numbers, policy=INT8)))

        want, want_gradient = jax.jit(jax.value_and_grad(expected))(kernel)
        np.testing.assert_array_equal(found, want)
        np.testing.assert_array_equal(gradient.kernel[...], want_gradient)
        out = converted(x)
        assert set(nnx.to_pure_dict(nnx.state(served))) == {"AqtDotGeneral_0"}
        nnx.update(served, nnx.filter_state(nnx.state(converted), lambda path, _: path[0] != "kernel"))
        np.testing.assert_array_equal(nnx.jit(lambda layer, x: layer(x))(served, x), out)
        np.testing.assert_allclose(out, trained(x), rtol=1e-6, atol=1e-6)


@pytest.mark.oracle
def test_maxtexts_own_experts_call_it():
    """What its MoE layers do with `quant.einsum`: made a part of the layer at the first call."""
    theirs = pytest.importorskip("maxtext.layers.quantizations", reason="MaxText needs Python 3.12")
    nnx = pytest.importorskip("flax.nnx")
    equation, parent = "BTD,EDF->BTEF", types.SimpleNamespace(rngs=nnx.Rngs(0))
    x, experts = X.reshape(2, 2, 16), jnp.asarray(np.random.default_rng(1).standard_normal((3, 16, 8)), jnp.float32)
    einsum = Quantization(INT8, theirs.get_quant_mode("convert")).einsum(mesh_axes=("exp", None, "mlp"))
    found = theirs.apply_einsum_in_nnx(parent, "wi", einsum, ["aqt"], equation, x, experts)
    np.testing.assert_allclose(found, fb.einsum(equation, x, experts, policy=INT8), rtol=1e-6, atol=1e-6)
    assert fb.is_qarray(parent.quant_einsum_wi.AqtDotGeneral_0["qrhs"]["frozen"].get_value())


def test_messages(unchecked):
    with pytest.raises(fb.QuantError, match="quant_mode is 'eval'; must be one of train, convert, serve"):
        Quantization(INT8, "eval")
    with pytest.raises(fb.QuantError, match="must name both operands and the result"):
        Quantization(INT8).einsum().apply({}, "...k,kn->...n", X, PARAMS["params"]["kernel"])
    delayed = fb.recipe("te_fp8_delayedscaling").rules[-1].policy
    with pytest.raises(fb.UnsupportedError, match="delayed scaling cannot serve"):
        Quantization(delayed, "serve")
