"""torchao: safetensors files with flattened tensor subclasses.

A parameter `m.weight` is stored as `m._weight_qdata`, `m._weight_scale` and so on. The header's `__metadata__` has, for each
parameter, JSON text with its class and attributes, and under `tensor_names` the list of all.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ...._json import converted, parsed
from ....array.qarray import QArray
from ....errors import QuantError, UnsupportedError
from ...checkpoint import Tensors
from ..container import AbstractContainer, Files, Group, Weight, grouped
from ..encodings.names import linear_modules
from .entries import MX, class_of, entry_of, parts_of, why_not_tiled
from .reader import READERS, Entry, StoredTensor

_NAMES = "tensor_names"
_PLAIN = "Tensor"
_CONFIGS = {
    "MXTensor": ("MXDynamicActivationMXWeightConfig", 1),
    "NVFP4Tensor": ("NVFP4WeightOnlyConfig", 1),
    "Int8Tensor": ("Int8WeightOnlyConfig", 2),
    "IntxUnpackedToInt8Tensor": ("IntxWeightOnlyConfig", 2),
    "Float8Tensor": ("Float8WeightOnlyConfig", 2),
}
"""torchao's configuration of each class, and its version. The header of a file decides; `config.json` must name one."""


class TorchAO(AbstractContainer):
    """The layout of torchao 0.18: MXTensor, NVFP4Tensor, Int8Tensor, IntxUnpackedToInt8Tensor and Float8Tensor."""

    name = "torchao"
    schemes = (
        *("int8", *(f"int{bits}_g{group}" for bits in (4, 3, 2, 5, 6, 7) for group in (32, 128))),
        *("fp8", "fp8_tensor", "nvfp4", *MX.values()),
    )

    def why_not(self, weight: Weight) -> str | None:
        if "." not in weight.name:
            return "it stores parameters of modules, whose names have a dot"
        if len(weight.shape) not in (2, 3) or weight.scheme.pack_axis != -1:
            return f"it stores matrices with tiles along the last axis, and the weight has shape {weight.shape}"
        if weight.activations is not None:
            return f"fewbit writes weights with float activations there, and here they are {weight.activations.name}"
        kind = class_of(weight.scheme)
        if kind is None:
            return f"it has no class for {weight.scheme.name}"
        return why_not_tiled(weight, kind)

    def encoded(self, weight: Weight, q: QArray) -> dict[str, np.ndarray]:
        owner, _, last = weight.name.rpartition(".")
        return {f"{owner}._{last}_{part}": array for part, array in parts_of(q).items()}

    def files(self, weights: Sequence[Weight], kept: Sequence[str], config: Mapping[str, Any]) -> Files:
        entries = {weight.name: entry_of(weight) for weight in weights}
        entries |= {name: {"_type": _PLAIN} for name in kept}
        metadata = {"format": "pt", **{name: json.dumps(entry) for name, entry in entries.items()}}
        metadata[_NAMES] = json.dumps(list(entries))
        kind = class_of(weights[0].scheme) if weights else None
        config_name, version = _CONFIGS[kind or "Int8Tensor"]
        section = {
            "quant_method": "torchao",
            "quant_type": {"default": {"_type": config_name, "_version": version, "_data": {}}},
            "modules_to_not_convert": linear_modules(kept, {weight.module for weight in weights}),
        }
        return Files({"quantization_config": section}, metadata=metadata)

    def recognises(self, config: Mapping[str, Any], tensors: Tensors) -> bool:
        section = config.get("quantization_config")
        is_other = isinstance(section, Mapping) and section.get("quant_method") != "torchao"
        return _NAMES in tensors.metadata and not is_other

    def decoded(self, config: Mapping[str, Any], tensors: Tensors, where: str) -> Tensors:
        where = f"{where}: __metadata__"
        names = converted(parsed(tensors.metadata[_NAMES].encode(), f"{where}: {_NAMES}"), list[str], f"{where}: {_NAMES}")
        groups: dict[str, Group] = {}
        for name in names:
            place = f"{where} of {name!r:.200}"
            stored = StoredTensor(name, tensors, place)
            if name in tensors.info or not stored.has("qdata"):  # an array; one file of several has the metadata of all
                continue
            if name not in tensors.metadata:
                raise QuantError(f"{place} is missing, and {_NAMES} lists it")
            entry = converted(parsed(tensors.metadata[name].encode(), place), Entry, place)
            if entry.type not in READERS:
                raise UnsupportedError(f"{place}: class {entry.type!r:.60}; fewbit reads {', '.join(READERS)}")
            groups[name] = READERS[entry.type](stored, entry.data)
        return grouped(tensors, groups, where)
