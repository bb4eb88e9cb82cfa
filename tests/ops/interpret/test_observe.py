"""What is measured does not depend on how JAX runs the function. Values: tests/calibration/test_observe.py."""

import jax
import jax.numpy as jnp
import numpy as np

import fewbit as fb

W, V, X = (jnp.asarray(np.random.default_rng(seed).normal(size=(8, 8)), jnp.float32) for seed in range(3))


def test_of_branches_by_platform_the_one_that_runs_is_measured():
    def platform(p, x):
        return jax.lax.platform_dependent(
            x, p["w"], p["v"], cpu=lambda x, w, v: x @ w, cuda=lambda x, w, v: x @ w, default=lambda x, w, v: 3 * x @ v
        )

    stats = fb.observe(platform, {"w": W, "v": V}, [X], "w8a8")
    assert (int(stats["w"].range.count), int(stats["v"].range.count)) == (1, 0)
    assert stats["w"].range.high == jnp.abs(X).max()


def test_layers_of_a_scan_have_statistics_of_their_own_without_jit():
    def scanned(p, x):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, p["w"])[0]

    stack = {"w": jnp.stack([W, V])}
    compiled = fb.observe(scanned, stack, [X], "int4", collect=("hessian",))
    with jax.disable_jit():
        stats = fb.observe(scanned, stack, [X], "int4", collect=("hessian",))
        plan = fb.plan(scanned, stack, X, recipe="int4")
    np.testing.assert_allclose(stats["w"].hessian, compiled["w"].hessian, rtol=1e-5, atol=1e-5)
    assert plan["w"].stacked == (-3,)
    assert fb.quantize_params(stack, plan, method=fb.methods.GPTQ(), stats=stats)["w"].shape == (2, 8, 8)
