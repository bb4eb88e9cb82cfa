"""What the command does before JAX: help, version, lists; and Ctrl-C while it imports."""

import json
import shutil
import subprocess
import sys

import pytest
from typer.testing import CliRunner

import fewbit as fb
from fewbit import cli
from fewbit.cli import commands
from fewbit.cli.commands import app
from fewbit.cli.completion import records
from fewbit.cli.listing import catalogue
from fewbit.cli.version import KERNELS, version_line

LIGHT = (["--help"], ["--version"], ["plan", "--help"], ["formats"], ["schemes", "--json"], ["recipes"])


def test_help_version_and_lists_do_without_jax():
    program = f"""
import sys, time
from typer.testing import CliRunner
from fewbit.cli.commands import app
for arguments in {LIGHT}:
    assert CliRunner().invoke(app, arguments).exit_code == 0, arguments
    assert "jax" not in sys.modules, arguments
print(time.process_time())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 2  # a third of a second on a quiet machine, for all six


def test_the_lists_are_those_of_the_registries():
    again = "write it anew: python -m fewbit.cli.listing"
    assert {kind: records(kind) for kind in catalogue()} == catalogue(), again


def test_the_version_names_the_kernels(tmp_path):
    said = CliRunner().invoke(app, ["--version"]).stdout
    assert said == version_line() + "\n" and said.startswith("fewbit 0.") and "C++ kernels: " in said
    for source in ("qmatmul/cpu/int8_gemm.cc", "quantize/cpu/quantize.cc"):
        (tmp_path / source).parent.mkdir(parents=True)
        shutil.copy(KERNELS / source, tmp_path / source)
    line = version_line(tmp_path)
    assert "C++ kernels: none; NOT built for this Python or older than their sources: int8_gemm, quantize" in line
    assert "install a C++17 compiler" in line and "\n" not in line


def test_completion_is_offered():
    text = CliRunner().invoke(app, ["--help"]).stdout
    assert "--install-completion" in text and "--show-completion" in text


class Interrupting:
    """A finder of modules during whose search Ctrl-C arrives."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "fewbit.cli.commands":
            raise KeyboardInterrupt


@pytest.mark.finding(18)
@pytest.mark.parametrize("moment", ["import", "run"])
def test_ctrl_c_ends_in_one_line(moment, monkeypatch, capsys):
    def interrupted():
        raise KeyboardInterrupt

    if moment == "import":
        monkeypatch.delitem(sys.modules, "fewbit.cli.commands")
        monkeypatch.delattr(cli, "commands")
        monkeypatch.setattr(sys, "meta_path", [Interrupting, *sys.meta_path])
    else:
        monkeypatch.setattr(commands, "run", interrupted)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 130
    assert capsys.readouterr().err == "error: interrupted\n"


@pytest.mark.finding(18)
def test_ctrl_c_while_a_command_imports_or_reads_its_arguments(monkeypatch):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("fewbit.cli.commands.catalogue.records", interrupted)
    done = CliRunner().invoke(app, ["formats"])
    assert (done.exit_code, done.stderr) == (130, "error: interrupted\n")
    monkeypatch.setattr("typer.core.TyperGroup.make_context", interrupted)
    done = CliRunner().invoke(app, ["formats"])
    assert (done.exit_code, done.stderr) == (130, "error: interrupted\n")


def test_the_package_gives_its_names_when_they_are_asked_for():
    from fewbit.recipe import Rule

    assert fb.recipe("int8").name == "int8" and fb.Rule is Rule and "quantize" in dir(fb)
    with pytest.raises(AttributeError, match="has no attribute 'quantise'"):
        fb.quantise  # noqa: B018 - the error is what is tested
    json.dumps(records("formats"))
