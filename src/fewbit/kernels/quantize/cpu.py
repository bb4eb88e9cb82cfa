"""Quantize and dequantize in C++ on CPU: `cpu.cc`, called inside the program that JAX compiles."""

import dataclasses
import functools
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from ..._tiles import tile_counts
from ...array import QArray, Scheme
from ...array.quantize import assembled, chosen_scales, dequantized, quantized, scale_factors, tensor_scale_of
from ...formats import AbstractFormat, Integer
from ..extension import device_refusal, extension
from ..platforms import on_platform
from ..select import AbstractBackend
from .backends import DEQUANTIZERS, QUANTIZERS
from .geometry import Geometry, geometry
from .problem import Decoding, Quantization
from .words import NOTHING, format_words, holder_words, rule_words

_DTYPES = ("float32", "bfloat16", "float16")
_LEVELS = {"portable": 0, "avx2": 1, "avx512": 2, None: 2}


@dataclasses.dataclass(frozen=True)
class CpuQuantizer(AbstractBackend[Quantization]):
    """C++ for the CPU, of the same bytes as the reference.

    Scales that the kernels cannot choose (searches on a grid, percentiles, given ones) are chosen in JAX; the codes are
    made here all the same.

    Attributes:
        isa: the instruction set to take, where the machine has it: avx512, avx2, portable; None: the best.
    """

    name: ClassVar[str] = "cpu"
    platform: ClassVar[str] = "cpu"
    isa: str | None = None

    def unsupported(self, problem: Quantization) -> str | None:
        scheme = problem.scheme
        if problem.is_stochastic:
            return "rounding by chance is left to the reference, whose random numbers are JAX's"
        if format_words(scheme.format) is None:
            return f"it cannot encode {scheme.format.name}: integers, minifloats and codebooks of up to 16 numbers"
        return _refusal(problem.shape, problem.dtype, scheme, scheme.tiles(len(problem.shape)))

    def passed_over(self, problem: Quantization) -> str | None:
        return device_refusal()

    def run(self, problem: Quantization, *operands: Any) -> QArray:
        return _quantized(self, problem, *operands)


@dataclasses.dataclass(frozen=True)
class CpuDequantizer(AbstractBackend[Decoding]):
    """C++ for the CPU, of the same numbers as the reference.

    Attributes:
        isa: the instruction set to take, where the machine has it: avx512, avx2, portable; None: the best.
    """

    name: ClassVar[str] = "cpu"
    platform: ClassVar[str] = "cpu"
    isa: str | None = None

    def unsupported(self, problem: Decoding) -> str | None:
        return _refusal(problem.shape, problem.dtype, problem.scheme, problem.tiles)

    def passed_over(self, problem: Decoding) -> str | None:
        return device_refusal()

    def run(self, problem: Decoding, *operands: Any) -> jax.Array:
        return _decoded(self, problem, *operands)


def _refusal(shape: tuple[int, ...], dtype: str, scheme: Scheme, tiles: Any) -> str | None:
    """Why an array of this kind cannot be read or written, or None."""
    if missing := extension("fewbit.kernels.quantize._cpu").missing:
        return missing
    if dtype not in _DTYPES:
        return f"the array is {dtype}, must be one of {', '.join(_DTYPES)}"
    if scheme.packing.interleave or scheme.packing.high_first:
        return "codes are interleaved or stand high bits first; the kernels take them in order, low bits first"
    if _geometry(shape, tiles, scheme) is None:
        return "its tiles extend over axes that do not lie side by side, or over more than two"
    return None


def _geometry(shape: tuple[int, ...], tiles: Any, scheme: Scheme) -> Geometry | None:
    return geometry(shape, tiles, None if scheme.format.bits == 8 else len(shape) + scheme.pack_axis)


# --- quantize ---


