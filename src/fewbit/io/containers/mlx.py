"""MLX: integers with scale and offset, and block floats, in 32-bit words.

`weight` is uint32 `[..., out, in * bits / 32]`, codes along `in`, the first in the lowest bits: the bytes of a QArray. Mode
"affine": `scales` and `biases` `[..., out, groups]` in the dtype of the model, `weight = code * scale + bias`. Modes "mxfp4",
"mxfp8" and "nvfp4": `scales` of one byte; nvfp4 of stacked experts may have a float32 `global_scale`, 2688 times the tensor
scale. `quantization` of `config.json` has bits, group size and mode, and those of single modules by their names.

Reference: MLX, mlx/backend/cpu/quantized.cpp; mlx-lm, mlx_lm/utils.py.
"""

import collections
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import jax.numpy as jnp
import msgspec
import numpy as np

from ..._json import converted
from ...array.qarray import QArray
from ...array.scheme import SCHEMES, Scheme
from ...errors import QuantError
from ...formats.format import FORMATS
from ...formats.integer import Integer
from ...recipe.role import Role
from ..checkpoint import TensorInfo, Tensors
from .container import AbstractContainer, Files, Group, Weight, grouped
from .encodings.integer_words import top_bits
from .encodings.stored import FLOATS, config_dtype, packed_codes, per_tile

_KEY = "quantization"
_BITS = (1, 2, 3, 4, 5, 6, 8)
_GROUPS = (32, 64, 128)
_BLOCKS = {"mxfp4": "mxfp4", "mxfp8": "mxfp8", "nvfp4": "nvfp4_one_level"}
"""The scheme of each mode with scales of one byte."""
_GLOBAL = np.float32(2688)
"""The largest element times the largest scale of nvfp4, 6 * 448."""


class _Mode(msgspec.Struct, frozen=True):
    """How a module is stored."""

    group_size: Annotated[int, msgspec.Meta(ge=1, le=4096)] = 64
    bits: Annotated[int, msgspec.Meta(ge=1, le=8)] = 4
    mode: Literal["affine", "mxfp4", "mxfp8", "nvfp4"] = "affine"

    @property
    def form(self) -> dict[str, Any]:
        return {"group_size": self.group_size, "bits": self.bits, "mode": self.mode}


