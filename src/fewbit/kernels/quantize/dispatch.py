"""`fb.quantize` and `fb.dequantize`: select the backend."""

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Float, Key

from ...array.qarray import QArray
from ...array.quantize import checked, dequantized, float_dtype, quantized, scale_values, shared_axes
from ...array.scheme import Scheme
from ...array.scheme import scheme as as_scheme
from ...errors import QuantError
from ..backend import AbstractBackend, select
from ..lowering import are_split, computed
from .cpu.backend import CpuDequantizer, CpuQuantizer
from .gpu.backend import TritonDequantizer, TritonQuantizer
from .problem import Decoding, Quantization
from .reference import ReferenceDequantizer, ReferenceQuantizer
from .tpu.backend import PallasTPUQuantizer
from .tpu.dequantize_backend import PallasTPUDequantizer

QUANTIZERS = (PallasTPUQuantizer(), TritonQuantizer(), CpuQuantizer(), ReferenceQuantizer())
"""The backends of quantize, in the order in which they are asked."""
DEQUANTIZERS = (PallasTPUDequantizer(), TritonDequantizer(), CpuDequantizer(), ReferenceDequantizer())
"""The backends of dequantize, in the order in which they are asked."""

Quantizer: TypeAlias = AbstractBackend[Quantization]
Dequantizer: TypeAlias = AbstractBackend[Decoding]


def quantize(
    x: ArrayLike,
    scheme: str | Scheme | Mapping[str, Any],
    *,
    axis: int | tuple[int, ...] = -1,
    error_weights: ArrayLike | None = None,
    key: Key[Array, ""] | None = None,
    scale: ArrayLike | None = None,
    offset: ArrayLike | None = None,
    shared_noise: tuple[int, ...] = (),
    backend: str | Quantizer | None = None,
) -> QArray:
    """Quantizes an array: one scale for each tile (block), one code for each element.

    `code = encode((x - offset) / scale)`, rounded to nearest and computed in float32 with the scale as stored. A tile whose
    calibrated scale would be below the smallest normal float32 number gets scale 1 and codes of zero (scale 0 in a format
    without zero, and where scales are quantized themselves), so an all-zero tile decodes to exact zeros. A NaN or an
    infinity makes every element of its tile NaN. Every array that is finite in float32 decodes to finite numbers: scales
    are limited so that the largest code decodes to at most the largest float32. In float16 and bfloat16 numbers above their
    largest become infinite, as by any cast. An empty array gives empty codes. Jit-compatible.

    Args:
        x: floating array of at least one axis: float16, bfloat16, float32 or float64 (which is rounded to float32).
        scheme: a Scheme, or anything that `fb.scheme` takes: `"nf4"`, `"int4_g64"`, a JSON form.
        axis: the contraction axis of the product, along which tiles run in place of the scheme's last axis: -1 for weights
            `[out, in]`, -2 for `[in, out]`; several when a product contracts several: tiles run along the last of them that
            has more than one element.
        error_weights: the weight of each element's squared error in a scale search, broadcast to `x`: finite and not negative,
            which is checked outside of jit. None: all equal. An error for calibrations that do not search.
        key: a JAX random key for stochastic rounding of the codes; None rounds to nearest. With a key rounding is unbiased:
            scales are not searched, but chosen so that no element saturates. Calibrations that clip on purpose (`fixed`,
            `absmax,0.9`) keep their range, and elements beyond it, or beyond a given scale's, saturate.
        scale: the scale of each tile, float, in place of the scheme's calibration (static ranges, delayed scaling); it
            broadcasts to the number of tiles on each axis, so a scalar is the scale of every tile. It is rounded to the
            scheme's scale format, after magnitudes below the smallest normal float32 number, such as 0, are replaced by 1 (by
            0 for a format without zero, or where scales are quantized themselves); a tensor scale is chosen for the largest of
            them. None calibrates.
        offset: the number that the code of value 0 decodes to, like `scale`; given with it if and only if the scheme has a
            zero point.
        shared_noise: the axes along which all elements are rounded with the same random number; with (), each has its own.
            Rounding is unbiased either way, and shared numbers are cheaper. Needs a key.
        backend: the only backend to use, or its name ("reference", "cpu", "pallas_tpu", "triton"); None chooses. All give the
            same bytes, except for scale searches where the errors of two scales agree to 20 bits.

    Returns:
        The QArray, of the shape and dtype of `x`.

    Raises:
        QuantError: for an array that is not floating or has no axis, an axis it does not have, an unknown scheme, a
            sharding on an explicit mesh that cuts tiles, a scale or an offset that does not match the tiles and the
            scheme, error weights that are negative or not finite, or shared noise without a key.
        UnsupportedError: when the named backend does not support the array or the platform.

    >>> quantize(jnp.array([[1.0, -0.5, 0.25, 0.0]]), "int8")
    QArray(int8, float32[1, 4], 8 bytes, 16.000 bits/weight)
    >>> dequantize(quantize(jnp.array([[1.0, -0.5, 0.25, 0.0]]), "int8", scale=0.25)).tolist()
    [[1.0, -0.5, 0.25, 0.0]]
    """
    array: Any = x
    if not isinstance(x, QArray):
        array = jnp.asarray(x)
    if isinstance(axis, list):
        axis = tuple(axis)
    _refuse_noise(key, shared_noise)
    _refuse_weights(error_weights)
    program = _jitted_quantize
    if are_split(array):
        program = _quantize
    return program(array, error_weights, key, scale, offset, as_scheme(scheme), axis, tuple(shared_noise), backend)