@functools.partial(jax.jit, static_argnames=("backend", "problem"), inline=True)
def _quantized(backend: CpuQuantizer, problem: Quantization, *operands: Any) -> QArray:
    """The C++ kernels on CPU, the reference elsewhere; derivatives are the reference's."""

    def reference(*operands: Any) -> QArray:
        x, weights, key, scale, offset = operands
        return quantized(x, problem.scheme, weights, key, scale, offset)

    def native(*operands: Any) -> QArray:
        x, weights, _, scale, offset = operands
        words = None if problem.is_given or problem.is_weighted else _words(problem)
        return (
            _in_one_call(backend, problem, words, x)
            if words
            else _with_chosen_scales(backend, problem, x, weights, scale, offset)
        )

    return on_platform("cpu", native, reference)(*operands)


def _words(problem: Quantization) -> dict[str, np.ndarray] | None:
    """The attributes of the kernel that chooses the scales too; None where it cannot."""
    scheme, ndim = problem.scheme, len(problem.shape)
    lengths = tuple(n if t is None else t for n, t in zip(problem.shape, scheme.tiles(ndim), strict=True) if t != 1)
    zero = scheme.zero_holder
    fmt, holder, rule = format_words(scheme.format), holder_words(scheme.scale), rule_words(scheme, lengths)
    zero_words = NOTHING if zero is None else format_words(zero) if isinstance(zero, AbstractFormat) else holder_words(zero)
    if fmt is None or holder is None or rule is None or zero_words is None:
        return None
    return {
        **fmt.attributes("format", "numbers"),
        **holder.attributes("scale_format", "scale_numbers"),
        **zero_words.attributes("zero_format", "zero_numbers"),
        **rule.attributes("rule", "rule_numbers"),
    }


def _in_one_call(backend: CpuQuantizer, problem: Quantization, words: dict[str, np.ndarray], x: jax.Array) -> QArray:
    """Scales and codes from one kernel."""
    scheme = problem.scheme
    tiles = scheme.tiles(x.ndim)
    cut = _geometry(x.shape, tiles, scheme)
    assert cut is not None
    zero = scheme.zero_holder
    results = (
        _shaped(cut.packed(scheme.format.bits), None),
        _shaped(cut.counts, scheme.scale),
        _shaped(cut.counts, zero) if zero is not None else _shaped((1, 1, 0), None),
        _shaped((1, 1, 1) if scheme.tensor_scale else (1, 1, 0), "float32"),
    )
    call = jax.ffi.ffi_call("fewbit_quantize", results, vmap_method="broadcast_all")
    given = jnp.zeros((1, 1, 0), jnp.float32)
    if scheme.calibration.searches_tensor_scale and (unit := tensor_scale_of(x, scheme)) is not None:
        given = unit.reshape(1, 1, 1)
    codes, scale, zero_point, unit = call(
        x.reshape(cut.shape), given, tiles=_tile_words(cut), level=np.int64(_LEVELS[backend.isa]), **words
    )
    counts = tile_counts(x.shape, tiles)
    packed = _packed(codes, x.shape, scheme)
    zero_point = None if zero is None else zero_point.reshape(counts)
    unit = unit.reshape((1,) * x.ndim) if scheme.tensor_scale else None
    return assembled(x, scheme, packed, scale.reshape(counts), zero_point, unit)


def _with_chosen_scales(
    backend: CpuQuantizer, problem: Quantization, x: jax.Array, weights: Any, scale: Any, offset: Any
) -> QArray:
    """Scales chosen in JAX, codes from a kernel."""
    scheme = problem.scheme
    cut = _geometry(x.shape, scheme.tiles(x.ndim), scheme)
    words = format_words(scheme.format)
    assert cut is not None
    assert words is not None
    chosen = chosen_scales(x, scheme, weights, scale, offset)
    result = _shaped(cut.packed(scheme.format.bits), None)
    call = jax.ffi.ffi_call("fewbit_encode", result, vmap_method="broadcast_all")
    divisor, shift = (_by_tile(v, cut) for v in (chosen.divisor, chosen.offset))
    attributes = words.attributes("format", "numbers")
    codes = call(
        x.reshape(cut.shape), divisor, shift, tiles=_tile_words(cut), level=np.int64(_LEVELS[backend.isa]), **attributes
    )
    return assembled(x, scheme, _packed(codes, x.shape, scheme), chosen.stored, chosen.zero_point, chosen.tensor_scale)


