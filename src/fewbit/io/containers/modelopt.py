"""ModelOpt, the layout of NVIDIA's quantizer that TensorRT-LLM and vLLM read.

A module `m` has `m.weight` and `m.weight_scale`, and in NVFP4 `m.weight_scale_2`, a factor of the tensor.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ..._tiles import FrozenTileMap
from ...array.qarray import QArray
from ...array.scales.fixed import Fixed
from ...array.scheme import SCHEMES, Scheme, scheme
from ...errors import QuantError, UnsupportedError
from ...formats.e8m0 import E8M0
from ..checkpoint import Tensors
from .container import SERVERS_FUSE, AbstractContainer, Files, Group, Weight, grouped, why_not_matrix
from .encodings.names import linear_modules
from .encodings.stored import (
    E4M3,
    NAN_SCALE,
    built,
    checked_info,
    config_dtype,
    described,
    packed_codes,
    per_tile,
)

VERSION = "0.47.0"
"""The version of ModelOpt whose layout is written."""
_CONFIG = "hf_quant_config.json"
_FLOAT = "float32"
_UNREAD = {
    "pre_quant_scale": "activations are multiplied by a stored scale (AWQ), and no scheme has one",
    "svdquant_lora_a": "a low-rank product is added (SVDQuant), and no scheme has one",
}
_PARTS = ("input_scale", "output_scale")

# The algorithm of each scheme that is written; ModelOpt calls NVFP4 with float activations W4A16_NVFP4.
_ALGORITHMS = {
    "nvfp4": "W4A16_NVFP4",
    "fp8_tensor": "FP8",
    "fp8": "FP8_PER_CHANNEL_PER_TOKEN",
    "mxfp8": "MXFP8",
}


_READ = {**_ALGORITHMS, "mxfp4": "MXFP4"}


class ModelOpt(AbstractContainer):
    """The layout of ModelOpt 0.47, for NVFP4 and FP8. FP8 is by tensor, by channel and in blocks of MXFP8."""

    name = "modelopt"
    schemes = tuple(_ALGORITHMS)
    fused = SERVERS_FUSE

    def why_not(self, weight: Weight) -> str | None:
        if reason := why_not_matrix(weight):
            return reason
        name = _scheme_name(weight.scheme)
        if name is None:
            return f"it has no algorithm for {weight.scheme.name}"
        tile = SCHEMES[name].tile.get(-1)
        if tile is not None and weight.shape[1] % tile:
            return f"rows of {weight.shape[1]} elements are no multiple of a block of {tile}"
        return _why_not_activations(name, weight.activations)

    def encoded(self, weight: Weight, q: QArray) -> dict[str, np.ndarray]:
        scale, codes = per_tile(q.scale, q), packed_codes(q)
        parts: dict[str, np.ndarray]
        name = _scheme_name(q.scheme)
        if name == "nvfp4":
            parts = {"weight": codes, "weight_scale": scale.view(E4M3), "weight_scale_2": _scalar(q.tensor_scale)}
        elif name == "mxfp8":
            if (scale == NAN_SCALE).any():
                raise UnsupportedError("modelopt cannot store a block of NaN: its scales are powers of two up to 2**127")
            parts = {"weight": codes.view(E4M3), "weight_scale": scale}
        elif name == "fp8_tensor":
            parts = {"weight": codes.view(E4M3), "weight_scale": _scalar(scale)}
        else:
            parts = {"weight": codes.view(E4M3), "weight_scale": scale.reshape(-1)}
        if weight.activations is not None and name == "fp8_tensor":
            parts["input_scale"] = _static_scale(weight.activations)
        return {f"{weight.module}.{part}": array for part, array in parts.items()}

    def files(self, weights: Sequence[Weight], kept: Sequence[str], config: Mapping[str, Any]) -> Files:
        layers = {weight.module: _settings(weight.scheme) for weight in weights}
        excluded = linear_modules(kept, layers, ["*{}.*"])
        algorithms = list({str(settings): settings for settings in layers.values()}.values())
        quantization: dict[str, Any] = {"quant_algo": "MIXED_PRECISION", "kv_cache_quant_algo": None}
        if len(algorithms) == 1:
            quantization |= {**algorithms[0], "exclude_modules": excluded}
        else:
            quantization |= {"quantized_layers": layers, "exclude_modules": excluded}
        producer = {"name": "modelopt", "version": VERSION}
        groups = {
            f"group_{i}": {
                **_group(settings),
                "targets": ["Linear"] if len(algorithms) == 1 else [m for m in layers if layers[m] == settings],
            }
            for i, settings in enumerate(algorithms)
        }
        section: dict[str, Any] = {
            "config_groups": groups,
            "ignore": excluded,
            "quant_algo": quantization["quant_algo"],
            "producer": producer,
            "quant_method": "modelopt",
        }
        if len(algorithms) > 1:
            section["quantized_layers"] = layers
        text = json.dumps({"producer": producer, "quantization": quantization}, indent=4)
        return Files({"quantization_config": section}, {_CONFIG: text.encode()})

    def recognises(self, config: Mapping[str, Any], tensors: Tensors) -> bool:
        section = config.get("quantization_config")
        if isinstance(section, Mapping):
            return section.get("quant_method") == "modelopt"
        return any(_is_scale(name, tensors) for name in tensors.info)  # the section is in hf_quant_config.json

    def decoded(self, config: Mapping[str, Any], tensors: Tensors, where: str) -> Tensors:
        dtype = config_dtype(config, "bfloat16")
        groups: dict[str, Group] = {}
        for name in tensors.info:
            module, _, part = name.rpartition(".")
            if part in _UNREAD:
                raise UnsupportedError(f"{where}: module {module!r} has {part}: {_UNREAD[part]}")
            if part == "weight_scale":
                groups[f"{module}.weight"] = _group_of(module, tensors, dtype, where)
        return grouped(tensors, groups, where)


def _is_scale(name: str, tensors: Tensors) -> bool:
    """Whether a tensor is a scale that directories without a section in `config.json` have: of NVFP4 or FP8 weights."""
    module, _, part = name.rpartition(".")
    weight = tensors.info.get(f"{module}.weight")
    return part == "weight_scale_2" or (part == "weight_scale" and weight is not None and weight.dtype == "float8_e4m3fn")


def _scheme_name(given: Scheme) -> str | None:
    """The scheme with these numbers, scales and tiles among those of `_ALGORITHMS`."""
    for name in _ALGORITHMS:
        preset = SCHEMES[name]
        fields = ("format", "tile", "scale", "tensor_scale", "zero_point")
        if all(getattr(given, field) == getattr(preset, field) for field in fields):
            return name
    return None


def _why_not_activations(name: str, activations: Scheme | None) -> str | None:
    """Why the activations of products with a scheme are not representable."""
    if activations is None:
        return None
    if name == "fp8_tensor":
        if _static_range(activations) is not None:
            return None
        return f"FP8 activations have a static range there (fp8_tensor with fixed,-m,m), not {activations.name}"
    dynamic = {"fp8": "fp8", "mxfp8": "mxfp8"}.get(name)
    if dynamic is None:
        return f"NVFP4 activations need a static input_scale there, and {activations.name} has none"
    if (activations.format, activations.tile, activations.scale) != _numbers(scheme(dynamic)):
        return f"activations of {name} weights are {dynamic} there, not {activations.name}"
    return None


def _numbers(given: Scheme) -> tuple[Any, FrozenTileMap, Any]:
    assert isinstance(given.tile, FrozenTileMap)
    return given.format, given.tile, given.scale


def _static_range(activations: Scheme) -> float | None:
    """The largest magnitude of activations with one fixed range; None for others."""
    preset = SCHEMES["fp8_tensor"]
    calibration = activations.calibration
    is_fp8 = (activations.format, activations.tile, activations.scale) == _numbers(preset)
    if is_fp8 and isinstance(calibration, Fixed) and calibration.low == -calibration.high:
        return calibration.high
    return None


def _static_scale(activations: Scheme) -> np.ndarray:
    """The scale of activations with a fixed range."""
    largest = _static_range(activations)
    assert largest is not None
    return np.array(np.float32(largest) / np.float32(activations.format.bound), np.float32)


def _scalar(leaf: Any) -> np.ndarray:
    """The only element of a leaf, without axes."""
    host = np.asarray(leaf)
    if host.size != 1:
        raise QuantError(f"a tensor scale of shape {host.shape} is not one number")
    return host.reshape(())


def _settings(given: Scheme) -> dict[str, Any]:
    """The settings of a quantized layer in `hf_quant_config.json`."""
    name = _scheme_name(given)
    assert name is not None
    settings: dict[str, Any] = {"quant_algo": _ALGORITHMS[name]}
    if given.tile.get(-1) is not None:
        settings["group_size"] = given.tile[-1]
    return settings


def _group(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The config group of an algorithm in `config.json`."""
    algorithm = settings["quant_algo"]
    numbers: dict[str, Any] = {"dynamic": False, "num_bits": 4 if "NVFP4" in algorithm else 8, "type": "float"}
    if "group_size" in settings:
        numbers["group_size"] = settings["group_size"]
    weights = dict(numbers)
    if algorithm == "FP8_PER_CHANNEL_PER_TOKEN":
        weights["strategy"] = "channel"
    if algorithm == "W4A16_NVFP4":
        return {"weights": weights}
    return {"input_activations": numbers, "weights": weights}


