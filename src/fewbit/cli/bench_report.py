"""Measures and prints `fewbit bench`."""

import dataclasses
from typing import Any

from .._table import Column, table
from ..errors import QuantError
from ..workflows.bench.products import DENSE, LAYOUTS, Grid, Row, bits_per_weight, fastest, float_activations, measured
from ..workflows.bench.roofline import circumstances, machine
from .console import emit_json, plain, say
from .options import comma_separated
from .progress import progress_bar

PRODUCTS = {"[N, K]": "x @ w.T", "[K, N]": "x @ w"}


def show_times(
    *,
    schemes: str | None,
    sizes: str | None,
    rows: str | None,
    rounds: int | None,
    int8_activations: bool,
    json: bool,
) -> None:
    """Measures and prints."""
    grid = Grid(int8_activations=int8_activations)
    if schemes is not None:
        grid = dataclasses.replace(grid, schemes=tuple(comma_separated("--schemes", schemes)))
    if sizes is not None:
        grid = dataclasses.replace(grid, sizes=_numbers("--sizes", sizes))
    if rows is not None:
        grid = dataclasses.replace(grid, rows=_numbers("--rows", rows))
    grid = dataclasses.replace(grid, rounds=rounds or grid.rounds)
    with progress_bar("measuring", grid.steps) as bar:
        done: list[str] = []
        rates, facts = machine(), circumstances()

        def step(what: str) -> None:
            done.append(what)
            bar.advance(len(done), what)

        found = measured(grid, step)
    if json:
        best = [_best_record(found, m, size) for size in grid.sizes for m in grid.rows]
        form = {**facts, "machine": rates, "rows": found, "fastest": best}
        if int8_activations:
            form["float_activations"] = float_activations(grid)
        emit_json(form)
        return
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    say(f"{facts['device']}; kernels: {facts['kernels']}; {versions}; {facts['date']}")
    say(f"copy {_rate(rates.copy)} GB/s; dense float32 {_rate(rates.float32)} GFLOP/s, bfloat16 {_rate(rates.bfloat16)}")
    if int8_activations:
        reasons = "; ".join(f"{product}: {reason}" for product, reason in float_activations(grid).items())
        rounded = "tables of numbers that are no integers rounded to int8"
        say(f"activations in int8, in the blocks of the weight, {rounded}; in float32 for {reasons or 'none'}", wrap=True)
    for size in grid.sizes:
        for m in grid.rows:
            say()
            say(_times_table(found, m, size))
            say(_best_line(found, m, size))


def _numbers(option: str, text: str) -> tuple[int, ...]:
    words = comma_separated(option, text)
    if not all(word.isdecimal() and int(word) > 0 for word in words):
        raise QuantError(f"{option} is {text!r}; give integers above 0, separated by commas")
    return tuple(sorted(map(int, words)))


def _times_table(rows: tuple[Row, ...], m: int, size: int) -> str:
    """The times of all weights at M = `m`, the fastest first."""
    by_weight: dict[tuple[str, str], dict[str, Any]] = {}
    for row in sorted(rows, key=lambda row: row.ms):
        if (row.m, row.k) == (m, size):
            record = by_weight.setdefault((row.weight, row.backend), _weight_record(row))
            low, middle, high = row.ratio
            record |= {f"{row.layout} ms": row.ms, f"{row.layout} ratio": f"{middle:.2f} ({low:.2f} to {high:.2f})"}
    columns = [
        Column("weight", kind="name"),
        Column("by"),
        Column("bits", "bits/weight", align="right"),
        Column("rate", "weight GB/s", align="right"),
    ]
    for layout in LAYOUTS:
        columns.append(Column(f"{layout} ms", f"{PRODUCTS[layout]}, ms", align="right"))
        columns.append(Column(f"{layout} ratio", "of dense float32", "right", rank=1))
    return table(list(by_weight.values()), columns, title=f"M = {m}, weight {size} x {size}")


def _weight_record(row: Row) -> dict[str, Any]:
    """The weight, its backend, bits per weight and bandwidth (of its faster layout)."""
    if row.backend == DENSE:
        bits = {"float32": 32.0, "bfloat16": 16.0}[row.weight]
    else:
        bits = bits_per_weight(row.weight, row.k)
    rate = 1e-6 * bits / 8 * row.k * row.n / row.ms
    return {"weight": row.weight, "by": row.backend, "bits": round(bits, 3), "rate": round(rate, 1)}


def _best_line(rows: tuple[Row, ...], m: int, size: int) -> str:
    """The fastest scheme, and the fastest one of each other code width in bits."""
    found = fastest(rows, m, size)
    texts = [f"{row.weight} {row.ms:.3g} ms, {row.ratio[1]:.2f} of dense float32" for row in found.values()]
    parts = [f"fastest at M = {m}: {texts[0]}"]
    parts += [f"of {bits} bits: {text}" for bits, text in list(zip(found, texts, strict=True))[1:]]
    if not any(row.ratio[1] < 1 for row in found.values()):
        parts.append("NONE is faster than dense float32")
    return "; ".join(parts)


def _best_record(rows: tuple[Row, ...], m: int, size: int) -> dict[str, Any]:
    return {"m": m, "size": size, "by_bits": {bits: plain(row) for bits, row in fastest(rows, m, size).items()}}


def _rate(spread: tuple[float, float, float]) -> str:
    low, middle, high = spread
    return f"{middle:.3g} ({low:.3g} to {high:.3g})"
