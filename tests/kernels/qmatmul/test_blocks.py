"""Integers of formats, refusals of weights in blocks, and the reference product against dequantized operands."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fewbit as fb
from fewbit.array.packing import Packing, paired
from fewbit.formats.codebook import nf4
from fewbit.kernels.qmatmul.blocks import block_numbers, block_product, refused_weight
from tests.conformance import array_laws as laws
from tests.kernels.unfused import unfused


def test_numbers_are_exact_and_small():
    for fmt in (fb.FORMATS[name] for name in fb.FORMATS.names()):
        found = block_numbers(fmt)
        if found is None:
            assert not isinstance(fmt, type(fb.FORMATS["int8"])), fmt.name
            continue
        numbers, step = found
        assert len(numbers) == 2**fmt.bits
        np.testing.assert_array_equal(np.float32(numbers[: len(fmt.values())] * step), np.float32(fmt.values()))
        assert fmt.bits == 8 or np.abs(numbers).max() <= 127


def test_other_formats_have_no_numbers():
    assert block_numbers(fb.FORMATS["nf4"]) is None
    found = block_numbers(nf4.in_int8())
    assert found is not None and np.abs(found[0]).max() == 127
    assert block_numbers(fb.FORMATS["e3m2"]) is None  # 28 is 448 steps
    assert block_numbers(fb.FORMATS["e4m3fn"]) is None


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("uint4_g64", "nvfp4_16x16", "q8_0")]


@pytest.mark.parametrize("scheme", ["q4_1", "mxfp4", *SLOW])
def test_reference_is_the_product_of_what_operands_decode_to(scheme):
    rng = np.random.default_rng(3)
    q = fb.quantize(jnp.asarray(rng.normal(size=(2, 18, 208)), jnp.float32), scheme)
    q = jax.tree.map(lambda leaf: leaf[:1], q)
    tile = q.tiles[2]
    for kind in (f"int8_g{tile}", "int8", "int8_g16", f"int8_g{2 * tile}"):
        x = fb.quantize(jnp.asarray(rng.normal(size=(1, 3, 208)), jnp.float32), kind)
        y = unfused(block_product)(x, q)
        wide, values = (np.float64(laws.numpy_dequantize(a)) for a in (x, q))
        # Four roundings of each block's product, one of each sum, and those of what is decoded.
        bound = (208 / min(tile, 16) + 8) * 2.0**-24 * (np.abs(wide) @ np.abs(values).swapaxes(1, 2))
        if q.zero_point is not None:  # terms of opposite signs
            bound *= 16
        assert np.all(np.abs(y - wide @ values.swapaxes(1, 2)) <= bound)


def test_refusals():
    def refusal(name, length=256, tile=32, x_tile=32, contracts_cols=True, **changes):
        scheme = dataclasses.replace(fb.scheme(name), **changes)
        return refused_weight(scheme, length, tile, x_tile, contracts_cols=contracts_cols)

    assert refusal("q4_1") is None
    assert refusal("q4_1", x_tile=None) is None
    assert refusal("q4_1", contracts_cols=False) == (
        "its codes are packed along its outputs; they must be packed along the contraction"
    )
    assert refused_weight(fb.scheme("q4_1").along(-2, 3), 256, 32, 32, contracts_cols=False) is None
    assert refusal("nf4") == "the numbers of nf4 are not small integers times one step"
    assert refusal("q4_0", length=32, tile=32) == "its scales do not vary along the contraction"
    assert refusal("q4_0", x_tile=16) is None
    assert refusal("q4_0", x_tile=64) is None
    assert refusal("q4_0", x_tile=48) == (
        "the block sizes along the contraction are 48 and 32; one must be a multiple of the other"
    )
    assert refusal("q4_0", tile=24, x_tile=24) == "the shorter block size is 24; it must be a multiple of 16"
    ggml = Packing(interleave=paired(32))
    assert refusal("q4_0", packing=ggml) is None
    assert refusal("q4_0", x_tile=16, packing=ggml) == "the shorter block size is 16; it must be a multiple of 32"
    assert refusal("int8_g32", length=2**19, tile=2**18, x_tile=2**18) == (
        "sums of 262144 products of its codes may not fit in int32"
    )
