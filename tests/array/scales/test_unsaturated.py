"""Stochastic rounding without bias: the mean of many roundings is the element itself, in every scheme and in training."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fewbit as fb
from fewbit.array.scales import MSE, Fixed, parse_calibration
from tests.each_scheme import each_scheme

TRIALS = 2000


def hard_row() -> np.ndarray:
    """80 elements whose tiles have their largest on the positive side, the negative side, or both."""
    x = np.random.default_rng(0).standard_normal(80).astype(np.float32)
    x[3], x[20], x[35] = 4.0, -4.0, 3.99
    x[40:48], x[47], x[70], x[79] = np.abs(x[40:48]), 3.0, 2.5, -2.5
    return x


def biases(x: np.ndarray, scheme: fb.Scheme, **arguments) -> tuple[np.ndarray, np.ndarray]:
    """For each element the mean error of TRIALS roundings, and what chance explains of it: five standard errors.

    The trials are rows of one array, which draw their numbers independently. What happens ten times in all trials, or less,
    may happen never, so a two-hundredth of the widest step is allowed as well.
    """

    def rounded(x, key):
        return fb.dequantize(fb.quantize(x, scheme, key=key, **arguments))

    quickly = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}  # it runs once
    many = jax.jit(rounded, compiler_options=quickly)(np.tile(x, (TRIALS, 1)), jax.random.key(1))
    many = np.asarray(many, np.float64)
    spread = many.std(axis=0)
    return many.mean(axis=0) - x, 5 * spread / np.sqrt(TRIALS) + 10 / TRIALS * 2 * spread.max()


@pytest.mark.finding(9)
@each_scheme(())
def test_every_element_of_every_scheme_is_right_on_average(name: str):
    if isinstance(fb.scheme(name).scale, fb.Scheme):
        with pytest.raises(fb.UnsupportedError, match=f"stochastic rounding in {name} would be biased"):
            fb.quantize(hard_row(), name, key=jax.random.key(0))
        return
    error, chance = biases(hard_row(), fb.scheme(name))
    assert (np.abs(error) <= chance).all()


OTHERS = {
    "int8 in tiles of 16": fb.scheme("int8_g16"),
    "uint4 in tiles of 5": fb.scheme("uint4_g5"),
    "signed with a zero point": fb.Scheme(
        fb.FORMATS["int4"], {...: 1, -1: 16}, zero_point=fb.FORMATS["int4"], calibration=parse_calibration("minmax")
    ),
    "a float offset": dataclasses.replace(fb.scheme("q4_1"), zero_point=np.dtype("bfloat16")),
    "bfloat16 scales": dataclasses.replace(fb.scheme("int8_g16"), scale=np.dtype("bfloat16")),
    "a search": dataclasses.replace(fb.scheme("int4_g16"), calibration=MSE()),
    "a search for both ends": dataclasses.replace(fb.scheme("uint4_g16"), calibration=MSE()),
    "the specification's rule": dataclasses.replace(fb.scheme("mxfp4"), calibration=parse_calibration("mx,floor")),
}


@pytest.mark.slow_after(2)
@pytest.mark.finding(9)
@pytest.mark.parametrize("name", OTHERS)
def test_every_element_is_right_on_average_with_any_tile_and_calibration(name: str):
    error, chance = biases(hard_row(), OTHERS[name])
    assert (np.abs(error) <= chance).all()


@pytest.mark.finding(9)
def test_what_is_clipped_on_purpose_saturates_and_the_rest_is_right_on_average():
    x = hard_row()
    clipped = dataclasses.replace(fb.scheme("int8"), calibration=Fixed(-2.0, 2.0))
    inside = np.abs(x) <= 2.0
    for scheme, arguments in ((clipped, {}), (fb.scheme("int8"), {"scale": 2.0 / 127})):
        error, chance = biases(x, scheme, **arguments)
        assert (np.abs(error) <= chance)[inside].all()
        assert (np.abs(error) > chance)[np.abs(x) > 2.1].all()


def test_arguments_that_stochastic_rounding_would_ignore_are_refused():
    with pytest.raises(fb.QuantError, match="error_weights have no effect with key"):
        fb.quantize(jnp.ones((2, 32)), "mxfp4", key=jax.random.key(0), error_weights=jnp.ones(32))
    one_bit = fb.Scheme(fb.FORMATS["uint1"], {}, zero_point=fb.FORMATS["uint1"], calibration=parse_calibration("minmax"))
    with pytest.raises(fb.UnsupportedError, match="integer zero point needs two bits or more, not uint1"):
        fb.quantize(jnp.ones((2, 32)), one_bit, key=jax.random.key(0))


@pytest.mark.finding(9)
@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["int8", "int4", "int8_aqt", "mxfp4", "nvfp4", "fp8_e5m2"])
def test_gradients_under_training_are_right_on_average(scheme: str):
    """The root mean square of (mean gradient - exact gradient) in standard errors is 1 without bias; it was 3.6 for int8."""
    draw = np.random.default_rng(0)
    x, w = (jnp.asarray(draw.standard_normal(shape), jnp.float32) for shape in ((16, 32), (32, 16)))
    target = jnp.asarray(draw.standard_normal((16, 16)) ** 3, jnp.float32)
    arm = fb.Arm(scheme, "original", rounding="stochastic")
    recipe = fb.Recipe((fb.Rule("w", fb.Policy("int8", dlhs=arm, drhs=arm)),))

    def loss(params, x):
        return jnp.sum((x @ params["w"]) * target)

    trained = jax.grad(fb.train(loss, recipe), argnums=(0, 1))
    many = jax.jit(jax.vmap(lambda key: trained({"w": w}, x, key=key)))(jax.random.split(jax.random.key(2), TRIALS))
    exact = jax.grad(loss, argnums=(0, 1))({"w": w}, x)
    for found, expected in zip(jax.tree.leaves(many), jax.tree.leaves(exact), strict=True):
        found = np.asarray(found, np.float64)
        standard_error = found.std(axis=0) / np.sqrt(TRIALS)
        z = (found.mean(axis=0) - expected) / standard_error
        # 512 elements, each a sum of 16 roundings that it shares with others of its row: 1 within about a fifth.
        assert np.sqrt(np.mean(z**2)) < 1.3
