"""Decodes codes to float32 with TPU vector operations.

A TPU computes on 32-bit lanes and has no cheap table lookup. So a byte is widened once, and each code in it (a *plane*: the low
nibbles, the high nibbles) is extracted from the 32-bit word. The decoding depends on the format:

- integers: converted at their position in the word, high nibbles as 16 times their value, signed low ones at the top of the
  word as 2**28 times theirs, so that no shift is needed; the scale divides by the power of two;
- e2m1: twice the magnitudes are integers below 16, packed in one 32-bit constant that is shifted by the code;
- e4m3fn and e5m2: the compiler's own conversion;
- tables of up to 16 numbers (NF4): a tree of selects, one level per bit of the code, exact for every table;
- other small floats: the format's arithmetic.

Codes of 3, 5, 6 and 7 bits straddle bytes. Each byte is widened to a word of its own, and a code is assembled from two.
"""

import jax
import jax.numpy as jnp
import numpy as np

from ...formats.codebook import Codebook
from ...formats.e8m0 import E8M0
from ...formats.format import AbstractFormat, power_of_two
from ...formats.integer import Integer
from ...formats.minifloat import Minifloat

NATIVE = {"e4m3fn": jnp.float8_e4m3fn, "e5m2": jnp.float8_e5m2}
"""The 8-bit floats that Mosaic converts on every TPU."""

MOST_NUMBERS = 16
"""The longest table decoded by selects."""

NF4_POLYNOMIAL = (0.03660897, 0.68031098, -0.04181319, -0.17091401, 0.01408488, 0.49060303)
"""The minimax polynomial of degree 5 in `(code - 7.5) / 7.5` for the 16 numbers of NF4."""

NF4_ERROR = 0.0089
"""The polynomial's largest error. It does not decode zero to zero."""


def undecodable(fmt: AbstractFormat) -> str | None:
    """Why the codes of a format are not supported; None when they are."""
    if isinstance(fmt, Codebook) and len(fmt.table) > MOST_NUMBERS:
        return f"{fmt.name} is a table of {len(fmt.table)} numbers; {MOST_NUMBERS} are decoded without a gather"
    return None


def code_values(
    fmt: AbstractFormat, group: list[jax.Array], plane: int, *, nf4_polynomial: bool = False
) -> tuple[jax.Array, float]:
    """Decodes one code of each byte, or of each group of bytes. Returns float32 values, and their unit.

    Args:
        fmt: the format.
        group: the bytes; for codes that straddle bytes the first byte of every group, the second, and so on, in 32-bit words.
        plane: which code.
        nf4_polynomial: whether NF4 is approximated by `NF4_POLYNOMIAL`.
    """
    if fmt.name in NATIVE:
        return jax.lax.bitcast_convert_type(group[0], NATIVE[fmt.name]).astype(jnp.float32), 1.0
    word, shift = _words(fmt, group, plane)
    if isinstance(fmt, Integer):
        return _whole(fmt, word, shift)
    table = _doubled(fmt)
    if table is not None:
        return _signed_nibbles(word, shift, table), 0.5
    if isinstance(fmt, Codebook) and not (nf4_polynomial and fmt.name == "nf4"):
        return _selected(word, shift, fmt.table), 1.0
    code = (word >> shift) & (2**fmt.bits - 1)
    if isinstance(fmt, Codebook):
        return _polynomial(code.astype(jnp.float32)), 1.0
    return fmt.decode(code.astype(jnp.uint8)), 1.0


def _words(fmt: AbstractFormat, group: list[jax.Array], plane: int) -> tuple[jax.Array, int]:
    """32-bit words, and the bit at which each has the code. Higher bits are arbitrary."""
    byte, shift = divmod(plane * fmt.bits, 8)
    if len(group) == 1:
        # As signed bytes: unsigned ones would be widened as signed ones and then masked.
        return jax.lax.bitcast_convert_type(group[0], jnp.int8).astype(jnp.int32), shift
    word = group[byte] >> shift
    if shift + fmt.bits > 8:
        word = word | (group[byte + 1] << (8 - shift))
    return word, 0


