"""The public names of fewbit, read off its sources, and the pages of the API reference that mkdocs makes of them.

A name is public when a package's `__init__.py` hands it on as `from .place import name as name`; the names of `fewbit` itself stand in
`_api.py`. It is documented once,
under its shortest path, on the page of the layer that defines it. The sources are parsed; only the help of the commands is
asked of the running package.
"""

import ast
import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SOURCES = Path(__file__).parent.parent / "src"

# The pages by layer, in the order of the design; a layer that is not built yet has no page.
TITLES = {
    "formats": "Formats",
    "array": "Arrays",
    "kernels": "Kernels",
    "ops": "Products",
    "recipe": "Recipes",
    "calibration": "Calibration",
    "training": "Training",
    "kvcache": "Caches",
    "methods": "Methods",
    "frameworks": "Frameworks",
    "io": "Files",
    "models": "Models",
    "evaluate": "Evaluation",
    "export": "Export",
    "torch": "PyTorch",
    "workflows": "Workflows",
    "cli": "Command line",
    "errors": "Errors",
}


@dataclasses.dataclass(frozen=True)
class PublicName:
    """A public name.

    Attributes:
        path: the shortest dotted path that users import it by, `fewbit.quantize`.
        file: the source file that defines it.
        name: its name in that file.
    """

    path: str
    file: Path
    name: str

    @property
    def layer(self) -> str:
        """The layer that defines it: the first folder or file below fewbit."""
        return self.file.relative_to(SOURCES / "fewbit").with_suffix("").parts[0]

    @property
    def definition(self) -> str:
        """The dotted path of the definition; where a module is called as its function is, only this path is unambiguous."""
        return ".".join([*self.file.relative_to(SOURCES).with_suffix("").parts, self.name]).replace(".__init__", "")

    @property
    def entry(self) -> str:
        """Its entry on a reference page: an anchor under its public path, and what mkdocstrings reads off the definition."""
        options = f"    options:\n      heading: {self.path}\n      toc_label: {self.path.removeprefix('fewbit.')}"
        anchor = "" if self.path == self.definition else f"[](){{#{self.path}}}\n\n"
        return f"{anchor}::: {self.definition}\n{options}"

    @property
    def node(self) -> ast.stmt:
        """The statement that defines it."""
        return _statements(self.file)[self._position]

    @property
    def docstring(self) -> str | None:
        """What it says of itself; of a constant, the string right below its assignment."""
        if isinstance(self.node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            return ast.get_docstring(self.node)
        below = _statements(self.file)[self._position + 1 :][:1]
        is_text = below and isinstance(below[0], ast.Expr) and isinstance(below[0].value, ast.Constant)
        return str(below[0].value.value) if is_text else None

    @property
    def _position(self) -> int:
        return max(i for i, node in enumerate(_statements(self.file)) if self.name in _defined(node))


def _statements(file: Path) -> list[ast.stmt]:
    return ast.parse(file.read_text()).body


def _defined(node: ast.stmt) -> list[str]:
    """The names that a statement of a module defines."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)]


def _source(package: Path, node: ast.ImportFrom) -> Path:
    """The file or folder that a relative import in a package's `__init__.py` reads."""
    place = package
    for _ in range(node.level - 1):
        place = place.parent
    return place.joinpath(*(node.module or "").split(".")) if node.module else place


def _definition(place: Path, name: str) -> PublicName | None:
    """Where `name` of a module is defined, through any number of packages that hand it on; None when it is a module."""
    if (place / name).is_dir() or ((place / f"{name}.py").is_file() and not _hands_on(place, name)):
        return None
    file = place.with_suffix(".py")
    if file.is_file():
        return PublicName("", file, name)
    source = _hands_on(place, name)
    if source is None:
        return PublicName("", place / "__init__.py", name)
    return _definition(source, name)


def _names_file(package: Path) -> Path:
    """The file with the public names of a package."""
    return package / ("_api.py" if package.name == "fewbit" else "__init__.py")


def _hands_on(package: Path, name: str) -> Path | None:
    """The place that a package's `__init__.py` takes `name` from; None when it does not."""
    for node in _statements(_names_file(package)):
        if isinstance(node, ast.ImportFrom) and node.module and any(alias.name == name for alias in node.names):
            return _source(package, node)
    return None


def _handed_on(package: Path) -> Iterator[PublicName]:
    """The public names of one package, each with its definition."""
    prefix = ".".join(package.relative_to(SOURCES).parts)
    for node in _statements(_names_file(package)):
        if not isinstance(node, ast.ImportFrom) or not node.level:
            continue
        for alias in node.names:
            if alias.asname == alias.name and not alias.name.startswith("_"):
                found = _definition(_source(package, node), alias.name)
                if found is not None:
                    yield dataclasses.replace(found, path=f"{prefix}.{alias.name}")


def _in_faces() -> Iterator[PublicName]:
    """The public definitions of the files of `fewbit.frameworks`, which users import as modules."""
    for file in sorted((SOURCES / "fewbit" / "frameworks").glob("[a-z]*.py")):
        for node in _statements(file):
            for name in _defined(node):
                if not name.startswith("_"):
                    yield PublicName(f"fewbit.frameworks.{file.stem}.{name}", file, name)


def public_names() -> list[PublicName]:
    """Every public name once, under its shortest path."""
    packages = sorted((init.parent for init in (SOURCES / "fewbit").rglob("__init__.py")), key=lambda p: len(p.parts))
    shortest: dict[tuple[Path, str], PublicName] = {}
    for package in packages:
        for found in _handed_on(package):
            shortest.setdefault((found.file, found.name), found)
    shortest.update({(found.file, found.name): found for found in _in_faces()})
    return list(shortest.values())


def arguments_listed(docstring: str) -> str:
    """The docstring of a package as markdown: the lines below `Args:` become a list."""
    text, title, arguments = docstring.partition("\nArgs:\n")
    return (text + "\n" + re.sub(r"^ {4}(\w+):", r"- `\1`:", arguments, flags=re.MULTILINE)) if title else docstring


def page_text(layer: str) -> str:
    """The reference page of a layer: what its package says of itself, then each public name that it defines."""
    names = [name for name in public_names() if name.layer == layer]
    package = SOURCES / "fewbit" / layer
    about = ast.get_docstring(
        ast.parse((package / "__init__.py" if package.is_dir() else package.with_suffix(".py")).read_text())
    )
    blocks = [f"# {TITLES[layer]}", arguments_listed(about or ""), *(name.entry for name in names)]
    return "\n\n".join(blocks) + "\n"


def commands_text() -> str:
    """What each command of the command line says of itself under `--help`."""
    import typer
    from typer.testing import CliRunner

    from fewbit.cli.commands import app

    runner = CliRunner(env={"COLUMNS": "100"})
    helps = {name: runner.invoke(app, [name, "--help"]).output for name in typer.main.get_command(app).commands}
    return "\n".join(f"## fewbit {name}\n\n```text\n{text.strip()}\n```\n" for name, text in helps.items())


def pages() -> dict[str, str]:
    """The reference pages by their path in the site."""
    layers = {name.layer for name in public_names()}
    unknown = layers - TITLES.keys()
    if unknown:
        raise ValueError(
            f"layers without a title for their reference page: {sorted(unknown)}; add them to TITLES in {__file__}"
        )
    return {f"api/{layer}.md": page_text(layer) for layer in TITLES if layer in layers}


def on_config(config: Any) -> Any:
    """mkdocs' hook: fills the sections of the navigation that mkdocs.yml names as a folder."""
    design = sorted(path.name for path in (Path(__file__).parent / "design").glob("*.md"))
    folders = {"api": list(pages()), "design": [f"design/{name}" for name in sorted(design, key="index.md".__ne__)]}

    def filled(entries: list[Any]) -> list[Any]:
        return [
            {
                title: filled(place) if isinstance(place, list) else folders.get(place, place)
                for title, place in entry.items()
            }
            for entry in entries
        ]

    config.nav = filled(config.nav)
    return config


def on_files(files: Any, config: Any) -> Any:
    """mkdocs' hook: adds the reference pages to the site's files."""
    from mkdocs.structure.files import File

    for path, text in pages().items():
        more = commands_text() if path == "api/cli.md" else ""
        files.append(File.generated(config, path, content=text + more))
    return files
