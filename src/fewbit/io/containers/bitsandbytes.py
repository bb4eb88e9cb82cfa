"""bitsandbytes: NF4 and FP4 blocks of flattened weights, and int8 rows.

4 bits: `weight`, uint8 `[n / 2, 1]`, the first code of a byte in its high bits; `weight.absmax`, one scale for each block (64
elements) of the flattened tensor: float32, or uint8 in the "nested" form, whose scales are quantized to 8 bits around their
mean; `weight.quant_state.bitsandbytes__nf4`, the bytes of a JSON object. 8 bits: `weight`, int8; `SCB`, the largest magnitude
of each row; the weight is `code * SCB / 127`.

Reference: bitsandbytes 0.50, functional.py (QuantState) and nn/modules.py (Linear8bitLt).
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np

from ...array.qarray import QArray
from ...array.scheme import SCHEMES, Scheme
from ...errors import QuantError, UnsupportedError
from ...formats.integer import Integer
from ..checkpoint import TensorInfo, Tensors
from .container import AbstractContainer, Files, Group, Weight, grouped, plain_array
from .encodings.bitsandbytes_blocks import FORMATS, NESTED, STATE, four_bit_arrays, four_bit_group, kind_of
from .encodings.integer_words import why_not_linear
from .encodings.names import linear_modules
from .encodings.stored import config_dtype, packed_codes, per_tile

_KEY = "quantization_config"
_FLOAT32 = np.dtype(np.float32)


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
        if reason := why_not_linear(plain):
            return reason
        if scheme.pack_axis != -1 or scheme.tiles(2)[0] != 1:
            return "its blocks do not run along the rows"
        if is_int8:
            known = SCHEMES["int8_narrow"]
            if (scheme.tile, scheme.scale, scheme.zero_point) != (known.tile, known.scale, None):
                return "its 8-bit codes do not have per-channel float32 scales, as int8_narrow does"
            if scheme.calibration != known.calibration:
                return f"its scales are chosen by {scheme.calibration}, and bitsandbytes stores absmax / 127 (int8_narrow)"
            return None
        if scheme.format not in FORMATS.values():
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
        return four_bit_arrays(weight, q)

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
            "llm_int8_skip_modules": linear_modules(kept, {weight.module for weight in weights}),
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
        return any(STATE in name or name.endswith(".SCB") for name in tensors.info)

    def decoded(self, config: Mapping[str, Any], tensors: Tensors, where: str) -> Tensors:
        groups: dict[str, Group] = {}
        dtype = config_dtype(config, "float16")
        for part in tensors.info:
            name, mark, kind = part.partition(STATE)
            if mark:
                groups[name] = four_bit_group(name, kind, tensors, where)
            elif part.endswith(".SCB"):
                name = part.removesuffix("SCB") + "weight"
                groups[name] = _int8(name, part, tensors, dtype, where)
        return grouped(tensors, groups, where)


def _has_known_scales(scheme: Scheme) -> bool:
    """Whether the scales are float32, or quantized as those of nf4_dq."""
    if isinstance(scheme.scale, Scheme):
        return scheme.scale == NESTED
    return isinstance(scheme.scale, np.dtype) and scheme.scale == _FLOAT32


def _form(scheme: Scheme) -> tuple[str, bool, int | None]:
    """What all weights of a directory have in common. That is codes, whether scales are quantized, and the block."""
    kind = "int8" if isinstance(scheme.format, Integer) else kind_of(scheme)
    return kind, isinstance(scheme.scale, Scheme), scheme.tiles(2)[1]


def _int8_arrays(weight: Weight, q: QArray) -> dict[str, np.ndarray]:
    scale = per_tile(q.scale, q)[:, 0]
    return {
        weight.name: packed_codes(q).view(np.int8),
        f"{weight.module}.SCB": _row_maxima(scale, weight.name),
        f"{weight.module}.weight_format": np.zeros((), np.uint8),
    }


def _row_maxima(scale: np.ndarray, name: str) -> np.ndarray:
    """The float32 numbers whose quotients by 127 are the scales.

    Scales of int8_narrow are such quotients. Of other numbers one in 128 is none.
    """
    with np.errstate(over="ignore"):
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
        with np.errstate(all="ignore"):  # a damaged number may be a signalling NaN
            scale = arrays[maxima][:, None] / np.float32(127)
        return QArray(
            jnp.asarray(arrays[name].view(np.uint8)), jnp.asarray(scale), None, None, SCHEMES["int8_narrow"], dtype
        )

    nbytes = sum(tensors.info[part].nbytes for part in parts)
    return Group(
        TensorInfo(codes.shape, dtype.name, "bitsandbytes int8", nbytes, SCHEMES["int8_narrow"]), tuple(parts), load
    )
