"""GPTQ: integers in 32-bit words along the rows, float16 scales for groups.

Of a weight `[out, in]` a file has its transpose: `qweight`, int32 `[in * bits / 32, out]`, codes along `in`; `scales`
`[groups, out]`; `qzeros`, int32 `[groups, out * bits / 32]`; `g_idx`, int32 `[in]`, the group of each input. The weight is
`scales[g_idx] * (code - zero)`. Version 1 ("gptq") stores `zero - 1`, version 2 ("gptq_v2") `zero`.

Reference: AutoGPTQ, auto_gptq/nn_modules/qlinear; GPTQModel, gptqmodel/utils/model.py.
"""

import dataclasses
import functools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

import jax.numpy as jnp
import msgspec
import numpy as np

from ..._json import converted
from ...array.qarray import QArray
from ...array.scheme import Scheme
from ...errors import QuantError, UnsupportedError
from ..checkpoint import TensorInfo, Tensors
from .container import AbstractContainer, Files, Group, Weight, grouped, plain_array
from .encodings.integer_words import (
    codes_of_words,
    integer_misfit,
    integer_scheme,
    top_bits,
    unsigned_bytes,
    unsigned_zero_points,
    why_not_linear,
    words_of_codes,
)
from .encodings.names import linear_modules, parts_apart
from .encodings.stored import config_dtype, per_tile

_BITS = (2, 3, 4, 8)
_KEY = "quantization_config"
_SCALES = ("float16", "bfloat16", "float32")


class _Settings(msgspec.Struct):
    """The part of `quantization_config` that says how tensors are stored."""

    group_size: Annotated[int, msgspec.Meta(ge=-1, lt=1 << 40)] = -1
    sym: bool = False
    checkpoint_format: str | None = None
    format: str | None = None
    meta: dict[str, Any] | None = None

    @property
    def version(self) -> str:
        return self.checkpoint_format or self.format or "gptq"

    @property
    def is_gptqmodel(self) -> bool:
        """Whether GPTQModel wrote the file."""
        return "gptqmodel" in str((self.meta or {}).get("quantizer"))


@dataclasses.dataclass(frozen=True)
class _Layer:
    """One quantized layer.

    Attributes:
        module: its name.
        shape: [out, in] of its weight.
        bits: of a code.
        groups: the number of groups.
        scale: the dtype of the scales.
        dtype: the dtype of the weight.
    """

    module: str
    shape: tuple[int, int]
    bits: int
    groups: int
    scale: np.dtype
    dtype: np.dtype


