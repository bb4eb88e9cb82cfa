"""What the Triton kernels compile to: wide loads and stores, and no more instructions than the committed figures plus a tenth."""

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton", reason="the Triton kernels need triton")

from bench import triton_code

COMMITTED = json.loads((Path(triton_code.__file__).parent / "results" / "triton.json").read_text())["rows"]
FIRST = ("mxfp4 optimal", 90)
"""The one that `make test-fast` compiles."""
PRODUCTS = (*triton_code.FAMILIES, "codes")
COMPILED = [row for row in COMMITTED if not row["kernel"].endswith(PRODUCTS)]
COMPILED += [row for row in COMMITTED if (row["kernel"], row["sm"]) in {("int4_g64 x1", 90), ("nvfp4 x16", 90)}]
"""Of the products, which take long to compile, two; `python -m bench.triton_code --save` compiles them all."""


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def compiled(kernel: str, sm: int) -> dict[str, Any]:
    """The figures of a kernel as it is now."""
    name, what = kernel.rsplit(" ", 1)
    if what == "decoded":
        return triton_code.decoder_rows(name, (sm,))[0]
    if what in triton_code.FAMILIES:
        return triton_code.product_rows(name, what, (sm,))[0]
    if what == "codes":
        return triton_code.codes_rows(name, (sm,))[0]
    if what == "swept":
        return triton_code.sweep_rows(name, (sm,))[0]
    return triton_code.quantizer_rows(name, what.removesuffix("-ptx"), (sm,), inline_ptx=what.endswith("-ptx"))[0]


def marks(row: dict[str, Any]) -> tuple[pytest.MarkDecorator, ...]:
    if (row["kernel"], row["sm"]) == FIRST:
        return ()
    return (pytest.mark.slow,) if row["sm"] == 90 else (pytest.mark.slow, pytest.mark.long)


@pytest.mark.parametrize(
    "row", [pytest.param(row, marks=marks(row), id=f"{row['kernel']} sm_{row['sm']}") for row in COMPILED]
)
def test_instructions_do_not_grow(row: dict[str, Any]) -> None:
    now = compiled(row["kernel"], row["sm"])
    assert now["lane_instructions"] <= 1.1 * row["lane_instructions"], "run python -m bench.triton_code --save if it has to"
    assert now["memory"] == row["memory"]


@pytest.mark.parametrize("row", COMMITTED, ids=lambda row: f"{row['kernel']} sm_{row['sm']}")
def test_loads_and_stores_are_wide(row: dict[str, Any]) -> None:
    wide_load = (
        {"LDG.E.64"}
        if row["kernel"].endswith("decoded")
        else {"LDG.E.128", "LDGSTS.E.BYPASS.128", "LDGSTS.E.BYPASS.LTC128B.128"}
    )
    assert wide_load & set(row["memory"])
    # Four codes of 6 bits in three bytes are stored as bytes, merged in the L2 cache; a sweep stores scales only, and a
    # product of one row a few sums.
    few = ("x1", "x1-float32", "x16", "grouped")
    if not row["kernel"].startswith("mxfp6") and not row["kernel"].endswith(("swept", *few)):
        assert {"STG.E.64", "STG.E.128"} & set(row["memory"])


BY_TENSOR_CORES = [row for row in COMMITTED if row["kernel"].endswith(PRODUCTS) and not row["kernel"].endswith("float32")]


@pytest.mark.parametrize("row", BY_TENSOR_CORES, ids=lambda row: f"{row['kernel']} sm_{row['sm']}")
def test_products_of_many_rows_are_made_by_tensor_cores(row: dict[str, Any]) -> None:
    fast = {80: ("HMMA", "IMMA"), 90: ("HGMMA", "QGMMA", "IGMMA"), 100: ("UTC",)}[row["sm"]]
    fast = ("HMMA",) if row["kernel"].endswith(triton_code.PAIRS) else fast
    assert any(op.startswith(fast) for op in row["matrix"])
    assert row["shared"] <= {80: 163, 90: 227, 100: 227}[row["sm"]] * 1024


def test_every_architecture_is_there() -> None:
    named = {f"{name} {method}" for name, method in triton_code.KERNELS} | {
        f"{name} decoded" for name in triton_code.DECODED
    }
    named |= {f"{name} {family}" for name, family in triton_code.MULTIPLIED}
    assert {(row["kernel"], row["sm"]) for row in COMMITTED} >= {(k, sm) for k in named for sm in triton_code.ARCHITECTURES}
