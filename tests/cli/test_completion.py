"""Names that a shell completes."""

import contextlib

import pytest
from typer.testing import CliRunner

from fewbit.cli.commands import app
from fewbit.cli.completion import layout_names, method_names, recipe_names, scheme_lists
from fewbit.errors import QuantError
from fewbit.methods.named import METHODS, scaled_method
from fewbit.workflows.convert.targets import target_names


def test_names_are_completed():
    assert ("w8a8", dict(recipe_names(""))["w8a8"]) in recipe_names("w8")
    assert {"nf4", "nf4_dq"} <= dict(recipe_names("nf4")).keys() and not recipe_names("nf5")
    assert [name for name, _ in scheme_lists("mxfp4,nf4_")] == ["mxfp4,nf4_dq"]
    assert "mxfp4,mxfp4" not in dict(scheme_lists("mxfp4,mx"))
    assert [name for name, _ in method_names("awq+gp")] == ["awq+gptq", "awq+gptq_mse"]
    assert tuple(name for name, _ in layout_names("")) == target_names()
    assert all(text for names in (scheme_lists, method_names, layout_names) for _, text in names(""))


@pytest.mark.parametrize("before", ["awq+", "smoothquant+", "qep+", "awq+qep+", "gptq+"])
def test_the_methods_completed_after_another_are_those_that_go_with_it(before):
    accepted = []
    for name in METHODS:
        with contextlib.suppress(QuantError):
            scaled_method(before + name)
            accepted.append(before + name)
    assert [name for name, _ in method_names(before)] == accepted


def test_the_shell_is_told_of_names():
    """What Typer's script for zsh asks the program for."""
    environment = {"_TYPER_COMPLETE_ARGS": "fewbit quantize smollm2 --recipe nf4", "_FEWBIT_COMPLETE": "complete_zsh"}
    done = CliRunner().invoke(app, [], prog_name="fewbit", env=environment)
    assert '"nf4"' in done.stdout and "bits per weight" in done.stdout
