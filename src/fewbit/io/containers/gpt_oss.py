"""gpt-oss: MXFP4 stacks of experts in Hugging Face directories.

The parameter `experts.gate_up_proj`, `[E, in, out]` in transformers, is stored transposed: `gate_up_proj_blocks` is
`[E, out, in / 32, 16]`, element 0 of a block in the low nibble of byte 0, and `gate_up_proj_scales` `[E, out, in / 32]`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ...array.qarray import QArray
from ...array.scheme import SCHEMES
from ...errors import QuantError, UnsupportedError
from ..checkpoint import Tensors
from .container import AbstractContainer, Files, Group, Weight, grouped
from .encodings.stored import NAN_SCALE, built, checked_info, config_dtype, described, packed_codes, per_tile

_BLOCKS, _SCALES = "_blocks", "_scales"
_NAMES = ("experts.gate_up_proj", "experts.down_proj")
_BLOCK = 32
_BYTES = 16
_KEPT = ("model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head")
_SCHEME = SCHEMES["mxfp4"].along(-2, 3)


class GptOss(AbstractContainer):
    """The layout of gpt-oss."""

    name = "gpt-oss"
    schemes = ("mxfp4",)

    def why_not(self, weight: Weight) -> str | None:
        if not weight.name.endswith(_NAMES):
            return f"it stores the expert stacks {' and '.join(_NAMES)} of gpt-oss"
        if len(weight.shape) != 3:
            return f"it stores stacks [experts, in, out], and the weight has {len(weight.shape)} axes"
        scheme = weight.scheme
        if (scheme.format, scheme.scale, scheme.zero_point) != (_SCHEME.format, _SCHEME.scale, None):
            return f"it stores mxfp4, not {scheme.name}"
        if scheme.tile != _SCHEME.tile or scheme.pack_axis != -2:
            return "its blocks are 32 elements along axis -2, the contraction axis"
        if weight.shape[1] % _BLOCK:
            return f"{weight.shape[1]} inputs are no multiple of a block of {_BLOCK}"
        if weight.activations is not None:
            return f"activations are not quantized there, and here they are {weight.activations.name}"
        return None

    def encoded(self, weight: Weight, q: QArray) -> dict[str, np.ndarray]:
        codes, scale = packed_codes(q), per_tile(q.scale, q)
        if (scale == NAN_SCALE).any():
            raise UnsupportedError(f"gpt-oss cannot store the block of NaN in {weight.name!r}")
        experts, inputs, outputs = q.shape
        blocks = np.ascontiguousarray(codes.transpose(0, 2, 1)).reshape(experts, outputs, inputs // _BLOCK, _BYTES)
        scales = np.ascontiguousarray(scale.transpose(0, 2, 1))
        return {f"{weight.name}{_BLOCKS}": blocks, f"{weight.name}{_SCALES}": scales}

    def files(self, weights: Sequence[Weight], kept: Sequence[str], config: Mapping[str, Any]) -> Files:
        quantized = {weight.module for weight in weights}
        left = [name.rpartition(".")[0] for name in kept if name.endswith(_NAMES)]
        if half := quantized.intersection(left):
            raise UnsupportedError(
                f"gpt-oss stores both weights of {min(half)!r} in mxfp4 or none, and one is not quantized"
            )
        section = {"quant_method": "mxfp4", "modules_to_not_convert": [*_KEPT, *dict.fromkeys(left)]}
        return Files({"quantization_config": section})

    def recognises(self, config: Mapping[str, Any], tensors: Tensors) -> bool:
        section = config.get("quantization_config")
        return isinstance(section, Mapping) and section.get("quant_method") == "mxfp4"

    def decoded(self, config: Mapping[str, Any], tensors: Tensors, where: str) -> Tensors:
        dtype = config_dtype(config, "bfloat16")
        names = [name.removesuffix(_BLOCKS) for name in tensors.info if name.endswith(_BLOCKS)]
        return grouped(tensors, {name: _group(name, tensors, dtype, where) for name in names}, where)


def _group(name: str, tensors: Tensors, dtype: np.dtype, where: str) -> Group:
    """The weight of two stored arrays."""
    parts = (f"{name}{_BLOCKS}", f"{name}{_SCALES}")
    experts, outputs, count, size = checked_info(tensors, parts[0], where, ("uint8",), 4).shape
    scales = checked_info(tensors, parts[1], where, ("uint8",), 3).shape
    if size != _BYTES or scales != (experts, outputs, count):
        raise QuantError(
            f"{where}: {name!r} has blocks of shape {(experts, outputs, count, size)} and scales of shape {scales}; expected "
            f"[experts, out, in / {_BLOCK}, {_BYTES}] and [experts, out, in / {_BLOCK}]"
        )
    shape = (experts, count * _BLOCK, outputs)

    def load(arrays: Mapping[str, np.ndarray]) -> QArray:
        blocks, scale = (arrays[part] for part in parts)
        if (scale == NAN_SCALE).any():
            raise QuantError(f"{where}: {name!r} has a scale of 2**128, which E8M0 lacks")
        codes = blocks.reshape(experts, outputs, count * _BYTES).transpose(0, 2, 1)
        return built(np.ascontiguousarray(codes), np.ascontiguousarray(scale.transpose(0, 2, 1)), _SCHEME, shape[1], dtype)

    return Group(described(tensors, parts, shape, dtype, "MXFP4", _SCHEME), parts, load)
