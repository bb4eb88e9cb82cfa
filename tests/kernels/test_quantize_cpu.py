"""quantize and dequantize in C++ give the bytes that the reference gives, for every scheme, dtype, axis and odd number."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fewbit as fb
from fewbit.kernels.extension import extension
from fewbit.kernels.quantize import dequantize, quantize

pytestmark = pytest.mark.skipif(
    extension("fewbit.kernels.quantize._cpu").missing is not None, reason="the C++ extension is not built"
)

# Each rule, each kind of format, each holder of scales; the other schemes differ from these in numbers only.
KINDS = (
    *(
        "int8",
        "int4_narrow",
        "int3",
        "uint4",
        "fp8_tensor",
        "fp8_block128",
        "nf4",
        "bnb_fp4",
        "nf4_dq",
        "q4_0",
        "q4_1",
        "q8_0",
    ),
    *("ternary", "binary", "mxfp4", "mxfp8_e5m2", "mxint8", "mxfp8_rceil", "nvfp4", "nvfp4_16x16", "nvint4", "fp8_e4m3fnuz"),
)
OTHERS = tuple(sorted(set(fb.SCHEMES.names()) - set(KINDS)))


def hard(shape, axis, seed=0):
    """Normal numbers, and rows along `axis` that are huge, tiny, zero, subnormal, or hold a NaN or an infinity."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=shape) * np.exp2(rng.integers(-6, 6, size=shape))
    rows = np.moveaxis(x, axis, -1).reshape(-1, shape[axis])
    rows[1], rows[2] = 0.0, -0.0
    rows[3] *= 2.0**120
    rows[4] *= 2.0**-125
    rows[5] *= 2.0**-140
    rows[6, 2:5] = -0.0, 1e-42, -1e-42
    rows[7, 40], rows[8, -1] = np.nan, -np.inf
    return np.moveaxis(rows.reshape(np.moveaxis(x, axis, -1).shape), -1, axis).astype(np.float32)


def assert_same_bytes(x, scheme, axis=-1, level=2, **given):
    """Both backends' leaves are the same to the bit, and so are the numbers that they decode to."""
    reference = quantize(x, scheme, axis=axis, backend="reference", **given)
    native = quantize(x, scheme, axis=axis, backend="cpu", **given)
    assert jax.tree.structure(reference) == jax.tree.structure(native)
    for path, expected in jax.tree_util.tree_leaves_with_path(reference):
        got = dict(jax.tree_util.tree_leaves_with_path(native))[path]
        assert got.dtype == expected.dtype and got.shape == expected.shape
        if path[-1].name == "zero_point" and got.dtype != np.uint8:  # the sign of a zero or a NaN is not told there
            np.testing.assert_array_equal(got, expected)
            continue
        different = np.asarray(got).view(np.uint8) != np.asarray(expected).view(np.uint8)
        assert not different.any(), f"{path}: {different.sum()} bytes differ, the first at {np.argwhere(different)[0]}"
    decoded = [np.asarray(dequantize(reference, backend=name)) for name in ("reference", "cpu")]
    assert decoded[0].dtype == decoded[1].dtype
    np.testing.assert_array_equal(decoded[0], decoded[1])
    is_number = ~np.isnan(decoded[0])
    np.testing.assert_array_equal(np.signbit(decoded[0][is_number]), np.signbit(decoded[1][is_number]))


@pytest.mark.parametrize("axis", [-1, -2], ids=["rows", "columns"])
@pytest.mark.parametrize("scheme", KINDS)
def test_every_kind_of_scheme(scheme, axis):
    assert_same_bytes(jnp.asarray(hard((19, 101) if axis == -1 else (101, 19), axis)), scheme, axis)


@pytest.mark.slow
@pytest.mark.parametrize("axis", [-1, -2], ids=["rows", "columns"])
@pytest.mark.parametrize("scheme", OTHERS)
def test_every_other_scheme(scheme, axis):
    assert_same_bytes(jnp.asarray(hard((19, 101) if axis == -1 else (101, 19), axis)), scheme, axis)
