"""MaxText's contract, as its layers call it: train, convert, serve. A stand-in for its DenseGeneral asserts what it asks."""

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


X = jnp.asarray(np.random.default_rng(0).standard_normal((4, 16)), jnp.float32)
PARAMS = {"params": Dense(Quantization(INT8)).init(jax.random.key(0), X)["params"]}


def exact(params, x):
    return jnp.einsum("bk,ekn->ebn", jnp.tanh(x @ params["kernel"]), params["experts"])


def test_training_quantizes_every_product_and_its_gradients():
    quant = Quantization(INT8)
    assert (quant.quant_mode, quant.get_block_size()) == ("train", 1)
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


def test_messages(unchecked):
    with pytest.raises(fb.QuantError, match="quant_mode is 'eval'; must be one of train, convert, serve"):
        Quantization(INT8, "eval")
    with pytest.raises(fb.QuantError, match="must name both operands and the result"):
        Quantization(INT8).einsum().apply({}, "...k,kn->...n", X, PARAMS["params"]["kernel"])
    delayed = fb.recipe("te_fp8_delayedscaling").rules[-1].policy
    with pytest.raises(fb.UnsupportedError, match="cannot follow delayed scaling"):
        Quantization(delayed)
