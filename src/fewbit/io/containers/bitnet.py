"""BitNet: ternary weights of two bits, int8 activations.

A matrix `m.weight [N / 4, K]` is uint8. Row `r` of it has four rows of the weight, `r`, `r + N / 4`, `r + N / 2` and `r + 3 N / 4`,
the first in the lowest two bits, and -1, 0 and 1 as 0, 1 and 2. `m.weight_scale [1]` multiplies the ternary numbers, or in the
older layout, `linear_class: bitlinear`, it divides them. Every product quantizes its activations to int8, one scale for a token.

Reference: transformers, integrations/bitnet.py.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import msgspec
import numpy as np

from ..._json import converted
from ...array.qarray import QArray
from ...array.scheme import SCHEMES
from ...errors import QuantError
from ...ops.policy import Policy
from ..checkpoint import Tensors
from .container import AbstractContainer, Files, Group, Weight, grouped, why_not_matrix
from .encodings.names import linear_modules
from .encodings.packed_bits import packed_bits
from .encodings.stored import FLOATS, built, checked_info, config_dtype, described, unpacked_codes

_METHOD = "bitnet"
_SCALE = "_scale"
_PARTS = 4
"""The rows of the weight in one stored row."""
_TERNARY = SCHEMES["ternary"]
_POLICY = Policy("ternary", "int8_narrow")
"""That of the recipe `ternary`."""


class _Section(msgspec.Struct, frozen=True):
    """The JSON schema of the section in `config.json`. The weights of mode "online" are the float ones of training."""

    linear_class: Literal["bitlinear", "autobitlinear"] = "bitlinear"
    quantization_mode: Literal["offline", "online"] = "offline"


class BitNet(AbstractContainer):
    """The layout of BitNet b1.58 in transformers 5.23."""

    name = "bitnet"
    schemes = ("ternary",)
    activations = "int8_narrow"

    def why_not(self, weight: Weight) -> str | None:
        if reason := why_not_matrix(weight):
            return reason
        if dataclasses.replace(weight.scheme, calibration=_TERNARY.calibration) != _TERNARY:
            return f"it stores ternary numbers with one float32 scale for the tensor, not {weight.scheme.name}"
        if weight.shape[0] % _PARTS:
            return f"it packs rows in fours, and the weight has {weight.shape[0]}"
        if weight.activations != _POLICY.activation:
            return "its products quantize activations to int8 for each token, as the recipe ternary does"
        return None

    def representable(self, q: QArray) -> QArray:
        """The weight with a scale of the model's dtype, which transformers rounds it to."""
        return dataclasses.replace(q, scale=q.scale.astype(q.dtype).astype(q.scale.dtype))

    def encoded(self, weight: Weight, q: QArray) -> dict[str, np.ndarray]:
        parts = unpacked_codes(q).reshape(_PARTS, -1, weight.shape[1])  # [4, N / 4, K]
        shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, None, None]
        scale = np.asarray(q.scale).reshape(1)
        rounded = scale.astype(FLOATS[weight.dtype])
        return {
            weight.name: np.bitwise_or.reduce(parts << shifts, axis=0),
            f"{weight.name}{_SCALE}": rounded if rounded.astype(np.float32) == scale else scale,
        }

    def files(self, weights: Sequence[Weight], kept: Sequence[str], config: Mapping[str, Any]) -> Files:
        section = {
            "quant_method": _METHOD,
            "linear_class": "autobitlinear",
            "quantization_mode": "offline",
            "modules_to_not_convert": linear_modules(kept, [weight.module for weight in weights]),
        }
        return Files({"quantization_config": section})

    def recognises(self, config: Mapping[str, Any], tensors: Tensors) -> bool:
        section = config.get("quantization_config")
        return isinstance(section, Mapping) and section.get("quant_method") == _METHOD

    def decoded(self, config: Mapping[str, Any], tensors: Tensors, where: str) -> Tensors:
        section = converted(config["quantization_config"], _Section, f"{where}: quantization_config in config.json")
        groups: dict[str, Group] = {}
        if section.quantization_mode == "offline":
            names = [name.removesuffix(_SCALE) for name in tensors.info if name.endswith(f".weight{_SCALE}")]
            dtype = config_dtype(config, "bfloat16")
            is_divisor = section.linear_class == "bitlinear"
            groups = {name: _group_of(name, tensors, dtype, where, is_divisor=is_divisor) for name in names}
        return grouped(tensors, groups, where)


def _group_of(name: str, tensors: Tensors, dtype: np.dtype, where: str, *, is_divisor: bool) -> Group:
    """The weight of a name, with its scale."""
    codes = checked_info(tensors, name, where, ("uint8",), 2)
    scale = checked_info(tensors, f"{name}{_SCALE}", where, tuple(FLOATS))
    if scale.shape not in ((), (1,)):
        raise QuantError(f"{where}: the scale of {name!r} has shape {scale.shape}, expected one number")
    parts = (name, f"{name}{_SCALE}")
    info = described(tensors, parts, (_PARTS * codes.shape[0], codes.shape[1]), dtype, "BitNet", _TERNARY)
    return Group(dataclasses.replace(info, policy=_POLICY), parts, _loader(name, dtype, where, is_divisor=is_divisor))


def _loader(name: str, dtype: np.dtype, where: str, *, is_divisor: bool) -> Callable[[Mapping[str, np.ndarray]], QArray]:
    def load(arrays: Mapping[str, np.ndarray]) -> QArray:
        stored = arrays[name]
        codes = np.concatenate([(stored >> (2 * i)) & np.uint8(3) for i in range(_PARTS)])  # [N, K]
        if codes.max() == 3:
            raise QuantError(f"{where}: {name!r} has the code 3, and ternary numbers are 0, 1 and 2")
        scale = arrays[f"{name}{_SCALE}"].astype(np.float32).reshape(1, 1)
        if is_divisor and not scale.all():
            raise QuantError(f"{where}: the scale of {name!r}, which divides it, is 0")
        if is_divisor:
            scale = 1 / scale
        q = built(packed_bits(codes, 2), scale, _TERNARY, stored.shape[1], dtype)
        return dataclasses.replace(q, policy=_POLICY)

    return load
