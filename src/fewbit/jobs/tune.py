"""The measured table of this machine: what `fb.explain` reads the time of a product off."""

import dataclasses
import json
import os
import pathlib
from collections.abc import Callable

from ..array import scheme as as_scheme
from ..errors import QuantError
from ..kernels.device import device_name, file_name
from ..kernels.qmatmul.codes import is_whole
from ..kernels.qmatmul.expected import read_table, user_path
from ..kernels.qmatmul.reference import Reference
from ..kernels.qmatmul.times import Row, Table
from .machine import Machine, circumstances
from .speed import SCHEMES, Grid, measured

GRID = Grid(SCHEMES, sizes=(512, 2048, 4096), rows=(1, 8, 64, 256), rounds=7)
"""What is measured by the backend that is chosen here."""

PLAIN = Reference.name
PLAIN_SIZE, PLAIN_ROWS = 2048, (1, 256)


def plain_grid(grid: Grid) -> Grid:
    """What is measured by the reference beside a grid: it serves where there are several devices, or no compiler.

    One size will do, since decoding and multiplying both grow as the weight does.
    """
    near = min(grid.sizes, key=lambda size: abs(size - PLAIN_SIZE))
    rows = tuple(m for m in PLAIN_ROWS if m in grid.rows) or grid.rows[:1]
    return dataclasses.replace(grid, sizes=(near,), rows=rows, backend=PLAIN)


def paired_grid(grid: Grid) -> Grid:
    """What is measured with activations of int8 beside a grid: weights of whole codes of 4 and 8 bits."""
    schemes = map(as_scheme, grid.schemes)
    names = tuple(s.name for s in schemes if is_whole(s) and s.format.bits in (4, 8))
    return dataclasses.replace(grid, schemes=names, activation="int8")


def steps(grid: Grid) -> int:
    """How often `tuned` says at most that something was done."""
    return sum(each.steps for each in (grid, paired_grid(grid), plain_grid(grid), paired_grid(plain_grid(grid))))


def tuned(grid: Grid = GRID, done: Callable[[str], None] = lambda _: None) -> tuple[Row, ...]:
    """Measures what a table holds.

    Args:
        grid: which products, by the backend that is chosen here.
        done: called with what was just done, at most as often as `steps` says.

    Raises:
        QuantError: for an unknown scheme.
        UnsupportedError: where the correctness gate is red.
    """
    rows = _measured_twice(grid, done)
    if any(row.backend == PLAIN for row in rows):
        return rows
    return (*rows, *(row for row in _measured_twice(plain_grid(grid), done) if row.backend == PLAIN))


def _measured_twice(grid: Grid, done: Callable[[str], None]) -> tuple[Row, ...]:
    """The times of a grid, and of its products with activations of int8."""
    pairs = paired_grid(grid)
    return (*measured(grid, done), *(measured(pairs, done) if pairs.schemes else ()))


def table_path(directory: pathlib.Path | None = None) -> pathlib.Path:
    """The file of this device's table, in a directory that is made where it is missing.

    Args:
        directory: where; None: where `fb.explain` looks for the user's own.

    Raises:
        QuantError: where the directory cannot be made, or the file that is there is no table of this device.
    """
    device = device_name()
    path = user_path(device) if directory is None else directory / file_name(device)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise QuantError(f"{path.parent} cannot be written: {error.strerror or error}; choose another --output") from error
    held = read_table(path)
    if held is not None and held.device != device:
        raise QuantError(f"{path} holds the times of {held.device}, and this is {device}; choose another --output")
    return path


def keep(rows: tuple[Row, ...], rates: Machine, path: pathlib.Path) -> Table:
    """Writes rows into a table, which keeps what it held of other products; the file is replaced at once.

    Args:
        rows: what was measured.
        rates: those of the machine.
        path: the table's file.

    Returns:
        The table that was written.

    Raises:
        QuantError: where it cannot be written.
    """
    facts = {**circumstances(), "machine": dataclasses.asdict(rates)}
    table = (read_table(path) or Table(str(facts.pop("device")), {}, ())).with_rows(rows, facts)
    partial = path.with_name(f".{path.name}.fewbit-partial")
    try:
        with partial.open("w", encoding="utf-8") as stream:
            stream.write(_text(table))
            stream.flush()
            os.fsync(stream.fileno())
        partial.replace(path)
    except OSError as error:
        raise QuantError(f"{path} cannot be written: {error.strerror or error}") from error
    return table


def _text(table: Table) -> str:
    """The JSON of a table, with a line for each fact and row."""
    form = table.to_json()
    rows = ",\n".join(f"  {json.dumps(row)}" for row in form.pop("rows"))
    head = "".join(f" {json.dumps(key)}: {json.dumps(value)},\n" for key, value in form.items())
    return f'{{\n{head} "rows": [\n{rows}\n ]\n}}\n'
