"""QArrays in files: named component arrays and a JSON record."""

import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np

from ..._json import Count, canonical, checked
from ...array.qarray import QArray
from ...array.scheme import Scheme
from ...array.validity import misfit
from ...errors import QuantError
from ...ops.policy import Policy
from ..checkpoint import TensorInfo


class _Record(msgspec.Struct, forbid_unknown_fields=True):
    """JSON schema of a record."""

    scheme: Count
    dtype: str
    slack: int
    zero_point: bool = False
    tensor_scale: bool = False
    policy: Count | None = None
    scale: "_Record | None" = None


LEAVES = ("codes", "scale", "zero_point", "tensor_scale")
"""The component arrays of a QArray; tensor names end in them."""


class Table:
    """A deduplicated list of JSON values. Records refer to schemes and policies by index."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self._places: dict[bytes, int] = {}

    def place(self, value: Mapping[str, object]) -> int:
        """The index of a value; adds a new one."""
        key = canonical(value)
        if key not in self._places:
            self._places[key] = len(self.values)
            self.values.append(value)
        return self._places[key]


class Records:
    """The JSON records of the QArrays of one output, by name. It also has the schemes and policies that they refer to."""

    def __init__(self) -> None:
        self.schemes, self.policies = Table(), Table()
        self.by_name: dict[str, Any] = {}

    @property
    def tables(self) -> dict[str, Any]:
        """The JSON of schemes and policies."""
        return {"schemes": self.schemes.values, "policies": self.policies.values}

    def add(self, name: str, q: QArray) -> dict[str, Any]:
        """Adds the record of a QArray; returns what `restore` takes.

        That is the record, and the schemes and policies that are new.

        Raises:
            QuantError: as `record`.
        """
        schemes, policies = len(self.schemes.values), len(self.policies.values)
        self.by_name[name] = record(q, self.schemes, self.policies, name)
        new = {"schemes": self.schemes.values[schemes:], "policies": self.policies.values[policies:]}
        return {"record": self.by_name[name], **new}

    def restore(self, name: str, added: Mapping[str, Any]) -> None:
        """Adds a record again."""
        for table, values in ((self.schemes, added["schemes"]), (self.policies, added["policies"])):
            for value in values:
                table.place(value)
        self.by_name[name] = added["record"]


def leaves(name: str, q: QArray) -> dict[str, jax.Array]:
    """The component arrays by their names in files: `<name>.codes`, `<name>.scale`, ..."""
    result: dict[str, jax.Array] = {}
    for part in LEAVES:
        value = getattr(q, part)
        if isinstance(value, QArray):
            result |= leaves(f"{name}.{part}", value)
        elif value is not None:
            result[f"{name}.{part}"] = value
    return result


def record(q: QArray, schemes: Table, policies: Table, name: str) -> dict[str, Any]:
    """The JSON record of a QArray, with the indices of scheme and policy in their tables.

    Raises:
        QuantError: for a QArray with inconsistent components, or a scheme or policy without a JSON form.
    """
    if reason := misfit(q):
        raise QuantError(f"tensor {name!r} is not a valid QArray: {reason}")
    form = q.scheme.to_json()
    known = len(schemes.values)
    result: dict[str, Any] = {"scheme": schemes.place(form), "dtype": q.dtype.name, "slack": q.slack}
    if result["scheme"] == known and Scheme.from_json(form).to_json() != form:  # a scheme that is new in this file
        raise QuantError(f"tensor {name!r}: scheme {q.scheme.name} cannot be restored from its JSON form")
    if q.zero_point is not None:
        result["zero_point"] = True
    if q.tensor_scale is not None:
        result["tensor_scale"] = True
    if q.policy is not None:
        if not isinstance(q.policy, Policy):
            raise QuantError(f"tensor {name!r} has a policy of type {type(q.policy).__name__}; files store only fb.Policy")
        result["policy"] = policies.place(q.policy.to_json())
    if isinstance(q.scale, QArray):
        result["scale"] = record(q.scale, schemes, policies, f"{name}.scale")
    return result


def moved_record(form: Mapping[str, Any], tables: tuple[list[Any], list[Any]], into: tuple[Table, Table]) -> dict[str, Any]:
    """A record of one file as another file writes it. Its schemes and policies are entries of the other file's tables."""
    result = dict(form) | {"scheme": into[0].place(tables[0][form["scheme"]])}
    if "policy" in form:
        result["policy"] = into[1].place(tables[1][form["policy"]])
    if "scale" in form:
        result["scale"] = moved_record(form["scale"], tables, into)
    return result


def leaf_names(name: str, form: Mapping[str, Any]) -> tuple[str, ...]:
    """The names of the component arrays of a record."""
    scale = leaf_names(f"{name}.scale", form["scale"]) if "scale" in form else (f"{name}.scale",)
    optional = tuple(f"{name}.{part}" for part in ("zero_point", "tensor_scale") if form.get(part))
    return (f"{name}.codes", *scale, *optional)


def checked_record(form: object, schemes: list[Any], policies: list[Any], where: str) -> dict[str, Any]:
    """Checks a JSON record and resolves its scheme and policy indices.

    Raises:
        QuantError: for a record that `record` does not write.
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
    """Loads the QArray of a checked record. `load` gives a component array by name. QuantError if they are inconsistent."""

    def part(which: str) -> jax.Array:
        return jnp.asarray(load(f"{name}.{which}"))

    def optional(which: str) -> jax.Array | None:
        return part(which) if form.get(which) else None

    scale = part("scale") if "scale" not in form else qarray(f"{name}.scale", form["scale"], load)
    static = form["scheme"], form["dtype"], form["slack"], form.get("policy")
    q = QArray(part("codes"), scale, optional("zero_point"), optional("tensor_scale"), *static)
    if reason := misfit(q):
        raise QuantError(f"tensor {name!r}: {reason}")
    return q


def _entry(table: list[Any], place: int, where: str) -> Any:
    if not 0 <= place < len(table):
        raise QuantError(f"{where} names entry {place} of a table of {len(table)} entries")
    return table[place]


def _dtype(name: str, where: str) -> np.dtype:
    try:
        if re.fullmatch(r"b?float\d+(_\w+)?", name):  # NumPy knows other texts as dtypes, too, and warns about some
            return np.dtype(jnp.dtype(name))
    except TypeError as error:
        raise QuantError(f"{where}: {name!r:.40} is not a dtype") from error
    raise QuantError(f"{where}: dtype is {name!r:.40}; a QArray has a floating dtype, such as bfloat16")


def weight_info(name: str, form: Mapping[str, Any], stored: Mapping[str, TensorInfo]) -> TensorInfo:
    """The description of the QArray of a checked record. `stored` describes its component arrays.

    Raises:
        QuantError: for codes with fewer axes than the scheme packs.
    """
    scheme, shape = form["scheme"], list(stored[f"{name}.codes"].shape)
    if len(shape) < -scheme.pack_axis:
        raise QuantError(f"tensor {name!r} has codes of shape {tuple(shape)}, which its scheme {scheme.name} does not fit")
    shape[scheme.pack_axis] = shape[scheme.pack_axis] * 8 // scheme.format.bits - form["slack"]
    nbytes = sum(stored[leaf].nbytes for leaf in leaf_names(name, form))
    return TensorInfo(tuple(shape), form["dtype"].name, scheme.name, nbytes, scheme, form.get("policy"))
