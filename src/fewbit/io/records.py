"""QArrays in files: the arrays of which one is made, under names of their own, and a JSON record of what they mean."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np

from .._json import Count, canonical, checked
from ..array import QArray, Scheme, misfit
from ..errors import QuantError
from ..ops import Policy


class _Record(msgspec.Struct, forbid_unknown_fields=True):
    """The JSON schema of a record."""

    scheme: Count
    dtype: str
    slack: int
    zero_point: bool = False
    tensor_scale: bool = False
    policy: Count | None = None
    scale: "_Record | None" = None


LEAVES = ("codes", "scale", "zero_point", "tensor_scale")
"""The parts of a QArray, which are the last words of their tensors' names."""


class Table:
    """JSON values, each once: a record names a scheme or policy by its place here."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self._places: dict[bytes, int] = {}

    def place(self, value: Any) -> int:
        """The place of a value, which is added if it is new."""
        key = canonical(value)
        if key not in self._places:
            self._places[key] = len(self.values)
            self.values.append(value)
        return self._places[key]


def leaves(name: str, q: QArray) -> dict[str, jax.Array]:
    """The arrays of a QArray by the names that files give them: `<name>.codes`, `<name>.scale`, ..."""
    result: dict[str, jax.Array] = {}
    for part in LEAVES:
        value = getattr(q, part)
        if isinstance(value, QArray):
            result |= leaves(f"{name}.{part}", value)
        elif value is not None:
            result[f"{name}.{part}"] = value
    return result


def record(q: QArray, schemes: Table, policies: Table, name: str) -> dict[str, Any]:
    """The JSON record of a QArray: scheme and policy by their places in the tables, dtype, slack, and optional parts.

    Raises:
        QuantError: for a QArray whose parts do not fit each other, or whose scheme or policy has no JSON form.
    """
    if reason := misfit(q):
        raise QuantError(f"tensor {name!r} is no valid QArray: {reason}")
    form = q.scheme.to_json()
    if Scheme.from_json(form).to_json() != form:
        raise QuantError(f"tensor {name!r}: scheme {q.scheme.name} does not come back from its JSON form")
    result: dict[str, Any] = {"scheme": schemes.place(form), "dtype": q.dtype.name, "slack": q.slack}
    if q.zero_point is not None:
        result["zero_point"] = True
    if q.tensor_scale is not None:
        result["tensor_scale"] = True
    if q.policy is not None:
        if not isinstance(q.policy, Policy):
            raise QuantError(
                f"tensor {name!r} has a policy of type {type(q.policy).__name__}; files hold those of fb.Policy"
            )
        result["policy"] = policies.place(q.policy.to_json())
    if isinstance(q.scale, QArray):
        result["scale"] = record(q.scale, schemes, policies, f"{name}.scale")
    return result


def leaf_names(name: str, form: Mapping[str, Any]) -> tuple[str, ...]:
    """The names of the arrays that a record needs."""
    scale = leaf_names(f"{name}.scale", form["scale"]) if "scale" in form else (f"{name}.scale",)
    optional = tuple(f"{name}.{part}" for part in ("zero_point", "tensor_scale") if form.get(part))
    return (f"{name}.codes", *scale, *optional)


def checked_record(form: Any, schemes: list[Any], policies: list[Any], where: str) -> dict[str, Any]:
    """A record read from JSON, with objects in place of the numbers of its scheme and policy.

    Raises:
        QuantError: for a record that `record` would not write.
    """
    result = {name: value for name, value in checked(form, _Record, where).items() if value is not None}
    result["scheme"] = Scheme.from_json(_entry(schemes, result["scheme"], where))
    result["dtype"] = _dtype(result["dtype"], where)
    if "policy" in result:
        result["policy"] = Policy.from_json(_entry(policies, result["policy"], where))
    if "scale" in result:
        result["scale"] = checked_record(result["scale"], schemes, policies, f"{where}.scale")
    return result


def qarray(name: str, form: Mapping[str, Any], load: Callable[[str], np.ndarray]) -> QArray:
    """The QArray of a checked record.

    Args:
        name: its name in the file.
        form: what `checked_record` gave.
        load: gives the array of a leaf's name.

    Raises:
        QuantError: when the arrays do not fit each other.
    """

    def part(which: str) -> jax.Array:
        return jnp.asarray(load(f"{name}.{which}"))

    q = QArray(
        part("codes"),
        qarray(f"{name}.scale", form["scale"], load) if "scale" in form else part("scale"),
        part("zero_point") if form.get("zero_point") else None,
        part("tensor_scale") if form.get("tensor_scale") else None,
        form["scheme"],
        form["dtype"],
        form["slack"],
        form.get("policy"),
    )
    if reason := misfit(q):
        raise QuantError(f"tensor {name!r}: {reason}")
    return q


def _entry(table: list[Any], place: int, where: str) -> Any:
    if not 0 <= place < len(table):
        raise QuantError(f"{where} names entry {place} of a table of {len(table)}")
    return table[place]


def _dtype(name: str, where: str) -> np.dtype:
    try:
        dtype = np.dtype(jnp.dtype(name))
    except TypeError as error:
        raise QuantError(f"{where}: {name!r:.40} is no dtype") from error
    if not jnp.issubdtype(dtype, jnp.floating):
        raise QuantError(f"{where}: dtype is {name}, but a QArray stands for floating numbers")
    return dtype
