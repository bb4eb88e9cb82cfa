"""Every finding of the first inspection has a test that fails without its repair, marked `finding(number)`."""

import ast
from pathlib import Path

TESTS = Path(__file__).parent
LATER = {20, 21, 22}  # the speed of AVX2 and of FP4 training, and the families that can be run, have issues of their own


def marked_numbers(tree: ast.AST) -> set[int]:
    """The numbers of every `finding(...)` in a file."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)]
    arguments = [argument for call in calls if call.func.attr == "finding" for argument in call.args]
    return {argument.value for argument in arguments if isinstance(argument, ast.Constant)}


def test_every_finding_has_a_test():
    found = set().union(*(marked_numbers(ast.parse(path.read_text())) for path in TESTS.rglob("test_*.py")))
    assert found == set(range(1, 41)) - LATER
