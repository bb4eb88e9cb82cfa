"""The primitive of kernels: one equation an operation, the kernel of each platform, no trace of an unused reference."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fewbit as fb
from fewbit.kernels.attention import Block, attention, seen_positions
from fewbit.kernels.backend import AbstractBackend, AbstractProblem, Choice
from fewbit.kernels.lowering import computed


@dataclasses.dataclass(frozen=True)
class Scaling(AbstractProblem):
    """`(codes, factor x)` of an array: an integer and a float result."""

    operation = "scaling"


@dataclasses.dataclass(frozen=True)
class Times(AbstractBackend[Scaling]):
    """The reference: `2 x`."""

    name: ClassVar[str] = "reference"

    def unsupported(self, problem):
        return None

    def run(self, problem, *operands):
        x, factor = operands
        return {"codes": jnp.round(x).astype(jnp.int8), "product": x * factor}


@dataclasses.dataclass(frozen=True)
class OnCpu(Times):
    """A kernel whose product is 1000 more, so that a test sees which backend ran."""

    name: ClassVar[str] = "cpu"
    platform: ClassVar[str] = "cpu"

    def run(self, problem, *operands):
        assert operands[0].ndim == 1, "vmap hands over one element at a time"
        result = super().run(problem, *operands)
        return result | {"product": result["product"] + 1000}


class OnTpu(Times):
    """A kernel of another platform that cannot be traced."""

    name: ClassVar[str] = "tpu"
    platform: ClassVar[str] = "tpu"

    def run(self, problem, *operands):
        raise AssertionError("traced")


def scaled(x, factor, *kernels, is_named=False):
    choice = Choice((*kernels, Times())[0], {}, kernels)
    return computed(choice, Scaling(), x, factor, reference=Times(), is_named=is_named)


X = jnp.array([1.0, 2.4, -3.0])


def test_the_kernel_of_the_platform_runs_and_no_other_is_traced():
    result = scaled(X, jnp.float32(2), OnTpu(), OnCpu())
    assert result["product"].tolist() == pytest.approx([1002, 1004.8, 994])
    assert result["codes"].tolist() == [1, 2, -3]
    assert scaled(X, jnp.float32(2), OnTpu())["product"].tolist() == pytest.approx([2, 4.8, -6])


def test_the_reference_of_a_program_that_runs_a_kernel_is_not_traced():
    class Untraceable(Times):
        def run(self, problem, *operands):
            raise AssertionError("traced")

    choice = Choice(OnCpu(), {}, (OnCpu(),))
    result = jax.jit(lambda x: computed(choice, Scaling(), x, jnp.float32(2), reference=Untraceable(), is_named=False))(X)
    assert result["product"].tolist() == pytest.approx([1002, 1004.8, 994])


def test_a_platform_without_a_kernel_gets_the_reference():
    traced = jax.jit(lambda x: scaled(x, jnp.float32(2), OnCpu())["product"]).trace(X)
    here, there = (traced.lower(lowering_platforms=(platform,)).as_text() for platform in ("cpu", "tpu"))
    assert "1.000000e+03" in here
    assert "1.000000e+03" not in there


def test_a_named_backend_is_refused_where_the_program_is_compiled_for_another_platform():
    with pytest.raises(fb.UnsupportedError) as caught:
        scaled(X, jnp.float32(2), OnTpu(), is_named=True)
    assert str(caught.value) == "scaling cannot run here:\n  tpu: it runs on tpu, and the program is compiled for cpu"


def test_vmap_maps_the_kernel():
    stack, factors = jnp.stack([X, 2 * X, 3 * X, 4 * X]), jnp.arange(4.0)
    result = jax.jit(jax.vmap(lambda x, f: scaled(x, f, OnCpu())))(stack, factors)
    np.testing.assert_allclose(result["product"], stack * factors[:, None] + 1000, rtol=1e-6)
    twice = jax.vmap(jax.vmap(lambda x, f: scaled(x, f, OnCpu()), in_axes=(None, 0)), in_axes=(1, None), out_axes=1)
    y = twice(stack.T, factors)["product"]  # [factors, stack, 3]
    np.testing.assert_allclose(y, stack[None] * factors[:, None, None] + 1000, rtol=1e-6)


def test_derivatives_are_the_references():
    def loss(x, factor):
        return scaled(x, factor, OnCpu())["product"].sum()

    of_x, of_factor = jax.jit(jax.grad(loss, (0, 1)))(X, jnp.float32(2))
    assert of_x.tolist() == [2, 2, 2]
    assert float(of_factor) == pytest.approx(0.4)
    value, tangent = jax.jvp(lambda f: loss(X, f), (jnp.float32(2),), (jnp.float32(1),))
    assert float(value) == pytest.approx(3000.8)  # the value is the kernel's
    assert float(tangent) == pytest.approx(0.4)
    assert float(jax.grad(jax.grad(lambda f: loss(X, f) ** 2))(jnp.float32(2))) == pytest.approx(2 * 0.4**2)
    batched = jax.vmap(jax.grad(loss), in_axes=(0, None))(jnp.stack([X, X]), jnp.float32(3))
    assert batched.tolist() == [[3, 3, 3], [3, 3, 3]]


def test_every_operation_is_one_equation():
    q = fb.quantize(jnp.ones((8, 64)), "nvfp4")
    cache = jnp.ones((1, 1, 1, 4, 8))

    def all_four(x, q, query):
        y = fb.dot_general(x, q, (((1,), (1,)), ((), ())), backend="cpu")
        mixed = attention(query, [Block(cache, cache, seen_positions(0, 4), layer=0)], backend="cpu")
        return fb.quantize(x, "mxfp4", backend="cpu"), fb.dequantize(q, backend="cpu"), y, mixed

    text = str(jax.make_jaxpr(all_four)(jnp.ones((2, 64)), q, jnp.ones((1, 1, 4, 8))))
    assert text.count("fewbit_kernel[") == 4
    assert "platform_index" not in text
