"""The house rules that can be read off the sources: the order of the layers, what is imported where, docstrings."""

import ast
import functools
import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "fewbit"
SOURCES = sorted(PACKAGE.rglob("*.py"))

# Each layer imports only what stands in a row above its own, and itself.
LAYERS = (
    ("errors",),
    ("_registry",),
    ("_json", "_merges", "_patterns", "_pretokenizers", "_table", "_wrapping", "_explicit_mesh"),
    ("_tiles", "_hybrids"),
    ("formats",),
    ("array",),
    ("kernels",),
    ("ops",),
    ("recipe",),
    ("calibration",),
    ("training", "kvcache", "methods"),
    ("frameworks", "io", "models"),
    ("evaluate", "export", "torch"),
    ("workflows",),
    ("cli",),
    ("_api",),  # collects the public names of every layer
)
RANK = {part: rank for rank, row in enumerate(LAYERS) for part in row}

# What `pip install fewbit` brings; everything else is an extra.
HARD = {"jax", "jaxlib", "jaxtyping", "ml_dtypes", "msgspec", "numpy", "regex", "rich", "scipy", "typer"}
# What the extras bring, as import names.
OPTIONAL = {
    "flax",
    "gguf",
    "jinja2",
    "matplotlib",
    "safetensors",
    "tokenizers",
    "torch",
    "transformers",
    "triton",
    "jax_triton",
    "optax",
    "equinox",
}
# The adapters of optional packages, whose files may import theirs at the top: nothing else of fewbit imports those files there.
ADAPTERS = (
    "frameworks/",
    "torch/",
    "kernels/triton/*.py",
    "kernels/*/gpu/*.py",
)


@functools.cache
def parsed(path: Path) -> ast.Module:
    """The syntax tree of a file."""
    return ast.parse(path.read_text())


def source_id(path: Path) -> str:
    """The path inside the package, to read in a test's name."""
    return path.relative_to(PACKAGE).as_posix()


def part_of(module: str) -> str | None:
    """The part of fewbit that an absolute module name belongs to; None for fewbit itself and for other packages."""
    words = module.split(".")
    return words[1] if words[0] == "fewbit" and len(words) > 1 else None


def module_name(path: Path) -> str:
    """The dotted name that a source file is imported by."""
    words = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(words[:-1] if words[-1] == "__init__" else words)


def imported_modules(node: ast.Import | ast.ImportFrom, path: Path) -> list[str]:
    """The absolute names that an import statement reaches; `from a import b` counts as `a.b`, since b may be a module."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    package = module_name(path).split(".")
    if path.name != "__init__.py":
        package = package[:-1]
    base = package[: len(package) - node.level + 1] if node.level else []
    stem = ".".join([*base, *([node.module] if node.module else [])])
    return [f"{stem}.{alias.name}" for alias in node.names]


def imports(path: Path, *, top_only: bool = False) -> Iterator[tuple[int, str]]:
    """Line and absolute name of every import of a file; `top_only`: only those that run when the file is imported."""
    pending: list[ast.AST] = [parsed(path)]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from ((node.lineno, name) for name in imported_modules(node, path))
        if top_only and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if top_only and isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            continue
        pending.extend(ast.iter_child_nodes(node))


def is_adapter(path: Path) -> bool:
    """Whether a file is an adapter of an optional package, which only its users import."""
    inner = path.relative_to(PACKAGE)
    return any(inner.match(f"{adapter}*.py" if adapter.endswith("/") else adapter) for adapter in ADAPTERS)


@pytest.mark.once
@pytest.mark.parametrize("path", SOURCES, ids=source_id)
def test_a_layer_imports_only_what_stands_left_of_it(path: Path) -> None:
    own = part_of(module_name(path))
    if own is None:
        return  # fewbit/__init__.py imports the public names when they are asked for
    assert own in RANK, f"{own} stands in no layer: add it to LAYERS, where DESIGN.md section 4 puts it"
    for line, name in imports(path):
        if name.split(".")[0] != "fewbit":
            continue
        other = part_of(name)
        assert other in RANK, f"{path}:{line} imports {name}; import from the layer that defines it"
        assert other == own or RANK[other] < RANK[own], (
            f"{path}:{line}: {own} must not import {other}, which stands right of it"
        )


@pytest.mark.once
@pytest.mark.parametrize("path", SOURCES, ids=source_id)
def test_only_hard_dependencies_are_imported_at_the_top(path: Path) -> None:
    for line, name in imports(path, top_only=True):
        package = name.split(".")[0]
        known = package in HARD or package == "fewbit" or package in sys.stdlib_module_names
        assert known or is_adapter(path), (
            f"{path}:{line} imports {package} at the top; import it inside the function that needs it"
        )


@pytest.mark.once
@pytest.mark.parametrize("path", SOURCES, ids=source_id)
def test_no_file_reads_private_jax(path: Path) -> None:
    private = [f"{path}:{line} {name}" for line, name in imports(path) if name.startswith(("jax._src", "jaxlib."))]
    assert not private
    reached = [n for n in ast.walk(parsed(path)) if isinstance(n, ast.Attribute) and n.attr == "_src"]
    assert not reached


def test_no_file_is_a_drawer() -> None:
    assert not [p for p in SOURCES if p.stem in ("utils", "util", "misc", "helpers", "common")]


def public_definitions(body: list[ast.stmt], prefix: str = "") -> Iterator[tuple[str, ast.AST]]:
    """Each public class, function and method with its dotted name; overloads aside."""
    for node in body:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) or node.name.startswith("_"):
            continue
        if any(ast.unparse(d).endswith(("overload", ".setter")) for d in node.decorator_list):
            continue
        yield prefix + node.name, node
        if isinstance(node, ast.ClassDef):
            yield from public_definitions(node.body, f"{prefix}{node.name}.")


@pytest.mark.once
@pytest.mark.parametrize("path", SOURCES, ids=source_id)
def test_a_file_and_its_public_definitions_say_what_they_are(path: Path) -> None:
    tree = parsed(path)
    first = tree.body[0] if tree.body else None
    is_string = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str)
    assert is_string, f"{path}: the first statement must be a docstring that says what the file is about"
    # A method that fulfils what a base class documents need not say it again.
    silent = [
        f"{path}:{node.lineno} {name}"
        for name, node in public_definitions(tree.body)
        if ast.get_docstring(node) is None and not ("." in name and overrides(path, name))
    ]
    assert not silent, "no docstring: " + ", ".join(silent)


def overrides(path: Path, name: str) -> bool:
    """Whether `Class.method` of a file fulfils a method that a base class documents."""
    cls = getattr(importlib.import_module(module_name(path)), name.split(".")[0])
    return any(getattr(vars(base).get(name.split(".")[-1]), "__doc__", None) for base in cls.__mro__[1:])


@pytest.mark.parametrize("path", SOURCES, ids=source_id)
def test_every_module_imports(path: Path) -> None:
    try:
        importlib.import_module(module_name(path))
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] not in OPTIONAL:
            raise
        pytest.skip(f"{error.name} is not installed")


def test_importing_fewbit_imports_no_extra() -> None:
    code = "import sys, fewbit._api; print(*sorted({name.split('.')[0] for name in sys.modules}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not OPTIONAL & set(done.stdout.split())


def test_importing_fewbit_starts_no_device() -> None:
    code = "import fewbit._api, jax; jax.config.update('jax_platforms', 'none_such'); jax.devices()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "none_such" in done.stderr
