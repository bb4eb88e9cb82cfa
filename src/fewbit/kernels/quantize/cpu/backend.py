"""Quantize and dequantize in C++ on CPU, FFI calls to `quantize.cc`."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import ClassVar, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from ...._tiles import Tile, tile_counts
from ....array.qarray import QArray
from ....array.quantize import (
    assembled,
    chosen_scales,
    scale_values,
    tensor_scale_of,
)
from ....array.scales.search.tensor_scale import TensorScaleKernels
from ....array.scheme import ScaleHolder, Scheme
from ....formats.e8m0 import E8M0
from ....formats.format import AbstractFormat
from ....formats.integer import Integer
from ...backend import AbstractBackend
from ...extension import device_refusal, extension
from ..problem import Decoding, Quantization
from .attributes import NOTHING, format_words, holder_words, rule_words
from .view import Geometry, geometry

Given: TypeAlias = jax.Array | None
"""An optional array argument of `quantize`."""

_DTYPES = ("float32", "bfloat16", "float16")
_LEVELS = {"portable": 0, "avx2": 1, "avx512": 2, None: 2}


@dataclasses.dataclass(frozen=True)
class CpuQuantizer(AbstractBackend[Quantization]):
    """C++ for the CPU; gives the same bytes as the reference.

    Scales that the kernels cannot compute (grid searches, percentiles, given scales) are computed in JAX; the C++ kernel
    then only encodes. Stochastic rounding draws JAX's random numbers.

    Attributes:
        isa: the instruction set to use, if the machine has it: avx512, avx2, portable; None: the best.
    """

    name: ClassVar[str] = "cpu"
    platform: ClassVar[str] = "cpu"
    isa: str | None = None

    def unsupported(self, problem: Quantization) -> str | None:
        scheme = problem.scheme
        if format_words(scheme.format) is None:
            return (
                f"it cannot encode {scheme.format.name}; it encodes integers, minifloats with mantissa bits, and "
                "codebooks of up to 16 numbers"
            )
        tiles = scheme.tiles(len(problem.shape))
        return _refusal(problem.shape, problem.dtype, scheme, tiles) or _noise_refusal(problem, tiles)

    def not_chosen(self, problem: Quantization) -> str | None:
        return device_refusal()

    def run(self, problem: Quantization, *operands: PyTree) -> QArray:
        x, weights, key, scale, offset = operands
        if not (problem.is_given or problem.is_weighted) and (words := _words(problem)):
            return _in_one_call(self, problem, words, x, key)
        return _with_chosen_scales(self, problem, x, weights, key, scale, offset)


@dataclasses.dataclass(frozen=True)
class CpuDequantizer(AbstractBackend[Decoding]):
    """C++ for the CPU; gives the same numbers as the reference.

    Attributes:
        isa: the instruction set to use, if the machine has it: avx512, avx2, portable; None: the best.
    """

    name: ClassVar[str] = "cpu"
    platform: ClassVar[str] = "cpu"
    isa: str | None = None

    def unsupported(self, problem: Decoding) -> str | None:
        return _refusal(problem.shape, problem.dtype, problem.scheme, problem.tiles)

    def not_chosen(self, problem: Decoding) -> str | None:
        return device_refusal()

    def run(self, problem: Decoding, *operands: PyTree) -> jax.Array:
        return _decoded(self, problem, *operands)


def _refusal(shape: tuple[int, ...], dtype: str, scheme: Scheme, tiles: Sequence[Tile]) -> str | None:
    """Why the kernels do not support the array, or None."""
    if missing := extension("fewbit.kernels.quantize.cpu._quantize").missing:
        return missing
    if dtype not in _DTYPES:
        return f"the array is {dtype}, must be one of {', '.join(_DTYPES)}"
    if scheme.packing.interleave or scheme.packing.high_first:
        return "codes are interleaved or high bits first; the kernels take them in order, low bits first"
    if _geometry(shape, tiles, scheme) is None:
        return "its tiles extend over more than two axes, or over axes that are not adjacent"
    return None


def _noise_refusal(problem: Quantization, tiles: Sequence[Tile]) -> str | None:
    """Why the kernels cannot draw the random numbers of the reference, or None."""
    if problem.key_impl is None:
        return None
    if problem.shared_noise:
        return "elements share random numbers, and the kernel draws one for each"
    if problem.key_impl != "threefry2x32" or not getattr(jax.config, "jax_threefry_partitionable", True):
        return f"the random key is {problem.key_impl}; the kernel draws the numbers of threefry2x32, partitionable (JAX's default)"
    cut = _geometry(problem.shape, tiles, problem.scheme)
    if cut is None or _noise_shape(problem.shape, tiles, cut) is None:
        return "it does not round stochastically where a short last tile is one of several axes"
    return None


def _noise_shape(shape: Sequence[int], tiles: Sequence[Tile], cut: Geometry) -> tuple[int, int] | None:
    """The rows and columns for which the reference draws random numbers: those of whole tiles.

    None where a short last tile lies on one of several tiled axes, or on an axis of one element.
    """
    whole = [n + -n % t for n, t in zip(shape, tiles, strict=True) if t is not None and n % t]
    if not whole:
        return cut.rows, cut.columns
    if sum(t != 1 for t in tiles) > 1 or cut.tile_rows == cut.tile_columns == 1:
        return None
    return (cut.rows, whole[0]) if cut.tile_columns > 1 else (whole[0], cut.columns)


def _noise(problem: Quantization, key: Given, cut: Geometry) -> tuple[jax.Array, np.ndarray]:
    """The words of the key, none without one, and the shape of the random numbers."""
    shape = _noise_shape(problem.shape, problem.scheme.tiles(len(problem.shape)), cut)
    if key is None:
        return jnp.zeros(0, jnp.uint32), np.zeros(2, np.int64)
    return jax.random.key_data(key), np.asarray(shape, np.int64)


def _geometry(shape: tuple[int, ...], tiles: Sequence[Tile], scheme: Scheme) -> Geometry | None:
    packed_axis = len(shape) + scheme.pack_axis
    return geometry(shape, tiles, packed_axis if scheme.format.bits < 8 else None)


# --- quantize ---


def _words(problem: Quantization) -> dict[str, np.ndarray] | None:
    """The attributes of the kernel that also computes the scales; None where it does not support the calibration."""
    scheme, zero_words = problem.scheme, NOTHING
    tiles = scheme.tiles(len(problem.shape))
    lengths = tuple(t or n for n, t in zip(problem.shape, tiles, strict=True) if t != 1)
    fmt, holder, rule = (
        format_words(scheme.format),
        holder_words(scheme.scale),
        rule_words(scheme, lengths, is_stochastic=problem.is_stochastic),
    )
    if isinstance(zero := scheme.zero_holder, AbstractFormat):
        zero_words = format_words(zero)
    elif zero is not None:
        zero_words = holder_words(zero)
    if fmt is None or holder is None or rule is None or zero_words is None:
        return None
    return {
        **fmt.attributes("format", "numbers"),
        **holder.attributes("scale_format", "scale_numbers"),
        **zero_words.attributes("zero_format", "zero_numbers"),
        **rule.attributes("rule", "rule_numbers"),
    }


def _in_one_call(
    backend: CpuQuantizer,
    problem: Quantization,
    words: dict[str, np.ndarray],
    x: jax.Array,
    key: Given,
    unit: jax.Array | None = None,
) -> QArray:
    """Scales and codes from one kernel. `unit`: the tensor scale; None: that of the scheme's calibration."""
    scheme = problem.scheme
    tiles = scheme.tiles(x.ndim)
    cut = _geometry(x.shape, tiles, scheme)
    assert cut is not None
    zero, none = scheme.zero_holder, (1, 1, 0)
    zero_result = _shaped(none, jnp.uint8) if zero is None else _shaped(cut.counts, zero)
    unit_result = _shaped((1, 1, int(scheme.tensor_scale)), jnp.float32)
    codes_result = _shaped(cut.packed(scheme.format.bits), jnp.uint8)
    results = (codes_result, _shaped(cut.counts, scheme.scale), zero_result, unit_result)
    call = jax.ffi.ffi_call("fewbit_quantize", results, vmap_method="broadcast_all")
    if unit is None and scheme.calibration.searches_tensor_scale and key is None:
        kernels = TensorScaleKernels(
            functools.partial(_rounded, backend, scheme), functools.partial(_row_magnitudes, backend)
        )
        unit = tensor_scale_of(x, scheme, kernels=kernels)
    given = jnp.zeros(none, jnp.float32)
    if unit is not None:
        given = unit.reshape(1, 1, 1)
    keys, noise = _noise(problem, key, cut)
    attributes = {"tiles": _tile_words(cut), "noise": noise, "level": np.int64(_LEVELS[backend.isa]), **words}
    codes, scale, zero_point, stored_unit = call(x.reshape(cut.shape), given, keys, **attributes)
    counts = tile_counts(x.shape, tiles)
    stored_zero = zero_point.reshape(counts) if zero is not None else None
    stored_unit = stored_unit.reshape((1,) * x.ndim) if scheme.tensor_scale else None
    return assembled(x, scheme, _packed(codes, x.shape, scheme), scale.reshape(counts), stored_zero, stored_unit)