def _quantize(
    x: jax.Array,
    error_weights: ArrayLike | None,
    key: jax.Array | None,
    scale: ArrayLike | None,
    offset: ArrayLike | None,
    scheme: Scheme,
    axis: int | tuple[int, ...],
    shared_noise: tuple[int, ...],
    backend: str | Quantizer | None,
) -> QArray:
    x, bound = checked(x, scheme, axis, error_weights, scale, offset)
    given = (error_weights, key, scale, offset)
    key_impl = None
    if key is not None:
        key_impl = jax.random.key_impl(key)
    is_weighted, is_given = error_weights is not None, scale is not None
    problem = Quantization(
        x.shape, x.dtype.name, bound, key_impl, is_given, is_weighted, shared_axes(shared_noise, x.ndim, key)
    )
    choice = select(QUANTIZERS, problem, backend)
    if not x.size:  # nothing to compute
        return quantized(x, bound, *given, problem.shared_noise)
    q: Any = computed(choice, problem, x, *given, reference=QUANTIZERS[-1], is_named=backend is not None)
    return q


_jitted_quantize = jax.jit(_quantize, static_argnums=(5, 6, 7, 8), inline=True)
"""One program for each shape, dtype and scheme."""


def dequantize(q: QArray, dtype: DTypeLike | None = None, *, backend: str | Dequantizer | None = None) -> Float[Array, "*s"]:
    """Dequantizes: `(decode(code) - zero_point) * scale`, or `decode(code) * scale + offset`.

    Computed in float32 and rounded once to `dtype`. Jit-compatible and differentiable in the scales.

    Args:
        q: the quantized array.
        dtype: the floating dtype of the result; None takes `q.dtype`.
        backend: the only backend to use, or its name ("reference", "cpu", "pallas_tpu", "triton"); None chooses. All give the
            same numbers.

    Returns:
        An array of the shape of `q`.

    Raises:
        QuantError: for a dtype that is not floating, and for a QArray whose leaves do not fit its scheme.
        UnsupportedError: when the named backend does not support the array or the platform.

    >>> dequantize(quantize(jnp.array([[6.0, -0.4, 0.0]]), "mxfp4")).tolist()
    [[6.0, -0.5, 0.0]]
    """
    if not isinstance(q, QArray):
        raise QuantError(f"dequantize takes a QArray, not {type(q).__name__}")
    if are_split(q.codes):
        return _dequantize(q, dtype, backend)
    return _jitted_dequantize(q, dtype, backend)


def _dequantize(q: QArray, dtype: DTypeLike | None, backend: str | Dequantizer | None) -> jax.Array:
    dtype, q = float_dtype(q, dtype), _with_one_unit(q)
    problem = Decoding(q.shape, dtype.name, q.scheme, q.tiles)
    choice = select(DEQUANTIZERS, problem, backend)
    if not q.size:  # nothing to compute
        return dequantized(q, dtype)
    x: jax.Array = computed(choice, problem, q, reference=DEQUANTIZERS[-1], is_named=backend is not None)
    return x


def _refuse_noise(key: Any, shared_noise: Any) -> None:
    """Raises a QuantError for anything but one random key or None, and axes."""
    if key is not None:
        is_typed = isinstance(key, jax.Array) and jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
        is_raw = isinstance(key, jax.Array | np.ndarray) and key.dtype == np.uint32
        if not (is_typed or is_raw) or jnp.ndim(key) != int(not is_typed):
            given = f"{key.dtype}{key.shape}" if isinstance(key, jax.Array | np.ndarray) else repr(key)
            raise QuantError(f"key is {given}; pass one key, as of jax.random.key(0)")
    if not isinstance(shared_noise, list | tuple):
        raise QuantError(f"shared_noise is {shared_noise!r}; pass a tuple of axes")


def _refuse_weights(error_weights: ArrayLike | None) -> None:
    """Raises a QuantError for weights that are negative or not finite, unless they are traced."""
    if error_weights is None or isinstance(error_weights, Tracer):
        return
    with jax.ensure_compile_time_eval():
        weights = jnp.asarray(error_weights, jnp.float32)
        count = int(jnp.sum(~((weights >= 0) & (weights < jnp.inf))))
    if count:
        raise QuantError(f"error_weights has {count} values that are negative or not finite; pass weights of 0 or more")


def _with_one_unit(q: QArray) -> QArray:
    """The same numbers with one tensor scale or none, as the kernels take them.

    A stack of arrays has a tensor scale for each. Their product with the scales of the tiles is the float32 scale of each tile.
    """
    if q.tensor_scale is None or q.tensor_scale.size == 1:
        return q
    scheme = dataclasses.replace(q.scheme, scale="float32", tensor_scale=False)
    return dataclasses.replace(q, scale=scale_values(q), tensor_scale=None, scheme=scheme)


_jitted_dequantize = jax.jit(_dequantize, static_argnums=(1, 2), inline=True)
