"""A weight as matrices, and back."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fewbit as fb
from fewbit.methods import AWQ, GPTQ, IMatrix, LearnedRounding
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


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    "method", [GPTQ(), AWQ(grid=4), IMatrix(), LearnedRounding(rounds=3)], ids=lambda method: method.name
)
def test_experts_along_any_axis_have_their_own_statistics(method):
    """As many outputs as experts, so that the shape does not tell them from each other."""
    experts, length, tokens = 4, 8, 16
    spread = jax.random.normal(jax.random.key(0), (experts, length)) * jnp.linspace(0.1, 3.0, experts)[:, None]
    x = jax.random.normal(jax.random.key(1), (tokens, experts, length)) * spread[None]
    w = jax.random.normal(jax.random.key(2), (experts, length, experts))

    def decoded(spec, w):
        def fn(params, x):
            return jnp.einsum(f"tek,{spec}->teo", x, params["w"])

        plan = fb.plan(fn, {"w": w}, x, recipe="int3")
        stats = fb.observe(fn, {"w": w}, [x], "int3", collect=method.collect)
        return fb.dequantize(fb.quantize_params({"w": w}, plan, method=method, stats=stats)["w"])

    np.testing.assert_allclose(
        decoded("oke", w.transpose(2, 1, 0)).transpose(2, 1, 0), decoded("eko", w), rtol=1e-5, atol=1e-6
    )


def test_batch_axes_that_are_no_whole_axes_are_refused():
    def fn(params, x):
        return jnp.einsum("tek,eko->teo", x, params["dense/w"].reshape(3, 4, 2))

    params, x = {"dense/w": jnp.ones((12, 2))}, jnp.ones((5, 3, 4))
    plan, stats = fb.plan(fn, params, x, recipe="int4"), fb.observe(fn, params, [x], "int4", collect=("hessian",))
    with pytest.raises(
        fb.UnsupportedError, match=r"dense/w: the batch axes of its products, of lengths \(3,\), are no whole axes"
    ):
        fb.quantize_params(params, plan, method=GPTQ(), stats=stats)
