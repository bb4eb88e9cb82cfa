"""NVFP4 and the MX formats of compressed-tensors."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from ....array.qarray import QArray
from ....array.scheme import SCHEMES, Scheme
from ....errors import UnsupportedError
from ..container import Group, Weight
from ..encodings.stored import E4M3, FLOATS, NAN_SCALE, built, packed_codes, per_tile
from .activations import activation_name
from .global_scale import divisor_of, factor_of
from .layout import AbstractLayout, Module

_BFLOAT16 = FLOATS["bfloat16"]


@dataclasses.dataclass(frozen=True)
class MXFloats(AbstractLayout):
    """Blocks of 32 floats with an E8M0 scale.

    Attributes:
        name: the format.
        scheme: the name of the scheme.
        part: where the codes are: packed bytes in "weight_packed", E4M3 numbers in "weight".
        activations: the scheme that activations can have.
    """

    name: str
    scheme: str
    part: str
    activations: str

    def fits(self, weight: Weight) -> bool:
        return _is_like(weight.scheme, SCHEMES[self.scheme])

    def why_not(self, weight: Weight) -> str | None:
        if weight.activations is not None and activation_name(weight.activations) != self.activations:
            return f"activations of {self.scheme} weights are {self.activations} there, not {weight.activations.name}"
        return _why_not_blocked(weight, SCHEMES[self.scheme])

    def arguments(self, weight: Weight) -> dict[str, Any]:
        return _settings(weight.scheme, "group", "torch.uint8")

    def encoded(self, q: QArray) -> dict[str, np.ndarray]:
        codes, scale = packed_codes(q), per_tile(q.scale, q)
        if (scale == NAN_SCALE).any():
            raise UnsupportedError(f"{self.name} cannot store a block of NaN: its scales are powers of two up to 2**127")
        return {self.part: codes.view(E4M3) if self.part == "weight" else codes, "weight_scale": scale}

    def group(self, module: Module) -> Group:
        scheme = SCHEMES[self.scheme]
        stored = E4M3.name if self.part == "weight" else "uint8"
        shape = _blocked_shape(module, self.part, stored, "uint8", scheme)

        def load(arrays: Mapping[str, np.ndarray]) -> QArray:
            scale = arrays["weight_scale"]
            if (scale == NAN_SCALE).any():
                raise module.fault("has a scale of 2**128, which E8M0 lacks")
            codes = np.ascontiguousarray(arrays[self.part]).view(np.uint8)
            return built(codes, scale, scheme, shape[1], module.dtype)

        return module.group((self.part, "weight_scale"), shape, module.dtype, self.name, scheme, load)


class NVFP4(AbstractLayout):
    """Blocks of 16 E2M1 numbers with an E4M3 scale. A float32 divisor applies to the tensor's scales.

    It decodes to bfloat16, so only bfloat16 weights are the same numbers there.
    """

    name = "nvfp4-pack-quantized"

    def fits(self, weight: Weight) -> bool:
        return _is_like(weight.scheme, SCHEMES["nvfp4"])

    def why_not(self, weight: Weight) -> str | None:
        if weight.dtype != "bfloat16":
            return (
                f"NVFP4 decodes to bfloat16 there, and the weight is {weight.dtype}; store the model in bfloat16 first: "
                "`fewbit convert MODEL DIRECTORY --to hf` does it for quantized weights, transformers' save_pretrained for float ones"
            )
        if weight.activations is not None:
            return f"NVFP4 activations need a static input_global_scale there, and {weight.activations.name} has none"
        return _why_not_blocked(weight, SCHEMES["nvfp4"])

    def arguments(self, weight: Weight) -> dict[str, Any]:
        return _settings(weight.scheme, "tensor_group", "torch.float8_e4m3fn")

    def encoded(self, q: QArray) -> dict[str, np.ndarray]:
        factor = np.asarray(q.tensor_scale).reshape(-1)
        divisor = divisor_of(factor[0]) if factor.size == 1 else None
        if divisor is None:
            raise UnsupportedError(
                f"{self.name} has no divisor for the tensor scale {factor}, and other scales would change the numbers; quantize "
                "the float model for this layout: fewbit quantize --to compressed-tensors"
            )
        return {
            "weight_packed": packed_codes(q),
            "weight_scale": per_tile(q.scale, q).view(E4M3),
            "weight_global_scale": np.array([divisor], np.float32),
        }

    def group(self, module: Module) -> Group:
        scheme = SCHEMES["nvfp4"]
        shape = _blocked_shape(module, "weight_packed", "uint8", E4M3.name, scheme)
        if module.info("weight_global_scale", "float32").shape not in ((1,), ()):
            raise module.fault("has more than one weight_global_scale")

        def load(arrays: Mapping[str, np.ndarray]) -> QArray:
            divisor = np.float32(arrays["weight_global_scale"].item())
            factor = factor_of(divisor)
            if factor is None:
                raise module.fault(f"has the weight_global_scale {divisor}, expected a positive number with a reciprocal")
            scale = np.ascontiguousarray(arrays["weight_scale"]).view(np.uint8)
            tensor = np.full((1, 1), factor, np.float32)
            return built(arrays["weight_packed"], scale, scheme, shape[1], _BFLOAT16, tensor_scale=tensor)

        parts = ("weight_packed", "weight_scale", "weight_global_scale")
        return module.group(parts, shape, _BFLOAT16, self.name, scheme, load)


def _is_like(scheme: Scheme, preset: Scheme) -> bool:
    """Whether a scheme has the numbers and the scales of a preset."""
    return (scheme.format, scheme.scale, scheme.tensor_scale) == (preset.format, preset.scale, preset.tensor_scale)


def _why_not_blocked(weight: Weight, preset: Scheme) -> str | None:
    scheme, block = weight.scheme, preset.tile[-1]
    assert block is not None
    if scheme.tile != preset.tile or scheme.zero_point is not None:
        return f"its blocks are {block} elements of a row"
    if weight.shape[1] % block:
        return f"rows of {weight.shape[1]} elements are no multiple of a block of {block}"
    return None


def _settings(scheme: Scheme, strategy: str, scale_dtype: str) -> dict[str, Any]:
    settings = {"num_bits": scheme.format.bits, "type": "float", "symmetric": True, "strategy": strategy}
    return settings | {"group_size": scheme.tile[-1], "scale_dtype": scale_dtype}


def _blocked_shape(module: Module, part: str, codes: str, scales: str, scheme: Scheme) -> tuple[int, int]:
    """The shape of a weight, from the shapes of its codes and scales."""
    rows, length = module.info(part, codes, ndim=2).shape
    scale = module.info("weight_scale", scales, ndim=2)
    block = scheme.tile[-1]
    assert block is not None
    columns = scale.shape[1] * block
    if scale.shape[0] != rows or length * 8 != columns * scheme.format.bits:
        raise module.fault(
            f"has codes of shape {(rows, length)} and scales of shape {scale.shape}, expected blocks of {block}"
        )
    return rows, columns
