"""Expected times for `fb.explain`, from this device's measured tables."""

import dataclasses
import pathlib

import numpy as np

from ..._json import file_text, parsed
from ...errors import QuantError
from ..device import cache_directory, device_name, file_name
from .matrix_view import matrix_view
from .problem import Operand, Problem
from .times import Expected, Table

SHIPPED = pathlib.Path(__file__).parent / "configs" / "times"
"""The directory of the tables that come with fewbit."""


def user_path(device: str) -> pathlib.Path:
    """The path of the user's own table of a device."""
    return cache_directory() / "qmatmul" / file_name(device)


def read_table(path: pathlib.Path) -> Table | None:
    """Reads a table; None if the file does not exist.

    Raises:
        QuantError: if the file is not a table.
    """
    if not path.exists():
        return None
    try:
        return Table.from_json(parsed(file_text(path, "table of measured times"), str(path)))
    except QuantError as error:
        raise QuantError(f"{path} cannot be read: {error}; remove it, and run `fewbit bench --tune`") from error


def tables(device: str) -> tuple[Table, ...]:
    """The tables of a device: the user's own first, then the one shipped with fewbit."""
    found = (read_table(directory) for directory in (user_path(device), SHIPPED / file_name(device)))
    return tuple(table for table in found if table is not None and table.device == device)


def time_line(problem: Problem, backend: str) -> str:
    """The expected time of a product relative to dense float32, as a sentence for `fb.explain`."""
    device = device_name()
    known = tables(device)
    if not known:
        return f"not measured on this device ({device}); run `fewbit bench --tune`"
    q, x, side = problem.rhs, problem.lhs, 1
    if q.scheme is None:
        q, x, side = problem.lhs, problem.rhs, 0
    assert q.scheme is not None
    try:
        shape = _shape(problem, q, x, side)
    except QuantError as refusal:
        return f"not measured: {refusal}"
    layout, batch, m, k, n = shape
    for table in known:
        if found := table.expected(backend, q.scheme, layout, m, k, n, x.scheme):
            return _sentence(dataclasses.replace(found, ms=found.ms * batch), q.scheme.name)
    what = q.scheme.name
    if x.scheme is not None:
        what += f" with {x.scheme.name} activations"
    return f"not measured on this device for {what} by {backend}; run `fewbit bench --tune --schemes {q.scheme.name}`"


def _sentence(found: Expected, name: str) -> str:
    dense = found.ms / found.ratio
    said = f"about {found.ms:.3g} ms, {found.ratio:.2f} of the dense float32 product ({dense:.3g} ms)"
    if found.ratio > 1:
        said = f"about {found.ms:.3g} ms, SLOWER than the dense float32 product: {found.ratio:.2f} times its {dense:.3g} ms"
    said = f"{said}; table of {found.date}"
    if found.weight != name:
        said += f", for {found.weight}, the closest measured scheme"
    return said


def _shape(problem: Problem, q: Operand, x: Operand, side: int) -> tuple[str, int, int, int, int]:
    """The weight layout, the batch size, and M, K and N of a product."""
    contracted, batch = problem.dimension_numbers
    stack = matrix_view(q, contracted[side], batch[side])
    count, k = (int(np.prod([q.shape[a] for a in axes])) for axes in (stack.batch, stack.contracted))
    sizes = [int(np.prod(operand.shape)) // max(1, count * k) for operand in (x, q)]
    return "[N, K]" if stack.contracts_cols else "[K, N]", count, sizes[0], k, sizes[1]
