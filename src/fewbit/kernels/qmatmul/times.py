"""Measured latencies per device, from which `fb.explain` estimates others.

A table has, for a backend, a scheme and a weight layout, the time of `x @ w` for a few numbers of rows M and sizes K x N, and its
ratio to the dense float32 product of the same layout, measured in alternation. Two numbers are interpolated in log-log space: the
ratio to the dense product, and the dense product's time per multiply-add. They are linear in log(K N), the size of the weight, at
each measured M, and then in log(M). Beyond the measured range they are constant: time grows with M K N.

`fewbit bench --tune` measures a table for the machine it runs on.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Self

import msgspec
import numpy as np

from ..._json import Positive, converted, form_of
from ...array import Scheme, scheme
from ...errors import QuantError

DENSE = "dense"
"""The backend name of float products in a table."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One measured product.

    Attributes:
        backend: its name; `DENSE` for a product of floats.
        weight: the name of the weight's scheme, or its dtype.
        layout: "[N, K]" for `x @ w.T`, "[K, N]" for `x @ w`; tiles run along K.
        m: rows of x, which is float32 unless the weight is dense and of another dtype.
        k: length of the contraction.
        n: columns of the result.
        ms: median milliseconds.
        ratio: the lowest, median and highest ratio to the dense float32 product of the same layout, measured in pairs.
        date: when it was measured, as ISO 8601 writes it.
        activation: the scheme to which x is quantized within the product; empty: none.
    """

    backend: str
    weight: str
    layout: str
    m: int
    k: int
    n: int
    ms: float
    ratio: tuple[float, float, float]
    date: str
    activation: str = ""

    @property
    def key(self) -> tuple[Any, ...]:
        """Identifies what was measured; rows with equal keys are repetitions."""
        return self.backend, self.weight, self.activation, self.layout, self.m, self.k, self.n


@dataclasses.dataclass(frozen=True)
class Expected:
    """The estimated time of a product.

    Attributes:
        ms: milliseconds.
        ratio: to the dense float32 product.
        weight: the measured scheme: the product's own, or the closest one.
        date: of the measurement.
    """

    ms: float
    ratio: float
    weight: str
    date: str


@dataclasses.dataclass(frozen=True)
class Table:
    """The measured products of one device.

    Attributes:
        device: its name.
        facts: of the last measurement: versions, bandwidth and rates of the machine.
        rows: the measurements.
    """

    device: str
    facts: Mapping[str, Any]
    rows: tuple[Row, ...]

    def expected(
        self, backend: str, weight: Scheme, layout: str, m: int, k: int, n: int, activation: Scheme | None = None
    ) -> Expected | None:
        """Estimates a product's time; None if neither its scheme nor a similar one was measured.

        The arguments are as in `Row`; `activation` is the scheme to which x is quantized, or None.
        """
        candidates = [row for row in self.rows if (row.backend, row.layout) == (backend, layout)]
        x_name: str | None = ""
        if activation is not None:
            x_name = _nearest(activation, {row.activation for row in candidates if row.activation})
        candidates = [row for row in candidates if row.activation == x_name]
        name = _nearest(weight, {row.weight for row in candidates})
        dense = [row for row in self.rows if (row.backend, row.weight, row.layout) == (DENSE, "float32", layout)]
        if name is None or not dense or not m * k * n:
            return None
        rows = [row for row in candidates if row.weight == name]
        ratio = _read({row.key: row.ratio[1] for row in rows}, m, k * n)
        per_operation = _read({row.key: row.ms / (row.m * row.k * row.n) for row in dense}, m, k * n)
        return Expected(ratio * per_operation * m * k * n, ratio, name, max(row.date for row in rows))

    def with_rows(self, rows: tuple[Row, ...], facts: Mapping[str, Any]) -> Self:
        """Adds rows; repeated measurements replace older ones."""
        merged = {row.key: row for row in (*self.rows, *rows)}
        return dataclasses.replace(self, facts=facts, rows=tuple(merged[key] for key in sorted(merged)))

    def to_json(self) -> dict[str, Any]:
        """The JSON form."""
        rows = [{key: value for key, value in dataclasses.asdict(r).items() if value != ""} for r in self.rows]
        return {**self.facts, "device": self.device, "rows": rows}

    @classmethod
    def from_json(cls, form: Any) -> Self:
        """Reads a table from its JSON form.

        Raises:
            QuantError: if it is not a table.
        """
        converted(form, _TABLE, "a table of measured times")
        rows = tuple(Row(**{**row, "ratio": tuple(row["ratio"])}) for row in form["rows"])
        facts = {key: value for key, value in form.items() if key not in ("device", "rows")}
        return cls(form["device"], facts, rows)


_ROWS: Any = list[form_of(Row, m=Positive, k=Positive, n=Positive)]
_TABLE = msgspec.defstruct("_TABLE", [("device", str), ("rows", _ROWS)])
"""The JSON schema of a table; its other fields are facts."""


def _read(values: Mapping[tuple[Any, ...], float], m: int, elements: int) -> float:
    """Interpolates by rows of x and elements of the weight; keys are those of `Row`."""
    by_rows: dict[int, dict[int, float]] = {}
    for (*_, rows, k, n), value in values.items():
        by_rows.setdefault(rows, {})[k * n] = value
    at = {rows: _between(sizes, elements) for rows, sizes in by_rows.items()}
    return _between(at, m)


def _between(values: Mapping[int, float], at: int) -> float:
    """Interpolates in log-log space; constant beyond the ends."""
    known = sorted(values)
    return float(np.exp(np.interp(np.log(at), np.log(known), [np.log(values[n]) for n in known])))


def _nearest(wanted: Scheme, names: set[str]) -> str | None:
    """The closest measured scheme of the same format family and bit width."""
    if wanted.name in names:
        return wanted.name
    similar = {name: found for name in sorted(names) if (found := _known(name)) and _is_similar(found, wanted)}

    def differences(name: str) -> tuple[bool, ...]:
        other = similar[name]
        fields = ("format", "scale", "tensor_scale")
        has_zero = (other.zero_point is None) != (wanted.zero_point is None)
        return has_zero, *(getattr(other, field) != getattr(wanted, field) for field in fields)

    return min(similar, key=differences, default=None)


def _is_similar(one: Scheme, other: Scheme) -> bool:
    """True for schemes of one format family and bit width."""
    return type(one.format) is type(other.format) and one.format.bits == other.format.bits


def _known(name: str) -> Scheme | None:
    """The scheme of a name; None for an unknown one."""
    try:
        return scheme(name)
    except QuantError:
        return None
