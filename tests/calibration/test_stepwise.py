"""Stepwise statistics: those of the whole function with the parameters quantized so far, and nothing is computed twice."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import fewbit as fb
from fewbit.calibration.stepwise import Program, Progress, Stepwise

D = 32


def normal(*shape: int, seed: int = 0) -> jax.Array:
    return jax.device_put(np.float32(np.random.default_rng((seed, *shape)).standard_normal(shape)))


PARAMS = {name: normal(D, D, seed=i) / 6 for i, name in enumerate("abc")}
BATCHES = [normal(rows, D, seed=rows) for rows in (24, 40, 24)]
"""Two shapes, so there are two programs, one of two batches."""


def chain(params, x):
    x = x + jnp.tanh(x @ params["a"])
    return jnp.tanh(x @ params["b"]) @ params["c"]


def used_again(params, x):
    """The second product with `a` reads what `b` makes."""
    return jnp.tanh(jnp.tanh(x @ params["a"]) @ params["b"]) @ params["a"] @ params["c"]


def transposed_early(params, x):
    """Transposes before the first product: they are of the quantized weights all the same."""
    b, c = params["b"].T, params["c"].T
    return jnp.tanh(jnp.tanh(x @ params["a"]) @ b) @ c


def read_early(params, x):
    """A sum with a parameter whose product comes later: that is not known before it is quantized."""
    return jnp.tanh(jnp.tanh((x + params["c"][0][None]) @ params["a"]) @ params["b"]) @ params["c"]


def scanned(params, x):
    x = lax.scan(lambda x, _: (x + jnp.tanh(x @ params["a"]), None), x, length=3)[0]
    return jnp.tanh(x @ params["b"]) @ params["c"]


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    "fn", [chain, used_again, transposed_early, read_early, scanned, pytest.param(jax.jit(chain), id="one_jit")]
)
def test_statistics_are_those_of_the_whole_function(fn):
    quantized, stepwise = dict(PARAMS), Stepwise.of(fn, PARAMS, BATCHES, "abc", ("hessian", "cross"))
    for name in "abc":
        found, stepwise = stepwise.measured([name], quantized)
        expected = fb.observe(fn, PARAMS, BATCHES, "w4", collect=("hessian", "cross"), quantized=quantized)[name]
        for statistic in ("hessian", "cross"):
            ours, whole = getattr(found[name], statistic), getattr(expected, statistic)
            # sums of at most 3 * 88 products: each within 264 roundings of half a unit in the last place
            np.testing.assert_allclose(ours, whole, rtol=0, atol=264 * 2.0**-24 * np.abs(whole).max(), err_msg=name)
        quantized[name] = fb.dequantize(fb.quantize(PARAMS[name], "int4"))
        assert not np.array_equal(quantized[name], PARAMS[name])


@pytest.mark.parametrize("fn", [chain, transposed_early])
def test_a_product_is_measured_once_and_computed_once(fn):
    program = Program.of(fn, PARAMS, (BATCHES[0],), "abc")
    progress, waiting = Progress(program, tuple(program.traced.closed.jaxpr.eqns)), frozenset("abc")
    runs = collections.Counter[int]()
    for name in "abc":
        progress, piece = progress.after(frozenset(name), waiting)
        runs.update(id(eqn) for eqn in piece.eqns if eqn.outvars[0] not in program.weights)
        waiting -= {name}
    assert max(runs.values()) == 2


def test_a_bias_may_change_until_it_is_added():
    def biased(params, x):
        bias = params["bias"][None]  # before the first product
        return jnp.tanh(x @ params["a"] + bias) @ params["b"]

    params = {name: PARAMS[name] for name in "ab"} | {"bias": normal(D)}
    _, stepwise = Stepwise.of(biased, params, BATCHES, "ab", ("hessian",)).measured(["a"], params)
    changed = params | {"bias": 2 * params["bias"]}
    found, _ = stepwise.measured(["b"], changed)
    expected = fb.observe(biased, changed, BATCHES, "w4", collect=("hessian",))["b"].hessian
    np.testing.assert_allclose(found["b"].hessian, expected, rtol=0, atol=88 * 2.0**-24 * np.abs(expected).max())
