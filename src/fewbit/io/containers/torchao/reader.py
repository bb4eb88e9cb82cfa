"""Reader of the tensor subclasses of torchao."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import msgspec
import numpy as np

from ...._json import Positive
from ...._tiles import FrozenTileMap, Tile, tile_counts
from ....array.qarray import QArray
from ....array.scheme import SCHEMES, Scheme
from ....errors import QuantError, UnsupportedError
from ....formats.format import FORMATS
from ...checkpoint import Tensors
from ..container import Group
from ..encodings.packed_bits import packed_bits
from ..encodings.stored import E4M3, FLOATS, built, checked_info, described, named_tiles
from .entries import E5M2, E8M0_DTYPE, FLOAT8, MX


class Attributes(msgspec.Struct, frozen=True):
    """JSON schema of the attributes that are read."""

    elem_dtype: Any = None
    orig_dtype: Any = None
    dtype: Any = None
    target_dtype: Any = None
    block_size: Positive | Annotated[list[Positive], msgspec.Meta(max_length=8)] | None = None
    is_swizzled_scales: bool = False


class Entry(msgspec.Struct, frozen=True):
    """JSON schema of one parameter."""

    type: str = msgspec.field(name="_type")
    data: Attributes = msgspec.field(name="_data", default=Attributes())


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """The stored arrays of one parameter, and its place for messages."""

    name: str
    tensors: Tensors
    where: str

    def path(self, part: str) -> str:
        """The name of a part in the file."""
        owner, _, last = self.name.rpartition(".")
        return f"{owner}._{last}_{part}"

    def has(self, part: str) -> bool:
        """Whether a part is stored."""
        return self.path(part) in self.tensors.info

    def shape(self, part: str, *dtypes: str) -> tuple[int, ...]:
        """The shape of a part. QuantError if it is missing or has another dtype."""
        return checked_info(self.tensors, self.path(part), self.where, dtypes).shape

    def fault(self, text: str) -> QuantError:
        """The error of arrays that do not fit together."""
        return QuantError(f"{self.where}: {text}")

    def dtype(self, given: Any) -> np.dtype:
        """The dtype of dequantized values."""
        name = _dtype_name(given)
        if name not in FLOATS:
            raise self.fault(f"its dtype is {name!r:.40}, expected {', '.join(FLOATS)}")
        return FLOATS[name]

    def group(self, parts: Sequence[str], shape: tuple[int, ...], dtype: np.dtype, scheme: Scheme, load: Any) -> Group:
        """The group of a weight; `load` builds it from its arrays by part."""
        paths = {self.path(part): part for part in parts}
        info = described(self.tensors, tuple(paths), shape, dtype, scheme.name, scheme)
        return Group(info, tuple(paths), lambda arrays: load({paths[path]: array for path, array in arrays.items()}))


def _dtype_name(given: Any) -> str | None:
    """The name of a dtype: text, or `{"_type": "torch.dtype", "_data": name}`."""
    if isinstance(given, Mapping):
        given = given.get("_data")
    return given if isinstance(given, str) else None


def _mx_group(stored: StoredTensor, data: Attributes) -> Group:
    element = _dtype_name(data.elem_dtype)
    if element not in MX or data.block_size != 32:
        raise UnsupportedError(f"{stored.where}: blocks of {data.block_size} elements of {element!r:.40}")
    scheme = SCHEMES[MX[element]]
    bits = scheme.format.bits
    fmt = scheme.format.name
    codes = stored.shape("qdata", FLOAT8[fmt].name if fmt in FLOAT8 else "uint8")
    shape = _logical(stored, codes, 2 if bits == 4 else 1, 32)
    swizzled = _is_swizzled(stored, data, stored.shape("scale", E8M0_DTYPE.name), shape, 32)
    dtype = stored.dtype(data.orig_dtype)

    def load(arrays: Mapping[str, np.ndarray]) -> QArray:
        codes = np.ascontiguousarray(arrays["qdata"]).view(np.uint8)
        if bits == 6:
            if (codes >= 64).any():
                raise stored.fault("has codes beyond 6 bits")
            codes = packed_bits(codes.reshape(-1, shape[-1]), 6).reshape(*shape[:-1], -1)
        scale = _in_order(np.ascontiguousarray(arrays["scale"]).view(np.uint8), shape, 32, swizzled)
        return built(codes, scale, scheme, shape[-1], dtype)

    return stored.group(("qdata", "scale"), shape, dtype, scheme, load)


def _nvfp4_group(stored: StoredTensor, data: Attributes) -> Group:
    scheme = SCHEMES["nvfp4"]
    if data.block_size != 16:
        raise UnsupportedError(f"{stored.where}: blocks of {data.block_size} elements, where NVFP4 has 16")
    shape = _logical(stored, stored.shape("qdata", "uint8"), 2, 16)
    swizzled = _is_swizzled(stored, data, stored.shape("scale", E4M3.name), shape, 16)
    parts = ["qdata", "scale"]
    has_factor = stored.has("per_tensor_scale")
    if has_factor:
        parts.append("per_tensor_scale")
        if math.prod(stored.shape("per_tensor_scale", "float32")) != 1:
            raise UnsupportedError(f"{stored.where}: a scale of each expert; fewbit has one of the tensor")
    if stored.has("act_per_tensor_scale"):
        parts.append("act_per_tensor_scale")
    dtype = stored.dtype(data.orig_dtype)

    def load(arrays: Mapping[str, np.ndarray]) -> QArray:
        codes = np.ascontiguousarray(arrays["qdata"])
        scale = _in_order(np.ascontiguousarray(arrays["scale"]).view(np.uint8), shape, 16, swizzled)
        factor = np.ones(1, np.float32)
        if has_factor:
            factor = arrays["per_tensor_scale"]
        return built(codes, scale, scheme, shape[-1], dtype, tensor_scale=factor.reshape((1,) * len(shape)))

    return stored.group(parts, shape, dtype, scheme, load)


def _integer_group(stored: StoredTensor, data: Attributes) -> Group:
    name = _dtype_name(data.target_dtype) or "int8"
    if name not in {f"int{bits}" for bits in range(1, 9)}:
        raise stored.fault(f"its target_dtype is {name!r:.40}, expected int1 to int8")
    fmt = FORMATS[name]
    shape = stored.shape("qdata", "int8")
    tiles, counts = _affine_tiles(stored, data, shape)
    parts = ["qdata", "scale"]
    scale_shape = stored.shape("scale", *FLOATS)
    has_zero = False
    if stored.has("zero_point"):
        parts.append("zero_point")
        if stored.shape("zero_point", "int8") != scale_shape:
            raise stored.fault(f"its zero points do not have the shape of its scales, {scale_shape}")
        has_zero = bool(np.any(np.asarray(stored.tensors[stored.path("zero_point")])))
    parts += [part for part in ("act_quant_scale", "act_quant_zero_point") if stored.has(part)]
    if stored.has("act_pre_scale"):
        raise UnsupportedError(f"{stored.where}: activations are multiplied by act_pre_scale, and no scheme has one")
    dtype = stored.dtype(data.dtype)
    scale_dtype = stored.tensors.info[stored.path("scale")].dtype
    scheme = Scheme(fmt, tiles, scale=scale_dtype, zero_point=fmt if has_zero else None)
    half = 2 ** (fmt.bits - 1)

    def codes_of(numbers: np.ndarray) -> np.ndarray:
        if numbers.size and (numbers.min() < -half or numbers.max() >= half):
            raise stored.fault(f"has numbers beyond {fmt.bits} bits")
        return np.ascontiguousarray(numbers).view(np.uint8) & np.uint8(2**fmt.bits - 1)

    def load(arrays: Mapping[str, np.ndarray]) -> QArray:
        codes = codes_of(arrays["qdata"])
        codes = packed_bits(codes.reshape(-1, shape[-1]), fmt.bits).reshape(*shape[:-1], -1)
        zero = None
        if has_zero:
            zero = codes_of(arrays["zero_point"]).reshape(counts)
        return built(codes, arrays["scale"].reshape(counts), scheme, shape[-1], dtype, zero)

    return stored.group(parts, shape, dtype, scheme, load)


def _float8_group(stored: StoredTensor, data: Attributes) -> Group:
    shape = stored.shape("qdata", E4M3.name, E5M2.name)
    tiles, counts = _affine_tiles(stored, data, shape)
    stored.shape("scale", *FLOATS)
    names = {E4M3.name: "e4m3fn", E5M2.name: "e5m2"}
    fmt = FORMATS[names[stored.tensors.info[stored.path("qdata")].dtype]]
    scheme = Scheme(fmt, tiles, scale=stored.tensors.info[stored.path("scale")].dtype)
    dtype = stored.dtype(data.dtype)

    def load(arrays: Mapping[str, np.ndarray]) -> QArray:
        codes = np.ascontiguousarray(arrays["qdata"]).view(np.uint8)
        return built(codes, arrays["scale"].reshape(counts), scheme, shape[-1], dtype)

    return stored.group(("qdata", "scale"), shape, dtype, scheme, load)


def _logical(stored: StoredTensor, codes: tuple[int, ...], per_byte: int, block: int) -> tuple[int, ...]:
    """The shape of a tensor from that of its codes. Blocks divide the last axis."""
    shape = (*codes[:-1], *(n * per_byte for n in codes[-1:]))
    if len(shape) not in (2, 3) or shape[-1] % block:
        raise stored.fault(f"codes of shape {codes} are no rows of blocks of {block}")
    return shape


def _is_swizzled(stored: StoredTensor, data: Attributes, scale: tuple[int, ...], shape: tuple[int, ...], block: int) -> bool:
    """Whether scales have the order of Blackwell's tensor cores; checks their shape."""
    expected = (*shape[:-1], shape[-1] // block)
    if data.is_swizzled_scales:
        if len(shape) != 2:
            raise UnsupportedError(f"{stored.where}: scales of a stack in the order of tensor cores")
        expected = (-(-shape[0] // 128) * 32, -(-shape[1] // block // 4) * 16)
    if scale != expected:
        raise stored.fault(f"scales have shape {scale}, expected {expected} for a tensor of shape {shape}")
    return data.is_swizzled_scales


def _in_order(scale: np.ndarray, shape: tuple[int, ...], block: int, is_swizzled: bool) -> np.ndarray:
    """Scales in the order of their blocks.

    For tensor cores they are stored in tiles of 128 rows and 4 columns, in 32 runs of 16.
    """
    if not is_swizzled:
        return scale
    rows, columns = -(-shape[0] // 128), -(-shape[1] // block // 4)
    tiles = scale.reshape(rows, columns, 32, 4, 4).transpose(0, 3, 2, 1, 4)  # [rows, 4, 32, columns, 4]
    return np.ascontiguousarray(tiles.reshape(rows * 128, columns * 4)[: shape[0], : shape[1] // block])


def _affine_tiles(stored: StoredTensor, data: Attributes, shape: tuple[int, ...]) -> tuple[FrozenTileMap, tuple[int, ...]]:
    """The tiles of a tensor from its `block_size`, and how many there are along each axis."""
    sizes = data.block_size
    if len(shape) < 2 or not isinstance(sizes, list) or len(sizes) != len(shape):
        raise stored.fault(f"block_size is {sizes} for a tensor of shape {shape}")
    tiles: list[Tile] = [None if size == n and n > 1 else size for size, n in zip(sizes, shape, strict=True)]
    counts = tile_counts(shape, tiles)
    scale = stored.tensors.info.get(stored.path("scale"))
    if scale is None or scale.shape != counts or any(n % size for n, size in zip(shape, sizes, strict=True)):
        raise stored.fault(f"block_size {sizes} does not fit a tensor of shape {shape} and its scales")
    return named_tiles(tiles), counts


READERS: dict[str, Callable[[StoredTensor, Attributes], Group]] = {
    "MXTensor": _mx_group,
    "NVFP4Tensor": _nvfp4_group,
    "Int8Tensor": _integer_group,
    "IntxUnpackedToInt8Tensor": _integer_group,
    "Float8Tensor": _float8_group,
}
