"""The operands of attention: where the window of each token starts."""

import jax.numpy as jnp
import numpy as np
import pytest

from fewbit.kernels.attention import seen_positions, window_start

SEEN = seen_positions(2, 3)
NUMBERS = {"python": int, "numpy": np.int64, "jax": jnp.int32}


@pytest.mark.parametrize("number", NUMBERS.values(), ids=NUMBERS)
def test_a_window_of_0_is_all_positions(number):
    first = window_start(SEEN, number(0))
    assert first is None or first.tolist() == [0, 0, 0]
    assert window_start(SEEN, number(4)).tolist() == [0, 0, 1]
