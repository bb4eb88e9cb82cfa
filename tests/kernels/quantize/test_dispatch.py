"""The checks of `fb.quantize` that need values, so that they run outside of jit only."""

import jax
import jax.numpy as jnp
import pytest

import fewbit as fb


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf, -1.0])
def test_error_weights_that_are_negative_or_not_finite_are_refused(bad: float) -> None:
    x = jnp.ones((2, 32))
    weights = x.at[0, 3].set(bad)
    with pytest.raises(fb.QuantError, match="error_weights has 1 values that are negative or not finite"):
        fb.quantize(x, "nvfp4", error_weights=weights)
    with pytest.raises(fb.QuantError, match="error_weights has 1 values"):
        jax.eval_shape(lambda x: fb.quantize(x, "nvfp4", error_weights=weights), x)
    jax.eval_shape(lambda x, w: fb.quantize(x, "nvfp4", error_weights=w), x, weights)
