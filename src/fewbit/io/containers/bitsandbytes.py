"""bitsandbytes: NF4 and FP4 in blocks of the flattened weight, and int8 rows.

4 bits: `weight`, uint8 `[n / 2, 1]`, the first code of a byte in its high bits; `weight.absmax`, one scale for each block (64
elements) of the flattened tensor: float32, or uint8 in the "nested" form, whose scales are quantized to 8 bits around their
mean; `weight.quant_state.bitsandbytes__nf4`, the bytes of a JSON object. 8 bits: `weight`, int8; `SCB`, the largest magnitude
of each row; the weight is `code * SCB / 127`.

Reference: bitsandbytes 0.50, functional.py (QuantState) and nn/modules.py (Linear8bitLt).
"""

import dataclasses
import functools
import json
import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import jax.numpy as jnp
import msgspec
import numpy as np

from ..._json import Positive, converted, parsed
from ...array.packing import Packing, pack, unpack
from ...array.qarray import QArray
from ...array.scheme import SCHEMES, Scheme
from ...errors import QuantError, UnsupportedError
from ...formats.codebook import Codebook, bnb_fp4, dynamic8, nf4
from ...formats.integer import Integer
from ..checkpoint import TensorInfo, Tensors
from .container import AbstractContainer, Files, Group, Weight, grouped, plain_array
from .integer_words import scales_of
from .modules import float_modules, linear_misfit, model_dtype

_KEY = "quantization_config"
_STATE = ".quant_state.bitsandbytes__"
_FORMATS: dict[str, Codebook] = {"nf4": nf4, "fp4": bnb_fp4}
_NESTED_BLOCK = 256
_NESTED = SCHEMES["nf4_dq"].scale
_HIGH_FIRST = Packing(high_first=True)
_BYTES, _FLOAT32 = np.dtype(np.uint8), np.dtype(np.float32)


class _State(msgspec.Struct):
    """The JSON object of a 4-bit weight."""

    quant_type: Literal["nf4", "fp4"]
    blocksize: Positive
    dtype: Literal["float32", "float16", "bfloat16"]
    shape: Annotated[list[Positive], msgspec.Meta(min_length=1, max_length=8)]
    nested_blocksize: Positive = _NESTED_BLOCK
    nested_offset: Annotated[float, msgspec.Meta(ge=-3e38, le=3e38)] = 0.0


