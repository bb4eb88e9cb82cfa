"""Adding adapters up: float for float bases, and in a scheme exactly what quantizing the sum gives."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fewbit as fb
from fewbit import QuantError
from fewbit.training.lora import Adapter


def normal(*shape, seed=0):
    return jax.device_put(np.float32(np.random.default_rng(seed).normal(size=shape) / np.sqrt(shape[-1])))


def adapter(shape, inputs, stacked=(), rank=3):
    def lengths(axes):
        return [shape[axis] for axis in axes]

    outputs = [axis for axis in range(-len(shape), 0) if axis not in inputs + stacked]
    a = normal(*lengths(stacked), *lengths(inputs), rank, seed=1)
    return Adapter(a, normal(*lengths(stacked), rank, *lengths(outputs), seed=2), 1.5, inputs, stacked)


def test_the_update_of_every_kind_of_axes_in_float64():
    """The sum in float64, index by index, for stacked, contracted and other axes in any order."""
    shape = (4, 3, 5, 2)
    one = adapter(shape, inputs=(-4, -2), stacked=(-3,))
    a, b = np.asarray(one.a, np.float64), np.asarray(one.b, np.float64)  # [3, 4, 5, r], [3, r, 2]
    w = normal(*shape)
    expected = np.asarray(w, np.float64) + one.scale * np.einsum("lxyr,lrz->xlyz", a, b)
    np.testing.assert_allclose(fb.lora.merge({"w": w}, {"w": one})["w"], expected, rtol=1e-6, atol=1e-6)
    assert one.scale == 0.5


def test_narrow_weights_are_rounded_once():
    w, one = normal(16, 8).astype(jnp.bfloat16), adapter((16, 8), (-2,))
    merged = fb.lora.merge({"w": w, "b": w}, {"w": one})
    exact = w.astype(jnp.float32) + one.scale * jnp.matmul(one.a, one.b, precision="highest")
    # float32 sums in another order can fall on the other side of a tie.
    off = jnp.abs(merged["w"].astype(jnp.float32) - exact) / jnp.abs(exact)
    assert merged["w"].dtype == jnp.bfloat16
    assert off.max() <= 2.0**-8 * 1.001
    assert merged["b"] is w


SHAPES = {"in out": ((64, 32), (-2,), ()), "out in": ((32, 64), (-1,), ()), "stacked": ((2, 64, 32), (-2,), (-3,))}
CASES = [
    pytest.param(
        name, *SHAPES[kind], id=f"{name}-{kind}", marks=() if (name, kind) == ("nf4", "stacked") else pytest.mark.slow
    )
    for name in ("nf4", "nvfp4", "int8", "mxfp4", "q4_1")
    for kind in SHAPES
]


@pytest.mark.parametrize(("name", "shape", "inputs", "stacked"), CASES)
def test_in_its_own_scheme_the_sum_is_quantized_as_the_base_was(name, shape, inputs, stacked):
    def quantized(w):
        def one(w):
            return fb.quantize(w, name, axis=inputs)

        return (jax.vmap(one) if stacked else one)(w)

    base, one = quantized(normal(*shape)), adapter(shape, inputs, stacked)
    base = dataclasses.replace(base, policy=fb.Policy(name, activation="int8"))
    total = fb.lora.merge({"w": base}, {"w": one})["w"]
    assert isinstance(total, jax.Array)
    expected = dataclasses.replace(quantized(total), policy=base.policy)
    found = fb.lora.merge({"w": base}, {"w": one}, scheme="base")["w"]
    assert jax.tree.structure(found) == jax.tree.structure(base)
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    chosen = fb.lora.merge({"w": normal(*shape)}, {"w": one}, scheme=name)["w"]
    assert chosen.scheme == base.scheme
    assert [leaf.shape for leaf in jax.tree.leaves(chosen)] == [leaf.shape for leaf in jax.tree.leaves(base)]


def test_a_float_base_stays_float_in_its_own_scheme():
    merged = fb.lora.merge({"w": normal(8, 4)}, {"w": adapter((8, 4), (-2,))}, scheme="base")
    assert merged["w"].dtype == jnp.float32


@pytest.mark.slow
@pytest.mark.parametrize(("name", "inputs"), [("nf4_dq", (-2,)), ("int8", (-3, -2))])
def test_scales_that_are_quantized_and_several_contracted_axes(name, inputs):
    shape = (4, 16, 8)
    base, one = fb.quantize(normal(*shape), name, axis=inputs), adapter(shape, inputs)
    found = fb.lora.merge({"w": base}, {"w": one}, scheme="base")["w"]
    expected = fb.quantize(fb.lora.merge({"w": base}, {"w": one})["w"], name, axis=inputs)
    assert jax.tree.structure(found) == jax.tree.structure(base)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_a_scheme_that_does_not_fit_names_the_weight():
    with pytest.raises(QuantError, match="w: unknown scheme 'nf5'; did you mean 'nf4'"):
        fb.lora.merge({"w": normal(8, 4)}, {"w": adapter((8, 4), (-2,))}, scheme="nf5")
