"""Names of modules that an engine must leave in float."""

from collections.abc import Collection, Sequence


def linear_modules(kept: Sequence[str], quantized: Collection[str]) -> list[str]:
    """The modules that an engine must leave in float.

    Those with a weight among the tensors that are kept, but for norms and the input embedding, which are no linear layers; and
    the output layer, which may be tied and have no tensor.

    >>> linear_modules(["model.norm.weight", "m.gate.weight", "m.up.bias"], ["m.up"])
    ['m.gate', 'lm_head']
    """
    owners = [name.removesuffix(".weight") for name in kept if name.endswith(".weight")]
    owners = [owner for owner in owners if not owner.endswith(("norm", "embed_tokens"))]
    return [owner for owner in dict.fromkeys((*owners, "lm_head")) if owner not in quantized]
