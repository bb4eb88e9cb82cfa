"""Every table of docs/kernels.md shows the numbers of its file in bench/results."""

import functools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs" / "kernels.md").read_text()
Row = tuple[str, ...]


def saved(name: str) -> list[dict[str, Any]]:
    """The rows of a file of bench/results."""
    return json.loads((ROOT / "bench" / "results" / f"{name}.json").read_text())["rows"]


def one(rows: list[dict[str, Any]], **facts: object) -> dict[str, Any]:
    """The row with these facts."""
    (row,) = [r for r in rows if facts.items() <= r.items()]
    return row


def tables() -> list[list[Row]]:
    """The cells of each table of the page, the heading first, without the line below it."""
    found: list[list[Row]] = []
    before = ""
    for line in PAGE.splitlines():
        if line.startswith("|"):
            if not before.startswith("|"):
                found.append([])
            found[-1].append(tuple(cell.strip() for cell in line.strip("|").split("|")))
        before = line
    return [[table[0], *table[2:]] for table in found]


def qmatmul() -> Iterator[Row]:
    rows = saved("qmatmul")
    for name in dict.fromkeys(r["who"].split()[0] for r in rows if r["who"].endswith(("K]", "N]"))):
        cells = [one(rows, m=m, who=f"{name} {layout}") for m in (1, 256) for layout in ("[N, K]", "[K, N]")]
        yield name, *(f"{c['of_xla_float32']:.2f}" for c in cells)


def layouts() -> Iterator[Row]:
    rows = saved("layouts")
    for shown, name in (
        *((n, n) for n in ("int8", "int4")),
        ("int8, tiles of 64", "int8 by 64"),
        ("nf4", "nf4"),
        ("mxfp4", "mxfp4"),
    ):
        cells = [one(rows, product=f"M={m}", who=f"{name} {layout}") for m in (1, 256) for layout in ("[N, K]", "[K, N]")]
        yield shown, *(f"{c['ratio']:.2f}" for c in cells)


def experts() -> Iterator[Row]:
    rows = saved("layouts")
    for shown in ("1 row each", "16 rows each", "2 have 64, 6 none", "128 rows each"):
        of = {r["who"]: r for r in rows if r["product"] == f"experts, {shown.removesuffix(', 6 none')}"}
        ratios = (of[who]["ratio"] for who in ("int4_g64 cpu", "nf4 cpu", "int8 cpu", "int8 reference"))
        yield shown, f"{of['dense']['ms']:.1f}", *(f"{r:.2f}" for r in ratios)


def integers() -> Iterator[Row]:
    rows = saved("integers")
    for name in ("int8", "int4", "int4_g64"):
        for shown, layout in (("x @ w.T", "[N, K]"), ("x @ w", "[K, N]")):
            few, many = (one(rows, m=m, who=f"{name} {layout}") for m in (16, 256))
            of_xla = many["ms"] / one(rows, m=256, who="XLA int8 [N, K]")["ms"]
            yield f"{name}, `{shown}`", f"{few['ratio']:.2f}", f"{of_xla:.2f}", f"{many['ratio']:.2f}"


def attention() -> Iterator[Row]:
    rows = saved("attention")
    yield "one layer", *dict.fromkeys(r["cache"] for r in rows)
    for task in dict.fromkeys(r["task"] for r in rows):
        yield task, *(f"{r['ratio']:.2f}" for r in rows if r["task"] == task)
    yield "write after 4096, us", *(f"{r['us']:.0f}" for r in rows if r["task"] == "write after 4096")


def generation() -> Iterator[Row]:
    rows = saved("generation")
    for what in dict.fromkeys(r["what"] for r in rows):
        ours, theirs = (one(rows, what=what, who=who) for who in ("fewbit", "llama.cpp"))
        low, high = ours["times_llama_cpp_range"]
        rates = (f"{r['tokens_per_second']:.0f}" for r in (ours, theirs))
        yield f"{what} {ours['tokens']} tokens", *rates, f"{ours['times_llama_cpp']:.2f} ({low:.2f} to {high:.2f})"


def quantize() -> Iterator[Row]:
    rows = saved("quantize")
    for name in ("int4", "int4_g64", "nf4", "mxfp4", "nvfp4"):
        made = (one(rows, scheme=name, what="quantize", who=who)["copies_in_place"] for who in ("fewbit", "plain"))
        read = (one(rows, scheme=name, what="dequantize", who=who)["fresh_copies"] for who in ("fewbit", "plain"))
        yield name, *(f"{r:.1f}" for r in made), *(f"{r:.2f}" for r in read)


def triton() -> Iterator[Row]:
    cells = {(r["kernel"], r["sm"]): f"{r['in_loop']:.1f}" for r in saved("triton") if "in_loop" in r}
    kernels = [("x1", 80), ("x1", 90), ("x1", 100), ("x16", 90), ("x256", 90), ("x1-float32", 90)]
    for name in ("int4_g64", "uint4_g64", "nf4", "mxfp4", "nvfp4", "int8", "fp8"):
        yield name, *(cells.get((f"{name} {kernel}", sm), "not counted") for kernel, sm in kernels)


