"""Compiled programs are kept on disk: where, within which limits, and for which later runs."""

import os
import subprocess
import sys

import pytest

from fewbit.cli import compiled
from fewbit.cli.compiled import keep_compiled_programs
from tests.workflows.checkpoints import llama_directory, needs_tokenizers

NAMES = ("JAX_COMPILATION_CACHE_DIR", "JAX_ENABLE_COMPILATION_CACHE", "JAX_COMPILATION_CACHE_MAX_SIZE", "XDG_CACHE_HOME")


@pytest.fixture
def environment(monkeypatch, tmp_path):
    """The environment variables, which keep what they are after the test."""
    for name in (*NAMES, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"):
        monkeypatch.setenv(name, "restored after the test")
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return monkeypatch


def test_the_directory_is_in_the_users_cache(environment, tmp_path):
    keep_compiled_programs()
    directory = os.environ["JAX_COMPILATION_CACHE_DIR"]
    assert directory.startswith(str(tmp_path / "home" / ".cache" / "fewbit" / "compiled-")) and os.path.isdir(directory)
    assert os.environ["JAX_COMPILATION_CACHE_MAX_SIZE"] == str(256 << 20)


def test_the_directory_follows_xdg(environment, tmp_path):
    environment.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    keep_compiled_programs()
    assert os.environ["JAX_COMPILATION_CACHE_DIR"].startswith(str(tmp_path / "xdg" / "fewbit"))


def test_each_kind_of_processor_has_its_own(environment, monkeypatch):
    keep_compiled_programs()
    first = os.environ.pop("JAX_COMPILATION_CACHE_DIR")
    monkeypatch.setattr(compiled.Path, "read_text", lambda path: "flags : sse2 avx2")
    keep_compiled_programs()
    assert os.environ["JAX_COMPILATION_CACHE_DIR"] != first


@pytest.mark.parametrize(("name", "value"), [("JAX_COMPILATION_CACHE_DIR", "mine"), ("JAX_ENABLE_COMPILATION_CACHE", "0")])
def test_the_variables_of_jax_take_precedence(environment, name, value, tmp_path):
    environment.setenv(name, value)
    keep_compiled_programs()
    assert os.environ.get("JAX_COMPILATION_CACHE_DIR") in (None, "mine")
    assert not (tmp_path / "home").exists()


def test_without_the_limits_package_there_is_no_limit(environment, monkeypatch):
    monkeypatch.setattr(compiled.importlib.util, "find_spec", lambda name: None)
    keep_compiled_programs()
    assert "JAX_COMPILATION_CACHE_DIR" in os.environ and "JAX_COMPILATION_CACHE_MAX_SIZE" not in os.environ


def test_a_home_that_cannot_be_written_keeps_nothing(environment, tmp_path):
    (tmp_path / "home").write_text("a file")
    keep_compiled_programs()
    assert "JAX_COMPILATION_CACHE_DIR" not in os.environ


@needs_tokenizers
@pytest.mark.slow
def test_a_second_run_with_another_prompt_compiles_nothing(tmp_path):
    model = llama_directory(tmp_path / "hf")
    environment = {name: value for name, value in os.environ.items() if name not in NAMES}
    environment |= {"XDG_CACHE_HOME": str(tmp_path / "cache"), "JAX_PLATFORMS": "cpu"}

    def programs_after(prompt: str) -> set[str]:
        command = [sys.executable, "-c", "from fewbit.cli import main; main()", "generate", str(model), prompt]
        done = subprocess.run([*command, "--max-tokens", "3"], capture_output=True, text=True, env=environment, check=False)
        assert done.returncode == 0 and done.stdout.startswith(prompt), done.stderr
        return {path.name for path in (tmp_path / "cache").rglob("*-cache")}

    first = programs_after("The quick ")
    assert any("of_leaves" in name for name in first)
    assert programs_after("Who ") == first
