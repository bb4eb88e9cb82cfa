"""Runs every row of docs/migrating.md: our side always, their side where the package is installed, and compares the two.

A row has the name, an expression of theirs, one of ours, and the largest relative difference: `equal`, or the largest relative
difference (of norms) that may be measured. From a thousandth on at least a tenth of it must be there, so that no row claims a
difference that is none. The page's blocks of code set up the expressions: `python` ours, `python no-run` theirs, section by section.
"""

import contextlib
import dataclasses
import importlib
import importlib.util
import inspect
import pkgutil
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import fewbit as fb

PAGE = Path(__file__).parent.parent / "docs" / "migrating.md"
HEADER = "| theirs | call | here | max. rel. diff. | |"
PACKAGES = {"Qwix": "qwix", "AQT": "aqt", "MaxText": None, "eFormer": "eformer", "qwantize": "qwantize"}
"""The packages that stand behind the sections of the page; None where none can be installed here."""


@dataclasses.dataclass(frozen=True)
class Row:
    """A row of a table, and the section that it stands in."""

    section: str
    called: str
    theirs: str
    ours: str
    difference: str
    remark: str

    @property
    def names(self) -> list[str]:
        """The names of theirs that it answers for."""
        return re.findall(r"`([^`]+)`", self.called)

    def __str__(self) -> str:
        return f"{self.section} {self.called.split('`, `')[0].replace('`', '')}"


def sections() -> Iterator[tuple[str, str]]:
    """The page's sections by title: the first word of a heading of the second level."""
    for part in re.split(r"^## ", PAGE.read_text(), flags=re.MULTILINE)[1:]:
        yield part.split()[0], part


def code(cell: str) -> str:
    """What stands between the backticks of a cell, or nothing."""
    found = re.fullmatch(r"(`+)(.+)\1", cell.strip())
    return found[2].strip() if found else ""


def rows() -> Iterator[Row]:
    """Every row of every table of names."""
    for section, text in sections():
        for line in text.split(HEADER, 1)[-1].splitlines() if HEADER in text else ():
            if line.startswith("| `"):
                names, theirs, ours, difference, remark = re.split(r"\s*\|\s*", line.strip("| "))
                yield Row(section, names, code(theirs), code(ours), difference.strip("- "), remark)


ROWS = list(rows())