def tpu_model() -> Iterator[Row]:
    rows, columns = saved("tpu_model"), ["v4", "v5e", "decoding", "v5p", "v6e"]

    def cell(name: str, column: str, key: str) -> str:
        row = one(rows, scheme=name, chip="v5e" if column == "decoding" else column)
        return str(row["decoding_us" if column == "decoding" else key])

    dense = ["none" if c == "decoding" else cell("int8", c, "dense_memory_us") for c in columns]
    yield "dense bfloat16", *dense
    for name in dict.fromkeys(r["scheme"] for r in rows):
        yield name, *(cell(name, c, "memory_us") for c in columns)


def tpu_pairs() -> Iterator[Row]:
    rows = saved("tpu_model_pairs")
    for m in (16, 4096):
        for name in ("int8", "int4_g128", "int4_g64"):
            five, six = (one(rows, right=name, m=m, chip=chip) for chip in ("v5e", "v6e"))
            numbers = (five["memory_us"], five["matrix_us"], five["decoding_us"], six["memory_us"], six["matrix_us"])
            yield name, str(m), *map(str, numbers)


def tpu_ragged() -> Iterator[Row]:
    rows = saved("tpu_model_ragged")
    for m in (4, 64, 4096):
        old, pro, new = (one(rows, m=m, chip=chip) for chip in ("v5e", "v5p", "v6e"))
        of_v5e = (old[key] for key in ("memory_us", "decoding_us", "dense_memory_us"))
        yield str(m), str(old["experts"]), *map(str, (*of_v5e, pro["memory_us"], new["memory_us"], new["dense_memory_us"]))


def blocks() -> Iterator[Row]:
    levels = saved("blocks-avx2"), saved("blocks")
    for name in dict.fromkeys(r["scheme"] for r in levels[0]):
        cells = [one(rows, what=f"{name} [K, N]", m=m) for rows in levels for m in (1, 4, 64)]
        cells += [one(rows, what=f"{name}, 8 experts, 16 rows each") for rows in levels]
        yield name, *(f"{r['of_float32']:.2f}" for r in cells)


def amx(kinds: tuple[str, ...]) -> Iterator[Row]:
    rows = [r for r in saved("amx") if r["x"].startswith(kinds)]
    for scheme in dict.fromkeys(r["scheme"] for r in rows):
        cells = [r for r in rows if r["scheme"] == scheme]
        yield scheme, *(f"{r['of_avx512']:.2f}" for r in cells)


def amx_and_dense() -> Iterator[Row]:
    for scheme, *cells in amx(("bfloat16",)):
        ms = one(saved("amx"), scheme=scheme, x="bfloat16", shape=[4096, 4096], m=512)["ms"]
        yield scheme, *cells, f"{ms['amx'] / ms['dense, bfloat16']:.2f}"


def encoder_activations() -> Iterator[Row]:
    for r in saved("encoder_activations"):
        yield r["recipe"], *(f"{r[f'{which}_{kind}']:.4f}" for which in ("mean", "least") for kind in ("float32", "int8"))


def activations() -> Iterator[Row]:
    for r in saved("activations"):
        cells = [f"{r[f'perplexity_{kind}']:.2f}" for kind in ("float32", "int8")]
        cells += [f"{r[f'kl_{kind}']:.4f}" for kind in ("float32", "int8")]
        cells += [f"{100 * r[f'same_top1_{kind}']:.1f} %" for kind in ("float32", "int8")]
        yield r["recipe"], *cells


LEVELS = ("-avx2", "", "-avx2-only")
"""The endings of the files that are limited to AVX2, of those with AVX-512, and of a processor that has AVX2 only."""
INTEL = ("-avx2-intel", "-avxvnni-intel", "-intel")
"""Those of one Intel Xeon: limited to AVX2, limited to AVX-VNNI, and with AVX-512."""


