"""Rounding tables do what `encode` does, wherever they are made."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fewbit.formats import FORMATS
from fewbit.formats.rounding import rounding_table


@pytest.mark.parametrize("name", ["e2m1", "e4m3fn", "nf4", "int4", "binary"])
def test_a_table_made_while_a_program_is_traced_encodes_as_the_format(name: str):
    rounding_table.cache_clear()
    fmt = FORMATS[name]
    tables = []

    @jax.jit
    def traced(x: jax.Array) -> jax.Array:
        tables.append(rounding_table(fmt))
        return fmt.encode(x)

    x = np.random.default_rng(0).normal(size=1000).astype(np.float32) * np.float32(fmt.max)
    codes = traced(jnp.asarray(np.append(x, np.nan)))
    table = tables[0]
    expected = table.codes[np.searchsorted(table.thresholds, x)]
    has_minus_zero = np.signbit(fmt.values()[fmt.values() == 0]).any()
    assert (table.minus_zero is not None) == has_minus_zero
    if has_minus_zero:
        expected = np.where((expected == table.zero) & (x < 0), np.uint8(table.minus_zero), expected)
    assert np.array_equal(expected, codes[:-1])
    assert table.nan == codes[-1]
