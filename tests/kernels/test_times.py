"""Expected times: read off a table between its points, from the right file, and told by `fb.explain`."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import pytest

import fewbit as fb
from fewbit.kernels import device
from fewbit.kernels.qmatmul import expected
from fewbit.kernels.qmatmul.expected import SHIPPED, read_table
from fewbit.kernels.qmatmul.times import DENSE, Row, Table
from fewbit.workflows.bench.roofline import Machine
from fewbit.workflows.bench.tune import keep

HERE = "A processor (family 1), 2 cores"


def row(backend: str, weight: str, m: int, size: int, ms: float, ratio: float = 1.0, layout: str = "[N, K]") -> Row:
    return Row(backend, weight, layout, m, size, size, ms, (ratio / 2, ratio, ratio * 2), "2026-01-02")


quantized = jax.jit(fb.quantize, static_argnums=1)


ROWS = (
    *(row(DENSE, "float32", m, size, m * size * size * 1e-6) for m in (1, 16) for size in (64, 256)),
    *(
        row("reference", "nf4", m, size, 7.0, ratio)
        for m, size, ratio in ((1, 64, 0.5), (1, 256, 2.0), (16, 64, 4.0), (16, 256, 4.0))
    ),
    row("reference", "int4_g64", 1, 64, 7.0, 0.75),
)
TABLE = Table(HERE, {}, ROWS)


def told(weight: str, m: int, k: int, n: int, layout: str = "[N, K]"):
    return TABLE.expected("reference", fb.scheme(weight), layout, m, k, n)


@pytest.mark.parametrize(
    ("m", "k", "n", "ratio"),
    [
        (1, 64, 64, 0.5),
        (1, 256, 256, 2.0),
        (1, 128, 128, 1.0),  # in the middle of the logarithms, the geometric mean
        (1, 32, 512, 1.0),  # by K N alone
        (4, 256, 256, 8**0.5),
        (1, 8, 8, 0.5),  # beyond the table what is at its edge
        (1000, 4096, 64, 4.0),
    ],
)
def test_between_the_points_and_beyond_them(m: int, k: int, n: int, ratio: float):
    found = told("nf4", m, k, n)
    assert found is not None and (found.weight, found.date) == ("nf4", "2026-01-02")
    assert found.ratio == pytest.approx(ratio)
    assert found.ms == pytest.approx(ratio * m * k * n * 1e-6)


def test_a_scheme_that_was_not_measured_takes_the_closest():
    assert [told(name, 1, 64, 64).weight for name in ("int4_g128", "int4_narrow", "q4_0", "bnb_fp4")] == [
        *("int4_g64", "int4_g64", "int4_g64", "nf4")
    ]
    assert told("int8", 1, 64, 64) is None
    assert told("nf4", 1, 64, 64, "[K, N]") is None
    assert told("nf4", 0, 64, 64) is None
    assert TABLE.expected("cpu", fb.scheme("nf4"), "[N, K]", 1, 64, 64) is None


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A user's cache directory, on a device of which fewbit ships no table."""
    monkeypatch.setenv(device.CACHE_VARIABLE, str(tmp_path))
    monkeypatch.setattr(expected, "device_name", lambda: HERE)
    return tmp_path / "qmatmul" / device.file_name(HERE)


def save(table: Table, path) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(table.to_json()))


def time_line(x, q) -> str:
    (line,) = [line for line in fb.explain(x, q).splitlines() if line.startswith("  time: ")]
    return line.removeprefix("  time: ")


def test_what_explain_tells(cache):
    x, q = jnp.ones((1, 64)), quantized(jnp.ones((64, 64)), "nf4").T
    assert time_line(x, q) == f"not measured on this device ({HERE}); run `fewbit bench --tune`"
    save(TABLE, cache)
    assert time_line(x, q) == "about 0.00205 ms, 0.50 of the dense float32 product (0.0041 ms); table of 2026-01-02"
    assert time_line(x, quantized(jnp.ones((64, 64)), "int4").T).endswith("for int4_g64, the closest measured scheme")
    slow = time_line(jnp.ones((2, 8, 64)), q)
    assert slow == "about 0.262 ms, SLOWER than the dense float32 product: 4.00 times its 0.0655 ms; table of 2026-01-02"
    assert time_line(q.T, x.T) == time_line(x, q)
    batch = time_line(jnp.ones((3, 1, 64)), quantized(jnp.ones((3, 64, 64)), "nf4").mT)
    assert batch.startswith("about 0.00614 ms, 0.50 of")
    assert time_line(x, quantized(jnp.ones((64, 64)), "int8").T) == (
        "not measured on this device for int8 by reference; run `fewbit bench --tune --schemes int8`"
    )


