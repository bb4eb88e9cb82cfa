"""Products with an update that is kept as two factors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fewbit.training.lora.factors import factored_product

ROWS, INPUTS, OUTPUTS, RANK = 3, 32, 48, 2


@pytest.mark.parametrize("contracted", [1, 2], ids=["inputs", "outputs"])
def test_the_factor_of_the_contracted_axis_goes_first(contracted):
    """The weight's axes are 1 and 2. No intermediate result is larger than `x` or the result."""
    draw = np.random.default_rng(0).normal
    a = jnp.asarray(draw(size=(INPUTS, 1, RANK)), jnp.float32)
    b = jnp.asarray(draw(size=(1, OUTPUTS, RANK)), jnp.float32)
    x = jnp.asarray(draw(size=(ROWS, (INPUTS, OUTPUTS)[contracted - 1])), jnp.float32)

    def product(x: jax.Array) -> jax.Array:
        return factored_product(x, (a, b), (0, contracted), (1, 2), (0, 3 - contracted), jax.lax.Precision.HIGHEST)

    update = a[:, 0] @ b[0].T
    expected = x @ (update if contracted == 1 else update.T)
    np.testing.assert_allclose(product(x), expected, rtol=1e-5, atol=1e-5)
    sizes = [eqn.outvars[0].aval.size for eqn in jax.make_jaxpr(product)(x).eqns]
    assert max(sizes) <= ROWS * max(INPUTS, OUTPUTS)
