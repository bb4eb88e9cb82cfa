"""Mutation testing: how many small faults in the sources `make test` notices.

    .venv/bin/python tests/mutants.py [--count 60] [--seed 0] [--jobs 2]

Each mutant changes one operator, comparison or number of one function, in a copy of the checkout, and runs the tests of
`make test` that mirror the module's package, its doctests, and the conformance suites. A mutant that no test notices is
printed as SURVIVED; some of them change nothing that can be observed (a bound that is never met, a faster path). The tests of
each package run without a change first, and must pass: else every mutant would count as noticed.
"""

import argparse
import ast
import concurrent.futures
import dataclasses
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = ("formats", "array", "ops", "recipe", "io", "training")
SUITES = {"formats": ("conformance",), "array": ("conformance",), "ops": ("conformance",)}
"""The suites of a package besides those that mirror it."""
COPIED = ("src", "tests", "bench", "docs", "conftest.py", "pyproject.toml", "README.md", "Makefile", "setup.py")
SWAPS: dict[type[ast.AST], str] = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==", ast.In: "not in", ast.NotIn: "in",
    ast.Add: "-", ast.Sub: "+", ast.Mult: "+", ast.FloorDiv: "*", ast.Mod: "//", ast.And: "or", ast.Or: "and",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One change of one line of a module."""

    path: Path
    line: int
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.before.strip()}  ->  {self.after.strip()}"


def mutants_of(path: Path) -> Iterator[Mutant]:
    """Every mutant of a module, within its functions and on one line."""
    source = (ROOT / path).read_text()
    lines = source.splitlines()
    for function in (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)):
        for node in (node for part in function.body for node in ast.walk(part)):
            for start, end, new in _changes(node):
                if start[0] == end[0]:
                    line = lines[start[0] - 1]
                    changed = line[: start[1]] + new + line[end[1] :]
                    if changed != line and not line.lstrip().startswith(('"', ">>>", "raise", 'f"')):
                        yield Mutant(path, start[0], line, changed)


def _changes(node: ast.AST) -> Iterator[tuple[tuple[int, int], tuple[int, int], str]]:
    """Where a node can be changed, from and to which position, and to what."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in SWAPS:
        yield _end(node.left), (node.comparators[0].lineno, node.comparators[0].col_offset), f" {SWAPS[type(node.ops[0])]} "
    if isinstance(node, ast.BinOp) and type(node.op) in SWAPS:
        yield _end(node.left), (node.right.lineno, node.right.col_offset), f" {SWAPS[type(node.op)]} "
    if isinstance(node, ast.BoolOp):
        yield _end(node.values[0]), (node.values[1].lineno, node.values[1].col_offset), f" {SWAPS[type(node.op)]} "
    if isinstance(node, ast.Constant) and type(node.value) is int:
        yield (node.lineno, node.col_offset), _end(node), str(node.value + 1)


def _end(node: ast.expr) -> tuple[int, int]:
    assert node.end_lineno is not None
    assert node.end_col_offset is not None
    return node.end_lineno, node.end_col_offset


def is_valid(mutant: Mutant) -> bool:
    """Whether the mutated module compiles; parentheses around an operand may break."""
    lines = (ROOT / mutant.path).read_text().splitlines()
    lines[mutant.line - 1] = mutant.after
    try:
        ast.parse("\n".join(lines))
    except SyntaxError:
        return False
    return True


def chosen(count: int, seed: int) -> list[Mutant]:
    """As many mutants of each package, the same for the same seed."""
    numbers, picked = random.Random(seed), []
    for package in PACKAGES:
        paths = sorted((ROOT / "src" / "fewbit" / package).rglob("*.py"))
        every = [mutant for path in paths for mutant in mutants_of(path.relative_to(ROOT))]
        numbers.shuffle(every)
        valid = (mutant for mutant in every if is_valid(mutant))
        picked += [next(valid) for _ in range(count // len(PACKAGES))]
    return picked


def tests_of(path: Path) -> list[list[str]]:
    """What of `make test` may notice a change of a module: its doctests and its own tests, then those of its package."""
    package = path.parts[2]
    own = Path("tests", *path.parts[2:-1], f"test_{path.name}")
    found = [str(own)] if (ROOT / own).is_file() else []
    return [[*found, str(path)], [f"tests/{package}", *(f"tests/{suite}" for suite in SUITES.get(package, ()))]]


def outcome(mutant: Mutant, cache: str) -> str:
    """ "noticed" if a test fails with the mutant, "SURVIVED" if none does, or "TIMEOUT".

    Args:
        mutant: the mutant.
        cache: a folder for compiled programs, which mutants share.
    """
    with tempfile.TemporaryDirectory() as folder:
        for name in COPIED:
            source, target = ROOT / name, Path(folder) / name
            if source.is_dir():
                shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, target)
        path = Path(folder) / mutant.path
        lines = path.read_text().splitlines(keepends=True)
        lines[mutant.line - 1] = mutant.after + "\n"
        path.write_text("".join(lines))
        variables = {**os.environ, "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
        for tests in tests_of(mutant.path):
            marks = ["-m", "not (slow or long or oracle)"]
            command = [sys.executable, "-m", "pytest", "-x", "-q", "-o", f"cache_dir={cache}", *marks, *tests]
            try:
                code = subprocess.run(command, cwd=folder, env=variables, capture_output=True, timeout=3600).returncode
            except subprocess.TimeoutExpired:
                return "TIMEOUT"
            if code not in (0, 5):  # 5: the module has no test of its own
                return "noticed"
        return "SURVIVED"


def main() -> None:
    """Runs the mutants, and prints what became of each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    mutants = chosen(options.count, options.seed)
    noticed = 0
    with tempfile.TemporaryDirectory() as cache, concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        unchanged = [
            dataclasses.replace(mutant, after=mutant.before) for mutant in mutants[:: options.count // len(PACKAGES)]
        ]
        for mutant, found in zip(unchanged, pool.map(lambda mutant: outcome(mutant, cache), unchanged), strict=True):
            if found != "SURVIVED":
                sys.exit(f"the tests of {mutant.path} fail without a change: {tests_of(mutant.path)}")
        for mutant, found in zip(mutants, pool.map(lambda mutant: outcome(mutant, cache), mutants), strict=True):
            noticed += found == "noticed"
            print(found, mutant, flush=True)  # noqa: T201 - a script
    print(f"{noticed} of {len(mutants)} mutants are noticed")  # noqa: T201


if __name__ == "__main__":
    main()
