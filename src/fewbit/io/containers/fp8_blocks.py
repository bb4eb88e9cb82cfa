"""FP8 in blocks, the layout of DeepSeek-V3's and Qwen3-FP8's own checkpoints.

A matrix `m.weight [N, K]` is E4M3, and `m.weight_scale_inv [ceil(N / 128), ceil(K / 128)]` has the factor of each block.
transformers calls the layout FineGrainedFP8.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import msgspec
import numpy as np

from ..._json import converted
from ..._tiles import Tile, tile_counts
from ...array.qarray import QArray
from ...array.scheme import Scheme
from ...errors import QuantError, UnsupportedError
from ...formats.format import FORMATS
from ..checkpoint import Tensors
from .container import AbstractContainer, Files, Group, Weight, grouped, why_not_matrix
from .encodings.names import linear_modules
from .encodings.stored import (
    E4M3,
    FLOATS,
    built,
    checked_info,
    config_dtype,
    described,
    named_tiles,
    packed_codes,
    per_tile,
)

_METHOD = "fp8"
_SCALE = "_scale_inv"
_STORED = "FP8 in blocks"
_Size = Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)]


class _Section(msgspec.Struct, frozen=True):
    """The JSON schema of the section in `config.json`. Null blocks are one scale for the tensor."""

    weight_block_size: tuple[_Size, _Size] | None = (128, 128)


class FP8Blocks(AbstractContainer):
    """The layout of FineGrainedFP8 in transformers 5.23.

    Engines quantize activations as they run; weights that are read here have no such policy.
    """

    name = "fp8-blocks"
    schemes = ("fp8_block128",)

    def why_not(self, weight: Weight) -> str | None:
        if reason := why_not_matrix(weight):
            return reason
        scheme = weight.scheme
        has_floats = scheme.format == FORMATS["e4m3fn"] and isinstance(scheme.scale, np.dtype)
        if not has_floats or scheme.zero_point is not None or scheme.tensor_scale:
            return f"it stores E4M3 numbers with a float scale for each block, not {scheme.name}"
        if None in scheme.tiles(2):
            return "its blocks have rows and columns, such as 128x128"
        if weight.activations is not None:
            return "the engine chooses there how activations are quantized; leave them out of the recipe"
        return None

    def encoded(self, weight: Weight, q: QArray) -> dict[str, np.ndarray]:
        return {weight.name: packed_codes(q).view(E4M3), f"{weight.name}{_SCALE}": per_tile(q.scale, q)}

    def files(self, weights: Sequence[Weight], kept: Sequence[str], config: Mapping[str, Any]) -> Files:
        blocks = {weight.scheme.tiles(2) for weight in weights}
        if len(blocks) > 1:
            raise UnsupportedError(f"{self.name} has one block size in a directory, not {sorted(map(str, blocks))}")
        section = {
            "quant_method": _METHOD,
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": list(next(iter(blocks), (128, 128))),
            "modules_to_not_convert": linear_modules(kept, [weight.module for weight in weights]),
        }
        return Files({"quantization_config": section})

    def recognises(self, config: Mapping[str, Any], tensors: Tensors) -> bool:
        section = config.get("quantization_config")
        return isinstance(section, Mapping) and section.get("quant_method") == _METHOD

    def decoded(self, config: Mapping[str, Any], tensors: Tensors, where: str) -> Tensors:
        section = converted(config["quantization_config"], _Section, f"{where}: quantization_config in config.json")
        dtype = config_dtype(config, "bfloat16")
        groups: dict[str, Group] = {}
        for path in tensors.info:
            if path.endswith(_SCALE):
                name = path.removesuffix(_SCALE)
                groups[name] = _group_of(name, tensors, section.weight_block_size, dtype, where)
        for name, info in tensors.info.items():
            if info.dtype == E4M3.name and name not in groups:
                raise UnsupportedError(f"{where}: {name!r} has FP8 numbers, and there is no {name + _SCALE!r}")
        return grouped(tensors, groups, where)


def _group_of(name: str, tensors: Tensors, blocks: tuple[int, int] | None, dtype: np.dtype, where: str) -> Group:
    """The weight of a name, with its scales."""
    codes = checked_info(tensors, name, where, (E4M3.name,), 2)
    scale = checked_info(tensors, f"{name}{_SCALE}", where, tuple(FLOATS))
    shape = (codes.shape[0], codes.shape[1])
    tile: tuple[Tile, Tile] = blocks or (None, None)
    counts = tile_counts(shape, tile)
    if scale.shape != counts and (blocks is not None or scale.shape not in ((), (1,))):
        raise QuantError(
            f"{where}: {name!r} has shape {shape} and scales of shape {scale.shape}, expected {counts} for blocks of {blocks}"
        )
    scheme = Scheme(FORMATS["e4m3fn"], named_tiles(tile), scale=scale.dtype)
    parts = [name, f"{name}{_SCALE}"]
    if (ranges := f"{name.removesuffix('weight')}activation_scale") in tensors.info:
        parts.append(ranges)  # of static activations, which the products of a weight that is read do not use
    info = described(tensors, parts, shape, dtype, _STORED, scheme)
    return Group(info, tuple(parts), _loader(name, scheme, shape, counts, dtype))


def _loader(
    name: str, scheme: Scheme, shape: tuple[int, int], counts: tuple[int, ...], dtype: np.dtype
) -> Callable[[Mapping[str, np.ndarray]], QArray]:
    def load(arrays: Mapping[str, np.ndarray]) -> QArray:
        codes = np.ascontiguousarray(arrays[name]).view(np.uint8)
        return built(codes, arrays[f"{name}{_SCALE}"].reshape(counts), scheme, shape[1], dtype)

    return load