@dataclasses.dataclass(frozen=True)
class _FourBit:
    """One 4-bit weight.

    Attributes:
        name: of the tensor.
        state: its JSON object.
        is_nested: whether its scales are quantized.
    """

    name: str
    state: _State
    is_nested: bool

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.state.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def blocks(self) -> int:
        return -(-self.size // self.state.blocksize)

    @property
    def parts(self) -> dict[str, tuple[int, np.dtype]]:
        """The length and dtype of each stored array, but for the codes."""
        expected = {"absmax": (self.blocks, _FLOAT32), "quant_map": (16, _FLOAT32)}
        if self.is_nested:
            nested = -(-self.blocks // self.state.nested_blocksize)
            expected["absmax"] = (self.blocks, _BYTES)
            expected |= {"nested_absmax": (nested, _FLOAT32), "nested_quant_map": (256, _FLOAT32)}
        return {f"{self.name}.{part}": form for part, form in expected.items()}


class BitsAndBytes(AbstractContainer):
    """bitsandbytes' NF4 and FP4, plain or nested, and LLM.int8() rows."""

    name: ClassVar[str] = "bitsandbytes"
    schemes: ClassVar[tuple[str, ...]] = ("nf4", "nf4_dq", "bnb_fp4", "int8_narrow", "nf4_g128")

    def why_not(self, weight: Weight) -> str | None:
        scheme = weight.scheme
        is_int8 = scheme.format == SCHEMES["int8_narrow"].format
        plain = weight
        if is_int8 and weight.activations is not None and isinstance(weight.activations.format, Integer):
            plain = dataclasses.replace(weight, activations=None)  # the program quantizes them to int8 by itself
        if reason := linear_misfit(plain):
            return reason
        if scheme.pack_axis != -1 or scheme.tiles(2)[0] != 1:
            return "its blocks do not run along the rows"
        if is_int8:
            if (
                scheme.zero_point is not None
                or isinstance(scheme.scale, Scheme)
                or not _has_known_scales(scheme)
                or scheme.tiles(2)[1]
            ):
                return "its 8-bit codes do not have one float32 scale a row"
            return None
        if scheme.format not in _FORMATS.values():
            return f"its codes are {scheme.format.name}; there are nf4, bnb_fp4 and int8_narrow"
        if scheme.zero_point is not None or scheme.tensor_scale or not _has_known_scales(scheme):
            return "its scales are neither float32 nor double-quantized as those of nf4_dq"
        block = scheme.tiles(2)[1] or weight.shape[1]
        if weight.shape[1] % block or block < 32 or block > 4096 or block & (block - 1):
            return f"blocks of {block} elements do not divide its rows of {weight.shape[1]}; a power of two from 32 to 4096 must"
        return None

    def encoded(self, weight: Weight, q: QArray) -> dict[str, np.ndarray]:
        if isinstance(weight.scheme.format, Integer):
            return _int8_arrays(weight, q)
        kind, block = _kind(weight.scheme), weight.scheme.tiles(2)[1] or weight.shape[1]
        state = {"quant_type": kind, "blocksize": block, "dtype": weight.dtype, "shape": list(weight.shape)}
        arrays = {"quant_map": _table(_FORMATS[kind])}
        if isinstance(q.scale, QArray):
            scale, offset = _nested_numbers(q.scale, weight.name)
            arrays["absmax"] = np.asarray(q.scale.codes).reshape(-1)
            arrays["nested_absmax"] = np.full(-(-arrays["absmax"].size // _NESTED_BLOCK), scale)
            arrays["nested_quant_map"] = _table(dynamic8)
            state |= {"nested_blocksize": _NESTED_BLOCK, "nested_dtype": "float32", "nested_offset": float(offset)}
        else:
            arrays["absmax"] = scales_of(q, weight.name).reshape(-1)
        arrays[f"quant_state.bitsandbytes__{kind}"] = np.frombuffer(json.dumps(state).encode(), np.uint8)
        return {weight.name: _high_first(q).reshape(-1, 1), **{f"{weight.name}.{part}": a for part, a in arrays.items()}}

    def files(self, weights: Sequence[Weight], kept: Sequence[str], config: Mapping[str, Any]) -> Files:
        forms = {_form(weight.scheme) for weight in weights}
        if len(forms) != 1:
            raise UnsupportedError(
                "a bitsandbytes directory has one kind of weights (NF4, FP4 or int8; nested or not; one block size); choose one "
                f"scheme, not {', '.join(sorted({weight.scheme.name for weight in weights}))}"
            )
        ((kind, is_nested, _),) = forms
        settings: dict[str, Any] = {
            "quant_method": "bitsandbytes",
            "load_in_8bit": kind == "int8",
            "load_in_4bit": kind != "int8",
            "llm_int8_skip_modules": float_modules(weights, kept),
            "llm_int8_threshold": 6.0,
            "llm_int8_has_fp16_weight": False,
            "llm_int8_enable_fp32_cpu_offload": False,
        }
        if kind != "int8":
            compute = weights[0].dtype
            settings |= {"bnb_4bit_quant_type": kind, "bnb_4bit_use_double_quant": is_nested}
            settings |= {"bnb_4bit_compute_dtype": compute, "bnb_4bit_quant_storage": "uint8"}
        return Files({_KEY: settings})

    def recognises(self, config: Mapping[str, Any], tensors: Tensors) -> bool:
        settings = config.get(_KEY)
        if isinstance(settings, Mapping) and "quant_method" in settings:
            return settings["quant_method"] == "bitsandbytes"
        return any(_STATE in name or name.endswith(".SCB") for name in tensors.info)

    def decoded(self, config: Mapping[str, Any], tensors: Tensors, where: str) -> Tensors:
        groups: dict[str, Group] = {}
        dtype = model_dtype(config, np.dtype(np.float16))
        for part in tensors.info:
            name, mark, kind = part.partition(_STATE)
            if mark:
                groups[name] = _four_bit(name, kind, tensors, where)
            elif part.endswith(".SCB"):
                name = part.removesuffix("SCB") + "weight"
                groups[name] = _int8(name, part, tensors, dtype, where)
        return grouped(tensors, groups, where)


def _has_known_scales(scheme: Scheme) -> bool:
    """Whether the scales are float32, or quantized as those of nf4_dq."""
    if isinstance(scheme.scale, Scheme):
        return scheme.scale == _NESTED
    return isinstance(scheme.scale, np.dtype) and scheme.scale == _FLOAT32


def _kind(scheme: Scheme) -> str:
    """The name of a scheme's 4-bit codes, "nf4" or "fp4"."""
    return next(name for name, form in _FORMATS.items() if form == scheme.format)


def _form(scheme: Scheme) -> tuple[str, bool, int | None]:
    """What all weights of a directory have in common: codes, whether scales are quantized, and the block."""
    kind = "int8" if isinstance(scheme.format, Integer) else _kind(scheme)
    return kind, isinstance(scheme.scale, Scheme), scheme.tiles(2)[1]


def _table(form: Codebook) -> np.ndarray:
    return np.asarray(form.table, np.float32)


def _high_first(q: QArray) -> np.ndarray:
    """The packed 4-bit codes with the first one of a byte in its high bits."""
    scheme = q.scheme
    if scheme.packing == _HIGH_FIRST:
        return np.asarray(q.codes)
    codes = q.codes
    if scheme.packing != Packing():
        codes = pack(unpack(codes, 4, q.shape[-1], scheme.packing), 4)
    return _swapped(np.asarray(codes))


def _swapped(data: np.ndarray) -> np.ndarray:
    """The bytes with their halves exchanged."""
    return data >> 4 | data << 4


def _nested_numbers(scale: QArray, name: str) -> tuple[np.float32, np.float32]:
    """The scale and the offset of quantized scales, each one number."""
    offset = scale.zero_point
    if scale.scale.size != 1 or offset is None or offset.size != 1 or not np.isfinite(np.asarray(offset)).all():
        raise UnsupportedError(
            f"{name}: its scales have {scale.scale.size} scales themselves, or an offset that is not finite; nf4_dq has one "
            "of each for a weight, quantize it again"
        )
    return np.asarray(scale.scale).reshape(-1)[0], np.asarray(offset).reshape(-1)[0]


def _int8_arrays(weight: Weight, q: QArray) -> dict[str, np.ndarray]:
    scale = scales_of(q, weight.name)[:, 0]
    return {
        weight.name: np.asarray(q.codes).view(np.int8),
        f"{weight.module}.SCB": _row_maxima(scale, weight.name),
        f"{weight.module}.weight_format": np.zeros((), np.uint8),
    }


def _row_maxima(scale: np.ndarray, name: str) -> np.ndarray:
    """The float32 numbers whose quotients by 127 are the scales.

    Scales of int8_narrow are such quotients. Of other numbers one in 128 is none.
    """
    near = (scale.astype(np.float64) * 127).astype(np.float32)
    result = near.copy()
    for candidate in (np.nextafter(near, np.float32(np.inf)), np.nextafter(near, np.float32(0)), near):
        result = np.where(candidate / np.float32(127) == scale, candidate, result)
    bad = np.flatnonzero(result / np.float32(127) != scale)
    if bad.size:
        raise UnsupportedError(
            f"{name}: {bad.size} of its {scale.size} scales, the first in row {bad[0]}, are no float32 number divided by 127, as "
            "bitsandbytes stores them; quantize with int8_narrow and its calibration absmax"
        )
    return result


def _four_bit(name: str, kind: str, tensors: Tensors, where: str) -> Group:
    """The stored arrays of a 4-bit weight, and how they are decoded."""
    key = f"{name}{_STATE}{kind}"
    text = plain_array(tensors[key])
    if text.dtype != np.uint8:
        raise QuantError(f"{where}: tensor {key!r} is {text.dtype}, expected the bytes of a JSON object")
    state = converted(parsed(text.tobytes(), f"{where}: {key}"), _State, f"{where}: {key}")
    weight = _FourBit(name, state, f"{name}.nested_absmax" in tensors.info)
    parts = weight.parts
    for part, (length, dtype) in parts.items():
        entry = tensors.info.get(part)
        if entry is None:
            raise QuantError(f"{where}: tensor {part!r} of the weight {name!r} is missing")
        if (entry.shape, entry.dtype) != ((length,), dtype.name):
            raise QuantError(f"{where}: tensor {part!r} is {entry.dtype}{entry.shape}, expected {dtype.name}({length},)")
    codes = tensors.info.get(name)
    if codes is None or codes.nbytes != -(-weight.size // 2):
        found = "missing" if codes is None else f"{codes.nbytes} bytes"
        raise QuantError(
            f"{where}: the codes {name!r} are {found}, expected {-(-weight.size // 2)} bytes for shape {state.shape}"
        )
    names = (name, *parts, key)
    _check_table(plain_array(tensors[f"{name}.quant_map"]), _FORMATS[state.quant_type], f"{where}: {name}.quant_map")
    scheme, load = _scheme(weight, tensors, where), _floats
    stored = f"bitsandbytes {state.quant_type} whose blocks of {state.blocksize} cross rows"
    if scheme is not None:
        load, stored = functools.partial(_qarray, scheme), f"bitsandbytes {state.quant_type}"
    nbytes = sum(tensors.info[part].nbytes for part in names)
    return Group(TensorInfo(weight.shape, state.dtype, stored, nbytes, scheme), names, functools.partial(load, weight))


def _scheme(weight: _FourBit, tensors: Tensors, where: str) -> Scheme | None:
    """The scheme of a 4-bit weight; None if blocks cross rows. Quantized scales stay so if they share one range."""
    state = weight.state
    scale: Any = "float32"
    if weight.is_nested:
        _check_table(
            plain_array(tensors[f"{weight.name}.nested_quant_map"]), dynamic8, f"{where}: {weight.name}.nested_quant_map"
        )
        ranges = plain_array(tensors[f"{weight.name}.nested_absmax"])
        if (ranges == ranges[0]).all():
            scale = _NESTED
    if weight.shape[-1] % state.blocksize or weight.shape[-1] % 2:
        return None
    base = SCHEMES["nf4" if state.quant_type == "nf4" else "bnb_fp4"]
    return dataclasses.replace(base, scale=scale).with_tile(state.blocksize)


def _check_table(found: np.ndarray, form: Codebook, what: str) -> None:
    """Refuses a table of numbers other than the format's, which bitsandbytes itself would not decode with."""
    if not np.allclose(found, _table(form), rtol=0, atol=1e-6):
        raise UnsupportedError(f"{what} has other numbers than bitsandbytes' table {form.name}")


def _qarray(scheme: Scheme, weight: _FourBit, arrays: Mapping[str, np.ndarray]) -> QArray:
    """The QArray of a weight whose blocks end with its rows."""
    *rows, length = weight.shape
    data = _swapped(_bytes(arrays[weight.name]).reshape(*rows, length // 2))
    counts = (*rows, length // weight.state.blocksize)
    if isinstance(scheme.scale, Scheme):
        one = (1,) * len(counts)
        codes = jnp.asarray(arrays[f"{weight.name}.absmax"].reshape(counts))
        unit = jnp.asarray(arrays[f"{weight.name}.nested_absmax"][:1].reshape(one))
        offset = jnp.full(one, weight.state.nested_offset, jnp.float32)
        scale: Any = QArray(codes, unit, offset, None, scheme.scale, _FLOAT32)
    else:
        scale = jnp.asarray(_scales(weight, arrays).reshape(counts))
    return QArray(jnp.asarray(data), scale, None, None, scheme, np.dtype(jnp.dtype(weight.state.dtype)))


def _floats(weight: _FourBit, arrays: Mapping[str, np.ndarray]) -> np.ndarray:
    """The dequantized weight, as bitsandbytes computes it."""
    data = _bytes(arrays[weight.name])
    codes = np.stack([data >> 4, data & 15], axis=-1).reshape(-1)[: weight.size]
    scale = np.repeat(_scales(weight, arrays), weight.state.blocksize)[: weight.size]
    values = _table(_FORMATS[weight.state.quant_type])[codes] * scale
    return values.astype(jnp.dtype(weight.state.dtype)).reshape(weight.shape)


def _scales(weight: _FourBit, arrays: Mapping[str, np.ndarray]) -> np.ndarray:
    """The float32 scale of each block."""
    absmax = arrays[f"{weight.name}.absmax"]
    if not weight.is_nested:
        return absmax
    table, ranges = arrays[f"{weight.name}.nested_quant_map"], arrays[f"{weight.name}.nested_absmax"]
    spread = np.repeat(ranges, weight.state.nested_blocksize)[: absmax.size]
    return table[absmax] * spread + np.float32(weight.state.nested_offset)


def _bytes(codes: np.ndarray) -> np.ndarray:
    """The bytes of codes, which may be stored as another dtype."""
    return np.ascontiguousarray(codes).reshape(-1).view(np.uint8)


def _int8(name: str, maxima: str, tensors: Tensors, dtype: np.dtype, where: str) -> Group:
    """The stored arrays of an int8 weight."""
    codes, rows = tensors.info.get(name), tensors.info[maxima]
    if codes is None or codes.dtype != "int8" or len(codes.shape) != 2:
        raise QuantError(f"{where}: {name!r} is {codes and codes.dtype}, expected the int8 matrix of {maxima!r}")
    if (rows.shape, rows.dtype) != (codes.shape[:1], "float32"):
        raise QuantError(f"{where}: {maxima!r} is {rows.dtype}{rows.shape}, expected float32({codes.shape[0]},)")
    parts = [name, maxima]
    layout = name.removesuffix("weight") + "weight_format"
    if layout in tensors.info:
        parts.append(layout)
        if tensors.info[layout].shape not in ((), (1,)) or plain_array(tensors[layout]).any():
            raise UnsupportedError(
                f"{where}: {name!r} is not in rows (weight_format 0); save it with bitsandbytes 0.43 or later"
            )

    def load(arrays: Mapping[str, np.ndarray]) -> QArray:
        scale = arrays[maxima][:, None] / np.float32(127)
        return QArray(
            jnp.asarray(arrays[name].view(np.uint8)), jnp.asarray(scale), None, None, SCHEMES["int8_narrow"], dtype
        )

    nbytes = sum(tensors.info[part].nbytes for part in parts)
    return Group(
        TensorInfo(codes.shape, dtype.name, "bitsandbytes int8", nbytes, SCHEMES["int8_narrow"]), tuple(parts), load
    )