def _rounded(backend: CpuQuantizer, scheme: Scheme, x: jax.Array, tiles: tuple[Tile, ...], unit: jax.Array) -> jax.Array:
    """An array quantized with a tensor scale and dequantized: a sample of another with tiles along its last axis, or itself."""
    if tiles != scheme.tiles(x.ndim):
        scheme = scheme.with_tiles(tiles, -1)
    problem = Quantization(x.shape, x.dtype.name, scheme)
    words = _words(problem)
    assert words is not None
    q = _in_one_call(backend, problem, words, x, None, unit)
    decoding = Decoding(x.shape, x.dtype.name, scheme, scheme.tiles(x.ndim))
    return _decoded(CpuDequantizer(backend.isa), decoding, q)


def _row_magnitudes(backend: CpuQuantizer, x: jax.Array) -> jax.Array:
    """`[..., 2]`: the largest finite magnitude of each row of `x`, and its largest: infinite if a number is not finite."""
    call = jax.ffi.ffi_call(
        "fewbit_row_magnitudes", jax.ShapeDtypeStruct((*x.shape[:-1], 2), jnp.float32), vmap_method="broadcast_all"
    )
    return call(x, level=np.int64(_LEVELS[backend.isa]))


def _with_chosen_scales(
    backend: CpuQuantizer, problem: Quantization, x: jax.Array, weights: Given, key: Given, scale: Given, offset: Given
) -> QArray:
    """Scales from JAX, codes from a kernel."""
    scheme = problem.scheme
    cut = _geometry(x.shape, scheme.tiles(x.ndim), scheme)
    words = format_words(scheme.format)
    assert cut is not None
    assert words is not None
    chosen = chosen_scales(x, scheme, weights, scale, offset, is_stochastic=problem.is_stochastic)
    result = _shaped(cut.packed(scheme.format.bits), jnp.uint8)
    call = jax.ffi.ffi_call("fewbit_encode", result, vmap_method="broadcast_all")
    divisor, shift = (_by_tile(v, cut) for v in (chosen.divisor, chosen.offset))
    keys, noise = _noise(problem, key, cut)
    attributes = {"tiles": _tile_words(cut), "noise": noise, "level": np.int64(_LEVELS[backend.isa])}
    codes = call(x.reshape(cut.shape), divisor, shift, keys, **attributes, **words.attributes("format", "numbers"))
    return assembled(x, scheme, _packed(codes, x.shape, scheme), chosen.stored, chosen.zero_point, chosen.tensor_scale)


