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


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def compiled(kernel: str, sm: int) -> dict[str, Any]:
    """The figures of a kernel as it is now."""
    name, what = kernel.rsplit(" ", 1)
    if what == "decoded":
        return triton_code.decoder_rows(name, (sm,))[0]
    if what == "swept":
        return triton_code.sweep_rows(name, (sm,))[0]
    return triton_code.quantizer_rows(name, what.removesuffix("-ptx"), (sm,), inline_ptx=what.endswith("-ptx"))[0]


def marks(row: dict[str, Any]) -> tuple[pytest.MarkDecorator, ...]:
    return () if (row["kernel"], row["sm"]) == FIRST else (pytest.mark.slow,)


@pytest.mark.parametrize(
    "row", [pytest.param(row, marks=marks(row), id=f"{row['kernel']} sm_{row['sm']}") for row in COMMITTED]
)
def test_instructions_do_not_grow(row: dict[str, Any]) -> None:
    now = compiled(row["kernel"], row["sm"])
    assert now["lane_instructions"] <= 1.1 * row["lane_instructions"], "run python -m bench.triton_code --save if it has to"
    assert now["memory"] == row["memory"]


@pytest.mark.parametrize("row", COMMITTED, ids=lambda row: f"{row['kernel']} sm_{row['sm']}")
def test_loads_and_stores_are_wide(row: dict[str, Any]) -> None:
    wide_load = {"LDG.E.64"} if row["kernel"].endswith("decoded") else {"LDG.E.128"}
    assert wide_load & set(row["memory"])
    # Four codes of 6 bits in three bytes are stored as bytes, merged in the L2 cache; a sweep stores scales only.
    if not row["kernel"].startswith("mxfp6") and not row["kernel"].endswith("swept"):
        assert {"STG.E.64", "STG.E.128"} & set(row["memory"])


def test_every_architecture_is_there() -> None:
    named = {f"{name} {method}" for name, method in triton_code.KERNELS} | {
        f"{name} decoded" for name in triton_code.DECODED
    }
    assert {(row["kernel"], row["sm"]) for row in COMMITTED} >= {(k, sm) for k in named for sm in triton_code.ARCHITECTURES}
