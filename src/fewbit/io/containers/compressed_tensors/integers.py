"""Integers packed into 32-bit words: the format pack-quantized."""

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np

from ...._tiles import tile_counts
from ....array.packing import packed_length
from ....array.qarray import QArray
from ....errors import UnsupportedError
from ....formats.integer import Integer
from ..container import Group, Weight
from ..encodings.packed_bits import packed_bits, unpacked_bits
from ..encodings.stored import FLOATS, built, packed_codes, per_tile, stored_integers
from .layout import AbstractLayout, Module
from .tiling import stored_tiles, strategy_of, why_not_integer, why_not_scaled

_WORD = 32
_LAST_PADDED = (0, 12)  # the last version known to start a code only where it fits into the word
_FIRST_DENSE = (0, 20)


class PackedIntegers(AbstractLayout):
    """Codes of 1 to 8 bits, in one bit stream per row.

    The stream stores each code plus half of the range, so zero is 0x8 of 4 bits. Releases of 2025 start a code only where it fits
    into a word; that layout, which differs for 3, 5, 6 and 7 bits, is read.
    """

    name = "pack-quantized"

    def fits(self, weight: Weight) -> bool:
        return isinstance(weight.scheme.format, Integer) and weight.activations is None

    def why_not(self, weight: Weight) -> str | None:
        if reason := why_not_integer(weight.scheme) or why_not_scaled(weight.scheme, weight.shape):
            return reason
        if strategy_of(weight.scheme, weight.shape)["strategy"] not in ("channel", "group"):
            return "integers have one scale per row or per group of a row there"
        return None

    def arguments(self, weight: Weight) -> dict[str, Any]:
        scheme = weight.scheme
        settings = {"num_bits": scheme.format.bits, "type": "int", "symmetric": scheme.zero_point is None}
        return settings | strategy_of(scheme, weight.shape)

    def encoded(self, q: QArray) -> dict[str, np.ndarray]:
        scheme = q.scheme
        arrays = {
            "weight_packed": _words(_stream(packed_codes(q), q.shape[1], scheme.format)),
            "weight_scale": per_tile(q.scale, q),
            "weight_shape": np.array(q.shape, np.int64),
        }
        if scheme.zero_point is not None:
            zero = per_tile(q.zero_point, q).T  # [tiles, out]
            packed = packed_bits(zero, scheme.format.bits)
            arrays["weight_zero_point"] = np.ascontiguousarray(_words(_stream(packed, q.shape[0], scheme.format)).T)
        return arrays

    def group(self, module: Module) -> Group:
        bits = module.arguments.num_bits
        if module.arguments.type != "int" or bits > 8:
            raise module.fault("has packed words, and its config group has no integers of 1 to 8 bits")
        words = module.info("weight_packed", "int32", ndim=2)
        scale = module.info("weight_scale", *FLOATS)
        module.info("weight_shape", "int64", ndim=1)
        shape = tuple(map(int, module.read("weight_shape")))
        if len(shape) != 2 or min(shape) < 1 or shape[0] != words.shape[0]:
            raise module.fault(f"has weight_shape {shape} and packed words of shape {words.shape}")
        is_dense = _is_dense(module, words.shape[1], shape[1], bits)
        tile = stored_tiles(module, shape, scale.shape)
        parts = ["weight_packed", "weight_scale", "weight_shape"]
        counts = tile_counts(shape, tile)
        has_zero, is_dense_zero = module.has("weight_zero_point"), True
        if has_zero:
            zero = module.info("weight_zero_point", "int32", ndim=2)
            is_dense_zero = _is_dense(module, zero.shape[0], shape[0], bits)
            if (shape[0], zero.shape[1]) != counts:
                raise module.fault(f"has zero points of shape {zero.shape} for scales of shape {scale.shape}")
            parts.append("weight_zero_point")
        if module.has("weight_g_idx"):
            _check_order(module, shape[1], tile[1])
            parts.append("weight_g_idx")
        scheme = stored_integers(bits, tile, scale.dtype, has_zero=has_zero)

        def load(arrays: Mapping[str, np.ndarray]) -> QArray:
            codes = _stream(_codes(arrays["weight_packed"], shape[1], bits, is_dense), shape[1], scheme.format)
            zero = None
            if has_zero:
                packed = _codes(np.ascontiguousarray(arrays["weight_zero_point"].T), shape[0], bits, is_dense_zero)
                zero = np.ascontiguousarray(unpacked_bits(packed, shape[0], bits).T)
            return built(codes, arrays["weight_scale"].reshape(counts), scheme, shape[1], module.dtype, zero)

        return module.group(tuple(parts), shape, module.dtype, self.name, scheme, load)


