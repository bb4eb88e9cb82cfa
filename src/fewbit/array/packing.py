"""Codes of 1 to 8 bits in bytes, densely: 3 bits cost 3 bits.

The codes along one axis form a stream of bits. By default code 0 takes the lowest bits of byte 0, the order of nearly every
container. Two things vary between containers, and both are data here: which code stands first within a group
(`interleave`), and whether a byte is filled from its low or its high bits (`high_first`).
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, UInt8

from .._json import checked, form_of
from ..errors import QuantError


@dataclasses.dataclass(frozen=True)
class Packing:
    """The order of the codes in their bytes.

    Attributes:
        interleave: within each group of `len(interleave)` codes, the code that stands at each place of the stream. Empty:
            codes in order. A length that no group divides is filled up to a whole group.
        high_first: whether the first code of a byte takes its high bits (bitsandbytes) instead of the low ones. Only for
            1, 2, 4 and 8 bits, whose codes never straddle a byte.

    >>> ggml = Packing(interleave=paired(32))
    >>> pack(jnp.arange(32, dtype=jnp.uint8) % 16, 4, ggml)[:2].tolist()  # codes 0 and 16, then 1 and 17
    [0, 17]
    """

    interleave: tuple[int, ...] = ()
    high_first: bool = False

    def __post_init__(self) -> None:
        if sorted(self.interleave) != list(range(len(self.interleave))):
            raise QuantError(f"interleave {self.interleave} must hold each of 0 .. {len(self.interleave) - 1} once")

    def to_json(self) -> dict[str, Any]:
        """The fields that differ from the default."""
        fields: dict[str, Any] = {}
        if self.interleave:
            fields["interleave"] = list(self.interleave)
        if self.high_first:
            fields["high_first"] = True
        return fields

    @classmethod
    def from_json(cls, form: Any) -> "Packing":
        """The packing of a JSON form; an unknown key raises QuantError with the near name."""
        fields = checked(form, PACKING, "a packing")
        return cls(tuple(fields.get("interleave", ())), fields.get("high_first", False))


PACKING = form_of(Packing)
"""The JSON schema of a packing."""


def paired(group: int, apart: int = 2) -> tuple[int, ...]:
    """The interleaving that puts codes of a group `group // apart` places apart side by side.

    `paired(32)` is ggml's (j with j + 16); `paired(8, 4)` read across is AWQ's 0, 2, 4, 6, 1, 3, 5, 7.

    Args:
        group: how many codes a group has.
        apart: into how many runs it is cut; codes at the same place of each run come side by side.

    Returns:
        The permutation, as `Packing.interleave` takes it.

    >>> paired(8)
    (0, 4, 1, 5, 2, 6, 3, 7)
    >>> paired(8, 4)
    (0, 2, 4, 6, 1, 3, 5, 7)
    """
    step = group // apart
    return tuple(plane * step + j for j in range(step) for plane in range(apart))


def packed_length(length: int, bits: int, packing: Packing = Packing()) -> int:
    """How many bytes `length` codes take.

    >>> packed_length(100, 3)
    38
    """
    group = len(packing.interleave) or 1
    return math.ceil(math.ceil(length / group) * group * bits / 8)


def code_capacity(byte_count: int, bits: int) -> int:
    """How many codes fit in `byte_count` bytes."""
    return byte_count * 8 // bits


def codes_per_unit(bits: int, packing: Packing = Packing()) -> int:
    """The smallest number of codes that end at a byte's and a group's edge: slices must begin and end there."""
    return math.lcm(8 // math.gcd(bits, 8), len(packing.interleave) or 1)


def pack(codes: UInt8[Array, "*s"], bits: int, packing: Packing = Packing(), *, axis: int = -1) -> UInt8[Array, "*p"]:
    """Packs the codes along one axis.

    Args:
        codes: values below `2**bits`.
        bits: 1 to 8.
        packing: their order.
        axis: the axis whose codes share bytes.

    Returns:
        The bytes: the shape of `codes`, but `ceil(n * bits / 8)` along `axis` for its `n` codes.

    Raises:
        QuantError: for bits outside 1..8, or `high_first` with bits that straddle bytes.
    """
    _check_bits(bits, packing)
    if bits == 8 and not packing.interleave:
        return codes
    axis = axis % codes.ndim
    length = packed_length(codes.shape[axis], bits, packing)
    unit = codes_per_unit(bits, packing)
    grouped = _grouped(codes, unit, axis)  # [..., units, unit, ...]
    if packing.interleave:
        grouped = _permuted(grouped, packing.interleave, axis + 1)
    part = [jax.lax.index_in_dim(grouped, i, axis + 1, keepdims=False) for i in range(unit)]
    bytes_of_unit = [_byte(part, b, bits, packing.high_first) for b in range(unit * bits // 8)]
    several = len(bytes_of_unit) > 1
    merged = _ungrouped(jnp.stack(bytes_of_unit, axis + 1), axis) if several else bytes_of_unit[0]
    return jax.lax.slice_in_dim(merged, 0, length, axis=axis)


def unpack(
    packed: UInt8[Array, "*p"], bits: int, length: int, packing: Packing = Packing(), *, axis: int = -1
) -> UInt8[Array, "*s"]:
    """The `length` codes along `axis` that `pack` put there; each comes back in the low bits of a byte.

    Args:
        packed: the bytes.
        bits: 1 to 8.
        length: how many codes lie along `axis`.
        packing: their order.
        axis: the axis whose codes share bytes.

    Returns:
        The codes: the shape of `packed`, but `length` along `axis`.

    Raises:
        QuantError: for bits outside 1..8, or when the bytes are too few for `length` codes.
    """
    _check_bits(bits, packing)
    axis = axis % packed.ndim
    if code_capacity(packed.shape[axis], bits) < length:
        raise QuantError(f"{packed.shape[axis]} bytes hold fewer than {length} codes of {bits} bits")
    if bits == 8 and not packing.interleave:
        return jax.lax.slice_in_dim(packed, 0, length, axis=axis)
    unit = codes_per_unit(bits, packing)
    grouped = _grouped(packed, unit * bits // 8, axis)  # [..., units, bytes of a unit, ...]
    part = [jax.lax.index_in_dim(grouped, b, axis + 1, keepdims=False) for b in range(unit * bits // 8)]
    codes = jnp.stack([_code(part, i, bits, packing.high_first) for i in range(unit)], axis + 1)
    if packing.interleave:
        place_of = tuple(packing.interleave.index(i) for i in range(len(packing.interleave)))
        codes = _permuted(codes, place_of, axis + 1)
    return jax.lax.slice_in_dim(_ungrouped(codes, axis), 0, length, axis=axis)


def _check_bits(bits: int, packing: Packing) -> None:
    if not 1 <= bits <= 8:
        raise QuantError(f"bits is {bits}, must be 1 to 8")
    if packing.high_first and 8 % bits:
        raise QuantError(f"high_first needs codes that do not straddle bytes (1, 2, 4 or 8 bits), not {bits} bits")


def _grouped(x: jax.Array, group: int, axis: int) -> jax.Array:
    """The axis split into whole groups, the last one filled with zeros."""
    n = x.shape[axis]
    count = -(-n // group)
    if count * group != n:
        x = jnp.pad(x, [(0, count * group - n if a == axis else 0) for a in range(x.ndim)])
    return x.reshape(*x.shape[:axis], count, group, *x.shape[axis + 1 :])


def _ungrouped(x: jax.Array, axis: int) -> jax.Array:
    """Groups that lie along an axis, and the elements of each along the next, as one axis."""
    return x.reshape(*x.shape[:axis], x.shape[axis] * x.shape[axis + 1], *x.shape[axis + 2 :])


def _permuted(x: jax.Array, interleave: tuple[int, ...], axis: int) -> jax.Array:
    """Each run of `len(interleave)` elements along `axis` taken in the order that `interleave` gives."""
    runs = x.shape[axis] // len(interleave)
    order = [run * len(interleave) + i for run in range(runs) for i in interleave]
    return jnp.take(x, jnp.asarray(order), axis=axis)


def _shift(index: int, byte: int, bits: int, high_first: bool) -> int:
    """By how many bits code `index` of a unit is moved left to meet byte `byte` (negative: right)."""
    place = index * bits - byte * 8
    return 8 - bits - place if high_first else place


def _byte(codes: list[jax.Array], byte: int, bits: int, high_first: bool) -> jax.Array:
    """Byte `byte` of a unit: the bits of every code that reaches into it."""
    first, last = byte * 8 // bits, (byte * 8 + 7) // bits
    out = None
    for index in range(first, last + 1):
        shift = _shift(index, byte, bits, high_first)
        part = codes[index] << shift if shift >= 0 else codes[index] >> -shift
        out = part if out is None else out | part
    assert out is not None
    return out


def _code(part: list[jax.Array], index: int, bits: int, high_first: bool) -> jax.Array:
    """Code `index` of a unit, from the one or two bytes that hold it."""
    first, last = index * bits // 8, (index * bits + bits - 1) // 8
    shift = _shift(index, first, bits, high_first)
    code = part[first] >> shift if shift else part[first]
    if last != first:
        code = code | (part[last] << -_shift(index, last, bits, high_first))
    return code & jnp.uint8(2**bits - 1) if bits < 8 else code
