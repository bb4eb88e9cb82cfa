"""Measured times of products, by device: what `fb.explain` expects of one that is not measured itself.

A table holds, for a backend, a scheme and a layout of the weight, the time of `x @ w` at a few numbers of rows M and sizes
K x N, beside the dense float32 product of the same layout, which took turns with it. Between the sizes two numbers are read
off, both straight in logarithms: the ratio to the dense product, and the dense product's time for one multiplication with
its addition. They are linear in log(K N), the bytes of the weight, at each measured M, and then in log(M), the operations for
each of these bytes. Beyond what was measured they stay what they are at its edge: time grows with M K N.

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
"""The backend of products of floats, in a table."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One measured product.

    Attributes:
        backend: what computed it; `DENSE` for a product of floats.
        weight: the name of the weight's scheme, or its dtype.
        layout: "[N, K]" for `x @ w.T`, "[K, N]" for `x @ w`; tiles run along K.
        m: rows of x, which is float32 unless the weight is a dense one of another dtype.
        k: how long the contraction is.
        n: columns of the result.
        ms: median milliseconds.
        ratio: the lowest, median and highest ratio to the dense float32 product of the same layout, turn by turn.
        date: when it was measured, as ISO 8601 writes it.
        activation: the name of the scheme that x is quantized to within the product; empty: it stays a float.
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
        """What is measured: two rows with one key are two measurements of the same."""
        return self.backend, self.weight, self.activation, self.layout, self.m, self.k, self.n


@dataclasses.dataclass(frozen=True)
class Expected:
    """What a table lets expect of a product.

    Attributes:
        ms: milliseconds.
        ratio: to the dense float32 product.
        weight: the scheme that was measured: the product's own, or the likest one.
        date: when that was.
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
        facts: what else is to be known of the last measurement: versions, rates of the machine.
        rows: the measurements.
    """

    device: str
    facts: Mapping[str, Any]
    rows: tuple[Row, ...]

    def expected(
        self, backend: str, weight: Scheme, layout: str, m: int, k: int, n: int, activation: Scheme | None = None
    ) -> Expected | None:
        """What a product takes, as the file's first lines say; None where neither its scheme nor a like one was measured.

        Args:
            backend: what computes it.
            weight: the scheme of the weight.
            layout: as of a `Row`.
            m: likewise.
            k: likewise.
            n: likewise.
            activation: the scheme that x is quantized to; None: it stays a float.
        """
        held = [row for row in self.rows if (row.backend, row.layout) == (backend, layout)]
        met = "" if activation is None else _nearest(activation, {row.activation for row in held if row.activation})
        name = _nearest(weight, {row.weight for row in held if row.activation == met})
        dense = [row for row in self.rows if (row.backend, row.weight, row.layout) == (DENSE, "float32", layout)]
        if name is None or not dense or not m * k * n:
            return None
        rows = [row for row in held if (row.weight, row.activation) == (name, met)]
        ratio = _read({row.key: row.ratio[1] for row in rows}, m, k * n)
        per_operation = _read({row.key: row.ms / (row.m * row.k * row.n) for row in dense}, m, k * n)
        return Expected(ratio * per_operation * m * k * n, ratio, name, max(row.date for row in rows))

    def with_rows(self, rows: tuple[Row, ...], facts: Mapping[str, Any]) -> Self:
        """The table with more rows; those that were measured again are replaced."""
        merged = {row.key: row for row in (*self.rows, *rows)}
        return dataclasses.replace(self, facts=facts, rows=tuple(merged[key] for key in sorted(merged)))

    def to_json(self) -> dict[str, Any]:
        """The JSON form."""
        rows = [{key: value for key, value in dataclasses.asdict(r).items() if value != ""} for r in self.rows]
        return {**self.facts, "device": self.device, "rows": rows}

    @classmethod
    def from_json(cls, form: Any) -> Self:
        """The table of a JSON form.

        Raises:
            QuantError: for what is none.
        """
        converted(form, _TABLE, "a table of measured times")
        rows = tuple(Row(**{**row, "ratio": tuple(row["ratio"])}) for row in form["rows"])
        facts = {key: value for key, value in form.items() if key not in ("device", "rows")}
        return cls(form["device"], facts, rows)


_ROWS: Any = list[form_of(Row, m=Positive, k=Positive, n=Positive)]
_TABLE = msgspec.defstruct("_TABLE", [("device", str), ("rows", _ROWS)])
"""The JSON schema of a table; its other fields are facts."""


def _read(values: Mapping[tuple[Any, ...], float], m: int, elements: int) -> float:
    """A number between the measured ones, by rows of x and elements of the weight; keys are those of `Row`."""
    by_rows: dict[int, dict[int, float]] = {}
    for (*_, rows, k, n), value in values.items():
        by_rows.setdefault(rows, {})[k * n] = value
    at = {rows: _between(sizes, elements) for rows, sizes in by_rows.items()}
    return _between(at, m)


def _between(values: Mapping[int, float], place: int) -> float:
    """Interpolates in logarithms; beyond the ends, the end's value."""
    places = sorted(values)
    return float(np.exp(np.interp(np.log(place), np.log(places), [np.log(values[p]) for p in places])))


def _nearest(wanted: Scheme, names: set[str]) -> str | None:
    """The measured scheme that a scheme is, or the likest one whose codes are decoded alike."""
    if wanted.name in names:
        return wanted.name
    like = {name: found for name in sorted(names) if (found := _known(name)) and _decoded_alike(found, wanted)}

    def differences(name: str) -> tuple[bool, ...]:
        other = like[name]
        fields = ("format", "scale", "tensor_scale")
        has_zero = (other.zero_point is None) != (wanted.zero_point is None)
        return has_zero, *(getattr(other, field) != getattr(wanted, field) for field in fields)

    return min(like, key=differences, default=None)


def _decoded_alike(one: Scheme, other: Scheme) -> bool:
    """Whether the codes of two schemes are of one kind and of as many bits."""
    return type(one.format) is type(other.format) and one.format.bits == other.format.bits


def _known(name: str) -> Scheme | None:
    """The scheme of a name; None for one that this process does not have."""
    try:
        return scheme(name)
    except QuantError:
        return None
