"""Packing against NumPy's bits, and against byte orders of other programs written out by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fewbit.array.packing import (
    Packing,
    code_capacity,
    codes_per_unit,
    pack,
    packed_length,
    paired,
    unpack,
)
from fewbit.errors import QuantError

pack_quickly = jax.jit(pack, static_argnums=(1, 2))
each_width = pytest.mark.parametrize("bits", range(1, 9))


def random_codes(bits: int, shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(bits).integers(0, 2**bits, shape, np.uint8)


def numpy_packed(codes: np.ndarray, bits: int) -> np.ndarray:
    """The codes of the last axis as one stream of bits, lowest bit first."""
    digits = np.unpackbits(codes[..., None], axis=-1, bitorder="little")[..., :bits]
    return np.packbits(digits.reshape(*codes.shape[:-1], -1), axis=-1, bitorder="little")


@each_width
def test_bytes_are_numpys(bits: int):
    codes = random_codes(bits, (2, 13, 3))
    packed = jax.jit(lambda c: pack(c, bits, axis=1))(codes)
    expected = np.moveaxis(numpy_packed(np.moveaxis(codes, 1, -1), bits), -1, 1)
    assert packed.dtype == jnp.uint8
    assert packed.shape == (2, -(-13 * bits // 8), 3), "dense: a code costs its bits and no more"
    assert np.array_equal(packed, expected)
    assert np.array_equal(jax.jit(lambda p: unpack(p, bits, 13, axis=1))(packed), codes)


@pytest.mark.slow
@each_width
@pytest.mark.parametrize(
    ("axis", "length"),  # every pair of a width and a length, and of an axis and a length
    [(0, 1), (1, 1), (-1, 5), (0, 8), (1, 31), (-1, 64)],
)
def test_any_axis_and_length(bits: int, axis: int, length: int):
    shape = [3, 2, 4]
    shape[axis] = length
    codes = random_codes(bits, tuple(shape))
    packed = pack(jnp.asarray(codes), bits, axis=axis)
    assert np.array_equal(packed, np.moveaxis(numpy_packed(np.moveaxis(codes, axis, -1), bits), -1, axis))
    assert np.array_equal(unpack(packed, bits, length, axis=axis), codes)


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_high_first_is_the_other_bit_order(bits: int):
    codes = random_codes(bits, (3, 21))
    digits = np.unpackbits(codes[..., None], axis=-1, bitorder="big")[..., 8 - bits :]
    expected = np.packbits(digits.reshape(3, -1), axis=-1, bitorder="big")
    packed = jax.jit(lambda c: pack(c, bits, Packing(high_first=True)))(codes)
    assert np.array_equal(packed, expected)
    assert np.array_equal(unpack(packed, bits, 21, Packing(high_first=True)), codes)


def test_bitsandbytes_order():
    codes = random_codes(4, (4, 10))
    assert np.array_equal(pack(jnp.asarray(codes), 4, Packing(high_first=True)), codes[:, ::2] << 4 | codes[:, 1::2])


def test_gguf_orders():
    codes = random_codes(4, (2, 64))
    blocks = codes.reshape(2, 2, 32)
    q4 = (blocks[..., :16] | blocks[..., 16:] << 4).reshape(2, 32)
    assert np.array_equal(pack_quickly(codes, 4, Packing(paired(32))), q4)
    blocks = codes.reshape(2, 4, 16)
    nvfp4 = (blocks[..., :8] | blocks[..., 8:] << 4).reshape(2, 32)
    assert np.array_equal(pack_quickly(codes, 4, Packing(paired(16))), nvfp4)
    codes = random_codes(2, (2, 128))
    planes = codes.reshape(2, 4, 32)
    q2 = planes[:, 0] | planes[:, 1] << 2 | planes[:, 2] << 4 | planes[:, 3] << 6
    assert np.array_equal(pack_quickly(codes, 2, Packing(paired(128, 4))), q2)


def test_awq_order():
    codes = random_codes(4, (3, 16))
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    words = sum(codes.reshape(3, 2, 8)[..., order[i]].astype(np.uint32) << np.uint32(4 * i) for i in range(8))
    packed = pack(jnp.asarray(codes), 4, Packing(tuple(order)))
    assert paired(8, 4) == tuple(order)
    assert np.array_equal(packed, words.astype("<u4").view(np.uint8).reshape(3, 8))


def test_gptq_words_are_the_default_order():
    # AutoGPTQ's int32 words for 3 bits: 32 codes in 3 words, codes 10 and 21 across two words.
    codes = random_codes(3, (2, 32))
    number = [sum(int(c) << (3 * i) for i, c in enumerate(row)) for row in codes]
    words = np.array([[n >> (32 * w) & 0xFFFFFFFF for w in range(3)] for n in number], "<u4")
    assert np.array_equal(pack(jnp.asarray(codes), 3), words.view(np.uint8).reshape(2, 12))


@pytest.mark.slow
@settings(max_examples=6)
@given(st.data())
def test_any_interleaving_comes_back(data: st.DataObject):
    bits, group = data.draw(st.sampled_from([1, 2, 3, 4, 8])), data.draw(st.sampled_from([2, 3, 8]))
    order = tuple(data.draw(st.permutations(range(group))))
    length = data.draw(st.sampled_from([5, 24]))
    codes = random_codes(bits, (2, length))
    padded = np.pad(codes, [(0, 0), (0, -length % group)]).reshape(2, -1, group)[..., list(order)].reshape(2, -1)
    packed = pack(jnp.asarray(codes), bits, Packing(order))
    assert np.array_equal(packed, numpy_packed(padded, bits))
    assert packed.shape[1] == packed_length(length, bits, Packing(order))
    assert np.array_equal(unpack(packed, bits, length, Packing(order)), codes)


@each_width
def test_sizes(bits: int):
    for length in range(1, 70):
        size = packed_length(length, bits)
        assert size == -(-length * bits // 8)
        assert code_capacity(size, bits) >= length
        assert code_capacity(size - 1, bits) < length
    unit = codes_per_unit(bits)
    assert unit * bits % 8 == 0
    assert all(n * bits % 8 for n in range(1, unit))


def test_paired_is_a_permutation():
    for group, apart in ((2, 2), (32, 2), (16, 4), (128, 4)):
        order = paired(group, apart)
        assert sorted(order) == list(range(group))
        assert order[:apart] == tuple(range(0, group, group // apart))


def test_json():
    for packing in (Packing(), Packing(paired(8)), Packing(high_first=True), Packing((1, 0), True)):
        assert Packing.from_json(packing.to_json()) == packing
    assert Packing().to_json() == {}


@pytest.mark.slow
def test_refusals():
    codes = jnp.zeros((2, 8), jnp.uint8)
    for bits in (0, 9):
        with pytest.raises(QuantError, match=f"bits is {bits}, must be 1 to 8"):
            pack(codes, bits)
        with pytest.raises(QuantError, match=f"bits is {bits}, must be 1 to 8"):
            unpack(codes, bits, 8)
    with pytest.raises(QuantError, match=r"high_first needs codes that do not straddle bytes .*, not 3 bits"):
        pack(codes, 3, Packing(high_first=True))
    with pytest.raises(QuantError, match="8 bytes hold fewer than 17 codes of 4 bits"):
        unpack(codes, 4, 17)
    with pytest.raises(QuantError, match=r"interleave \(0, 2\) must contain each of 0 .. 1 once"):
        Packing((0, 2))