def _packed(codes: jax.Array, shape: tuple[int, ...], scheme: Scheme) -> jax.Array:
    """The codes in the shape that the QArray holds them."""
    packed = list(shape)
    packed[scheme.pack_axis] = -(-packed[scheme.pack_axis] * scheme.format.bits // 8)
    return codes.reshape(packed)


# --- dequantize ---


@functools.partial(jax.jit, static_argnames=("backend", "problem"), inline=True)
def _decoded(backend: CpuDequantizer, problem: Decoding, q: QArray) -> jax.Array:
    """The C++ kernel on CPU, the reference elsewhere; derivatives are the reference's."""

    def reference(q: QArray) -> jax.Array:
        return dequantized(q, jnp.dtype(problem.dtype))

    return on_platform("cpu", functools.partial(_native_decoded, backend, problem), reference)(q)


def _native_decoded(backend: CpuDequantizer, problem: Decoding, q: QArray) -> jax.Array:
    scheme, shape = problem.scheme, problem.shape
    cut = _geometry(shape, problem.tiles, scheme)
    assert cut is not None
    factors = [_by_tile(factor, cut) for factor in scale_factors(q)]
    more = factors[1] if len(factors) > 1 else _by_tile(None, cut)
    zero = scheme.zero_point
    whole, offset = None, q.zero_point
    if isinstance(zero, AbstractFormat) and offset is not None:
        whole, offset = zero.decode(offset), None
    result = jax.ShapeDtypeStruct(cut.shape, jnp.dtype(problem.dtype))
    call = jax.ffi.ffi_call("fewbit_dequantize", result, vmap_method="broadcast_all")
    beside = (factors[0], more, _by_tile(whole, cut), _by_tile(offset, cut))
    codes = q.codes.reshape(cut.packed(scheme.format.bits))
    attributes = {"bits": scheme.format.bits, "whole_shift": _whole_shift(scheme.format), "level": _LEVELS[backend.isa]}
    words = {name: np.int64(number) for name, number in attributes.items()}
    y = call(codes, *beside, tiles=_tile_words(cut), values=_values(scheme.format), **words)
    return y.reshape(shape)


def _whole_shift(fmt: AbstractFormat) -> int:
    """How far the sign of a whole number's code stands from the top of 32 bits, 0 without a sign; -1 for other formats."""
    return -1 if not isinstance(fmt, Integer) else 32 - fmt.bits if fmt.signed else 0


@functools.cache
def _values(fmt: AbstractFormat) -> np.ndarray:
    """The number of each code, filled up to 256."""
    with jax.ensure_compile_time_eval():
        values = np.asarray(fmt.decode(jnp.arange(2**fmt.bits, dtype=jnp.uint8)))
    return np.pad(values, (0, 256 - len(values)))


# --- what both hand over ---


def _tile_words(cut: Geometry) -> np.ndarray:
    return np.asarray((cut.tile_rows, cut.tile_columns, cut.packs_rows), np.int64)


def _shaped(shape: tuple[int, ...], holder: Any) -> jax.ShapeDtypeStruct:
    """The shape of a result: bytes for the codes of a format, else the dtype."""
    dtype = jnp.uint8 if holder is None or isinstance(holder, AbstractFormat) else jnp.dtype(holder)
    return jax.ShapeDtypeStruct(shape, dtype)


def _by_tile(values: jax.Array | None, cut: Geometry) -> jax.Array:
    """Float32 numbers, one a tile; an empty array where there are none."""
    if values is None:
        return jnp.zeros((1, 1, 0), jnp.float32)
    values = values.astype(jnp.float32)
    if values.size == math.prod(cut.counts):
        return values.reshape(cut.counts)
    return jnp.broadcast_to(values.reshape((1, 1, 1)), cut.counts)


QUANTIZERS.add("cpu", CpuQuantizer())
DEQUANTIZERS.add("cpu", CpuDequantizer())
