"""bitsandbytes' 4-bit weights: blocks of the flattened tensor.

`weight`, uint8 `[n / 2, 1]`, the first code of a byte in its high bits; `weight.absmax`, one scale for each block: float32, or
uint8 in the "nested" form, whose scales are quantized to 8 bits around their mean; `weight.quant_map`, the numbers of the
codes; `weight.quant_state.bitsandbytes__nf4` (or fp4), the bytes of a JSON object.

Reference: bitsandbytes 0.50, functional.py (QuantState).
"""

import dataclasses
import functools
import json
import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import jax.numpy as jnp
import msgspec
import numpy as np

from ...._json import Positive, converted, parsed
from ....array.qarray import QArray
from ....array.scheme import SCHEMES, Scheme
from ....errors import QuantError, UnsupportedError
from ....formats.codebook import Codebook, bnb_fp4, dynamic8, nf4
from ...checkpoint import TensorInfo, Tensors
from ..container import Group, Weight, plain_array
from .stored import packed_codes, per_tile

STATE = ".quant_state.bitsandbytes__"
"""What is between the name of a weight and that of its codes."""
FORMATS: dict[str, Codebook] = {"nf4": nf4, "fp4": bnb_fp4}
NESTED = SCHEMES["nf4_dq"].scale
"""The scheme of quantized scales."""

_NESTED_BLOCK = 256
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
        expected: dict[str, tuple[int, np.dtype]] = {"absmax": (self.blocks, _FLOAT32), "quant_map": (16, _FLOAT32)}
        if self.is_nested:
            nested = -(-self.blocks // self.state.nested_blocksize)
            expected["absmax"] = (self.blocks, _BYTES)
            expected |= {"nested_absmax": (nested, _FLOAT32), "nested_quant_map": (256, _FLOAT32)}
        return {f"{self.name}.{part}": form for part, form in expected.items()}


def four_bit_arrays(weight: Weight, q: QArray) -> dict[str, np.ndarray]:
    """The arrays that store a 4-bit weight."""
    kind, block = kind_of(weight.scheme), weight.scheme.tiles(2)[1] or weight.shape[1]
    state = {"quant_type": kind, "blocksize": block, "dtype": weight.dtype, "shape": list(weight.shape)}
    arrays = {"quant_map": _table(FORMATS[kind])}
    if isinstance(q.scale, QArray):
        scale, offset = _nested_numbers(q.scale, weight.name)
        arrays["absmax"] = np.asarray(q.scale.codes).reshape(-1)
        arrays["nested_absmax"] = np.full(-(-arrays["absmax"].size // _NESTED_BLOCK), scale)
        arrays["nested_quant_map"] = _table(dynamic8)
        state |= {"nested_blocksize": _NESTED_BLOCK, "nested_dtype": "float32", "nested_offset": float(offset)}
    else:
        arrays["absmax"] = per_tile(q.scale, q).reshape(-1)
    arrays[f"quant_state.bitsandbytes__{kind}"] = np.frombuffer(json.dumps(state).encode(), np.uint8)
    return {
        weight.name: _swapped(packed_codes(q)).reshape(-1, 1),
        **{f"{weight.name}.{part}": a for part, a in arrays.items()},
    }


def kind_of(scheme: Scheme) -> str:
    """The name of a scheme's 4-bit codes, "nf4" or "fp4"."""
    return next(name for name, form in FORMATS.items() if form == scheme.format)


def _table(form: Codebook) -> np.ndarray:
    return np.asarray(form.table, np.float32)


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


def four_bit_group(name: str, kind: str, tensors: Tensors, where: str) -> Group:
    """The stored arrays of a 4-bit weight, and how they are decoded."""
    key = f"{name}{STATE}{kind}"
    text = plain_array(tensors[key])
    if text.dtype != np.uint8:
        raise QuantError(f"{where}: tensor {key!r} is {text.dtype}, expected the bytes of a JSON object")
    state = converted(parsed(text.tobytes(), f"{where}: {key}"), _State, f"{where}: {key}")
    if state.quant_type != kind:
        raise QuantError(f"{where}: tensor {key!r} says {state.quant_type}")
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
    _check_table(plain_array(tensors[f"{name}.quant_map"]), FORMATS[state.quant_type], f"{where}: {name}.quant_map")
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
            scale = NESTED
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
    with np.errstate(all="ignore"):  # a damaged scale may be infinite
        values = _table(FORMATS[weight.state.quant_type])[codes] * scale
        return values.astype(jnp.dtype(weight.state.dtype)).reshape(weight.shape)


def _scales(weight: _FourBit, arrays: Mapping[str, np.ndarray]) -> np.ndarray:
    """The float32 scale of each block."""
    absmax = arrays[f"{weight.name}.absmax"]
    if not weight.is_nested:
        return absmax
    table, ranges = arrays[f"{weight.name}.nested_quant_map"], arrays[f"{weight.name}.nested_absmax"]
    spread = np.repeat(ranges, weight.state.nested_blocksize)[: absmax.size]
    with np.errstate(all="ignore"):
        return table[absmax] * spread + np.float32(weight.state.nested_offset)


def _bytes(codes: np.ndarray) -> np.ndarray:
    """The bytes of codes, which may be stored as another dtype."""
    return np.ascontiguousarray(codes).reshape(-1).view(np.uint8)
