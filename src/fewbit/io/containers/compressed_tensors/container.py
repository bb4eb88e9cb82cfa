"""compressed-tensors, the layout of llm-compressor and vLLM."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from ....array.qarray import QArray
from ....errors import UnsupportedError
from ....ops.policy import Policy
from ...checkpoint import Tensors
from ..container import SERVERS_FUSE, AbstractContainer, Files, Group, Weight, grouped, why_not_matrix
from ..encodings.stored import E4M3, FLOATS, config_dtype
from .activations import activation_arguments, activation_scheme
from .blocks import NVFP4, MXFloats
from .config import Arguments, Section, section, section_of
from .global_scale import with_divisor
from .integers import PackedIntegers
from .layout import AbstractLayout, Module
from .plain import PlainFloats, PlainIntegers

_LAYOUTS: dict[str, AbstractLayout] = {
    layout.name: layout
    for layout in (
        NVFP4(),
        MXFloats("mxfp4-pack-quantized", "mxfp4", "weight_packed", "mxfp4"),
        MXFloats("mxfp6-pack-quantized", "mxfp6", "weight_packed", "mxfp8"),
        MXFloats("mxfp8-quantized", "mxfp8", "weight", "mxfp8"),
        PlainIntegers(),
        PackedIntegers(),
        PlainFloats(),
    )
}
_SCALE = "weight_scale"
_FP6_BYTES = 24  # of a block


class CompressedTensors(AbstractContainer):
    """The layout of compressed-tensors 0.20: a module `m` has `m.weight_packed` or `m.weight`, and `m.weight_scale`."""

    name = "compressed-tensors"
    config_keys = ("quantization_config", "compression_config")
    schemes = (
        *(f"int{bits}{group}" for bits in (8, 4, 3, 2, 5, 6, 7) for group in ("", "_g128")),
        *(f"uint{bits}{group}" for bits in (8, 4, 3, 2, 5, 6, 7) for group in ("", "_g128")),
        *("fp8", "fp8_tensor", "fp8_block128", "nvfp4", "mxfp4", "mxfp6", "mxfp8"),
    )
    fused = SERVERS_FUSE

    def why_not(self, weight: Weight) -> str | None:
        if reason := why_not_matrix(weight):
            return reason
        layout = _layout(weight)
        if layout is None:
            return f"it has no format for {weight.scheme.name}"
        return layout.why_not(weight)

    def representable(self, q: QArray) -> QArray:
        if q.tensor_scale is None or q.tensor_scale.size != 1:
            return q
        factor = np.float32(np.asarray(q.tensor_scale).item())
        return dataclasses.replace(q, tensor_scale=jnp.full_like(q.tensor_scale, with_divisor(factor)))

    def encoded(self, weight: Weight, q: QArray) -> dict[str, np.ndarray]:
        layout = _layout(weight)
        assert layout is not None
        return {f"{weight.module}.{part}".removeprefix("."): array for part, array in layout.encoded(q).items()}

    def files(self, weights: Sequence[Weight], kept: Sequence[str], config: Mapping[str, Any]) -> Files:
        groups: list[dict[str, Any]] = []
        modules: list[list[str]] = []
        for weight in weights:
            layout = _layout(weight)
            assert layout is not None
            settings = {
                "weights": {**layout.arguments(weight), "dynamic": False},
                "input_activations": activation_arguments(weight.activations),
                "format": layout.name,
            }
            if settings not in groups:
                groups.append(settings)
                modules.append([])
            modules[groups.index(settings)].append(weight.module)
        return Files({"quantization_config": section(groups, modules, kept)})

    def recognises(self, config: Mapping[str, Any], tensors: Tensors) -> bool:
        return section_of(config) is not None

    def decoded(self, config: Mapping[str, Any], tensors: Tensors, where: str) -> Tensors:
        found = Section(config, where)
        groups: dict[str, Group] = {}
        for path in tensors.info:
            owner, _, part = path.rpartition(".")
            if part != _SCALE:
                continue
            group = found.group_of(owner)
            scale = tensors.info[path].dtype
            default = scale if scale in FLOATS else "bfloat16"
            dtype = config_dtype(config, default)
            module = Module(owner, tensors, group.weights or Arguments(), dtype, found.version, where)
            groups[module.path("weight")] = _with_policy(_stored_layout(module).group(module), group.input_activations)
        return grouped(tensors, groups, where)


def _layout(weight: Weight) -> AbstractLayout | None:
    """The format for a weight."""
    return next((layout for layout in _LAYOUTS.values() if layout.fits(weight)), None)


def _stored_layout(module: Module) -> AbstractLayout:
    """The format of a module, from the names and dtypes of its tensors."""
    scale = module.info(_SCALE, *FLOATS, "uint8", E4M3.name)
    part = "weight"
    if module.has("weight_packed"):
        part = "weight_packed"
    codes = module.info(part, "int32", "uint8", "int8", E4M3.name, ndim=2)
    if part == "weight_packed" and codes.dtype == "int32":
        return _LAYOUTS["pack-quantized"]
    if part == "weight_packed" and scale.dtype == E4M3.name:
        return _LAYOUTS["nvfp4-pack-quantized"]
    if part == "weight_packed" and scale.dtype == "uint8":
        if len(scale.shape) == 2 and codes.shape[1] == scale.shape[1] * _FP6_BYTES:
            return _LAYOUTS["mxfp6-pack-quantized"]
        return _LAYOUTS["mxfp4-pack-quantized"]
    if part == "weight" and codes.dtype == E4M3.name:
        if scale.dtype == "uint8":
            return _LAYOUTS["mxfp8-quantized"]
        return _LAYOUTS["float-quantized"]
    if part == "weight" and codes.dtype == "int8":
        return _LAYOUTS["int-quantized"]
    raise UnsupportedError(
        f"{module.where}: module {module.name!r} has {codes.dtype} codes and {scale.dtype} scales, in no format that fewbit reads"
    )


def _with_policy(group: Group, activations: Arguments | None) -> Group:
    """The group with the policy of its products: activations quantized when they run."""
    scheme = activation_scheme(activations)
    if scheme is None:
        return group
    weight = group.info.scheme
    assert weight is not None
    policy = Policy(weight, scheme)

    def load(arrays: Mapping[str, np.ndarray]) -> QArray:
        q = group.load(arrays)
        assert isinstance(q, QArray)
        return dataclasses.replace(q, policy=policy)

    return dataclasses.replace(group, info=dataclasses.replace(group.info, policy=policy), load=load)
