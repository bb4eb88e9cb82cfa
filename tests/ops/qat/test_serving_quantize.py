"""Trained parameters have the codes of the served ones in each of their uses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fewbit as fb


def normal(*shape, seed=0):
    return jax.device_put(np.float32(np.random.default_rng(seed).normal(size=shape) / 8))


W, X = normal(3, 32, 32), normal(4, 32, seed=1)


def sliced(p, x):
    """Contracts one element of the axis."""
    return jnp.matmul(x[:, :1], p["w"][:, :1])


def mixed(p, x):
    """Contracts the axis that a loop runs over."""
    looped = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, p["w"])[0]
    return looped + x @ jnp.einsum("lkn,l->kn", p["w"], jnp.array([0.3, 0.5, 0.2]))


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("fn", [sliced, mixed])
def test_a_scheme_with_a_tensor_scale_whose_tiles_run_along_another_axis(fn, axis):
    recipe = fb.Recipe((fb.Rule("w", "nvfp4", axis=axis),))
    trained = fb.train(fn, recipe)({"w": W}, X)
    serve = fb.transparent(fn, fallback="dequantize")
    served = serve(fb.quantize_params({"w": W}, fb.plan(fn, {"w": W}, X, recipe=recipe)), X)
    np.testing.assert_allclose(trained, served, atol=1e-6 * float(jnp.abs(served).max()))
