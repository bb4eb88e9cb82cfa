"""Replacement of MaxText's `KVQuant` for quantized KV caches.

MaxText's `KVCache` stores the two arrays of `quantize`: the quantized numbers, and a bfloat16 scale, which it divides by 127.5, 7.5
or 448 when it reads. Its attention computes QK and PV with the functions of `einsum_fn_with_rhs_qtensor` and
`einsum_fn_with_rhs_qtensor_and_dequant`. `configure_kv_quant` replaces MaxText's. Nothing of MaxText or AQT is imported here.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, BFloat16, Float, PyTree

from .._registry import near_names
from ..errors import QuantError
from ..formats.format import AbstractFormat
from ..kvcache.policy import kv_policy

_STORED = {"int8": (jnp.int8, 127.5), "int4": (jnp.int4, 7.5), "fp8": (jnp.float8_e4m3fn, 448.0)}
"""For each `kv_quant_dtype` the dtype of the numbers, and the divisor of their scale in MaxText."""
_SHARING = {"dkv": ("cache_kv",), "heads_and_dkv": ("cache_heads", "cache_kv")}
"""For each `kv_quant_axis` the names of the axes whose elements share a scale."""


@dataclasses.dataclass(frozen=True)
class KVQuant:
    """Symmetric KV quantization with a scale per token, or per token and head.

    `x` and `-x` dequantize to opposite values, the numbers are rounded for the scale that MaxText reads back (its own are rounded
    before two roundings of the scale to bfloat16), and a row of zeros dequantizes to zeros in every format.

    Attributes:
        kv_quant_dtype: "int8" (-127 .. 127), "int4" (-7 .. 7) or "fp8" (e4m3fn).
        axis_cfg: the axes that share a scale: "dkv", one head of a token; "heads_and_dkv", all heads of a token.

    Raises:
        QuantError: for other names.

    >>> numbers, scale = KVQuant("int4", "dkv").quantize(jnp.array([[7.0, -7.0, 2.2], [0.0, 0.0, 0.0]]), ("s", "cache_kv"))
    >>> numbers.tolist(), (scale / 7.5).tolist()
    ([[7, -7, 2], [0, 0, 0]], [[1.0], [0.0]])
    """

    kv_quant_dtype: Literal["int8", "int4", "fp8"] = "int8"
    axis_cfg: Literal["dkv", "heads_and_dkv"] = "heads_and_dkv"

    def __post_init__(self) -> None:
        for name, known in (("kv_quant_dtype", _STORED), ("axis_cfg", _SHARING)):
            if getattr(self, name) not in known:
                raise QuantError(f"unknown {name} {getattr(self, name)!r}; {near_names(getattr(self, name), tuple(known))}")

    @property
    def dtype(self) -> Any:
        """The dtype of the stored numbers."""
        return _STORED[self.kv_quant_dtype][0]

    @property
    def format(self) -> AbstractFormat:
        """The format of the stored numbers."""
        return kv_policy(self.kv_quant_dtype).keys.format

    def quantize(self, kv: Float[Array, "*s"], axis_names: Sequence[str]) -> tuple[Array, BFloat16[Array, "*t"]]:
        """Quantizes keys or values.

        With `S = max |kv| * d / format.max` in bfloat16 and `d` = 127.5, 7.5 or 448, the numbers are `round(kv / (S / d))`.
        NaN or infinity makes every element of its scale NaN.

        Args:
            kv: keys or values in any order of axes.
            axis_names: MaxText's name of each axis, with "cache_kv" and, for "heads_and_dkv", "cache_heads" among them.

        Returns:
            The numbers in `dtype`, and `S`, 1 long along the axes that share a scale.

        Raises:
            QuantError: for names that do not match the axes.
        """
        shared = _SHARING[self.axis_cfg]
        if len(axis_names) != kv.ndim or not set(shared) <= set(axis_names):
            raise QuantError(f"axis_names is {tuple(axis_names)} for shape {kv.shape}; {self.axis_cfg} needs {shared} in it")
        x = kv.astype(jnp.float32)
        largest = jnp.max(jnp.abs(x), axis=tuple(map(tuple(axis_names).index, shared)), keepdims=True)
        scale = (largest * (_STORED[self.kv_quant_dtype][1] / self.format.max)).astype(jnp.bfloat16)
        step = self._step(scale)
        is_small = step < jnp.finfo(jnp.float32).tiny
        numbers = self.format.nearest(jnp.where(is_small, 0.0, x / jnp.where(is_small, 1.0, step)))
        return numbers.astype(self.dtype), scale

    def _step(self, scale: BFloat16[Array, "*t"]) -> Float[Array, "*t"]:
        """The step in float32; MaxText divides in bfloat16 for integers, in float32 for fp8."""
        divisor = _STORED[self.kv_quant_dtype][1]
        if self.kv_quant_dtype == "fp8":
            return scale.astype(jnp.float32) / divisor
        return (scale / jnp.asarray(divisor, scale.dtype)).astype(jnp.float32)

    def einsum_fn_with_rhs_qtensor(self) -> Callable[[str, Array, Any], Array]:
        """The QK product: `einsum(equation, lhs, rhs)`, where `rhs` is an array or AQT's QTensor.

        The scale multiplies the result where the equation keeps its axes, and `lhs` where it sums over them, so that the cache is
        not dequantized. Sums are float32, the result has the dtype of `lhs`.
        """
        return _einsum

    def einsum_fn_with_rhs_qtensor_and_dequant(self) -> Callable[[str, Array, Any], Array]:
        """The PV product; the same function."""
        return _einsum


def configure_kv_quant(config: Any) -> KVQuant | None:
    """The KV cache's quantizer; replaces MaxText's function of this name.

    Args:
        config: an object with MaxText's `quantize_kvcache`, `kv_quant_dtype` and `kv_quant_axis`.

    Returns:
        The quantizer; None without `quantize_kvcache`.

    Raises:
        QuantError: for an unknown name.

    >>> import types
    >>> configure_kv_quant(types.SimpleNamespace(quantize_kvcache=True, kv_quant_dtype="int8", kv_quant_axis="dkv"))
    KVQuant(kv_quant_dtype='int8', axis_cfg='dkv')
    """
    if not config.quantize_kvcache:
        return None
    dtype, axis = (str(getattr(x, "value", x)) for x in (config.kv_quant_dtype, config.kv_quant_axis))
    return KVQuant(dtype, axis)  # type: ignore[arg-type]


def _einsum(equation: str, lhs: Array, rhs: PyTree) -> Array:
    """An einsum of an array with a cached array or QTensor, in the dtype of `lhs`."""
    if not hasattr(rhs, "qvalue"):
        return _product(equation, lhs, rhs.astype(lhs.dtype)).astype(lhs.dtype)
    if len(rhs.scale) != 1 or rhs.bias:
        raise QuantError(
            f"a cached tensor has {len(rhs.scale)} scales and {len(rhs.bias)} biases; expected one scale and no bias"
        )
    (scale,) = rhs.scale
    left, right, out = equation.replace("->", ",").split(",")
    names = {name for name, n in zip(right, scale.shape, strict=True) if n != 1}
    numbers = rhs.qvalue.astype(lhs.dtype)
    if names <= set(out):
        return (_product(equation, lhs, numbers) * _along(scale, right, out)).astype(lhs.dtype)
    if names <= set(left):
        scaled = lhs.astype(jnp.float32) * _along(scale, right, left)
        return _product(equation, scaled.astype(lhs.dtype), numbers).astype(lhs.dtype)
    raise QuantError(f"equation {equation!r} keeps some axes of the scale {scale.shape} and sums over others")


def _product(equation: str, lhs: Array, rhs: Array) -> Float[Array, "..."]:
    """An einsum with float32 sums; float32 operands keep full precision on accelerators."""
    precision = lax.Precision.HIGHEST if lhs.dtype == jnp.float32 else None
    return jnp.einsum(equation, lhs, rhs, precision=precision, preferred_element_type=jnp.float32)


def _along(scale: Array, names: str, target: str) -> Float[Array, "..."]:
    """Transposes and reshapes a scale from axes `names` to axes `target`, in float32."""
    length = {name: n for name, n in zip(names, scale.shape, strict=True) if n != 1}
    order = np.argsort([target.index(name) for name in length])
    long = scale.squeeze(tuple(i for i, n in enumerate(scale.shape) if n == 1))
    return long.transpose(order).reshape([length.get(name, 1) for name in target]).astype(jnp.float32)
