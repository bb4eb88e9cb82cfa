"""What config.json says of layers with a state: Granite 4, LFM2, Nemotron-H."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec

from ._json import converted
from .errors import QuantError, UnsupportedError

GRANITE_4, LFM2 = ("mamba", "linear_attention"), ("conv",)
"""The names in `layer_types` of layers with a state in place of keys and values."""
_ATTENTION = ("attention", "full_attention")


def layers_with_state(layer_types: Sequence[str], layers: int, names: tuple[str, ...]) -> tuple[int, ...]:
    """The layers with a state in place of keys and values; the others have attention.

    Args:
        layer_types: the kind of each layer.
        layers: the number of layers.
        names: the kinds with a state, `GRANITE_4` or `LFM2`.

    Raises:
        QuantError: for another number of kinds than layers.
        UnsupportedError: for another kind.
    """
    if len(layer_types) != layers:
        raise QuantError(f"config.json has {len(layer_types)} layer_types and num_hidden_layers {layers}")
    known = (*names, *_ATTENTION)
    if unknown := [kind for kind in layer_types if kind not in known]:
        raise UnsupportedError(
            f"config.json has layer_types = {unknown[0]!r}; supported is {' or '.join(repr(kind) for kind in known)}"
        )
    return tuple(i for i, kind in enumerate(layer_types) if kind in names)


def lfm2_layer_types(given: Sequence[str] | None, attention: Collection[int] | None, layers: int) -> Sequence[str]:
    """The kind of each layer of LFM2, by `layer_types` or `full_attn_idxs`; every layer has attention where neither is given."""
    if given is not None:
        return given
    return ["full_attention" if attention is None or i in attention else "conv" for i in range(layers)]


def lfm2_hidden(given: int, *, is_adjusted: bool, factor: float | None, multiple: int) -> int:
    """The width of LFM2's feed-forward block: two thirds of what is given, times a factor, rounded up.

    Args:
        given: `block_ff_dim`, or `intermediate_size`.
        is_adjusted: `block_auto_adjust_ff_dim`.
        factor: `block_ffn_dim_multiplier`; None: nothing is multiplied or rounded.
        multiple: `block_multiple_of`.
    """
    hidden = int(2 * given / 3) if is_adjusted else given
    if not is_adjusted or factor is None:
        return hidden
    return -(-int(factor * hidden) // multiple) * multiple


_NEMOTRON_H = {"M": "linear_attention", "E": "moe", "*": "full_attention", "-": "mlp"}
"""The letters of `hybrid_override_pattern`."""
_OLDER = {"mamba": "linear_attention", "attention": "full_attention"}


class _Layers(msgspec.Struct):
    kinds: list[str] | None = msgspec.field(name="layers_block_type", default=None)
    pattern: str | None = msgspec.field(name="hybrid_override_pattern", default=None)


def nemotron_h_kinds(config: Mapping[str, Any]) -> list[str]:
    """The kind of each layer of Nemotron-H: "linear_attention" (a state space), "full_attention", "mlp" or "moe".

    Args:
        config: the content of config.json.

    Raises:
        QuantError: when it does not say the kinds.
        UnsupportedError: for another kind.
    """
    found = converted(config, _Layers, "config.json")
    kinds = [_OLDER.get(kind, kind) for kind in found.kinds or ()]
    if not kinds and found.pattern:
        kinds = [_NEMOTRON_H.get(letter, letter) for letter in found.pattern]
    if not kinds:
        raise QuantError("config.json lacks 'layers_block_type', or the older 'hybrid_override_pattern'")
    for kind in kinds:
        if kind not in _NEMOTRON_H.values():
            raise UnsupportedError(
                f"config.json has a layer of the kind {kind!r}; supported is {' or '.join(map(repr, _NEMOTRON_H.values()))}"
            )
    return kinds
