"""Rows of quantized tables against rows of the tables they stand for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fewbit as fb


@pytest.fixture(scope="module")
def table():
    return jax.device_put(np.float32(np.random.default_rng(0).normal(size=(50, 64))))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["int8", "nf4", "nvfp4", "q4_1", "int3_g32", "fp8_block128", "fp8_tensor", "nf4_dq", "uint4"]
)
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_taken_rows_are_those_of_the_array(table, name, axis):
    q = fb.quantize(table, name)
    ids = jnp.array([[3, 0], [49, 3], [7, 7]])
    np.testing.assert_array_equal(fb.take(q, ids, axis), jnp.take(fb.dequantize(q), ids, axis=axis))


@pytest.mark.parametrize("mode", [None, "fill", "clip", "wrap"])
def test_indices_out_of_bounds_follow_the_mode(table, mode):
    q = fb.quantize(table, "int8")
    ids = jnp.array([-1, -50, -51, 0, 49, 50, 120])
    np.testing.assert_array_equal(fb.take(q, ids, 0, mode=mode), jnp.take(fb.dequantize(q), ids, axis=0, mode=mode))


@pytest.mark.parametrize("mode", [None, "fill", "clip", "wrap"])
@pytest.mark.parametrize("dtype", ["uint8", "int16", "uint16", "uint32"])
def test_indices_of_any_dtype_out_of_bounds(table, dtype, mode):
    q, largest = fb.quantize(table, "nf4"), np.iinfo(dtype).max
    ids = jnp.asarray(np.array([0, 49, 50, largest - 1, largest]).astype(dtype))
    expected = jnp.take(fb.dequantize(q), ids, axis=0, mode=mode)
    np.testing.assert_array_equal(fb.take(q, ids, 0, mode=mode), expected)
    if mode is None:
        np.testing.assert_array_equal(fb.transparent(lambda e: e[ids])(q), fb.dequantize(q)[ids])


def test_rows_without_nan_pass_jax_debug_nans(table):
    q, ids = fb.quantize(table, "int8"), jnp.array([3, 0])
    with jax.debug_nans(True):
        assert fb.take(q, ids, 0).shape == fb.transparent(lambda e: e[ids])(q).shape == (2, 64)
        with pytest.raises(FloatingPointError):
            fb.take(q, jnp.array([50]), 0)


@pytest.mark.usefixtures("unchecked")
def test_wrong_arguments_are_named(table):
    q, x = fb.quantize(table, "int8"), jnp.ones((2, 64))
    with pytest.raises(fb.QuantError, match="indices are float32; must be integers"):
        fb.take(q, jnp.array([1.0]), 0)
    with pytest.raises(fb.QuantError, match="axis is 5, but the array has 2 axes"):
        fb.dot_general(x, q, (((5,), (1,)), ((), ())))
    with pytest.raises(fb.QuantError, match=r"policy is 'int8'; pass a Policy, such as fb\.Policy"):
        fb.dot_general(x, table, (((1,), (1,)), ((), ())), policy="int8")


def test_only_the_rows_are_decoded(table):
    q = fb.quantize(table, "nf4")
    jaxpr = jax.make_jaxpr(lambda q, ids: fb.take(q, ids, 0))(q, jnp.array([1, 2]))
    floats = [v.aval.shape for e in jaxpr.eqns for v in e.outvars if v.aval.dtype == jnp.float32 and v.aval.size > 1]
    assert max(np.prod(shape) for shape in floats) <= 2 * 64


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_no_index_takes_no_row(table, backend, monkeypatch):
    if backend == "cpu":  # as in a process with one device, where the extension is there
        monkeypatch.setattr("fewbit.kernels.quantize.cpu.backend.device_refusal", lambda: None)
    assert fb.take(fb.quantize(table, "nf4"), jnp.zeros((0, 3), jnp.int32), 0).shape == (0, 3, 64)


def test_arrays_and_messages(table):
    np.testing.assert_array_equal(fb.take(table, jnp.array([1]), 0), table[1:2])
    with pytest.raises(fb.QuantError, match="mode is 'raise'"):
        fb.take(table, jnp.array([1]), 0, mode="raise")
    with pytest.raises(fb.QuantError, match="axis is 2"):
        fb.take(fb.quantize(table, "int8"), jnp.array([1]), 2)
