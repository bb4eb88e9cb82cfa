"""What scalings share: statistics of channels, products with scales, the output error."""

import jax.numpy as jnp
import numpy as np

from fewbit.methods.scaling import moments_error, times_scales, to_channels


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def test_statistics_of_elements_become_those_of_channels():
    x, channels = jnp.arange(12.0).reshape(2, 6), jnp.array([0, 1, 0, 1, 2, 2])
    assert to_channels(x, channels, 3, "add", by_expert=True).tolist() == [[2, 4, 9], [14, 16, 21]]
    assert to_channels(x, channels, 3, "add", by_expert=False).tolist() == [16, 20, 30]
    assert to_channels(x, channels, 3, "max", by_expert=True).tolist() == [[2, 3, 5], [8, 9, 11]]
    assert to_channels(x[1], channels, 3, "max", by_expert=False).tolist() == [8, 9, 11]


def test_scales_multiply_the_contraction_axis():
    w, s, each = normal(3, 4, 5), normal(4, seed=1), normal(3, 4, seed=2)
    np.testing.assert_array_equal(times_scales(jnp.asarray(w), jnp.asarray(s), -2), w * s[:, None])
    np.testing.assert_array_equal(times_scales(jnp.asarray(w), jnp.asarray(each), -2), w * each[:, :, None])
    np.testing.assert_array_equal(times_scales(jnp.asarray(w[0]), jnp.asarray(normal(5)), -1), w[0] * normal(5))


def test_the_error_is_that_of_the_outputs():
    x, error = normal(2, 50, 6), normal(2, 4, 6, seed=1)
    outputs = np.einsum("etk,enk->etn", x.astype(np.float64), error)
    hessian = np.einsum("etk,etl->ekl", x, x)
    # Sums of 36 float32 products, relative to sums of squares.
    np.testing.assert_allclose(
        moments_error(jnp.asarray(error), jnp.asarray(hessian)), np.square(outputs).sum((1, 2)), rtol=1e-5
    )