def blocks(info: str) -> Iterator[tuple[str, str]]:
    """The code of the blocks with this info string, and the section of each."""
    for section, text in [("", PAGE.read_text().split("\n## ")[0]), *sections()]:
        for block in re.findall(rf"^```{info}\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
            yield section, block


OURS = [*blocks("python"), *(blocks("python torch") if importlib.util.find_spec("torch") else ())]
"""Our own blocks, those for PyTorch where it is installed."""


@contextlib.contextmanager
def readers_rules() -> Iterator[None]:
    """What a reader's JAX does: other packages promote dtypes and ranks, and use what is deprecated."""
    with warnings.catch_warnings(), jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        warnings.simplefilter("ignore")
        yield


@readers_rules()
def ran(sources: list[str]) -> dict[str, Any]:
    """The names that code leaves behind."""
    namespace: dict[str, Any] = {}
    for source in sources:
        exec(source, namespace)
    return namespace


@pytest.fixture(scope="module")
def ours() -> dict[str, Any]:
    """What the page's own code defines."""
    return ran([block for _, block in OURS])


@pytest.fixture(scope="module")
def theirs(ours: dict[str, Any]) -> Iterator[dict[str, dict[str, Any]]]:
    """For each package, our names and those that its block defines."""
    yield {}
    jax.clear_caches()  # what their patched functions traced must not be found by another test


@readers_rules()
def numbers(value: Any) -> list[np.ndarray] | None:
    """The arrays of a value, quantized ones decoded; None when there are none."""
    if hasattr(value, "materialize") and not isinstance(value, type):
        value = value.materialize()
    if type(value).__name__ == "QArray" and not isinstance(value, fb.QArray):
        import qwix

        value = qwix.dequantize(value)
    leaves = [leaf.numpy() if hasattr(leaf, "numpy") else leaf for leaf in jax.tree.leaves(value, is_leaf=fb.is_qarray)]
    leaves = [fb.dequantize(leaf) if isinstance(leaf, fb.QArray) else leaf for leaf in leaves]
    is_numeric = leaves and all(isinstance(leaf, jax.Array | np.ndarray | int | float) for leaf in leaves)
    return [np.asarray(leaf, np.float64) for leaf in leaves] if is_numeric else None


def is_compared(row: Row) -> bool:
    """Whether the second of the tests below evaluates both sides of it here."""
    package = PACKAGES[row.section]
    return bool(row.theirs) and (package is None or importlib.util.find_spec(package) is not None)


@pytest.mark.slow
@pytest.mark.parametrize("row", [row for row in ROWS if row.ours and not is_compared(row)], ids=str)
def test_our_side_of_a_row_evaluates(row: Row, ours: dict[str, Any]) -> None:
    if row.section == "qwantize":
        pytest.importorskip("torch")
    with readers_rules():
        eval(row.ours, ours)


@pytest.mark.slow
@pytest.mark.oracle
@pytest.mark.parametrize("row", [row for row in ROWS if row.theirs], ids=str)
def test_both_sides_are_differ_as_the_row_says(row: Row, ours: dict[str, Any], theirs: dict[str, dict[str, Any]]) -> None:
    package = PACKAGES[row.section]
    if package is not None:
        pytest.importorskip(package)
    if row.section not in theirs:
        namespace = ours | ran([b for s, b in [*OURS, *blocks("python no-run")] if s in ("", row.section)])
        theirs[row.section] = namespace
    with readers_rules():
        them = numbers(eval(row.theirs, theirs[row.section]))
        us = numbers(eval(row.ours, ours)) if row.ours else None
    assert (them is not None and us is not None) == bool(row.difference), "a row says how far numbers differ, and only then"
    if them is None or us is None:
        return
    assert [a.shape for a in us] == [a.shape for a in them]
    off, size = (np.sqrt(sum((x**2).sum() for x in part)) for part in ([a - b for a, b in zip(us, them, strict=True)], them))
    if row.difference == "equal":
        assert off == 0
    else:
        allowed = float(row.difference)
        assert off <= allowed * size
        assert allowed < 1e-3 or off >= allowed * size / 10, "the numbers are nearer than the row says"


def public(module: str) -> list[str]:
    """The public names of a module that are its own: neither modules, nor what it renames for itself."""
    found = {name: value for name, value in vars(importlib.import_module(module)).items() if not name.startswith("_")}
    own = [name for name, value in found.items() if not inspect.ismodule(value) and not name.startswith("qwix_")]
    return list(getattr(importlib.import_module(module), "__all__", own))


def qwix_names() -> list[str]:
    """Qwix's names, the fields of its rules, its kernels' names, and the modules of its contrib."""
    import qwix

    base = {field.name for field in dataclasses.fields(qwix.QuantizationRule)}
    fields = [(field.name in base, field.name) for field in dataclasses.fields(qwix.QtRule)]
    ruled = [f"{'QuantizationRule' if is_base else 'QtRule'}.{name}" for is_base, name in fields]
    contrib = [f"contrib.{module.name}" for module in pkgutil.iter_modules(qwix.contrib.__path__)]
    return [*public("qwix"), *(f"qwix.pallas.{name}" for name in public("qwix.pallas")), *ruled, *contrib]


def aqt_names() -> list[str]:
    """What AQT's config module defines."""
    config = importlib.import_module("aqt.jax.v2.config")
    own = [name for name, value in vars(config).items() if getattr(value, "__module__", "") == config.__name__]
    return [f"config.{name}" for name in own if not name.startswith("_")]


def qwantize_names() -> list[str]:
    """qwantize's functions."""
    return [name for name, value in vars(importlib.import_module("qwantize")).items() if inspect.isfunction(value)]


NAMES: dict[str, tuple[str, Callable[[], list[str]]]] = {
    "qwix": ("Qwix", qwix_names),
    "aqt": ("AQT", aqt_names),
    "qwantize": ("qwantize", qwantize_names),
    "eformer": ("eFormer", lambda: [*public("eformer.ops.quantization"), *public("eformer.jaximus")]),
}


@pytest.mark.oracle
@pytest.mark.parametrize("package", NAMES)
def test_every_public_name_of_theirs_has_a_row(package: str) -> None:
    pytest.importorskip(package)
    section, names = NAMES[package]
    listed = {name for row in ROWS if row.section == section for name in row.names}
    assert sorted(set(names()) - listed) == []


def test_what_is_not_here_is_said_so() -> None:
    assert len(ROWS) > 120
    silent = [str(row) for row in ROWS if not row.ours and not row.remark.startswith("Not here")]
    assert not silent
    assert not [str(row) for row in ROWS if row.difference and not (row.ours and row.theirs)]
