"""Quantized activations of compressed-tensors, scaled when a product runs."""

import dataclasses
from typing import Any

from ....array.scheme import Scheme, scheme
from ....formats.e8m0 import E8M0
from .config import Arguments

_INT8 = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": True, "strategy": "token"}
_FP8 = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": True}
_MX = {"symmetric": True, "dynamic": True, "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}

_KNOWN: dict[str, dict[str, Any]] = {
    "int8": _INT8,
    "int4": _INT8 | {"num_bits": 4},
    "fp8": _FP8 | {"strategy": "token"},
    "fp8_g128": _FP8 | {"strategy": "group", "group_size": 128},
    "mxfp8": {"num_bits": 8, "type": "float", **_MX},
    "mxfp4": {"num_bits": 4, "type": "float", **_MX},
}
"""The settings of each scheme of activations."""


def activation_name(given: Scheme) -> str | None:
    """The scheme with these numbers and scales among the known ones. None if there is none.

    How MX scales are chosen is up to the engine, so it is not compared.
    """
    for name in _KNOWN:
        known = scheme(name)
        if isinstance(known.scale, E8M0):
            known = dataclasses.replace(known, calibration=given.calibration)
        if given == known:
            return name
    return None


def activation_arguments(given: Scheme | None) -> dict[str, Any] | None:
    """The `input_activations` of a config group; None for activations that are not quantized."""
    if given is None:
        return None
    name = activation_name(given)
    assert name is not None
    return dict(_KNOWN[name])


def activation_scheme(arguments: Arguments | None) -> Scheme | None:
    """The scheme of dynamic activations. None for none, and for static ranges, which a policy does not have."""
    if arguments is None:
        return None
    fields = ("num_bits", "type", "symmetric", "dynamic", "strategy", "group_size")
    found = {field: getattr(arguments, field) for field in fields}
    for name, known in _KNOWN.items():
        if all(found[field] == known.get(field) for field in fields):
            return scheme(name)
    return None
