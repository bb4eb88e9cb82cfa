"""QArrays in `flax.serialization`.

`linen.quantize` and `nnx.quantize` register them; a program that uses neither calls `register` once. Importing fewbit does not,
because that would import flax.
"""

import dataclasses
import functools
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from ..array.qarray import QArray
from ..errors import QuantError
from ..ops.policy import Policy
from ._flax import flax

_PARTS = ("codes", "scale", "zero_point", "tensor_scale")
_FORM = "form"


@functools.cache
def register() -> None:
    """Registers QArrays with `flax.serialization`; a second call does nothing.

    The state of a QArray is a dict of its arrays and of `form`, the JSON text of its scheme, dtype, slack and policy as uint8.
    Restoring compares it with the target's, so that codes are never decoded by another scheme.

    Raises:
        UnsupportedError: when flax is not installed.

    >>> from flax import serialization
    >>> register()
    >>> q = fb.quantize(jnp.ones((4, 64)), "nf4")
    >>> serialization.from_bytes(q, serialization.to_bytes(q))
    QArray(nf4, float32[4, 64], 144 bytes, 4.500 bits/weight)
    """
    flax("serialization").register_serialization_state(QArray, _to_state_dict, _from_state_dict)


def _to_state_dict(q: QArray) -> dict[str, Any]:
    to_state_dict = flax("serialization").to_state_dict
    parts = {part: getattr(q, part) for part in _PARTS}
    return {_FORM: _form(q)} | {part: to_state_dict(value) for part, value in parts.items() if value is not None}


def _from_state_dict(target: QArray, state: object) -> QArray:
    expected = _to_state_dict(target)
    if not isinstance(state, dict) or set(state) != set(expected):
        found = sorted(state) if isinstance(state, dict) else f"a {type(state).__name__}"
        raise QuantError(f"the state of a QArray in {target.scheme.name} has {sorted(expected)}; found {found}")
    if bytes(np.asarray(state[_FORM])) != bytes(expected[_FORM]):
        raise QuantError(
            f"the state is not that of the target QArray: found {_text(state[_FORM])}, expected {_text(expected[_FORM])}"
        )
    parts = {part: state[part] for part in expected if part != _FORM}
    parts["scale"] = flax("serialization").from_state_dict(target.scale, state["scale"])
    for part, value in parts.items():
        if np.shape(value) != getattr(target, part).shape:
            raise QuantError(f"the state's {part} has shape {np.shape(value)}, the target's {getattr(target, part).shape}")
    return dataclasses.replace(target, **jax.tree.map(jnp.asarray, parts))


def _form(q: QArray) -> np.ndarray:
    """The static fields of a QArray as an array. It is JSON text in uint8, since state dicts contain arrays."""
    if not isinstance(q.policy, Policy | None):
        raise QuantError(f"the QArray has a policy of type {type(q.policy).__name__}; files store only fb.Policy")
    policy = None if q.policy is None else q.policy.to_json()
    form = {"scheme": q.scheme.to_json(), "dtype": q.dtype.name, "slack": q.slack, "policy": policy}
    return np.frombuffer(json.dumps(form, sort_keys=True).encode(), np.uint8)


def _text(form: ArrayLike) -> str:
    return bytes(np.asarray(form)).decode("utf-8", "replace")