class MLX(AbstractContainer):
    """Directories of MLX, as mlx-lm loads them."""

    name: ClassVar[str] = "mlx"
    schemes: ClassVar[tuple[str, ...]] = (
        "affine4",
        "affine8",
        "q4_1_g64",
        "int4_f16_g64",
        "q4_0",
        "q8_0",
        "mxfp4",
        "mxfp8",
        "nvfp4_one_level",
    )
    config_keys: ClassVar[tuple[str, ...]] = (_KEY, "quantization_config")
    roles: ClassVar[tuple[Role, ...]] = (Role.MATMUL, Role.EXPERTS, Role.EMBEDDING)

    def why_not(self, weight: Weight) -> str | None:
        if not weight.name.endswith(".weight") or len(weight.shape) < 2:
            return "it is not a matrix whose name ends in .weight"
        if weight.activations is not None:
            return "its activations are quantized too, and MLX quantizes weights only"
        if reason := _misfit(weight.scheme, len(weight.shape)):
            return reason
        group = weight.scheme.tiles(len(weight.shape))[-1]
        assert group is not None
        if weight.shape[-1] % group:
            return f"groups of {group} do not divide its rows of {weight.shape[-1]}"
        return None

    def encoded(self, weight: Weight, q: QArray) -> dict[str, np.ndarray]:
        form, scale = weight.scheme.format, per_tile(q.scale, q)
        data = packed_codes(q)
        arrays = {"scales": scale}
        if isinstance(form, Integer) and form.signed:
            # code * scale = (code + offset) * scale - offset * scale; a power of two times a number is exact
            data = data ^ top_bits(form.bits, data.shape[-1])
            arrays["biases"] = scale * scale.dtype.type(-(2 ** (form.bits - 1)))
        elif isinstance(form, Integer):
            arrays["biases"] = per_tile(q.zero_point, q)
        arrays["weight"] = np.ascontiguousarray(data).view(np.uint32)
        return {f"{weight.module}.{part}": np.ascontiguousarray(arrays[part]) for part in sorted(arrays, reverse=True)}

    def files(self, weights: Sequence[Weight], kept: Sequence[str], config: Mapping[str, Any]) -> Files:
        modes = {weight.module: _mode(weight.scheme, len(weight.shape)) for weight in weights}
        ((usual, _),) = collections.Counter(modes.values()).most_common(1)
        others = {module: mode.form for module, mode in modes.items() if mode != usual}
        settings = {**usual.form, **others}
        return Files(dict.fromkeys(self.config_keys, settings), metadata={"format": "mlx"})

    def recognises(self, config: Mapping[str, Any], tensors: Tensors) -> bool:
        settings = config.get(_KEY)
        return isinstance(settings, Mapping) and "bits" in settings and bool(_modules(tensors))

    def decoded(self, config: Mapping[str, Any], tensors: Tensors, where: str) -> Tensors:
        settings = converted(config.get(_KEY), dict[str, Any], f"{where}: {_KEY} of config.json")
        usual = converted(settings, _Mode, f"{where}: {_KEY} of config.json")
        groups: dict[str, Group] = {}
        for module in _modules(tensors):
            mode = usual
            if isinstance(settings.get(module), Mapping):
                mode = converted(settings[module], _Mode, f"{where}: {module!r} in {_KEY} of config.json")
            groups[f"{module}.weight"] = _group(module, mode, tensors, config_dtype(config, "bfloat16"), where)
        return grouped(tensors, groups, where)


def _modules(tensors: Tensors) -> list[str]:
    """The quantized modules: those with scales and a weight of words."""
    modules = [name.removesuffix(".scales") for name in tensors.info if name.endswith(".scales")]
    weights = {module: tensors.info.get(f"{module}.weight") for module in modules}
    return [module for module, weight in weights.items() if weight is not None and weight.dtype == "uint32"]


def _misfit(scheme: Scheme, ndim: int) -> str | None:
    """Why no mode stores a scheme. None if one does."""
    *others, group = scheme.tiles(ndim)
    if scheme.pack_axis != -1 or any(tile != 1 for tile in others) or group is None:
        return "its groups do not run along the rows"
    if scheme.tensor_scale:
        return "it has a tensor scale, which MLX's linear layers lack (nvfp4_one_level has none)"
    form = scheme.format
    if not isinstance(form, Integer):
        if _block_mode(scheme, group) is None:
            return f"its codes are {form.name} in groups of {group}; of floats there are mxfp4, mxfp8 and nvfp4_one_level"
        return None
    if group not in _GROUPS or form.bits not in _BITS or form.step != 1:
        return f"it has groups of {group} and {form.bits} bits; there are groups of 32, 64, 128 and 1 to 6 and 8 bits"
    if not isinstance(scheme.scale, np.dtype):
        return "its scales are not floats"
    is_half = scheme.scale.itemsize == 2
    if form.signed and (scheme.zero_point is not None or not is_half):
        return "its codes are signed, which MLX stores exactly only with float16 or bfloat16 scales and no zero point"
    if not form.signed and scheme.zero_holder != scheme.scale:
        return f"its offsets are not {scheme.scale.name} like its scales (those of affine4 are)"
    return None


def _block_mode(scheme: Scheme, group: int | None) -> str | None:
    """The mode of a scheme with scales of one byte."""
    for mode, name in _BLOCKS.items():
        known = SCHEMES[name]
        if (scheme.format, scheme.scale, group, scheme.zero_point) == (known.format, known.scale, known.tile[-1], None):
            return mode
    return None


