"""Reads rotary embedding and its scaling from config.json."""

import math
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from ..._json import Positive, converted
from ...errors import QuantError, UnsupportedError
from ..attention.rope_scaling import Dynamic, Linear, Llama3, LongRope, Proportional, RopeScaling, Yarn, yarn_gain

_Number = Annotated[float, msgspec.Meta(gt=0, lt=1e30)]
_WHERE = "config.json's rope_parameters"

_OF_IMAGES = ("mrope_section", "mrope_interleaved")
"""What `rope_parameters` has for positions in images."""


def llama3_rope(theta: float, factor: float) -> dict[str, Any]:
    """The `rope_parameters` of a family whose default is Llama 3.1's scaling of 8,192 positions."""
    return {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


def without_images(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary embedding of text alone, where positions in images are those of the text."""
    kept = {key: value for key, value in rope.items() if key not in _OF_IMAGES}
    return {key: "default" if key in ("type", "rope_type") and value == "mrope" else value for key, value in kept.items()}


def rope_fields(
    rope: Mapping[str, Any],
    plain: Mapping[str, float],
    *,
    head_dim: int,
    context: int,
    original_context: int | None = None,
    rotates_part: bool = False,
) -> dict[str, Any]:
    """The fields of `DecoderConfig` for `rope_parameters`, or the older `rope_scaling`.

    Args:
        rope: the JSON object; empty: no scaling.
        plain: `rope_theta` and `partial_rotary_factor` outside of the object, which come second.
        head_dim: the width of a head.
        context: `max_position_embeddings`.
        original_context: `original_max_position_embeddings` outside of the object, which comes first.
        rotates_part: whether the family obeys `partial_rotary_factor`; transformers ignores it in the others.

    Raises:
        UnsupportedError: for an unknown scaling, or a parameter that its scaling or its family does not have.
        QuantError: for a missing parameter, or one of another type.
    """
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in _SCHEMAS:
        raise UnsupportedError(f"{_WHERE} has rope_type = {kind!r}; supported is {' or '.join(map(repr, _SCHEMAS))}")
    schema = _SCHEMAS[kind]
    given = {key: value for key, value in rope.items() if value is not None}
    known = {field.encode_name for field in msgspec.structs.fields(schema)}
    if unknown := [key for key in given if key not in known]:
        raise UnsupportedError(
            f"{_WHERE} has {unknown[0]} = {given[unknown[0]]!r:.80}, which rotary embedding of type {kind!r} does not have"
        )
    found = converted({**plain, **given}, schema, _WHERE)
    original = original_context or found.original_max_position_embeddings or context
    scaling, context = _scaling(found, context, original)
    if isinstance(found, _Proportional):
        pairs = int(found.partial_rotary_factor * head_dim // 2)
        return {"rope_theta": found.rope_theta, "rope_scaling": Proportional(pairs, found.factor), "context": context}
    if found.partial_rotary_factor != 1 and not rotates_part:
        raise UnsupportedError(
            f"config.json has partial_rotary_factor = {found.partial_rotary_factor}; supported is 1, for transformers ignores it "
            "in models of this family"
        )
    rotary_dim = int(head_dim * found.partial_rotary_factor)
    if rotary_dim == head_dim:
        rotary_dim = 0
    return {"rope_theta": found.rope_theta, "rope_scaling": scaling, "rotary_dim": rotary_dim, "context": context}


class _Plain(msgspec.Struct, kw_only=True):
    rope_theta: _Number
    partial_rotary_factor: _Number
    rope_type: str = "default"
    type: str = "default"
    original_max_position_embeddings: Positive | None = None


class _Factor(_Plain, kw_only=True):
    factor: _Number


class _Proportional(_Plain, kw_only=True):
    factor: _Number = 1.0


class _Llama3(_Factor, kw_only=True):
    low_freq_factor: _Number
    high_freq_factor: _Number


class _Yarn(_Plain, kw_only=True):
    factor: _Number | None = None
    attention_factor: _Number | None = None
    beta_fast: _Number = 32.0
    beta_slow: _Number = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


class _LongRope(_Plain, kw_only=True):
    short_factor: list[_Number]
    long_factor: list[_Number]
    factor: _Number | None = None
    attention_factor: _Number | None = None


_SCHEMAS: dict[str, type[_Plain]] = {
    "default": _Plain,
    "linear": _Factor,
    "dynamic": _Factor,
    "proportional": _Proportional,
    "llama3": _Llama3,
    "yarn": _Yarn,
    "longrope": _LongRope,
}


def _scaling(found: _Plain, context: int, original: int) -> tuple[RopeScaling | None, int]:
    """The scaling, and the context with it."""
    match found:
        case _LongRope():
            factor = found.factor or context / original
            gain = found.attention_factor
            if gain is None and original == 1:
                raise QuantError(
                    f"{_WHERE} has an original context of 1 token, whose logarithm is no divisor; it is damaged"
                )
            if gain is None:
                gain = math.sqrt(1 + math.log(max(factor, 1)) / math.log(original))
            return LongRope(tuple(found.short_factor), tuple(found.long_factor), original, gain), context
        case _Yarn():
            factor = found.factor or context / original
            gain = found.attention_factor or 0.0
            if not gain and found.mscale and found.mscale_all_dim:
                gain = yarn_gain(factor, found.mscale) / yarn_gain(factor, found.mscale_all_dim)
            return Yarn(factor, original, found.beta_fast, found.beta_slow, found.truncate, gain), context
        case _Llama3():
            return Llama3(found.factor, found.low_freq_factor, found.high_freq_factor, original), context
        case _Factor() if found.rope_type == "dynamic" or found.type == "dynamic":
            return Dynamic(found.factor, context), int(context * found.factor)
        case _Factor():
            return Linear(found.factor), context
    return None, context
