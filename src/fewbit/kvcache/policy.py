"""Schemes of a KV cache, for keys and values."""

import dataclasses

from jax.typing import DTypeLike

from .._registry import near_names
from ..array.scheme import Scheme
from ..errors import QuantError
from ..formats.format import FORMATS, AbstractFormat

_TILES = {"head": {...: 1, -1: None}, "token": {...: 1, -3: None, -1: None}}
"""What shares a scale: one head of a token, or all its heads."""

_FOLDABLE = {(1, 1, 1, None): "head", (1, None, 1, None): "token"}  # the tiles of an array [B, K, S, h]


@dataclasses.dataclass(frozen=True)
class KVPolicy:
    """The schemes of keys and values `[B, K, S, h]` in a cache.

    Scales must not vary along the head dimension, which attention contracts, nor be shared between tokens, so that a token
    can be appended without changing the others.

    Attributes:
        keys: the scheme of the keys: symmetric, one scale for each token and head, or for each token.
        values: the scheme of the values, with the same limits.
        sees_raw: whether tokens of one call attend to each other's unquantized keys and values (MaxText's prefill), and to
            earlier calls' quantized ones. False: always to quantized ones, so that the result does not depend on how a
            prompt is split into calls.
        int8_queries: whether decoders quantize their queries to int8, so that attention multiplies integers; keys and values
            must be int8.

    Raises:
        QuantError: for a scheme whose scales cannot be folded, or that needs more than codes and scales; for int8 queries
            where keys or values are not int8.

    >>> print(kv_policy("int8"))
    int8_narrow per head
    """

    keys: Scheme
    values: Scheme
    sees_raw: bool = False
    int8_queries: bool = False

    def __post_init__(self) -> None:
        for name in ("keys", "values"):
            scheme = getattr(self, name)
            if reason := _unfit(scheme):
                raise QuantError(f"the scheme of the {name} {reason}")
            if self.int8_queries and scheme.format != FORMATS["int8_narrow"]:
                raise QuantError(f"int8 queries need int8 keys and values; the {name} are {scheme.format.name}")

    def __str__(self) -> str:
        text, values = _words(self.keys), _words(self.values)
        if text != values:
            text = f"keys {text}, values {values}"
        if self.sees_raw:
            text += ", raw within a call"
        if self.int8_queries:
            text += ", int8 queries"
        return text


def kv_policy(
    keys: str | AbstractFormat,
    values: str | AbstractFormat | None = None,
    *,
    per: str = "head",
    scale: AbstractFormat | DTypeLike = "float32",
    sees_raw: bool = False,
    int8_queries: bool = False,
) -> KVPolicy:
    """The policy of a format; scales map amax to the format's largest number.

    Args:
        keys: the format of the keys. `"int2"` to `"int8"` mean the narrow (symmetric) range, in which `-x` is quantized to
            the negative of `x`, and `"fp8"` means e4m3fn; any other name is that of `fb.FORMATS`. A Format is used as it is.
        values: the format of the values; None: that of the keys.
        per: `"head"`: a scale for each token and head (MaxText's `dkv`); `"token"`: for each token (`heads_and_dkv`).
        scale: the dtype of the scales: float32, bfloat16, float16, or a Format.
        sees_raw: as in `KVPolicy`.
        int8_queries: as in `KVPolicy`.

    Returns:
        The policy.

    Raises:
        QuantError: for an unknown name, with the nearest ones, or for a format without negative and positive numbers; for
            int8 queries of other keys or values than int8.

    >>> print(kv_policy("int8", "int4", per="token", scale="bfloat16"))
    keys int8_narrow per token, bfloat16 scales, values int4_narrow per token, bfloat16 scales
    """
    if per not in _TILES:
        raise QuantError(f"unknown per {per!r}; {near_names(per, tuple(_TILES))}")
    if values is None:
        values = keys
    schemes = [Scheme(_format(f), _TILES[per], scale=scale) for f in (keys, values)]
    return KVPolicy(*schemes, sees_raw=sees_raw, int8_queries=int8_queries)


def _format(spec: str | AbstractFormat) -> AbstractFormat:
    """The format of a name."""
    if isinstance(spec, AbstractFormat):
        return spec
    names = f"{spec}_narrow", {"fp8": "e4m3fn"}.get(spec, spec)
    for name in names:
        if name in FORMATS:
            return FORMATS[name]
    raise QuantError(f"unknown cache format {spec!r}; {near_names(spec, ('fp8', *FORMATS.names()))}")


def _unfit(scheme: Scheme) -> str | None:
    """Why a cache cannot use a scheme; None when it can."""
    if not scheme.format.min < 0 < scheme.format.max:
        return f"has format {scheme.format.name}, which lacks negative or positive numbers; use int8, int4 or e4m3fn"
    if scheme.zero_point is not None:
        return "has zero points; attention folds scales only, so use a symmetric scheme"
    if scheme.tensor_scale or isinstance(scheme.scale, Scheme):
        return "has two levels of scales; use one level, with a float dtype or a Format"
    if scheme.tiles(4) not in _FOLDABLE or scheme.pack_axis != -1:
        return (
            f"has tiles {scheme.tile}; use {{...: 1, -1: None}}, a scale for each token and head, "
            "or {...: 1, -3: None, -1: None}, a scale for each token"
        )
    return None


def _words(scheme: Scheme) -> str:
    """The fields of a scheme that differ between cache policies."""
    form, text = scheme.to_json(), f"{scheme.format.name} per {_FOLDABLE[scheme.tiles(4)]}"
    if form["scale"] != "float32":
        text += f", {form['scale']} scales"
    if form["calibration"] != "absmax":
        text += f", {form['calibration']}"
    return text
