"""The package installs with a C++ compiler and without one, and what pyproject.toml promises holds in the repository."""

import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

# A whole FFI kernel, so that the headers of jaxlib are compiled too.
KERNEL = """
#include "cpp/python_module.h"
#include "xla/ffi/api/ffi.h"
namespace ffi = xla::ffi;
static ffi::Error Nothing(ffi::Result<ffi::AnyBuffer>) { return ffi::Error::Success(); }
XLA_FFI_DEFINE_HANDLER_SYMBOL(nothing, Nothing, ffi::Ffi::Bind().Ret<ffi::AnyBuffer>());
FEWBIT_MODULE(_nothing, {"nothing", reinterpret_cast<void*>(nothing)})
"""


def wheel_of(tree: Path, **environment: str) -> zipfile.ZipFile:
    """The wheel that pip builds from a source tree."""
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-build-isolation", "--no-deps", "--no-index"]
    subprocess.run([*command, "-w", "out", "."], cwd=tree, check=True, env=os.environ | environment)
    (wheel,) = (tree / "out").glob("fewbit-*.whl")
    return zipfile.ZipFile(wheel)


def wheel_names(tree: Path, **environment: str) -> list[str]:
    """The files of that wheel."""
    return wheel_of(tree, **environment).namelist()


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of what the build reads, without any C++ file."""
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(
        ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("*.cc", "*.so", "*.egg-info", "__pycache__")
    )
    return tmp_path


def add_kernel(tree: Path) -> None:
    """Puts one C++ file where kernels stand."""
    folder = tree / "src" / "fewbit" / "kernels" / "nothing" / "cpu"
    folder.mkdir(parents=True)
    for package in (folder.parent, folder):
        (package / "__init__.py").write_text('"""A kernel that does nothing."""\n')
    (folder / "nothing.cc").write_text(KERNEL)


def extensions(names: list[str]) -> list[str]:
    """The compiled files among the names."""
    return [name for name in names if name.endswith((".so", ".pyd"))]


@pytest.mark.slow
def test_without_cpp_files_the_wheel_is_pure(tree: Path) -> None:
    names = wheel_names(tree)
    assert "fewbit/__init__.py" in names
    assert "fewbit/py.typed" in names
    data = {path.relative_to(ROOT / "src").as_posix() for path in (ROOT / "src" / "fewbit").rglob("*.json")}
    assert "fewbit/kernels/qmatmul/gpu/configs/gpu_default.json" in data
    assert data <= set(names)
    assert not extensions(names)
    assert {Path(name).parts[0].split("-")[0] for name in names} == {"fewbit"}


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler here")
def test_a_cpp_file_becomes_an_extension_beside_it(tree: Path) -> None:
    add_kernel(tree)
    wheel = wheel_of(tree)
    (built,) = extensions(wheel.namelist())
    assert built == "fewbit/kernels/nothing/cpu/_nothing.abi3.so"
    assert "-cp311-abi3-" in str(wheel.filename), "one wheel for every Python"
    wheel.extractall(tree / "built")
    assert reason_missing(tree / "built") == "None"
    with (tree / "built" / "fewbit" / "kernels" / "cpp" / "isa.h").open("a") as header:
        header.write("// one more line\n")
    assert reason_missing(tree / "built") == (
        "its C++ extension was built from other sources than those here; "
        "run `pip install -e .`, or `python setup.py build_ext --inplace`"
    )
    (
        tree / "built" / "fewbit" / "kernels" / "nothing" / "cpu" / "nothing.cc"
    ).unlink()  # without its source nothing is compared
    assert reason_missing(tree / "built") == "None"


def reason_missing(folder: Path) -> str:
    """Why the package in a folder does not load its compiled kernel."""
    code = "from fewbit.kernels.extension import extension; print(extension('fewbit.kernels.nothing.cpu._nothing').missing)"
    env = os.environ | {"PYTHONPATH": str(folder), "JAX_PLATFORMS": "cpu"}
    return subprocess.run([sys.executable, "-c", code], env=env, check=True, text=True, capture_output=True).stdout.strip()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("script") is None, reason="the program `script` makes the terminal")
def test_without_a_compiler_the_package_installs_without_the_extension(tree: Path) -> None:
    """One line on the terminal says so, though pip shows nothing that a build prints."""
    add_kernel(tree)
    environment = os.environ | {"CC": "/nowhere/cc", "CXX": "/nowhere/c++"}
    pip = f"{sys.executable} -m pip wheel --no-build-isolation --no-deps --no-index -w out ."
    command = ["script", "--quiet", "--return", "--command", pip, "/dev/null"]
    run = subprocess.run(
        command, cwd=tree, check=True, env=environment, text=True, stdin=subprocess.DEVNULL, capture_output=True
    )
    lines = [line.strip() for line in run.stdout.splitlines() if "kernels are left out" in line]
    assert lines == [
        "fewbit: the C++ kernels are left out, because /nowhere/c++ is not found; the reference kernels compute"
    ]
    (wheel,) = (tree / "out").glob("fewbit-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert "fewbit/kernels/nothing/cpu/__init__.py" in names
    assert not extensions(names)


def test_the_command_is_declared() -> None:
    assert PROJECT["scripts"] == {"fewbit": "fewbit.cli:main"}


def test_ci_runs_the_readmes_test_command() -> None:
    commands = (ROOT / ".ci" / "run").read_text()
    assert commands.index("\nmake test\n") < commands.index("\nmake test-all ")
    assert "make test" in (ROOT / "README.md").read_text()


def test_the_demo_needs_no_heavy_package() -> None:
    extras = PROJECT["optional-dependencies"]
    wanted = " ".join([*PROJECT["dependencies"], *extras["io"], *extras["plot"], *extras["demo"]])
    assert not [name for name in ("torch", "flax", "transformers", "qwix") if name in wanted]


def test_every_constraint_is_one_exact_version() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert lines
    assert [line for line in lines if line.count("==") != 1 or "@" in line or "+" in line] == []