def _mode(scheme: Scheme, ndim: int) -> _Mode:
    """The mode of a scheme that passed `_misfit`."""
    group = scheme.tiles(ndim)[-1]
    assert group is not None
    if isinstance(scheme.format, Integer):
        return _Mode(group, scheme.format.bits)
    mode = _block_mode(scheme, group)
    assert mode is not None
    return converted({"group_size": group, "bits": scheme.format.bits, "mode": mode}, _Mode, mode)


def _group(module: str, mode: _Mode, tensors: Tensors, dtype: np.dtype, where: str) -> Group:
    """The stored arrays of a module, and how they are decoded. QuantError when they do not fit together."""
    info = tensors.info
    names = [f"{module}.weight", f"{module}.scales"]
    weight, scales = (info[name] for name in names)
    is_affine = scales.dtype in FLOATS
    if is_affine:
        names.append(f"{module}.biases")
        biases = info.get(names[2])
        if biases is None or (biases.shape, biases.dtype) != (scales.shape, scales.dtype):
            raise QuantError(f"{where}: {names[2]!r} is missing, or not {scales.dtype}{scales.shape} like {names[1]!r}")
        scheme, dtype = _affine(mode.bits, mode.group_size, FLOATS[scales.dtype]), FLOATS[scales.dtype]
    else:
        scheme = SCHEMES[_BLOCKS.get(mode.mode, "mxfp4")]
    is_stated = is_affine == (mode.mode == "affine") and scales.dtype in (*FLOATS, "uint8")
    group, bits = scheme.tiles(2)[-1], scheme.format.bits
    assert group is not None
    if len(weight.shape) < 2 or not is_stated:
        raise QuantError(
            f"{where}: {module!r} has scales of {scales.dtype} and a weight {weight.shape}, not of mode {mode.mode}"
        )
    *rows, words = weight.shape
    length = words * 32 // bits
    if length * bits != words * 32 or length % group or scales.shape != (*rows, length // group) or not words:
        raise QuantError(
            f"{where}: weight {weight.shape} and scales {scales.shape} of {module!r} do not fit {bits} bits in groups of "
            f"{group}, as {_KEY} of config.json says"
        )
    shared = f"{module}.global_scale"
    if shared in info and mode.mode == "nvfp4":
        names.append(shared)
        if info[shared].dtype != "float32" or info[shared].shape not in ((), (1,), (rows[0],)):
            raise QuantError(
                f"{where}: {shared!r} is {info[shared].dtype}{info[shared].shape}, expected one float32 an expert"
            )
        scheme = dataclasses.replace(scheme, tensor_scale=True)
    nbytes = sum(info[name].nbytes for name in names)
    entry = TensorInfo((*rows, length), dtype.name, f"MLX {mode.mode}", nbytes, scheme)
    return Group(entry, tuple(names), functools.partial(_qarray, tuple(names), scheme, dtype))


def _affine(bits: int, group: int, scale: np.dtype) -> Scheme:
    """The scheme of the affine mode."""
    return dataclasses.replace(SCHEMES["affine4"], format=FORMATS[f"uint{bits}"], scale=scale, zero_point=scale).with_tile(
        group
    )


def _qarray(names: tuple[str, ...], scheme: Scheme, dtype: np.dtype, arrays: Mapping[str, np.ndarray]) -> QArray:
    words, scale, *rest = (arrays[name] for name in names)
    zero_point = tensor_scale = None
    if scheme.tensor_scale:
        shape = (rest[0].size,) + (1,) * (words.ndim - 1)
        with np.errstate(all="ignore"):  # a damaged number may be a signalling NaN
            tensor_scale = jnp.asarray(rest[0].reshape(shape) / _GLOBAL)
    elif rest:
        zero_point = jnp.asarray(rest[0])
    codes = jnp.asarray(np.ascontiguousarray(words).view(np.uint8))
    return QArray(codes, jnp.asarray(scale), zero_point, tensor_scale, scheme, dtype)
