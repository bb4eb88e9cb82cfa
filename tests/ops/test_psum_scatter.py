"""The reduce-scatter in few bits: the sum of the devices' quantized chunks, and bytes on the wire."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P
from jax.sharding import AxisType

import fewbit as fb
from fewbit.ops import psum_scatter
from tests.collectives import collective_bytes

DEVICES, ROWS, COLUMNS = 4, 8, 64
each_scheme = pytest.mark.parametrize("scheme", ["int8", "mxfp8", "fp8_tensor", "nvfp4", "nf4_dq", "uint4"])


@functools.cache
def mesh() -> jax.sharding.Mesh:
    return jax.make_mesh((DEVICES,), ("d",), axis_types=(AxisType.Auto,), devices=jax.devices()[:DEVICES])


def every() -> jax.Array:
    """What each device has: [DEVICES, DEVICES * ROWS, COLUMNS]."""
    return jax.random.normal(jax.random.key(0), (DEVICES, DEVICES * ROWS, COLUMNS))


def scattered(x: jax.Array, **options: Any) -> jax.Array:
    """The sum over the devices, of which each has its part."""
    add = jax.shard_map(lambda x: psum_scatter(x[0], "d", **options)[None], mesh=mesh(), in_specs=P("d"), out_specs=P("d"))
    return jax.jit(add)(x)


def assert_sums(found: jax.Array, chunks: list[list[jax.Array]], scheme: str) -> None:
    """Compares with the sums of quantized chunks, `[of device][for device]`, in float64.

    Each device's term rounds twice, when its scale is applied and when it is added; XLA may join both in one instruction.
    """
    quantized = jax.jit(lambda x: fb.dequantize(fb.quantize(x, scheme)))
    decoded = np.array([[quantized(chunk) for chunk in row] for row in chunks], np.float64)
    bound = 2.0**-24 * (len(chunks) + 1) * np.abs(decoded).sum(0)
    assert np.all(np.abs(np.asarray(found, np.float64) - decoded.sum(0)) <= bound)


@pytest.mark.slow
@each_scheme
def test_it_adds_the_quantized_chunks(scheme):
    x = every()
    chunks = [list(jnp.split(row, DEVICES)) for row in x]
    assert_sums(scattered(x, scheme=scheme, tiled=True), chunks, scheme)


def test_along_another_axis_and_untiled():
    x = every()
    chunks = [list(jnp.split(row, DEVICES, axis=1)) for row in x]
    along = scattered(x, scheme="int8", scatter_dimension=1, tiled=True)
    assert_sums(along, chunks, "int8")
    np.testing.assert_array_equal(scattered(x, scheme="int8", scatter_dimension=-1, tiled=True), along)
    with pytest.raises(fb.QuantError, match="axis is -3, but the array has 2 axes"):
        scattered(x, scheme="int8", scatter_dimension=-3, tiled=True)
    x = x[:, :DEVICES]
    untiled = scattered(x, scheme="int8")
    assert_sums(untiled, [list(row) for row in x], "int8")


def test_the_result_has_the_dtype_of_the_array():
    """float32 sums, rounded once: bfloat16 sums of 256 + 1 + 1 + 1 would stay 256."""
    x = jnp.stack([jnp.full((DEVICES, 32), 256.0), *[jnp.ones((DEVICES, 32))] * (DEVICES - 1)]).astype(jnp.bfloat16)
    result = scattered(x, scheme="mxfp8")
    assert result.dtype == jnp.bfloat16
    np.testing.assert_array_equal(result, jnp.full((DEVICES, 32), 260.0, jnp.bfloat16))  # 259 rounds to 260


def test_scalar_chunks():
    x = jnp.arange(4.0 * DEVICES).reshape(DEVICES, 4) - 6  # one tile each, so int8_narrow rounds none
    np.testing.assert_allclose(scattered(x, scheme="int8_narrow"), x.sum(0), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("axis", ["shard_map", "vmap"])
@pytest.mark.parametrize("options", [{"tiled": True}, {"tiled": True, "scatter_dimension": 1}, {"tiled": False}], ids=str)
def test_the_derivatives_are_those_of_the_unquantized_sum(axis: str, options: dict[str, Any]):
    x = every()[:, : DEVICES * 2 if options["tiled"] else DEVICES]
    tangent, weights = jax.random.normal(jax.random.key(2), (2, *x.shape))

    def over_devices(scatter: Any) -> Any:
        if axis == "vmap":
            return jax.vmap(lambda x: scatter(x, "d", **options), axis_name="d")
        return jax.shard_map(lambda x: scatter(x[0], "d", **options)[None], mesh=mesh(), in_specs=P("d"), out_specs=P("d"))

    def derivatives(scatter: Any) -> Any:
        add = over_devices(scatter)

        def weighted(x: jax.Array) -> jax.Array:
            y = add(x)
            return jnp.sum(y * weights.ravel()[: y.size].reshape(y.shape))

        return jax.jit(lambda x: (jax.grad(weighted)(x), jax.jvp(add, (x,), (tangent,))[1]))(x)

    found = derivatives(functools.partial(psum_scatter, scheme="int8"))
    jax.tree.map(np.testing.assert_array_equal, found, derivatives(jax.lax.psum_scatter))


def test_the_gradient_with_a_key_and_a_replicated_array():
    """Each device has the same array, whose gradient is the sum over the devices; rounding at random changes nothing."""
    x = every()[0].astype(jnp.bfloat16)
    add = jax.shard_map(
        lambda x, key: psum_scatter(x, "d", scheme="int8", tiled=True, key=key), mesh=mesh(), in_specs=P(), out_specs=P("d")
    )
    gradient = jax.jit(jax.grad(lambda x, key: jnp.sum(add(x, key).astype(jnp.float32))))(x, jax.random.key(1))
    assert gradient.dtype == jnp.bfloat16
    np.testing.assert_array_equal(gradient, jnp.full(x.shape, DEVICES, jnp.bfloat16))


def test_stochastic_rounding_is_unbiased():
    x = jnp.zeros((DEVICES, DEVICES, 4096)).at[..., 0].set(127.0).at[..., 1:].set(0.25)  # a step of 1
    keys = jax.random.split(jax.random.key(1), DEVICES)
    add = jax.shard_map(
        lambda x, key: psum_scatter(x[0], "d", scheme="int8", key=key[0])[None],
        mesh=mesh(),
        in_specs=P("d"),
        out_specs=P("d"),
    )
    result = np.asarray(jax.jit(add)(x, keys))[:, 1:]
    # Each device adds 1 with probability 1/4: the mean of n sums has the variance DEVICES * 3/16 / n. Five deviations.
    assert abs(result.mean() - DEVICES / 4) < 5 * np.sqrt(DEVICES * 3 / 16 / result.size)
    assert set(np.unique(result)) <= set(range(DEVICES + 1))


def test_nan_stays_in_its_tile():
    x = every().at[1, 3, 5].set(jnp.nan)
    result = np.asarray(scattered(x, scheme="mxfp8", tiled=True))
    is_nan = np.zeros(result.shape, bool)
    is_nan[0, 3, :32] = True
    np.testing.assert_array_equal(np.isnan(result), is_nan)


def test_axes_that_do_not_divide():
    with pytest.raises(fb.QuantError, match=r"axis 0 of \(30, 64\) does not divide into chunks for 4 devices"):
        scattered(every()[:, :30], scheme="int8", tiled=True)
    with pytest.raises(fb.QuantError, match="does not divide"):
        scattered(every(), scheme="int8")


def test_only_codes_and_scales_are_exchanged():
    found = collective_bytes(functools.partial(scattered, scheme="mxfp8", tiled=True), every())
    size = DEVICES * ROWS * COLUMNS
    assert found == {("all-to-all", "u8"): size + size // 32}
