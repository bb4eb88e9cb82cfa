"""Arrays without elements are quantized, decoded, multiplied and saved like all others."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fewbit as fb
from fewbit.array import misfit
from fewbit.io import read, write
from fewbit.kernels.extension import extension

BACKENDS = ["reference"] + ["cpu"] * (extension("fewbit.kernels.quantize.cpu._quantize").missing is None)
SHAPES = ((0, 64), (4, 0), (0, 0), (0,), (2, 0, 3))


@pytest.mark.slow_after(5)
@pytest.mark.finding(40)
@pytest.mark.parametrize("name", fb.SCHEMES.names())
def test_every_scheme(name):
    least = max((-a for a in fb.scheme(name).tile if a is not ...), default=1)
    for shape in (s for s in SHAPES if len(s) >= least):
        q = fb.quantize(jnp.zeros(shape), name)
        assert (q.shape, q.dtype, q.codes.size) == (shape, np.float32, 0)
        assert misfit(q) is None
        dense = fb.dequantize(q)
        assert (dense.shape, dense.dtype) == (shape, np.float32)
        assert "nan bits/weight" in repr(q)


@pytest.mark.slow_after(4)
@pytest.mark.finding(40)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["int8", "q4_1", "nf4_dq", "nvfp4"])
def test_backends_and_products(name, backend):
    for shape in SHAPES[:2]:
        q = fb.quantize(jnp.zeros(shape, jnp.bfloat16), name, backend=backend)
        assert fb.dequantize(q, backend=backend).dtype == jnp.bfloat16
        for side in (0, 1):
            y = fb.dot_general(jnp.ones((3, shape[side]), jnp.bfloat16), q, (((1,), (side,)), ((), ())), backend=backend)
            np.testing.assert_array_equal(y, np.zeros((3, shape[1 - side])))
    w = fb.quantize(jnp.ones((5, 64)), name)
    assert fb.dot_general(jnp.ones((0, 64)), w, (((1,), (1,)), ((), ())), backend=backend).shape == (0, 5)
    assert fb.take(w, jnp.zeros(0, jnp.int32), 0).shape == (0, 64)
    experts = fb.quantize(jnp.ones((0, 64, 4)), name, axis=-2)
    rows = fb.ragged_dot(jnp.ones((3, 64)), experts, jnp.zeros(0, jnp.int32), backend=backend)
    np.testing.assert_array_equal(rows, np.zeros((3, 4)))


@pytest.mark.finding(40)
def test_files_and_layouts(tmp_path):
    arrays = {f"w{i}": fb.quantize(jnp.zeros(s), "nvfp4") for i, s in enumerate(SHAPES)}
    write(tmp_path / "out", arrays)
    for name, q in arrays.items():
        found = read(tmp_path / "out").tensors[name]
        assert isinstance(found, fb.QArray)
        assert (found.shape, jax.tree.structure(found)) == (q.shape, jax.tree.structure(q))
        assert q.T.shape == q.shape[::-1]
    with pytest.raises(fb.QuantError, match=r"cannot reshape \(0, 64\) into \(64, 0\): without elements"):
        arrays["w0"].reshape(64, 0)


def test_a_given_scale_is_kept():
    q = fb.quantize(jnp.zeros((4, 0)), "uint8", scale=0.5, offset=-1.0)
    np.testing.assert_array_equal(q.scale, np.full((4, 1), 0.5))
    np.testing.assert_array_equal(q.zero_point, np.full((4, 1), 2))
