"""Formats and stored scales as compile-time constants of the Triton kernels.

A kernel takes each as one `tl.constexpr` parameter and reads its fields. Triton compiles a kernel once for each value: its cache
keys contain the `repr` of a constant, so every field is shown in it, and is a plain number, string or tuple.
"""

import dataclasses
import functools
from typing import Literal, Self

import numpy as np

from ...array.scales.store import ScaleStore
from ...array.scheme import Scheme
from ...formats.codebook import Codebook
from ...formats.e8m0 import E8M0
from ...formats.format import AbstractFormat
from ...formats.integer import Integer
from ...formats.minifloat import Minifloat
from ...formats.rounding import rounding_table


@dataclasses.dataclass(frozen=True)
class Codes:
    """The format of the codes.

    Attributes:
        kind: of the numbers.
        bits: of a code.
        mantissa: explicit mantissa bits of a minifloat.
        bias: the exponent bias of a minifloat.
        low: the least number.
        high: the largest number.
        step: between integers.
        signed: whether the first bit of a code is a sign.
        specials: which codes of a minifloat are not numbers, as in `Minifloat`.
        nan: the code of NaN.
        thresholds: of a codebook: an element above i of them rounds to number i.
        table: the numbers of a codebook, in code order.
    """

    kind: Literal["minifloat", "integer", "codebook"]
    bits: int
    mantissa: int
    bias: int
    low: float
    high: float
    step: float
    signed: bool
    specials: str
    nan: int
    thresholds: tuple[float, ...]
    table: tuple[float, ...]

    @classmethod
    @functools.lru_cache(maxsize=64)
    def of(cls, fmt: AbstractFormat) -> Self:
        """The constants of a format."""
        kind: Literal["minifloat", "integer", "codebook"] = "codebook"
        thresholds, table = (), ()
        if isinstance(fmt, Minifloat):
            kind = "minifloat"
        elif isinstance(fmt, Integer):
            kind = "integer"
        elif isinstance(fmt, Codebook):
            thresholds, table = tuple(rounding_table(fmt).thresholds.tolist()), tuple(map(float, fmt.table))
        return cls(
            kind=kind,
            bits=fmt.bits,
            mantissa=getattr(fmt, "mantissa", 0),
            bias=getattr(fmt, "bias", 0),
            low=float(fmt.min),
            high=float(fmt.max),
            step=float(getattr(fmt, "step", 1.0)),
            signed=bool(getattr(fmt, "signed", True)),
            specials=getattr(fmt, "specials", "none"),
            nan=int(rounding_table(fmt).nan),
            thresholds=thresholds,
            table=table,
        )


@dataclasses.dataclass(frozen=True)
class Scales:
    """How the scales and zero points of a scheme are stored.

    Attributes:
        kind: powers of two (E8M0), minifloats, or a float dtype.
        mantissa: mantissa bits of a minifloat.
        bias: the exponent bias of a minifloat.
        low: the smallest positive scale.
        high: the largest scale.
        nan: the code of NaN.
        has_tensor_scale: whether one scale of the whole tensor multiplies all others.
        zero: zero points: none, codes, or offsets in units of values.
        zero_signed: whether zero point codes are signed.
    """

    kind: Literal["power", "minifloat", "float"]
    mantissa: int
    bias: int
    low: float
    high: float
    nan: int
    has_tensor_scale: bool
    zero: Literal["none", "codes", "offsets"]
    zero_signed: bool

    @classmethod
    @functools.lru_cache(maxsize=64)
    def of(cls, scheme: Scheme) -> Self:
        """The constants of a scheme, whose scales are E8M0, E4M3 or a float dtype."""
        stored = scheme.scale
        kind: Literal["power", "minifloat", "float"] = "float"
        nan = 0
        if isinstance(stored, AbstractFormat):
            kind, nan = "minifloat", int(rounding_table(stored).nan)
        if isinstance(stored, E8M0):
            kind = "power"
        zero: Literal["none", "codes", "offsets"] = "none"
        if isinstance(scheme.zero_point, AbstractFormat):
            zero = "codes"
        elif scheme.zero_point is not None:
            zero = "offsets"
        assert not isinstance(stored, Scheme)
        store = ScaleStore(stored if isinstance(stored, AbstractFormat) else np.dtype(stored), limit=scheme.scale_limit)
        return cls(
            kind=kind,
            mantissa=getattr(stored, "mantissa", 0),
            bias=getattr(stored, "bias", 0),
            low=float(store.smallest),
            high=float(store.largest),
            nan=nan,
            has_tensor_scale=scheme.tensor_scale,
            zero=zero,
            zero_signed=bool(getattr(scheme.zero_point, "signed", False)),
        )