def _packed(codes: jax.Array, shape: tuple[int, ...], scheme: Scheme) -> jax.Array:
    """The codes in the shape of the QArray's."""
    packed = list(shape)
    packed[scheme.pack_axis] = -(-packed[scheme.pack_axis] * scheme.format.bits // 8)
    return codes.reshape(packed)


# --- dequantize ---


def _decoded(backend: CpuDequantizer, problem: Decoding, q: QArray) -> jax.Array:
    scheme, shape = problem.scheme, problem.shape
    cut = _geometry(shape, problem.tiles, scheme)
    assert cut is not None
    scale, unit, tables = q.scale, q.tensor_scale, np.zeros(0, np.float32)
    if isinstance(scheme.scale, AbstractFormat):
        tables = _scale_tables(scheme.scale)
    elif isinstance(scheme.scale, Scheme):
        scale, unit = scale_values(q), None
    zero_point, offset = None, q.zero_point
    if isinstance(scheme.zero_point, AbstractFormat) and offset is not None:
        zero_point, offset = scheme.zero_point.decode(offset), None
    result = jax.ShapeDtypeStruct(cut.shape, jnp.dtype(problem.dtype))
    call = jax.ffi.ffi_call("fewbit_dequantize", result, vmap_method="broadcast_all")
    offsets = (_by_tile(None if leaf is None else leaf.astype(jnp.float32), cut) for leaf in (zero_point, offset))
    units = jnp.zeros((1, 1, 0), jnp.float32) if unit is None else unit.reshape(1, 1, 1)
    codes = q.codes.reshape(cut.packed(scheme.format.bits))
    attributes = {"bits": scheme.format.bits, "whole_shift": _whole_shift(scheme.format), "level": _LEVELS[backend.isa]}
    words: dict[str, np.ndarray | np.integer] = {name: np.int64(number) for name, number in attributes.items()}
    words |= {"tiles": _tile_words(cut), "values": _values(scheme.format), "scale_tables": tables}
    return call(codes, _by_tile(scale, cut), units, *offsets, **words).reshape(shape)


def _whole_shift(fmt: AbstractFormat) -> int:
    """By how many bits an integer's code is shifted to the top of 32 bits, 0 if unsigned; -1 for formats decoded by a table.

    The kernel multiplies by the number of code 1, which of a signed single bit is -1 instead of the step.
    """
    if not isinstance(fmt, Integer) or (fmt.signed and fmt.bits == 1):
        return -1
    return 32 - fmt.bits if fmt.signed else 0


@functools.cache
def _scale_tables(holder: AbstractFormat) -> np.ndarray:
    """The float32 scale that each byte is, padded to 256; of E8M0 the two factors of it, see `stored_factors`."""
    if not isinstance(holder, E8M0):
        return _values(holder)
    exponents = np.arange(256) - 127
    half = exponents // 2
    low = np.where(exponents == 128, np.nan, 2.0**half)
    return np.concatenate([low, 2.0 ** (exponents - half)]).astype(np.float32)


@functools.cache
def _values(fmt: AbstractFormat) -> np.ndarray:
    """The number of each code, padded to 256."""
    values = fmt.values().astype(np.float32)
    return np.pad(values, (0, 256 - len(values)))


# --- arguments of both ---


def _tile_words(cut: Geometry) -> np.ndarray:
    return np.asarray((cut.tile_rows, cut.tile_columns, cut.packs_rows), np.int64)


def _shaped(shape: tuple[int, ...], holder: ScaleHolder) -> jax.ShapeDtypeStruct:
    """A result of a kernel: uint8 for the codes of a format, else of the dtype."""
    if isinstance(holder, AbstractFormat):
        return jax.ShapeDtypeStruct(shape, jnp.uint8)
    return jax.ShapeDtypeStruct(shape, jnp.dtype(holder))  # type: ignore[arg-type]


def _by_tile(values: jax.Array | None, cut: Geometry) -> jax.Array:
    """One number a tile; an empty array for None."""
    if values is None:
        return jnp.zeros((1, 1, 0), jnp.float32)
    if values.size == math.prod(cut.counts):
        return values.reshape(cut.counts)
    return jnp.broadcast_to(values.reshape((1, 1, 1)), cut.counts)
