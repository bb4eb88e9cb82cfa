"""The random numbers of stochastic rounding: one an element, one a row, one a tensor, and each without bias."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fewbit as fb

SHARED = {"element": (), "row": (1,), "column": (0,), "tensor": (0, 1)}
TRIALS = 2000


@pytest.mark.slow
@pytest.mark.parametrize("shared", SHARED)
def test_elements_that_share_a_number_round_alike(shared):
    x = jnp.full((16, 64), 2.5)
    axes = SHARED[shared]
    q = fb.quantize(x, fb.scheme("int8"), scale=1.0, key=jax.random.key(0), shared_noise=axes)
    values = np.asarray(fb.dequantize(q))
    assert set(np.unique(values)) <= {2.0, 3.0}
    for axis in (0, 1):
        assert (values == values.take([0], axis)).all() == (axis in axes)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["int4", "fp8", "nf4", "fp4_g16", "ternary"])
def test_every_element_is_unbiased_however_noise_is_shared(scheme):
    x = jnp.asarray(np.random.default_rng(0).uniform(-0.9, 0.9, (4, 32)), jnp.float32)
    scheme = fb.scheme(scheme)
    scale = jnp.float32(1 / scheme.format.max)
    numbers = np.unique(scheme.format.values()[np.isfinite(scheme.format.values())])
    # What happens ten times in all trials, or less, may happen never.
    rare = 10 / TRIALS * np.diff(numbers).max() * float(scale)

    @jax.jit
    def rounded(keys):
        def once(key, axes):
            return fb.dequantize(fb.quantize(x, scheme, scale=scale, key=key, shared_noise=axes))

        return [jax.vmap(lambda key, axes=axes: once(key, axes))(keys) for axes in SHARED.values()]

    for many in rounded(jax.random.split(jax.random.key(1), TRIALS)):
        # 128 means of 2000 trials, each within five of its standard errors: one in 15,000 runs fails by chance.
        error = np.asarray(many.mean(axis=0) - x)
        assert (np.abs(error) <= 5 * np.asarray(many.std(axis=0)) / np.sqrt(TRIALS) + rare).all()


def test_tiles_do_not_matter_to_who_shares():
    """A scheme with tiles of 16 sees the same numbers along a row as one with a scale a row."""
    x = jnp.full((2, 64), 2.5)
    one, other = (
        fb.quantize(x, fb.scheme(name), scale=1.0, key=jax.random.key(3), shared_noise=(-1,))
        for name in ("int8", "int8_g16")
    )
    assert np.array_equal(fb.dequantize(one), fb.dequantize(other))


@pytest.mark.parametrize(
    ("key", "shared", "message"),
    [
        (lambda: jax.random.split(jax.random.key(0), 2), (), r"key is key<fry>\(2,\); pass one key"),
        (lambda: jax.random.split(jax.random.PRNGKey(0), 2), (), r"key is uint32\(2, 2\); pass one key"),
        (lambda: 0, (), "key is 0; pass one key"),
        (lambda: jax.random.key(0), 0, "shared_noise is 0; pass a tuple of axes"),
    ],
)
def test_what_is_no_key_or_no_axes_is_refused(key, shared, message, unchecked):
    with pytest.raises(fb.QuantError, match=message):
        fb.quantize(jnp.ones((4, 32)), "int8", key=key(), shared_noise=shared)


def test_a_key_of_both_kinds_and_a_list_of_axes(unchecked):
    for key in (jax.random.key(0), jax.random.PRNGKey(0)):
        assert fb.quantize(jnp.ones((4, 32)), "int8", key=key, shared_noise=[0]).shape == (4, 32)
    mapped = jax.vmap(lambda key: fb.quantize(jnp.ones((4, 32)), "int8", key=key).codes)
    assert mapped(jax.random.split(jax.random.key(0), 3)).shape == (3, 4, 32)


def test_noise_to_share_is_honoured_or_refused():
    x = jnp.ones((2, 32))
    with pytest.raises(fb.QuantError, match="shared_noise is given without key"):
        fb.quantize(x, "int8", shared_noise=(1,))
    with pytest.raises(fb.QuantError, match="but the array has 2 axes"):
        fb.quantize(x, "int8", key=jax.random.key(0), shared_noise=(2,))


def test_an_arm_shares_along_what_its_product_sums():
    """With the same gradient everywhere, every element of a row that one sum runs over is rounded alike."""
    numbers = (((1,), (0,)), ((), ()))
    x, w = jnp.ones((4, 8)), jnp.eye(8, 16)

    def pulled(noise):
        policy = fb.Policy("int8", dlhs=fb.Arm("int4", "original", "stochastic", noise=noise))
        g = jnp.full((4, 16), 0.36).at[:, 0].set(1.0)
        return jax.vjp(lambda x: fb.dot_general(x, w, numbers, policy=policy, key=jax.random.key(0)), x)[1](g)[0]

    # With the identity as the weight, the gradient of `x` is the rounded gradient's first columns.
    found = {noise: np.asarray(jax.jit(pulled, static_argnums=0)(noise))[:, 1:] for noise in ("element", "row", "tensor")}
    assert (found["row"] == found["row"][:, :1]).all()
    assert not (found["row"] == found["row"][:1]).all()
    assert (found["tensor"] == found["tensor"][0, 0]).all()
    assert not (found["element"] == found["element"][:, :1]).all()