def test_activations_have_times_of_their_own(cache):
    x, q = jnp.ones((1, 64)), quantized(jnp.ones((64, 64)), "int8").T
    save(TABLE, cache)
    assert time_line(quantized(x, "int8"), q) == (
        "not measured on this device for int8 with int8 activations by reference; run `fewbit bench --tune --schemes int8`"
    )
    pair = dataclasses.replace(row("reference", "int8", 1, 64, 7.0, 0.25), activation="int8")
    table = TABLE.with_rows((pair,), {})
    assert Table.from_json(json.loads(json.dumps(table.to_json()))) == table
    save(table, cache)
    assert time_line(quantized(x, "int8"), q).startswith("about 0.00102 ms, 0.25 of the dense")
    assert time_line(x, q).startswith("not measured on this device for int8 by reference")


def test_the_users_table_wins_and_another_devices_is_left_alone(cache, monkeypatch):
    shipped = cache.parent.parent / "shipped"
    monkeypatch.setattr(expected, "SHIPPED", shipped)
    doubled = tuple(dataclasses.replace(r, date="2025-01-01") for r in ROWS)
    save(Table(HERE, {}, doubled), shipped / cache.name)
    x, q = jnp.ones((1, 64)), quantized(jnp.ones((64, 64)), "nf4").T
    assert time_line(x, q).endswith("table of 2025-01-01")
    save(Table(HERE, {}, tuple(r for r in ROWS if r.weight != "int4_g64")), cache)
    assert time_line(x, q).endswith("table of 2026-01-02")
    assert "2025-01-01" in time_line(x, quantized(jnp.ones((64, 64)), "int4_g64").T)  # which only the shipped one has
    save(Table("Another", {}, ROWS), cache)
    assert time_line(x, q).endswith("table of 2025-01-01")


@pytest.mark.parametrize("text", ["{", "[]", '{"device": "A"}', '{"device": "A", "rows": [{"m": 1}]}', "\x00\xff"])
def test_a_damaged_table_is_named(cache, text: str):
    cache.parent.mkdir()
    cache.write_text(text)
    with pytest.raises(fb.QuantError, match=r"cores\.json cannot be read: .*remove it, and run `fewbit bench --tune`"):
        fb.explain(jnp.ones((1, 64)), quantized(jnp.ones((64, 64)), "nf4").T)


def test_a_table_keeps_what_was_not_measured_again(tmp_path):
    rates = Machine((1.0, 2.0, 3.0), (1.0, 2.0, 3.0), (1.0, 2.0, 3.0))
    path = tmp_path / "table.json"
    keep(ROWS, rates, path)
    again = dataclasses.replace(ROWS[-1], ms=1.0, date="2026-02-03")
    keep((again,), rates, path)
    table = read_table(path)
    assert table is not None and [p.name for p in tmp_path.iterdir()] == ["table.json"]
    assert set(table.rows) == {*ROWS[:-1], again}
    assert table.facts["machine"]["copy"] == [1.0, 2.0, 3.0] and set(table.facts["versions"]) >= {"jax", "fewbit"}


def test_where_a_users_table_lies(monkeypatch, tmp_path):
    monkeypatch.delenv(device.CACHE_VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert device.cache_directory() == tmp_path / "fewbit"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert device.cache_directory().parts[-2:] == (".cache", "fewbit")
    assert device.device_name().endswith("cores")


def test_the_shipped_tables_are_read():
    for path in SHIPPED.glob("*.json"):
        table = read_table(path)
        assert table is not None and path.name == device.file_name(table.device)
        assert any(r.backend == DENSE for r in table.rows) and any(r.backend != DENSE for r in table.rows)
