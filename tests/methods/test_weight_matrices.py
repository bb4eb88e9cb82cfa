"""A weight as matrices, and back."""

import jax.numpy as jnp
import numpy as np
import pytest

import fewbit as fb
from fewbit.methods.weight_matrices import WeightMatrices


@pytest.mark.parametrize(
    ("shape", "axis", "hessian", "scheme", "tile"),
    [
        ((6, 64), (-1,), (64, 64), "int4_g32", 32),
        ((64, 6), (-2,), (64, 64), "int4", None),
        ((2, 6, 64), (-1,), (2, 64, 64), "nvfp4", 16),
        ((2, 32, 6), (-3, -2), (64, 64), "mxfp4", 32),
        ((6, 8), (-1,), (8, 8), "int4_g32", None),
    ],
)
def test_round_trip(shape, axis, hessian, scheme, tile):
    x = jnp.arange(np.prod(shape), dtype=jnp.float32).reshape(shape)
    q = fb.quantize(x, scheme, axis=axis)
    view = WeightMatrices.of(q, axis, hessian)
    assert view.tile == tile
    matrices = view.columns_first(x)
    assert matrices.shape == (*(hessian[:-2] or (1,)), hessian[-1], x.size // matrices.shape[0] // hessian[-1])
    np.testing.assert_array_equal(view.restored(matrices), x)
    tiles = -(-hessian[-1] // (tile or hessian[-1]))
    leaf = q.scale.size // matrices.shape[0] // tiles
    by_tile = q.scale.transpose(list(view.order)).reshape(matrices.shape[0], tiles, leaf)
    np.testing.assert_array_equal(view.restored_tiles(by_tile), q.scale)
