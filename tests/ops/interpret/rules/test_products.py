"""Look-ups in quantized tables."""

import jax.numpy as jnp
import numpy as np
import pytest

import fewbit as fb

TABLE = fb.quantize(np.broadcast_to(np.arange(300, dtype=np.float32)[:, None], (300, 32)), "q8_0")
IDS = {"int8": [3, 100, 127], "uint8": [3, 200, 255], "int16": [3, 299, 300]}


@pytest.mark.parametrize("mode", ["clip", "fill"])
@pytest.mark.parametrize("dtype", IDS)
def test_indices_of_few_bits_look_up_a_longer_table(dtype, mode):
    ids = jnp.array(IDS[dtype], dtype)

    def look_up(table, ids):
        return jnp.take(table, ids, axis=0, mode=mode)

    np.testing.assert_array_equal(fb.transparent(look_up)(TABLE, ids), look_up(fb.dequantize(TABLE), ids))