def _group_of(module: str, tensors: Tensors, dtype: np.dtype, where: str) -> Group:
    """The weight of a module, its layout recognised by dtypes and shapes."""
    path = f"{module}.weight"
    codes = checked_info(tensors, path, where, ("uint8", E4M3.name), 2)
    scale = checked_info(tensors, f"{path}_scale", where, (E4M3.name, _FLOAT, "uint8"))
    rows, columns = codes.shape
    parts = [path, f"{path}_scale"]
    if codes.dtype == scale.dtype == "uint8":
        name, columns = "mxfp4", 2 * columns
    elif codes.dtype == "uint8":
        name, columns = "nvfp4", 2 * columns
        factor = checked_info(tensors, f"{path}_scale_2", where, (_FLOAT,))
        if factor.shape not in ((), (1,)) or scale.dtype != E4M3.name:
            raise QuantError(f"{where}: module {module!r} has uint8 codes, and its scales are not those of NVFP4")
        parts.append(f"{path}_scale_2")
    elif scale.dtype == "uint8":
        name = "mxfp8"
    else:
        name = "fp8" if scale.shape == (rows,) and rows > 1 else "fp8_tensor"
    preset = SCHEMES[name]
    block = preset.tile.get(-1)
    expected = {"fp8": ((rows,),), "fp8_tensor": ((), (1,))}.get(name, ((rows, columns // (block or 1)),))
    if scale.shape not in expected or columns % (block or 1) or (scale.dtype == E4M3.name) != (name == "nvfp4"):
        raise UnsupportedError(
            f"{where}: module {module!r} has {codes.dtype} codes of shape {codes.shape} and {scale.dtype} scales of shape "
            f"{scale.shape}, in no layout that fewbit reads"
        )
    parts += [found for part in _PARTS if (found := f"{module}.{part}") in tensors.info]
    info = described(tensors, parts, (rows, columns), dtype, _READ[name], preset)
    return Group(info, tuple(parts), _loader(path, preset, (rows, columns), dtype, where))


def _loader(
    path: str, preset: Scheme, shape: tuple[int, int], dtype: np.dtype, where: str
) -> Callable[[Mapping[str, np.ndarray]], QArray]:
    counts = (shape[0] if preset.tile else 1, shape[1] // (preset.tile.get(-1) or shape[1]))

    def load(arrays: Mapping[str, np.ndarray]) -> QArray:
        scale, tensor = np.ascontiguousarray(arrays[f"{path}_scale"]), None
        if preset.tensor_scale:
            tensor = arrays[f"{path}_scale_2"].reshape(1, 1)
        if scale.dtype == E4M3:
            scale = scale.view(np.uint8)
        if isinstance(preset.scale, E8M0) and (scale == NAN_SCALE).any():
            raise QuantError(f"{where}: {path!r} has a scale of 2**128, which E8M0 lacks")
        codes = np.ascontiguousarray(arrays[path]).view(np.uint8)
        return built(codes, scale.reshape(counts), preset, shape[1], dtype, tensor_scale=tensor)

    return load
