"""Names of modules: those left in float, and output layers with two names."""

from collections.abc import Collection, Sequence

MODULE_PATTERNS = ("{}.", r"(?:.*\.)?{}")
"""A part of a model as vLLM and transformers look for it: within a module's name, and as a regular expression from its start."""

OLDER_HEADS = {"embed_out": "lm_head"}
"""Output layers that transformers 5 runs under another name than files have (GPT-NeoX)."""


def linear_modules(kept: Sequence[str], quantized: Collection[str], patterns: Sequence[str] = MODULE_PATTERNS) -> list[str]:
    """The modules that an engine must leave in float.

    Those with a weight among the tensors that are kept, but for norms and the input embedding, which are no linear layers; and
    the output layer, which may be tied and have no tensor. A part of the model without a quantized weight is named as a whole,
    too, because transformers may have its modules under other names than its files.

    Args:
        kept: the names of the tensors that are not quantized.
        quantized: the modules that are.
        patterns: what is listed for a whole part, whose name replaces `{}`.

    >>> linear_modules(["model.norm.weight", "m.gate.weight", "m.up.bias"], ["m.up"])
    ['m.gate', 'lm_head']
    >>> linear_modules(["vision_tower.layers.0.up.weight"], ["model.layers.0.up"], ["re:.*{}.*"])
    ['vision_tower.layers.0.up', 'lm_head', 're:.*vision_tower.*']
    >>> linear_modules(["norm.weight"], ["embed_out"])
    []
    """
    owners = [name.removesuffix(".weight") for name in kept if name.endswith(".weight")]
    owners = [owner for owner in owners if not owner.endswith(("norm", "embed_tokens"))]
    quantized = {*quantized, *(OLDER_HEADS[name] for name in quantized if name in OLDER_HEADS)}
    owners = [owner for owner in dict.fromkeys((*owners, "lm_head")) if owner not in quantized]
    return owners + [pattern.format(part) for part in parts_apart(kept, quantized) for pattern in patterns]


def parts_apart(kept: Sequence[str], quantized: Collection[str]) -> list[str]:
    """The parts of a model without a quantized weight, such as a vision tower.

    A part is what a module's name begins with, after `model.`.

    Args:
        kept: the names of the tensors that are not quantized.
        quantized: the modules that are.
    """
    own = {_part(f"{module}.weight") for module in quantized}
    return [part for part in dict.fromkeys(map(_part, kept)) if part and part not in own]


def _part(name: str) -> str:
    """The part of a tensor; empty for one of a module that is no part of another."""
    pieces = name.removeprefix("model.").split(".")
    return pieces[0] if len(pieces) > 2 else ""
