"""Runs the Python of every page: README, CONTRIBUTING and docs/, each page's blocks in order, in one namespace.

A block fenced as ```python runs, as ```python torch where torch is installed; ```pycon runs as a doctest, and what it prints must match;
```python no-run is skipped, and the run's summary counts them; ```console and all others are for reading only.
"""

import dataclasses
import doctest
import importlib.util
import re
import runpy
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
NEEDED = {"docs/frameworks.md": ("flax", "optax", "equinox"), "docs/io.md": ("flax", "orbax"), "docs/torch.md": ("torch",)}
"""The packages beside those of `make test-fast` that a page's code imports."""
FENCE = re.compile(r"^(?P<indent>[ \t]*)```(?P<info>.*)\n(?P<code>(?:.*\n)*?)(?P=indent)```[ \t]*$", re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Block:
    """A fenced block of a page: its info string, its code, and the line of the page that its code starts at."""

    page: Path
    info: str
    code: str
    line: int


def blocks(page: Path) -> Iterator[Block]:
    """The fenced blocks of a page, in order."""
    text = page.read_text()
    for found in FENCE.finditer(text):
        indent = found["indent"]
        code = re.sub(rf"^{indent}", "", found["code"], flags=re.MULTILINE)
        yield Block(page, found["info"].strip(), code, text.count("\n", 0, found.start("code")) + 1)


def run(block: Block, namespace: dict[str, Any]) -> None:
    """Runs one block; lines are counted as in the page, so that a traceback points into it."""
    if block.info == "python" or (block.info == "python torch" and importlib.util.find_spec("torch")):
        code = "\n" * (block.line - 1) + block.code
        exec(compile(code, str(block.page), "exec"), namespace)
    elif block.info == "pycon":
        examples = doctest.DocTestParser().get_doctest(
            block.code, namespace, block.page.name, str(block.page), block.line - 1
        )
        report: list[str] = []
        if doctest.DocTestRunner(verbose=False).run(examples, out=report.append, clear_globs=False).failed:
            raise AssertionError("".join(report))
        namespace.update(examples.globs)


def run_page(page: Path) -> None:
    """Runs a page's blocks in one namespace; the first that fails is named by the page and the line."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks(page):
        try:
            run(block, namespace)
        except Exception as error:
            lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(page)]
            error.add_note(f"in the block at {page}:{lines[-1] if lines else block.line}")
            raise


def page_id(page: Path) -> str:
    """The page's path in the repository."""
    return page.relative_to(ROOT).as_posix()


QUICK = ("docs/quickstart.md", "docs/formats.md")
RUN = [pytest.param(page, id=page_id(page), marks=[] if page_id(page) in QUICK else [pytest.mark.slow]) for page in PAGES]


@pytest.mark.parametrize("page", RUN)
def test_the_code_of_a_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in NEEDED.get(page_id(page), ()):
        pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):  # what a reader's JAX does
        run_page(page)


def test_the_blocks_that_are_left_out_are_counted() -> None:
    left_out = [f"{page_id(page)}:{block.line}" for page in PAGES for block in blocks(page) if block.info == "python no-run"]
    if left_out:
        pytest.skip(f"{len(left_out)} blocks are marked no-run: {', '.join(left_out)}")


KNOWN = {"python", "python no-run", "python torch", "pycon", "console", "sh", "text", "json", "toml", "c++", ""}


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_every_fence_says_how_it_is_read(page: Path) -> None:
    assert {block.info for block in blocks(page)} <= KNOWN
    assert page.read_text().count("```") == 2 * len(list(blocks(page))), "a fence is not closed"


@pytest.mark.parametrize("page", [page for page in PAGES if page.parent != ROOT], ids=page_id)
def test_a_fence_of_the_site_has_one_word(page: Path, tmp_path: Path) -> None:
    """mkdocs takes a fence with two words for text; the hook `docs/fences.py` removes the words for tests."""
    hook = runpy.run_path(str(ROOT / "docs" / "fences.py"))["on_page_markdown"]
    copy = tmp_path / page.name
    copy.write_text(hook(page.read_text()))
    assert not [block.info for block in blocks(copy) if " " in block.info]


@pytest.mark.parametrize(
    ("code", "error", "line"),
    [
        ("```python\nx = 1\n```\n\n```python\nx += 1\nassert x == 3\n```\n", AssertionError, 7),
        ("```python\n\nimport nowhere_at_all\n```\n", ModuleNotFoundError, 3),
        ("1. step\n\n   ```python\n   y = (\n   ```\n", SyntaxError, 4),
        ("```pycon\n>>> 1 + 1\n3\n```\n", AssertionError, 2),
    ],
    ids=["second block", "import", "syntax", "doctest"],
)
def test_a_page_that_is_wrong_is_named_with_its_line(code: str, error: type[Exception], line: int, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(code)
    with pytest.raises(error) as failure:
        run_page(page)
    assert failure.value.__notes__ == [f"in the block at {page}:{line}"]


def test_a_page_that_is_right_passes(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "```python\nx = 2\n```\n```python no-run\n1 / 0\n```\n```pycon\n>>> x + 1\n3\n```\n```console\n$ rm\n```\n"
    )
    run_page(page)
    assert [block.info for block in blocks(page)] == ["python", "python no-run", "pycon", "console"]
