"""Every public name says what it is, names its arguments, and stands in the API reference."""

import ast
import importlib
import inspect
import operator
import re

import pytest

import fewbit
from docs.api_pages import PublicName, commands_text, pages, public_names

NAMES = public_names()


def section(docstring: str, title: str) -> str | None:
    """The lines of every `Args:`, `Returns:` or `Attributes:`; None when there are none."""
    return "\n".join(re.findall(rf"^{title}:\n((?:^[ \t]+\S.*\n?|^\s*\n)+)", docstring, re.MULTILINE)) or None


def documented(docstring: str, *titles: str) -> set[str]:
    """The names that stand before a colon in the sections: `x: ...`, `lo, hi: ...`, `*axes: ...`."""
    lines = "".join(section(docstring, title) or "" for title in titles).splitlines()
    heads = [re.match(r"[ \t]+([*\w, `]+?)(?: \(.*?\))?:", line) for line in lines]
    return {name.strip(" *`") for head in heads if head for name in head.group(1).split(",")}


def arguments(node: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    """The names of a function's parameters."""
    every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs, node.args.vararg, node.args.kwarg]
    return {arg.arg for arg in every if arg is not None}


def fields(node: ast.ClassDef) -> set[str]:
    """The names of a dataclass's public fields."""
    annotated = [
        item for item in node.body if isinstance(item, ast.AnnAssign) and "ClassVar" not in ast.unparse(item.annotation)
    ]
    return {item.target.id for item in annotated if isinstance(item.target, ast.Name) and not item.target.id.startswith("_")}


def whole_docstring(name: PublicName) -> str:
    """The docstring; an adapter's "as `fb.name`" adds that function's, and its package documents the arguments they share."""
    texts = [name.docstring or ""]
    if name.layer == "frameworks":
        counterparts = re.findall(r"\bas `fb\.([\w.]+)`", texts[0])
        texts += [inspect.getdoc(operator.attrgetter(path)(fewbit)) or "" for path in counterparts]
        texts += [inspect.getdoc(fewbit.frameworks) or ""]
    return "\n\n".join(texts)


@pytest.mark.parametrize("name", NAMES, ids=lambda name: name.path)
def test_the_name_is_there(name: PublicName) -> None:
    if name.layer == "torch":
        pytest.importorskip("torch")
    module, _, attribute = name.path.rpartition(".")
    assert hasattr(importlib.import_module(module), attribute)


@pytest.mark.once
@pytest.mark.parametrize("name", NAMES, ids=lambda name: name.path)
def test_the_first_paragraph_is_a_sentence(name: PublicName) -> None:
    assert name.docstring, (
        f"{name.path} has no docstring; for a constant it is the string right below its assignment ({name.file})"
    )
    first = name.docstring.split("\n\n")[0].rstrip()
    assert first.endswith((".", "?", ":")), f"{name.path} starts with {first!r}, which is not a sentence"


@pytest.mark.once
@pytest.mark.parametrize("name", NAMES, ids=lambda name: name.path)
def test_what_it_takes_and_gives_is_said(name: PublicName) -> None:
    node, text = name.node, whole_docstring(name)
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        missing = arguments(node) - documented(text, "Args")
        gives = node.returns is not None and ast.unparse(node.returns) not in ("None", "NoReturn")
        silent = gives and arguments(node) and not re.search(r"^(Returns|Yields):", text, re.MULTILINE)
        assert not missing, f"{name.path}: no line under Args: for {sorted(missing)}"
        assert not silent, f"{name.path}: no Returns: section"
    elif isinstance(node, ast.ClassDef):
        missing = fields(node) - documented(text, "Attributes", "Args")
        assert not missing, f"{name.path}: no line under Attributes: for {sorted(missing)}"


def test_every_name_stands_in_the_reference_once() -> None:
    entries = re.findall(r"^::: (\S+)$", "\n".join(pages().values()), re.MULTILINE)
    assert sorted(entries) == sorted(name.definition for name in NAMES)
    assert "fewbit.kernels.quantize.dispatch.quantize" in entries


def test_every_command_stands_in_the_reference() -> None:
    text = commands_text()
    assert "## fewbit quantize\n" in text
    assert text.count("Usage: ") == text.count("## fewbit ")