def _whole(fmt: Integer, word: jax.Array, shift: int) -> tuple[jax.Array, float]:
    """Integers at their position in the word, and their unit. Those at the top of a byte need no shift."""
    place = shift
    if fmt.signed and shift + fmt.bits != 8:
        place = 32 - fmt.bits
        word = word << (place - shift)
        if shift:
            word = word & -(2**place)
    else:
        mask = -(2**shift) if fmt.signed else (2**fmt.bits - 1) << shift
        word = word & mask
    return word.astype(jnp.float32), fmt.step * 2.0**-place


def _doubled(fmt: AbstractFormat) -> int | None:
    """Twice the magnitudes of a signed 4-bit float, in one word, else None."""
    if not isinstance(fmt, Minifloat) or fmt.bits != 4 or not fmt.signed:
        return None
    twice = 2 * fmt.values()[:8]
    if not np.array_equal(twice, np.clip(np.round(twice), 0, 15)):
        return None
    word = sum(int(number) << (4 * code) for code, number in enumerate(twice))
    return int(np.uint32(word).view(np.int32))


def _signed_nibbles(word: jax.Array, shift: int, table: int) -> jax.Array:
    """`table` at the low three bits of each code, signed by its fourth."""
    place = (word << 2 if shift == 0 else word >> (shift - 2)) & 28  # four times the three bits
    number = jax.lax.shift_right_logical(jnp.full_like(word, table), place) & 15
    sign = (word << (28 - shift)) & np.int32(-(2**31))
    bits = jax.lax.bitcast_convert_type(number.astype(jnp.float32), jnp.int32) | sign
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def _selected(word: jax.Array, shift: int, table: tuple[float, ...]) -> jax.Array:
    """`table[code]` by selects: each bit of the code halves the candidates."""
    bits = (len(table) - 1).bit_length()
    left = [jnp.float32(number) for number in (*table, *table[-1:] * (2**bits - len(table)))]
    for bit in range(bits):
        is_set = (word & (1 << (shift + bit))) != 0
        left = [jnp.where(is_set, high, low) for low, high in zip(left[::2], left[1::2], strict=True)]
    return left[0]


def _polynomial(code: jax.Array) -> jax.Array:
    """`NF4_POLYNOMIAL` at `(code - 7.5) / 7.5`."""
    x = code * jnp.float32(2 / 15) - 1
    total = jnp.full_like(x, NF4_POLYNOMIAL[-1])
    for coefficient in NF4_POLYNOMIAL[-2::-1]:
        total = total * x + jnp.float32(coefficient)
    return total


def stored_values(stored: jax.Array, holder: AbstractFormat | np.dtype) -> jax.Array:
    """Decodes stored scales or zero points to float32.

    E8M0's smallest scale, 2**-127, becomes zero, since TPUs flush subnormal numbers. Float16, which the vector unit does not
    support, is passed as its bits in uint16.
    """
    if isinstance(holder, E8M0):
        code = stored.astype(jnp.int32)
        power = jax.lax.bitcast_convert_type(code << 23, jnp.float32)
        return jnp.where(code == 255, jnp.full_like(power, jnp.nan), power)
    if isinstance(holder, Integer):
        values, own = code_values(holder, [stored], 0)
        return values * jnp.float32(own)
    if isinstance(holder, AbstractFormat):
        return holder.decode(stored)
    if stored.dtype == jnp.uint16:
        return _from_half(stored)
    return stored.astype(jnp.float32)


def _from_half(stored: jax.Array) -> jax.Array:
    """Float16 bits to float32."""
    word = stored.astype(jnp.int32)
    exponent, fraction = (word >> 10) & 31, word & 1023
    significand = fraction + jnp.where(exponent > 0, 1024, 0)
    value = significand.astype(jnp.float32) * power_of_two(jnp.maximum(exponent, 1) - 25)
    special = jnp.where(fraction > 0, jnp.float32(jnp.nan), jnp.float32(jnp.inf))
    value = jnp.where(exponent == 31, special, value)
    return jnp.where(word >= 2**15, -value, value)