def goals(levels: tuple[str, ...] = LEVELS) -> Iterator[Row]:
    """Ratios by level, with the quartiles of the rounds."""
    runs, products, pairs, made, steps = (
        [saved(f"{name}{ending}") for ending in levels]
        for name in ("generation", "qmatmul", "integers", "quantize", "training_step")
    )

    def spread(quartiles: list[float]) -> str:
        low, middle, high = quartiles
        return f"{middle:.2f} ({low:.2f} to {high:.2f})"

    for shown, what, who in (
        ("decode 64 tokens, int8 activations, of llama.cpp's rate", "write", "fewbit, int8"),
        ("decode 64 tokens, float32 activations", "write", "fewbit"),
        ("prefill 512 tokens, int8 activations", "read", "fewbit, int8"),
        ("prefill 512 tokens, float32 activations", "read", "fewbit"),
    ):
        yield shown, *(spread(one(rows, what=what, who=who)["times_llama_cpp_quartiles"]) for rows in runs)
    for shown, m, who, other in (
        ("int4_g64, 1 row, of torch int4pack's time", 1, "int4_g64 [N, K]", "torch int4, groups of 64"),
        ("int8, 1 row, of torch int8pack's time", 1, "int8 [N, K]", "torch int8"),
        ("int4_g64, 1 row of int8, of a plain read's time", 1, "int4_g64 x int8 [N, K]", "plain read of 4 bits"),
        ("q4_1, 1 row of int8, of a plain read's time", 1, "q4_1 x int8 [N, K]", "plain read of 4 bits"),
        ("mxfp6, 1 row, of the dense product's time", 1, "mxfp6 [N, K]", "XLA float32"),
        ("int8, 1 row, `x @ w`, of the dense product's time", 1, "int8 [K, N]", "XLA float32"),
        ("int4_g64, 256 rows, of the dense product's time", 256, "int4_g64 [N, K]", "XLA float32"),
        ("int4_g64, 256 rows, `x @ w`, of the dense product's time", 256, "int4_g64 [K, N]", "XLA float32"),
    ):
        yield shown, *(spread(one(rows, m=m, who=who)["of"][other]) for rows in products)
    yield (
        "W8A8, 256 rows, tiles of 64, of `torch._int_mm`",
        *(spread(one(rows, m=256, who="int4_g64 [N, K]")["of"]["torch int8 [N, K]"]) for rows in pairs),
    )
    for name in ("int4_g64", "nf4", "mxfp4", "nvfp4"):
        found = (one(rows, scheme=name, what="quantize", who="fewbit")["copies_in_place_quartiles"] for rows in made)
        yield f"quantize {name}, of a copy in place", *map(spread, found)
    for run in ("int8", "fp8", "nvfp4", "mxfp4"):
        found = (one(rows, run=run) for rows in steps)
        yield (
            f"a training step in {run}, of the float step's time / to compile",
            *(f"{spread(r['quartiles'])} / {r['compile_ratio']:.2f}" for r in found),
        )


@pytest.mark.parametrize(
    ("endings", "kernels", "table"),
    [(LEVELS[:2], {"avx2", "avx512"}, 0), (LEVELS[2:], {"avx2"}, 0), (INTEL, {"avx2", "avx512"}, 1)],
    ids=["AMD, AVX-512", "AMD, AVX2 only", "Intel"],
)
def test_the_targets_are_of_one_machine(endings: tuple[str, ...], kernels: set[str], table: int):
    names = ("generation", "qmatmul", "integers", "quantize", "training_step")
    texts = [(ROOT / "bench" / "results" / f"{name}{ending}.json").read_text() for name in names for ending in endings]
    files = [json.loads(text) for text in texts]
    assert len({file["device"] for file in files}) == 1
    assert {file["kernels"] for file in files} == kernels
    before_the_table = PAGE.split("### Targets and results")[1].split("| work |")[table]
    assert all(date in before_the_table for date in {file["date"] for file in files})


FILES: dict[str, tuple[str, Callable[[], Iterator[Row]]]] = {
    "qmatmul": ("weight | 1 row, `x @ w.T` | 1 row, `x @ w` | 256 rows, `x @ w.T` | 256 rows, `x @ w`", qmatmul),
    "layouts": ("weight, tiles along the outputs", layouts),
    "experts": ("8 experts of 1024 x 1024, rows", experts),
    "integers": ("weight | 16 rows, of XLA's int8", integers),
    "blocks": ("int8 `x`, blocks, `x @ w`", blocks),
    "amx": ("AMX, `x` in bfloat16", amx_and_dense),
    "amx of integers": ("AMX, `x` in int8", functools.partial(amx, ("int8",))),
    "activations": ("recipe | perplexity, float32", activations),
    "encoder_activations": ("MiniLM, recipe", encoder_activations),
    "attention": ("one layer", attention),
    "generation": ("work | fewbit, tokens/s", generation),
    "goals": ("work | limited to AVX2 | AVX-512 | AVX2 only", goals),
    "goals of Intel": ("work | limited to AVX2 | limited to AVX-VNNI | AVX-512", functools.partial(goals, INTEL)),
    "quantize": ("scheme | quantize, in copies in place", quantize),
    "triton": ("weight | 1 row, sm_80", triton),
    "tpu_model": ("scheme | v4 memory", tpu_model),
    "tpu_model_pairs": ("weight | rows | v5e memory", tpu_pairs),
    "tpu_model_ragged": ("rows | experts that have some", tpu_ragged),
}
"""How the heading of each table begins, and the rows that its file gives."""


@pytest.mark.finding(36)
@pytest.mark.parametrize("name", FILES)
def test_a_table_shows_its_file(name: str):
    heading, rows = FILES[name]
    (table,) = [t for t in tables() if " | ".join(t[0]).startswith(heading)]
    shown = [row[:4] for row in table] if name.startswith("goals") else table  # beside what is asked
    assert (shown if name == "attention" else shown[1:]) == list(rows())


@pytest.mark.finding(36)
def test_every_table_of_numbers_has_its_file():
    """The other tables of the page have no cell that is a number."""
    known = [heading for heading, _ in FILES.values()]
    others = [t for t in tables() if not any(" | ".join(t[0]).startswith(heading) for heading in known)]
    assert len(tables()) - len(others) == len(FILES)
    for table in others:
        assert not [cell for row in table for cell in row if cell.replace(".", "").isdigit()], table[0]