def _is_dense(module: Module, words: int, length: int, bits: int) -> bool:
    """Whether the `words` of a row are one bit stream. Otherwise codes start only where they fit into a word."""
    dense = -(-length * bits // _WORD)
    padded = -(-length // (_WORD // bits))
    if words == dense and (_WORD % bits == 0 or length * bits <= _WORD or words != padded):
        return True
    if words == padded and words != dense:
        return False
    if words != dense:
        raise module.fault(f"has {words} words for {length} codes of {bits} bits, expected {dense}")
    version = tuple(int(part) for part in module.version.split(".")[:2] if part.isdigit() and len(part) < 9)
    if len(version) == 2 and version >= _FIRST_DENSE:
        return True
    if len(version) == 2 and version <= _LAST_PADDED:
        return False
    raise UnsupportedError(
        f"{module.where}: module {module.name!r} has {length} codes of {bits} bits, which take as many words in both layouts of "
        f"compressed-tensors, and the version {module.version!r:.20} in config.json does not tell which"
    )


def _check_order(module: Module, length: int, tile: int | None) -> None:
    """Refuses groups that are not runs of neighbouring columns."""
    module.info("weight_g_idx", "int32", ndim=1)
    group = module.read("weight_g_idx")
    if not np.array_equal(group, np.arange(length) // (tile or length)):
        raise UnsupportedError(
            f"{module.where}: module {module.name!r} has weight_g_idx: its columns are in the order of activations, which no "
            "scheme has"
        )


@functools.lru_cache(maxsize=64)
def _masks(length: int, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Two masks of the bytes of a row of packed codes.

    The first has all bits of codes set, the second the highest bit of each code.
    """
    full = packed_bits(np.full((1, length), 2**bits - 1, np.uint8), bits)
    high = packed_bits(np.full((1, length), 2 ** (bits - 1), np.uint8), bits)
    return full, high


def _stream(codes: np.ndarray, length: int, fmt: object) -> np.ndarray:
    """Packed codes without sign, and with zero padding. Half of the range is added (mod `2**bits`) to signed codes."""
    assert isinstance(fmt, Integer)
    full, high = _masks(length, fmt.bits)
    codes = codes & full
    return codes ^ high if fmt.signed else codes


def _words(stream: np.ndarray) -> np.ndarray:
    """Rows of bytes as 32-bit words, zero-padded."""
    padded = np.pad(stream, ((0, 0), (0, -stream.shape[1] % 4)))
    return np.ascontiguousarray(padded).view("<i4")


def _codes(words: np.ndarray, length: int, bits: int, is_dense: bool) -> np.ndarray:
    """The bit stream of each row of words."""
    stored = np.ascontiguousarray(words).view(np.uint8)
    if is_dense:
        return stored[:, : packed_length(length, bits)]
    per_word = _WORD // bits
    rows, count = words.shape
    split = np.unpackbits(stored.reshape(rows, count, 4), axis=-1, bitorder="little")[..., : per_word * bits]
    return np.packbits(split.reshape(rows, -1)[:, : length * bits], axis=-1, bitorder="little")
