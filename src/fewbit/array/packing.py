"""Bit packing of 1- to 8-bit codes.

The codes along one axis form a bit stream; by default code 0 takes the lowest bits of byte 0, as in nearly every file
format. `Packing` describes the others: the order within a group (`interleave`), and bytes filled from their high bits
(`high_first`).
"""

import dataclasses
import functools
import math
import operator
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, UInt8

from .._json import checked, form_of
from ..errors import QuantError


@dataclasses.dataclass(frozen=True)
class Packing:
    """The order of packed codes.

    Attributes:
        interleave: the permutation of each group of `len(interleave)` codes: which code comes at each place. Empty: in
            order. The last group is padded.
        high_first: whether the first code of a byte takes its high bits (bitsandbytes). Only for 1, 2, 4 and 8 bits, whose
            codes never straddle a byte.

    >>> ggml = Packing(interleave=paired(32))
    >>> pack(jnp.arange(32, dtype=jnp.uint8) % 16, 4, ggml)[:2].tolist()  # codes 0 and 16, then 1 and 17
    [0, 17]
    """

    interleave: tuple[int, ...] = ()
    high_first: bool = False

    def __post_init__(self) -> None:
        if sorted(self.interleave) != list(range(len(self.interleave))):
            raise QuantError(f"interleave {self.interleave} must contain each of 0 .. {len(self.interleave) - 1} once")

    def to_json(self) -> dict[str, Any]:
        """The fields that differ from the default."""
        fields: dict[str, Any] = {}
        if self.interleave:
            fields["interleave"] = list(self.interleave)
        if self.high_first:
            fields["high_first"] = True
        return fields

    @classmethod
    def from_json(cls, form: object) -> "Packing":
        """The packing of a JSON form; QuantError for an unknown key."""
        fields = checked(form, PACKING, "a packing")
        return cls(tuple(fields.get("interleave", ())), fields.get("high_first", False))


PACKING = form_of(Packing)
"""The JSON schema of a packing."""


def paired(group: int, runs: int = 2) -> tuple[int, ...]:
    """The `Packing.interleave` that places code j next to code `j + group // runs`.

    `paired(32)` is ggml's order (j with j + 16); `paired(8, 4)` is AWQ's 0, 2, 4, 6, 1, 3, 5, 7.

    Args:
        group: codes per group.
        runs: runs per group; codes at the same place of each run become neighbours.

    Returns:
        The permutation, as `Packing.interleave` takes it.

    >>> paired(8)
    (0, 4, 1, 5, 2, 6, 3, 7)
    >>> paired(8, 4)
    (0, 2, 4, 6, 1, 3, 5, 7)
    """
    step = group // runs
    return tuple(plane * step + j for j in range(step) for plane in range(runs))


def packed_length(length: int, bits: int, packing: Packing = Packing()) -> int:
    """The bytes of `length` packed codes.

    >>> packed_length(100, 3)
    38
    """
    group = len(packing.interleave) or 1
    return math.ceil(math.ceil(length / group) * group * bits / 8)


def code_capacity(byte_count: int, bits: int) -> int:
    """The codes that fit in `byte_count` bytes."""
    return byte_count * 8 // bits


def codes_per_unit(bits: int, packing: Packing = Packing()) -> int:
    """The fewest codes that fill whole bytes and groups. Slices must start and end at multiples of it."""
    return math.lcm(8 // math.gcd(bits, 8), len(packing.interleave) or 1)


def pack(codes: UInt8[Array, "*s"], bits: int, packing: Packing = Packing(), *, axis: int = -1) -> UInt8[Array, "*p"]:
    """Packs codes below `2**bits` along one axis.

    Args:
        codes: values below `2**bits`.
        bits: 1 to 8.
        packing: their order.
        axis: the axis whose codes share bytes.

    Returns:
        The bytes: the shape of `codes`, but `ceil(n * bits / 8)` along `axis` for its `n` codes.

    Raises:
        QuantError: for bits outside 1..8, or `high_first` with codes that straddle bytes.
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
    merged = bytes_of_unit[0]
    if len(bytes_of_unit) > 1:
        merged = _ungrouped(jnp.stack(bytes_of_unit, axis + 1), axis)
    return jax.lax.slice_in_dim(merged, 0, length, axis=axis)


def unpack(
    packed: UInt8[Array, "*p"], bits: int, length: int, packing: Packing = Packing(), *, axis: int = -1
) -> UInt8[Array, "*s"]:
    """The inverse of `pack`: `length` codes along `axis`, one per byte.

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
    """The axis split into (groups, elements of a group), the last group zero-padded."""
    n = x.shape[axis]
    if n % group:
        padding = [(0, 0)] * x.ndim
        padding[axis] = (0, -n % group)
        x = jnp.pad(x, padding)
    return x.reshape(*x.shape[:axis], -(-n // group), group, *x.shape[axis + 1 :])


def _ungrouped(x: jax.Array, axis: int) -> jax.Array:
    """The inverse of `_grouped`, without removing its padding."""
    return x.reshape(*x.shape[:axis], x.shape[axis] * x.shape[axis + 1], *x.shape[axis + 2 :])


def _permuted(x: jax.Array, interleave: tuple[int, ...], axis: int) -> jax.Array:
    """Each run of `len(interleave)` elements along `axis`, permuted."""
    runs = x.shape[axis] // len(interleave)
    order = [run * len(interleave) + i for run in range(runs) for i in interleave]
    return jnp.take(x, jnp.asarray(order), axis=axis)


def _shift(index: int, byte: int, bits: int, high_first: bool) -> int:
    """The left shift of code `index` of a unit within byte `byte`; negative: right."""
    place = index * bits - byte * 8
    if high_first:
        return 8 - bits - place
    return place


def _shifted(x: jax.Array, left: int) -> jax.Array:
    if left < 0:
        return x >> -left
    if left > 0:
        return x << left
    return x


def _byte(codes: list[jax.Array], byte: int, bits: int, high_first: bool) -> jax.Array:
    """Byte `byte` of a unit, from every code that overlaps it."""
    indices = range(byte * 8 // bits, (byte * 8 + 7) // bits + 1)
    return functools.reduce(operator.or_, (_shifted(codes[i], _shift(i, byte, bits, high_first)) for i in indices))


def _code(part: list[jax.Array], index: int, bits: int, high_first: bool) -> jax.Array:
    """Code `index` of a unit, from the one or two bytes that it overlaps."""
    places = sorted({index * bits // 8, (index * bits + bits - 1) // 8})
    code = functools.reduce(operator.or_, (_shifted(part[b], -_shift(index, b, bits, high_first)) for b in places))
    if bits == 8:
        return code
    return code & jnp.uint8(2**bits - 1)
