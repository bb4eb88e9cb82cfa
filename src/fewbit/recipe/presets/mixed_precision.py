"""MaxText's `quantization="intmp"`: bits by layer, from its JSON files."""

import dataclasses
import os
import pathlib
import re
from collections.abc import Mapping
from typing import Any

from ..._json import converted, file_text, form_of, parsed
from ..._patterns import Pattern
from ...array.scales.absmax import AbsMax
from ...array.scheme import Scheme
from ...errors import QuantError, UnsupportedError
from ...formats.format import FORMATS
from ...ops.policy import Policy
from ..recipe import RECIPES, Recipe
from ..role import QUANTIZED_ROLES, Role
from ..rule import Rule

LAYERS = "(?!.*encoder/).*layers.*"
"""The parameters of the decoder's layers, as in MaxText: no embedding, logits or vision encoder."""

_DEFAULT = "__default__"


@dataclasses.dataclass(frozen=True)
class _Layer:
    """One entry of MaxText's JSON, with MaxText's own defaults."""

    w_bits: int | None = None
    a_bits: int | None = None
    w_scale: float = 1.0
    a_scale: float = 1.0
    tile_size: int = -1

    def policy(self, key: str) -> Policy | None:
        """The policy of the entry; None where neither side has bits."""
        if self.w_bits is None:
            if self.a_bits is not None:
                raise UnsupportedError(f"entry {key!r} quantizes the activation alone; it must have w_bits, too")
            return None
        activation = None if self.a_bits is None else self._scheme(key, self.a_bits, self.a_scale)
        return Policy(self._scheme(key, self.w_bits, self.w_scale), activation, clips_gradient=False)

    def _scheme(self, key: str, bits: int, clip: float) -> Scheme:
        """AQT's integers: `clip * amax` is the upper edge of the largest code."""
        if bits not in range(2, 9):
            raise QuantError(f"entry {key!r} has {bits!r} bits; must be 2 to 8, or null for floating point")
        if self.tile_size != -1 and self.tile_size < 1:
            raise QuantError(f"entry {key!r}: tile_size is {self.tile_size}, must be a length or -1 for none")
        top = 2 ** (bits - 1) - 1
        length = None if self.tile_size == -1 else self.tile_size
        return Scheme(FORMATS[f"int{bits}_narrow"], {...: 1, -1: length}, calibration=AbsMax(clip * (top / (top + 0.5))))


_LAYER = form_of(_Layer)


def maxtext_mixed_precision(
    config: str | os.PathLike | Mapping[str, Any], *, name: str = "maxtext/intmp", path: str = LAYERS, description: str = ""
) -> Recipe:
    """The recipe of a MaxText mixed-precision JSON (`quantization="intmp"`, `quant_cfg_path`).

    A key is a regular expression for a full module path, such as `".*/query"`, and selects the module's kernel. As in
    MaxText the last matching key decides, missing fields come from `"__default__"`, and parameters without a matching key
    follow `"__default__"`. Unlike in MaxText, a key that matches nothing is an error once the recipe is applied to a model.

    The fields: `w_bits`, `a_bits` (2 to 8; null: not quantized), `w_scale`, `a_scale` (the fraction of amax that the range
    keeps), `tile_size` (group size along the contraction; -1: all). Gradients are floating point, computed from the
    quantized operands, straight through the rounding and not masked.

    Args:
        config: the JSON object, or its file.
        name: the recipe's name.
        path: the parameters that follow `"__default__"` where no key matches.
        description: one line about it.

    Returns:
        The recipe.

    Raises:
        QuantError: for an unknown field, bits outside 2 to 8, or a file that cannot be read.
        UnsupportedError: for an entry that quantizes activations alone.

    >>> print(maxtext_mixed_precision({"__default__": {"w_bits": 8}, ".*/query": {"w_bits": 4}}, name="mine"))
    mine
      (?:params/)?(?:.*/query)(?:/kernel)? used by dot_general -> int4_aqt
      (?!.*encoder/).*layers.* used by dot_general -> int8_aqt
    """
    entries = config
    if not isinstance(entries, Mapping):
        file = pathlib.Path(entries)
        where = f"mixed-precision file {file}"
        entries = converted(parsed(file_text(file, "mixed-precision file"), where), dict[str, Any], where)
    for key, entry in entries.items():
        converted(entry, _LAYER, f"entry {key!r}")
    default = entries.get(_DEFAULT, {})
    layers = {key: _Layer(**{**default, **entry}) for key, entry in entries.items() if key != _DEFAULT}
    rules = [_rule(key, layer) for key, layer in reversed(layers.items())]
    rules.append(Rule(path, _Layer(**default).policy(_DEFAULT), ops=("dot_general",), optional=bool(rules)))
    return Recipe(tuple(rules), name, description)


def _rule(key: str, layer: _Layer) -> Rule:
    """The rule of one key: the module's kernel, or the parameter of that path."""
    if flags := re.match(r"\(\?([aiLmsux]+)\)", key):
        rest = key[flags.end() :]
        raise QuantError(
            f"entry {key!r} begins with flags, and a key is a part of its rule's path; write '(?{flags[1]}:{rest})'"
        )
    Pattern(key, "entry")  # refuses a key that is no regular expression by itself
    roles: tuple[Role, ...] = ()
    # Routers are quantized only by keys that name them, such as ".*/gate".
    if re.search("gate|router", key) and layer.w_bits is not None:
        roles = (*QUANTIZED_ROLES, Role.ROUTER)
    return Rule(f"(?:params/)?(?:{key})(?:/kernel)?", layer.policy(key), ops=("dot_general",), roles=roles)


_four = {f".*/{_module}": {"w_bits": 4} for _module in ("query", "key", "value", "out", "wi_0", "wo")}
_scaled = {".*/query": {"w_scale": 0.8}, ".*/key": {"w_scale": 0.9}}
_tiled = {".*/query": {"tile_size": 128}, ".*/key": {"tile_size": 256}}

SHIPPED: dict[str, tuple[dict[str, Any], str]] = {
    "int8_weight_only": ({_DEFAULT: {"w_bits": 8}}, "int8 weights"),
    "int4_weight_only": ({_DEFAULT: {"w_bits": 4}}, "int4 weights"),
    "dense_llm_weight_only_scale": (
        {_DEFAULT: {"w_bits": 8}, **{key: {**entry, **_scaled.get(key, {})} for key, entry in _four.items()}},
        "int8 weights; int4 in attention, wi_0 and wo, with queries and keys clipped at 0.8 and 0.9",
    ),
    "dense_llm_subchannel": (
        {_DEFAULT: {"w_bits": 8, "a_bits": 8}, **{key: {**entry, **_tiled.get(key, {})} for key, entry in _four.items()}},
        "int8 weights and activations; int4 weights in attention, wi_0 and wo, with group sizes 128 and 256 for queries "
        "and keys",
    ),
}
"""MaxText's files in `configs/quantization`, each with a description."""

for _name, (_config, _text) in SHIPPED.items():
    _full = f"maxtext/intmp/{_name}"
    RECIPES.add(
        _full,
        maxtext_mixed_precision(
            _config, name=_full, description=f"{_text}: MaxText's intmp with {_name}.json, in AQT's numbers."
        ),
    )
