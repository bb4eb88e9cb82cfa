"""What `fewbit bench` measures and prints."""

from pathlib import Path
from typing import Any

from .._table import Column, table
from ..errors import QuantError
from ..jobs.machine import circumstances, machine
from ..jobs.speed import LAYOUTS, SCHEMES, Grid, bits_per_weight, fastest, measured
from ..jobs.tune import GRID, keep, steps, table_path, tuned
from ..kernels.qmatmul.times import DENSE, Row
from .output import emit_json, plain, progress_bar, say

PRODUCTS = {"[N, K]": "x @ w.T", "[K, N]": "x @ w"}


def show_times(
    *,
    schemes: str | None,
    sizes: str | None,
    rows: str | None,
    rounds: int | None,
    tune: bool,
    output: Path | None,
    json: bool,
) -> None:
    """Measures, prints, and with `tune` keeps the times."""
    if output is not None and not tune:
        raise QuantError(f"--output {output} is for the table of --tune; it needs --tune")
    usual = GRID if tune else Grid()
    grid = Grid(
        SCHEMES if schemes is None else tuple(_words("--schemes", schemes)),
        usual.sizes if sizes is None else _numbers("--sizes", sizes),
        usual.rows if rows is None else _numbers("--rows", rows),
        rounds or usual.rounds,
    )
    path = table_path(output) if tune else None
    with progress_bar("measuring", steps(grid) if tune else grid.steps) as bar:
        done: list[str] = []
        rates, facts = machine(), circumstances()

        def step(what: str) -> None:
            done.append(what)
            bar.advance(len(done), what)

        found = tuned(grid, step) if tune else measured(grid, step)
    if path is not None:
        keep(found, rates, path)
    if json:
        best = [_best_record(found, m, size) for size in grid.sizes for m in grid.rows]
        emit_json({**facts, "machine": rates, "rows": found, "fastest": best, "table": path})
        return
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    say(f"{facts['device']}; kernels: {facts['kernels']}; {versions}; {facts['date']}")
    say(f"copy {_rate(rates.copy)} GB/s; dense float32 {_rate(rates.float32)} GFLOP/s, bfloat16 {_rate(rates.bfloat16)}")
    for size in grid.sizes[-1:] if tune else grid.sizes:
        for m in grid.rows:
            say()
            say(_times_table(found, m, size))
            say(_best_line(found, m, size))
    if path is not None:
        say(f"\n{len(found)} products kept in {path}")


def _words(option: str, text: str) -> list[str]:
    """What an option names, separated by commas."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words or len(set(words)) < len(words):
        raise QuantError(f"{option} is {text!r}; give at least one, each once, separated by commas")
    return words


def _numbers(option: str, text: str) -> tuple[int, ...]:
    words = _words(option, text)
    if not all(word.isdecimal() and int(word) > 0 for word in words):
        raise QuantError(f"{option} is {text!r}; give whole numbers above 0, separated by commas")
    return tuple(sorted(map(int, words)))


def _times_table(rows: tuple[Row, ...], m: int, size: int) -> str:
    """The times of all weights for so many rows of x, the fastest first."""
    by_weight: dict[tuple[str, str, str], dict[str, Any]] = {}
    for row in sorted(rows, key=lambda row: row.ms):
        if (row.m, row.k) == (m, size):
            record = by_weight.setdefault((row.weight, row.activation, row.backend), _weight_record(row))
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
    title = f"{_rows_text(m)} of x, a weight of {size} x {size}"
    return table(list(by_weight.values()), columns, title=title)


def _weight_record(row: Row) -> dict[str, Any]:
    """What is said of a weight beside its times; bytes a second are those of its faster layout."""
    bits = {"float32": 32.0, "bfloat16": 16.0}[row.weight] if row.backend == DENSE else bits_per_weight(row.weight, row.k)
    rate = 1e-6 * bits / 8 * row.k * row.n / row.ms
    weight = f"{row.weight}, {row.activation} x" if row.activation else row.weight
    return {"weight": weight, "by": row.backend, "bits": round(bits, 3), "rate": round(rate, 1)}


def _best_line(rows: tuple[Row, ...], m: int, size: int) -> str:
    """Which scheme is fastest, of all and of each number of bits."""
    found = fastest(rows, m, size)
    first, *others = [f"{row.weight} {row.ms:.3g} ms, {row.ratio[1]:.2f} of dense float32" for row in found.values()]
    told = [f"of {bits} bits: {other}" for bits, other in zip(list(found)[1:], others, strict=True)]
    none = "" if any(row.ratio[1] < 1 for row in found.values()) else "; NONE is faster than dense float32"
    return "; ".join([f"fastest with {_rows_text(m)}: {first}", *told]) + none


def _best_record(rows: tuple[Row, ...], m: int, size: int) -> dict[str, Any]:
    return {"m": m, "size": size, "by_bits": {bits: plain(row) for bits, row in fastest(rows, m, size).items()}}


def _rows_text(m: int) -> str:
    return "1 row" if m == 1 else f"{m} rows"


def _rate(spread: tuple[float, float, float]) -> str:
    low, middle, high = spread
    return f"{middle:.3g} ({low:.3g} to {high:.3g})"
