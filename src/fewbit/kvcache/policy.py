"""How keys and values are kept in few bits: a scheme for each, with scales that attention can fold into its products."""

import dataclasses

from jax.typing import DTypeLike

from .._registry import near_names
from ..array import Scheme
from ..errors import QuantError
from ..formats import FORMATS, AbstractFormat

_TILES = {"head": {...: 1, -1: None}, "token": {...: 1, -3: None, -1: None}}
"""What shares a scale: the coordinates of one head of a token, or those of all its heads."""

_FOLDABLE = {(1, 1, 1, None): "head", (1, None, 1, None): "token"}  # the tiles of an array [B, K, S, h]


@dataclasses.dataclass(frozen=True)
class KVPolicy:
    """How a cache keeps keys and values `[B, K, S, h]`, and what new tokens see of each other.

    The scales must not vary along the head dimension, over which attention sums the keys, nor be shared between tokens, so
    that a token can be added without touching the others.

    Attributes:
        keys: the scheme of the keys: symmetric, one scale for each token and head, or for each token.
        values: the scheme of the values, likewise.
        sees_raw: whether tokens that are read in one call see each other's keys and values as they were computed (MaxText's
            prefill); those of earlier calls they see as stored. False: all are seen as stored, so that it does not matter in
            how many calls a prompt is read.

    Raises:
        QuantError: for a scheme whose scales cannot be folded, or that needs more than codes and scales.

    >>> print(kv_policy("int8"))
    int8_narrow per head
    """

    keys: Scheme
    values: Scheme
    sees_raw: bool = False

    def __post_init__(self) -> None:
        for name in ("keys", "values"):
            if reason := _unfit(getattr(self, name)):
                raise QuantError(f"the scheme of the {name} {reason}")

    def __str__(self) -> str:
        keys, values = _words(self.keys), _words(self.values)
        seen = ", raw within a call" if self.sees_raw else ""
        return (keys if keys == values else f"keys {keys}, values {values}") + seen


def kv_policy(
    keys: str | AbstractFormat,
    values: str | AbstractFormat | None = None,
    *,
    per: str = "head",
    scale: AbstractFormat | DTypeLike = "float32",
    sees_raw: bool = False,
) -> KVPolicy:
    """The policy of a format: scales that put the largest magnitude on the format's largest number.

    Args:
        keys: the format of the keys. The names `"int2"` to `"int8"` mean the narrow range, in which a number and its
            negative come back alike, and `"fp8"` means e4m3fn; any other name is that of `fb.FORMATS`. A Format is taken as
            it is.
        values: the format of the values; None: that of the keys.
        per: `"head"`: a scale for each token and head (MaxText's `dkv`); `"token"`: for each token (`heads_and_dkv`).
        scale: what holds the scales: float32, bfloat16, float16, or a Format.
        sees_raw: as in `KVPolicy`.

    Returns:
        The policy.

    Raises:
        QuantError: for a name that is not known, with those near it, or for a format without negative and positive numbers.

    >>> print(kv_policy("int8", "int4", per="token", scale="bfloat16"))
    keys int8_narrow per token, bfloat16 scales, values int4_narrow per token, bfloat16 scales
    """
    if per not in _TILES:
        raise QuantError(f"unknown sharing of scales {per!r}; {near_names(per, tuple(_TILES))}")
    schemes = [Scheme(_format(f), _TILES[per], scale=scale) for f in (keys, keys if values is None else values)]
    return KVPolicy(*schemes, sees_raw=sees_raw)


def _format(spec: str | AbstractFormat) -> AbstractFormat:
    """The format of a name."""
    if isinstance(spec, AbstractFormat):
        return spec
    name = "e4m3fn" if spec == "fp8" else spec
    if name not in FORMATS:
        raise QuantError(f"unknown cache format {spec!r}; {near_names(spec, ('fp8', *FORMATS.names()))}")
    narrow = f"{name}_narrow"
    return FORMATS[narrow if narrow in FORMATS else name]


def _unfit(scheme: Scheme) -> str | None:
    """Why a cache cannot keep a scheme; None when it can."""
    if not scheme.format.min < 0 < scheme.format.max:
        return f"has format {scheme.format.name}, whose numbers do not lie on both sides of zero; take int8, int4 or e4m3fn"
    if scheme.zero_point is not None:
        return "has zero points; attention folds scales only, so take a symmetric scheme"
    if scheme.tensor_scale or isinstance(scheme.scale, Scheme):
        return "has scales of two levels; take one level, held as a float dtype or in a Format"
    if scheme.tiles(4) not in _FOLDABLE or scheme.pack_axis != -1:
        return (
            f"has tiles {scheme.tile}; take {{...: 1, -1: None}}, a scale for each token and head, "
            "or {...: 1, -3: None, -1: None}, a scale for each token"
        )
    return None


def _words(scheme: Scheme) -> str:
    """What stands out of a scheme."""
    form = scheme.to_json()
    held = "" if form["scale"] == "float32" else f", {form['scale']} scales"
    searched = "" if form["calibration"] == "absmax" else f", {form['calibration']}"
    return f"{scheme.format.name} per {_FOLDABLE[scheme.tiles(4)]}{held}{searched}"
