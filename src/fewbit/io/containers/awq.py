"""AWQ (GEMM version): 4-bit integers in 32-bit words along the columns.

Of a weight `[out, in]` a file has its transpose: `qweight`, int32 `[in, out / 8]`; `qzeros`, int32 `[groups, out / 8]`;
`scales` `[groups, out]`. The eight codes of a word, from the lowest bits, are those of columns 0, 2, 4, 6, 1, 3, 5, 7. The
weight is `scales * (code - zero)`.

Reference: AutoAWQ, awq/modules/linear/gemm.py and awq/utils/packing_utils.py.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax.numpy as jnp
import msgspec
import numpy as np

from ..._json import converted
from ...array.packing import paired
from ...array.qarray import QArray
from ...array.scheme import Scheme
from ...errors import QuantError, UnsupportedError
from ..checkpoint import TensorInfo, Tensors
from .container import AbstractContainer, Files, Group, Weight, grouped
from .encodings.integer_words import (
    codes_of_words,
    integer_misfit,
    integer_scheme,
    unsigned_bytes,
    unsigned_zero_points,
    why_not_linear,
    words_of_codes,
)
from .encodings.names import linear_modules
from .encodings.stored import config_dtype, per_tile

_KEY = "quantization_config"
_ORDER = paired(8, 4)
"""The column of each code of a word: 0, 2, 4, 6, 1, 3, 5, 7."""
_PLACE = paired(8)
"""The place of each column's code: 0, 4, 1, 5, 2, 6, 3, 7."""
_PARTS = ("qweight", "qzeros", "scales")


class _Settings(msgspec.Struct):
    """The part of `quantization_config` that says how tensors are stored."""

    bits: int = 4
    w_bit: int = 4
    version: str | None = None
    format: str | None = None

    @property
    def layout(self) -> str:
        return (self.version or self.format or "gemm").lower()


class AWQ(AbstractContainer):
    """AWQ files in the GEMM layout."""

    name: ClassVar[str] = "awq"
    schemes: ClassVar[tuple[str, ...]] = ("uint4_f16_g128", "uint4_f16_g64", "uint4_f16_g32", "int4_f16_g128", "q4_0")

    def why_not(self, weight: Weight) -> str | None:
        if reason := why_not_linear(weight) or integer_misfit(weight.scheme, (4,)):
            return reason
        group = weight.scheme.tiles(2)[1] or weight.shape[1]
        if weight.shape[0] % 8 or weight.shape[1] % group:
            return f"its shape {weight.shape} is not a multiple of 8 outputs and of groups of {group} inputs"
        if weight.shape[1] % 2:
            return f"it has {weight.shape[1]} inputs, an odd number"
        return None

    def encoded(self, weight: Weight, q: QArray) -> dict[str, np.ndarray]:
        codes = codes_of_words(unsigned_bytes(q), 4)  # [out, in]
        return {
            f"{weight.module}.qweight": _words(codes.T),
            f"{weight.module}.qzeros": _words(unsigned_zero_points(q).T),
            f"{weight.module}.scales": np.ascontiguousarray(per_tile(q.scale, q).T),
        }

    def files(self, weights: Sequence[Weight], kept: Sequence[str], config: Mapping[str, Any]) -> Files:
        groups = {weight.scheme.tiles(2)[1] or -1 for weight in weights}
        if len(groups) != 1:
            raise UnsupportedError(f"an AWQ directory has one group size; the weights have {sorted(groups)}")
        settings = {
            "quant_method": "awq",
            "bits": 4,
            "group_size": groups.pop(),
            "zero_point": True,
            "version": "gemm",
            "modules_to_not_convert": linear_modules(kept, {weight.module for weight in weights}),
        }
        return Files({_KEY: settings})

    def recognises(self, config: Mapping[str, Any], tensors: Tensors) -> bool:
        settings = config.get(_KEY)
        return isinstance(settings, Mapping) and settings.get("quant_method") == "awq"

    def decoded(self, config: Mapping[str, Any], tensors: Tensors, where: str) -> Tensors:
        settings = converted(config.get(_KEY), _Settings, f"{where}: {_KEY} of config.json")
        if settings.layout != "gemm" or (settings.bits, settings.w_bit) != (4, 4):
            raise UnsupportedError(
                f"{where} has AWQ weights of {settings.bits} bits in the layout {settings.layout!r}; 4 bits in the layout "
                "gemm are read"
            )
        modules = [name.removesuffix(".qweight") for name in tensors.info if name.endswith(".qweight")]
        return grouped(tensors, {f"{m}.weight": _group(m, tensors.info, config, where) for m in modules}, where)


def _group(module: str, info: Mapping[str, TensorInfo], config: Mapping[str, Any], where: str) -> Group:
    """The stored arrays of a layer. QuantError when their shapes and dtypes do not fit together."""
    names = tuple(f"{module}.{part}" for part in _PARTS)
    for name in names:
        if name not in info:
            raise QuantError(f"{where}: tensor {name!r} is missing")
    entries = [info[name] for name in names]
    scale = entries[2].dtype
    is_typed = [e.dtype for e in entries[:2]] == ["int32"] * 2 and scale in ("float16", "bfloat16", "float32")
    if not is_typed or any(len(e.shape) != 2 for e in entries):
        found = ", ".join(f"{e.dtype}{e.shape}" for e in entries)
        raise QuantError(f"{where}: qweight, qzeros and scales of {module!r} are {found}, not those of an AWQ layer")
    (rows, words), zeros, (groups, columns) = (e.shape for e in entries)
    if (
        not groups
        or not rows
        or rows % groups
        or rows % 2
        or not columns
        or columns != words * 8
        or zeros != (groups, words)
    ):
        shapes = ", ".join(str(e.shape) for e in entries)
        raise QuantError(
            f"{where}: qweight, qzeros and scales of {module!r} have shapes {shapes}, which do not fit together"
        )
    group = rows // groups if groups > 1 or _has_groups(config) else None
    scale_dtype = np.dtype(jnp.dtype(scale))
    scheme = integer_scheme(4, False, group, scale_dtype)
    dtype = config_dtype(config, scale)
    entry = TensorInfo((columns, rows), dtype.name, "AWQ", sum(e.nbytes for e in entries), scheme)
    return Group(entry, names, functools.partial(_qarray, names, scheme, dtype))


def _has_groups(config: Mapping[str, Any]) -> bool:
    """Whether the configuration names a group size. If so, a single group is not a whole row by definition."""
    size = config[_KEY].get("group_size", config[_KEY].get("q_group_size"))
    return isinstance(size, int) and size > 0


def _qarray(names: Sequence[str], scheme: Scheme, dtype: np.dtype, arrays: Mapping[str, np.ndarray]) -> QArray:
    qweight, qzeros, scales = (arrays[name] for name in names)
    codes = np.ascontiguousarray(_columns(qweight).T)  # [out, in]
    data = codes[:, ::2] | codes[:, 1::2] << 4
    zeros = np.ascontiguousarray(_columns(qzeros).T)
    return QArray(jnp.asarray(data), jnp.asarray(np.ascontiguousarray(scales.T)), jnp.asarray(zeros), None, scheme, dtype)


def _columns(words: np.ndarray) -> np.ndarray:
    """The codes of words, in the order of the columns."""
    codes = codes_of_words(words, 4)
    return codes.reshape(*words.shape, 8)[..., _PLACE].reshape(codes.shape)


def _words(codes: np.ndarray) -> np.ndarray:
    """The inverse of `_columns`."""
    return words_of_codes(codes.reshape(len(codes), -1, 8)[..., _ORDER].reshape(codes.shape), 4)