class GPTQ(AbstractContainer):
    """GPTQ files: symmetric ones are written in version 1, asymmetric ones in version 2."""

    name: ClassVar[str] = "gptq"
    schemes: ClassVar[tuple[str, ...]] = ("int4_f16_g128", "uint4_f16_g128", "int8_f16_g128", "int4_f16", "int8_f16", "q4_0")

    def why_not(self, weight: Weight) -> str | None:
        if reason := why_not_linear(weight) or integer_misfit(weight.scheme, _BITS):
            return reason
        bits = weight.scheme.format.bits
        # A word has whole codes, but for 3 bits: there 32 codes fill 3 words.
        unit = 32 if bits == 3 else 32 // bits
        if any(n % unit for n in weight.shape):
            return f"its shape {weight.shape} is not in multiples of {unit}, which {bits}-bit codes need"
        return None

    def encoded(self, weight: Weight, q: QArray) -> dict[str, np.ndarray]:
        bits, rows = weight.scheme.format.bits, weight.shape[1]
        zeros = unsigned_zero_points(q)
        if _is_symmetric(weight.scheme):
            zeros = zeros - np.uint8(1)  # version 1
        group = weight.scheme.tiles(2)[1] or rows
        return {
            f"{weight.module}.qweight": np.ascontiguousarray(unsigned_bytes(q).view(np.int32).T),
            f"{weight.module}.qzeros": words_of_codes(zeros.T, bits),
            f"{weight.module}.scales": np.ascontiguousarray(per_tile(q.scale, q).T),
            f"{weight.module}.g_idx": (np.arange(rows) // group).astype(np.int32),
        }

    def files(self, weights: Sequence[Weight], kept: Sequence[str], config: Mapping[str, Any]) -> Files:
        if len({_is_symmetric(weight.scheme) for weight in weights}) > 1:
            raise UnsupportedError(
                "a GPTQ directory is symmetric or asymmetric as a whole; choose schemes with zero points for all weights "
                "(uint4_f16_g128), or for none (int4_f16_g128)"
            )
        forms = {weight.module: _form(weight.scheme) for weight in weights}
        usual = max(forms.values(), key=list(forms.values()).count)
        # A pattern "-:" names modules that are not quantized, "+:" modules in another form than the usual one.
        dynamic: dict[str, dict[str, int]] = {
            _pattern("-", module): {} for module in linear_modules(kept, {weight.module for weight in weights}, ())
        }
        dynamic |= {rf"-:(?:.*\.)?{part}\..*": {} for part in parts_apart(kept, {weight.module for weight in weights})}
        dynamic |= {_pattern("+", module): form for module, form in forms.items() if form != usual}
        is_symmetric = all(_is_symmetric(weight.scheme) for weight in weights)
        settings = {
            **usual,
            "desc_act": False,
            "sym": is_symmetric,
            "lm_head": "lm_head" in forms,
            "quant_method": "gptq",
            "checkpoint_format": "gptq" if is_symmetric else "gptq_v2",
            "pack_dtype": "int32",
            "dynamic": dynamic,
        }
        return Files({_KEY: settings}, {"quantize_config.json": json.dumps(settings, indent=1).encode()})

    def recognises(self, config: Mapping[str, Any], tensors: Tensors) -> bool:
        settings = config.get(_KEY)
        if isinstance(settings, Mapping) and "quant_method" in settings:
            return settings["quant_method"] == "gptq"
        return any(name.endswith(".g_idx") for name in tensors.info)

    def decoded(self, config: Mapping[str, Any], tensors: Tensors, where: str) -> Tensors:
        if _KEY not in config:
            raise QuantError(f"{where}: config.json lacks {_KEY!r}; put the contents of quantize_config.json there")
        settings = converted(config[_KEY], _Settings, f"{where}: {_KEY} of config.json")
        if settings.version not in ("gptq", "gptq_v2"):
            raise UnsupportedError(
                f"{where} has GPTQ weights in the format {settings.version!r}; gptq and gptq_v2 are read, convert it with GPTQModel"
            )
        modules = [name.removesuffix(".qweight") for name in tensors.info if name.endswith(".qweight")]
        groups = {f"{m}.weight": _group(_layer(m, tensors.info, config, where), settings, tensors, where) for m in modules}
        return grouped(tensors, groups, where)


def _is_symmetric(scheme: Scheme) -> bool:
    """Whether every zero point is the middle of the codes."""
    return scheme.zero_point is None and scheme.format.min < 0


def _form(scheme: Scheme) -> dict[str, int]:
    return {"bits": scheme.format.bits, "group_size": scheme.tiles(2)[1] or -1}


def _pattern(sign: str, module: str) -> str:
    """The pattern of one module in GPTQModel's `dynamic`."""
    return f"{sign}:^{re.escape(module)}$"


def _layer(module: str, info: Mapping[str, TensorInfo], config: Mapping[str, Any], where: str) -> _Layer:
    """The layer of these tensors. QuantError when their shapes and dtypes do not fit together."""
    parts = [info.get(f"{module}.{part}") for part in ("qweight", "qzeros", "scales")]
    for part, entry in zip(("qweight", "qzeros", "scales"), parts, strict=True):
        if entry is None:
            raise QuantError(f"{where}: tensor {f'{module}.{part}'!r} is missing")
        if len(entry.shape) != 2 or entry.dtype not in (_SCALES if part == "scales" else ("int32",)):
            raise QuantError(
                f"{where}: tensor {f'{module}.{part}'!r} is {entry.dtype}{entry.shape}, not that of a GPTQ layer"
            )
    (words, columns), (groups, zero_words), (scale_groups, scale_columns) = (entry.shape for entry in parts if entry)
    bits = zero_words * 32 // max(columns, 1)
    rows = words * 32 // max(bits, 1)
    if (scale_groups, scale_columns) != (groups, columns) or (bits * columns, bits * rows) != (32 * zero_words, 32 * words):
        shapes = ", ".join(str(entry.shape) for entry in parts if entry)
        raise QuantError(
            f"{where}: qweight, qzeros and scales of {module!r} have shapes {shapes}, which do not fit together"
        )
    if bits not in _BITS:
        raise UnsupportedError(f"{where}: {module!r} has {bits} bits; GPTQ weights of 2, 3, 4 and 8 bits are read")
    if not 0 < groups <= rows:
        raise QuantError(f"{where}: {module!r} has {groups} groups for {rows} inputs")
    scale = np.dtype(jnp.dtype(info[f"{module}.scales"].dtype))
    return _Layer(module, (columns, rows), bits, groups, scale, config_dtype(config, scale.name))


def _group(layer: _Layer, settings: _Settings, tensors: Tensors, where: str) -> Group:
    """The stored arrays of a layer, and how they are decoded."""
    names = tuple(f"{layer.module}.{part}" for part in ("qweight", "qzeros", "scales", "g_idx"))
    order = None
    if names[3] not in tensors.info:
        names = names[:3]
    elif tensors.info[names[3]].shape != (0,):
        order = _group_indices(layer, plain_array(tensors[names[3]]), where)
    nbytes = sum(tensors.info[name].nbytes for name in names)
    group = _group_length(layer, settings, order)
    if group == 0 and order is None:
        raise QuantError(
            f"{where}: {layer.module!r} has {layer.groups} groups for {layer.shape[1]} inputs, and no g_idx that assigns them"
        )
    scheme, stored = None, "GPTQ with act-order"
    if group != 0:
        scheme, stored = integer_scheme(layer.bits, settings.sym, group, layer.scale), "GPTQ"
    info = TensorInfo(layer.shape, layer.dtype.name, stored, nbytes, scheme)
    if scheme is None:
        assert order is not None
        return Group(info, names, functools.partial(_floats, layer, settings, order))
    return Group(info, names, functools.partial(_qarray, layer, settings, scheme, where))


def _group_indices(layer: _Layer, order: np.ndarray, where: str) -> np.ndarray:
    """The checked `g_idx`."""
    rows = layer.shape[1]
    if order.shape != (rows,) or not np.issubdtype(order.dtype, np.integer):
        raise QuantError(f"{where}: {layer.module}.g_idx is {order.dtype}{order.shape}, expected {rows} integers")
    if order.min() < 0 or order.max() >= layer.groups:
        raise QuantError(f"{where}: {layer.module}.g_idx has a group outside 0 .. {layer.groups - 1}")
    return order


def _group_length(layer: _Layer, settings: _Settings, order: np.ndarray | None) -> int | None:
    """The number of inputs in a group. None: all; 0: the groups are not runs of one length (act-order)."""
    rows = layer.shape[1]
    # A module may have a group size of its own. With a short last group only g_idx says which.
    own = rows // layer.groups if rows % layer.groups == 0 else 0
    if order is not None:
        own = int(np.count_nonzero(order == 0))
    for length in (settings.group_size, own):
        is_count = length > 0 and -(-rows // length) == layer.groups
        if is_count and (order is None or np.array_equal(order, np.arange(rows) // length)):
            return length if layer.groups > 1 or length == settings.group_size else None
    return 0


def _qarray(layer: _Layer, settings: _Settings, scheme: Scheme, where: str, arrays: Mapping[str, np.ndarray]) -> QArray:
    """The QArray of a layer whose groups are runs of inputs."""
    codes, zeros, scale = _decoded_parts(layer, settings, arrays)
    zero_point = None
    if scheme.zero_point is None:
        middle = 2 ** (layer.bits - 1)
        if (zeros != middle).any():
            raise QuantError(
                f"{where}: config.json says sym, but {layer.module}.qzeros has zero points other than {middle}; set sym to "
                f"false in {_KEY!r} to read them"
            )
        codes = codes ^ top_bits(layer.bits, codes.shape[1])
    else:
        zero_point = jnp.asarray(zeros)
    return QArray(jnp.asarray(codes), jnp.asarray(scale), zero_point, None, scheme, layer.dtype)


def _floats(layer: _Layer, settings: _Settings, order: np.ndarray, arrays: Mapping[str, np.ndarray]) -> np.ndarray:
    """The decoded weight of a layer in act-order.

    Its inputs are not in the order of their groups. It is decoded as its program does.
    """
    data, zeros, scale = _decoded_parts(layer, settings, arrays)
    codes = codes_of_words(data, layer.bits).astype(np.int16) - zeros[:, order]  # [out, in]
    with np.errstate(all="ignore"):  # a damaged scale may be infinite
        return (codes.astype(np.float32) * scale.astype(np.float32)[:, order]).astype(layer.dtype)


def _decoded_parts(
    layer: _Layer, settings: _Settings, arrays: Mapping[str, np.ndarray]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The packed codes of each row, its zero points and its scales. Codes and zero points have no sign."""
    qweight, qzeros, scales = (arrays[f"{layer.module}.{part}"] for part in ("qweight", "qzeros", "scales"))
    codes = np.ascontiguousarray(qweight.T).view(np.uint8)  # [out, in * bits / 8]
    zeros = _zero_points(qzeros, layer.bits, settings)
    return codes, np.ascontiguousarray(zeros.T), np.ascontiguousarray(scales.T)


def _zero_points(qzeros: np.ndarray, bits: int, settings: _Settings) -> np.ndarray:
    """The zero points of `qzeros`: in version 1 one more than stored.

    A zero point of 0 is stored as -1. AutoGPTQ adds 1 to each code modulo `2**bits`; GPTQModel subtracts and adds 1 in all
    codes of a word at once, so that -1 borrows from the next code (but for 3 bits).
    """
    if settings.version == "gptq_v2":
        return codes_of_words(qzeros, bits)
    if settings.is_gptqmodel and bits != 3:
        ones = sum(1 << place for place in range(0, 32, bits))
        return codes_of_words(np.ascontiguousarray(qzeros).view(np.uint32) + np.uint32(ones), bits)
    return (codes_of_words(qzeros, bits) + np.uint8(1)) & np.uint8(2**bits - 1)
