"""One byte per code: the formats int-quantized and float-quantized."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from ...._tiles import tile_counts
from ....array.qarray import QArray
from ....array.scheme import Scheme
from ....errors import UnsupportedError
from ....formats.format import FORMATS, AbstractFormat
from ....formats.integer import Integer
from ..container import Group, Weight
from ..encodings.packed_bits import packed_bits
from ..encodings.stored import E4M3, FLOATS, built, named_tiles, packed_codes, per_tile, stored_integers, unpacked_codes
from .activations import activation_name
from .layout import AbstractLayout, Module
from .tiling import stored_tiles, strategy_of, why_not_integer, why_not_scaled


class PlainIntegers(AbstractLayout):
    """Integers in int8, for products with quantized activations."""

    name = "int-quantized"

    def fits(self, weight: Weight) -> bool:
        return isinstance(weight.scheme.format, Integer) and weight.activations is not None

    def why_not(self, weight: Weight) -> str | None:
        assert weight.activations is not None
        if activation_name(weight.activations) not in ("int8", "int4"):
            return f"activations of integer weights are int8 per token there, not {weight.activations.name}"
        if reason := why_not_integer(weight.scheme) or why_not_scaled(weight.scheme, weight.shape):
            return reason
        if strategy_of(weight.scheme, weight.shape)["strategy"] == "block":
            return "integers have scales per tensor, row or group there"
        return None

    def arguments(self, weight: Weight) -> dict[str, Any]:
        scheme = weight.scheme
        settings = {"num_bits": scheme.format.bits, "type": "int", "symmetric": scheme.zero_point is None}
        return settings | strategy_of(scheme, weight.shape)

    def encoded(self, q: QArray) -> dict[str, np.ndarray]:
        arrays = {"weight": _signed(unpacked_codes(q), q.scheme.format), "weight_scale": _stored_scale(q.scale, q)}
        if q.scheme.zero_point is not None:
            arrays["weight_zero_point"] = _signed(_stored_scale(q.zero_point, q), q.scheme.zero_point)
        return arrays

    def group(self, module: Module) -> Group:
        weight = module.info("weight", "int8", ndim=2)
        scale = module.info("weight_scale", *FLOATS)
        bits = module.arguments.num_bits
        if module.arguments.type != "int" or bits > 8:
            raise module.fault("has int8 codes, and its config group has no integers of 1 to 8 bits")
        shape = (weight.shape[0], weight.shape[1])
        tile = stored_tiles(module, shape, scale.shape)
        counts = tile_counts(shape, tile)
        parts = ("weight", "weight_scale")
        has_zero = module.has("weight_zero_point")
        if has_zero:
            zero = module.info("weight_zero_point", "int8")
            if zero.shape != scale.shape:
                raise module.fault(f"has zero points of shape {zero.shape} for scales of shape {scale.shape}")
            parts = (*parts, "weight_zero_point")
        scheme = stored_integers(bits, tile, scale.dtype, has_zero=has_zero)
        half = 2 ** (bits - 1)
        shift = np.uint8(0)
        if has_zero:
            shift = np.uint8(half)

        def codes_of(stored: np.ndarray) -> np.ndarray:
            if stored.size and (stored.min() < -half or stored.max() >= half):
                raise module.fault(f"has numbers beyond {bits} bits")
            return (stored.view(np.uint8) + shift) & np.uint8(2**bits - 1)

        def load(arrays: Mapping[str, np.ndarray]) -> QArray:
            codes = packed_bits(codes_of(arrays["weight"]), bits)
            zero = None
            if has_zero:
                zero = codes_of(arrays["weight_zero_point"]).reshape(counts)
            return built(codes, arrays["weight_scale"].reshape(counts), scheme, shape[1], module.dtype, zero)

        return module.group(parts, shape, module.dtype, self.name, scheme, load)


class PlainFloats(AbstractLayout):
    """E4M3 numbers with float scales by tensor, row, group or block."""

    name = "float-quantized"

    def fits(self, weight: Weight) -> bool:
        return weight.scheme.format == FORMATS["e4m3fn"] and not isinstance(weight.scheme.scale, AbstractFormat)

    def why_not(self, weight: Weight) -> str | None:
        scheme = weight.scheme
        if scheme.zero_point is not None:
            return "floats have no zero point there"
        if weight.activations is not None and activation_name(weight.activations) not in ("fp8", "fp8_g128"):
            return f"activations of float8 weights are fp8 per token or group of 128 there, not {weight.activations.name}"
        return why_not_scaled(scheme, weight.shape)

    def arguments(self, weight: Weight) -> dict[str, Any]:
        return {"num_bits": 8, "type": "float", "symmetric": True, **strategy_of(weight.scheme, weight.shape)}

    def encoded(self, q: QArray) -> dict[str, np.ndarray]:
        return {"weight": packed_codes(q).view(E4M3), "weight_scale": _stored_scale(q.scale, q)}

    def group(self, module: Module) -> Group:
        weight = module.info("weight", E4M3.name, ndim=2)
        scale = module.info("weight_scale", *FLOATS)
        if module.has("weight_zero_point"):
            raise UnsupportedError(f"{module.where}: module {module.name!r} has floats with zero points")
        shape = (weight.shape[0], weight.shape[1])
        tile = stored_tiles(module, shape, scale.shape)
        scheme = Scheme(FORMATS["e4m3fn"], named_tiles(tile), scale=scale.dtype)

        def load(arrays: Mapping[str, np.ndarray]) -> QArray:
            codes = np.ascontiguousarray(arrays["weight"]).view(np.uint8)
            return built(codes, arrays["weight_scale"].reshape(tile_counts(shape, tile)), scheme, shape[1], module.dtype)

        return module.group(("weight", "weight_scale"), shape, module.dtype, self.name, scheme, load)


def _signed(codes: np.ndarray, fmt: Any) -> np.ndarray:
    """Codes as signed numbers: two's complement, or unsigned less half of the range."""
    half = np.uint8(2 ** (fmt.bits - 1))
    if fmt.signed:
        codes = codes ^ half
    return (codes - half).view(np.int8)


def _stored_scale(leaf: Any, q: QArray) -> np.ndarray:
    """A scale or zero point per tile. One of the whole tensor has one axis."""
    stored = per_tile(leaf, q)
    if q.scheme.tiles(2) == (None, None):
        return stored.reshape(1)
    return stored
