"""Measures the time table of this machine for `fb.explain`."""

import dataclasses
import json
import os
import pathlib
from collections.abc import Callable

from ...array import scheme as as_scheme
from ...errors import QuantError
from ...kernels.device import device_name, file_name
from ...kernels.qmatmul.code_product import is_whole
from ...kernels.qmatmul.expected import read_table, user_path
from ...kernels.qmatmul.reference import Reference
from ...kernels.qmatmul.times import Row, Table
from .products import SCHEMES, Grid, measured
from .roofline import Machine, circumstances

GRID = Grid(SCHEMES, sizes=(512, 2048, 4096), rows=(1, 8, 64, 256), rounds=7)
"""The matmuls that the default backend is measured on."""

PLAIN = Reference.name
PLAIN_SIZE, PLAIN_ROWS = 2048, (1, 256)


def plain_grid(grid: Grid) -> Grid:
    """The reference backend's part of a grid; it runs on several devices, or without a compiler.

    One size is enough: dequantizing and multiplying both scale with the weight.
    """
    near = min(grid.sizes, key=lambda size: abs(size - PLAIN_SIZE))
    rows = tuple(m for m in PLAIN_ROWS if m in grid.rows) or grid.rows[:1]
    return dataclasses.replace(grid, sizes=(near,), rows=rows, backend=PLAIN)


def paired_grid(grid: Grid) -> Grid:
    """The part of a grid measured with int8 activations too: 4- and 8-bit integer weights."""
    schemes = map(as_scheme, grid.schemes)
    names = tuple(s.name for s in schemes if is_whole(s) and s.format.bits in (4, 8))
    return dataclasses.replace(grid, schemes=names, activation="int8")


def steps(grid: Grid) -> int:
    """How often `tuned` calls `done` at most."""
    return sum(each.steps for each in (grid, paired_grid(grid), plain_grid(grid), paired_grid(plain_grid(grid))))


def tuned(grid: Grid = GRID, done: Callable[[str], None] = lambda _: None) -> tuple[Row, ...]:
    """Measures the rows of a table.

    Args:
        grid: the matmuls for the default backend.
        done: called with what was just done, at most `steps(grid)` times.

    Raises:
        QuantError: for an unknown scheme.
        UnsupportedError: when results exceed the rounding tolerance.
    """
    rows = _measured_twice(grid, done)
    if any(row.backend == PLAIN for row in rows):
        return rows
    return (*rows, *(row for row in _measured_twice(plain_grid(grid), done) if row.backend == PLAIN))


def _measured_twice(grid: Grid, done: Callable[[str], None]) -> tuple[Row, ...]:
    """The times of a grid, without and with int8 activations."""
    rows, pairs = measured(grid, done), paired_grid(grid)
    if pairs.schemes:
        rows += measured(pairs, done)
    return rows


def table_path(directory: pathlib.Path | None = None) -> pathlib.Path:
    """The file of this device's table; its directory is created if missing.

    Args:
        directory: the directory; None: the user's own, where `fb.explain` looks.

    Raises:
        QuantError: when the directory cannot be created, or the file is the table of another device.
    """
    device = device_name()
    path = user_path(device) if directory is None else directory / file_name(device)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise QuantError(f"{path.parent} cannot be written: {error.strerror or error}; choose another --output") from error
    old = read_table(path)
    if old is not None and old.device != device:
        raise QuantError(f"{path} has the times of {old.device}, but this device is {device}; choose another --output")
    return path


def keep(rows: tuple[Row, ...], rates: Machine, path: pathlib.Path) -> Table:
    """Merges rows into a table file; the file is replaced atomically.

    Args:
        rows: the measurements.
        rates: the machine's roofline.
        path: the table's file.

    Returns:
        The table that was written.

    Raises:
        QuantError: when it cannot be written.
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
    """The JSON of a table, one line per fact and row."""
    form = table.to_json()
    rows = ",\n".join(f"  {json.dumps(row)}" for row in form.pop("rows"))
    head = "".join(f" {json.dumps(key)}: {json.dumps(value)},\n" for key, value in form.items())
    return f'{{\n{head} "rows": [\n{rows}\n ]\n}}\n'
