"""A compiled extension is told from one that was built of other sources; `tests/test_packaging.py` builds one."""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import jax.ffi
import pytest

from fewbit import QuantError
from fewbit.kernels import extension
from fewbit.kernels.fingerprint import fingerprint

ROOT = Path(__file__).parents[2]


def test_every_header_and_every_name_counts(tmp_path):
    source, near, far = tmp_path / "one" / "cpu.cc", tmp_path / "one" / "a.h", tmp_path / "cpp" / "b.h"
    found = []

    def note():
        found.append(fingerprint(source, tmp_path))

    for path in (source, near, far):
        path.parent.mkdir(exist_ok=True)
        path.write_text("")
    note()
    for path in (source, near, far):
        path.write_text("//")
        note()
    far.rename(tmp_path / "cpp" / "c.h")
    note()
    assert len(set(found)) == 5
    assert fingerprint(source, tmp_path) == found[-1]


def test_every_source_is_listed():
    """What is compiled is what the tests ask for staleness."""
    folder = Path(extension.__file__).parent
    sources = sorted(path.relative_to(folder) for path in folder.rglob("*.cc"))
    assert sorted(extension.EXTENSIONS) == sorted(
        ".".join(("fewbit.kernels", *path.parent.parts, f"_{path.stem}")) for path in sources
    )


@pytest.mark.slow
@pytest.mark.newest
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.parametrize("source", sorted((ROOT / "src/fewbit/kernels").rglob("*.cc")), ids=lambda path: path.stem)
def test_a_source_fits_the_headers_of_this_jax(source):
    """`make test-newest` runs the kernels that the pinned JAX's headers made; a user compiles against those of the newest."""
    folders = [
        f"-I{ROOT / 'src/fewbit/kernels'}",
        f"-I{sysconfig.get_paths()['include']}",
        "-isystem",
        jax.ffi.include_dir(),
    ]
    macros = ["-DPy_LIMITED_API=0x030B0000", '-DFEWBIT_SOURCES=""']
    subprocess.run(["g++", "-std=c++17", "-fsyntax-only", "-w", *macros, *folders, str(source)], check=True)


def test_a_stale_extension_ends_the_tests(monkeypatch, pytestconfig):
    """It counts as missing for a user, whom the reference serves; skipped tests would hide it from us."""
    (conftest,) = (
        p for p in pytestconfig.pluginmanager.get_plugins() if getattr(p, "__file__", "") == str(ROOT / "conftest.py")
    )
    conftest.pytest_sessionstart(None)
    monkeypatch.setattr(extension, "extension", lambda name: extension.Extension(missing="stale", is_stale=True))
    with pytest.raises(
        pytest.UsageError,
        match=r"qmatmul\.cpu\._dequant_gemm, .*built from other C\+\+ sources than those of this checkout; run `pip install",
    ):
        conftest.pytest_sessionstart(None)


def test_a_module_of_other_sources_is_stale(monkeypatch, tmp_path):
    (tmp_path / "cpu.cc").write_text("// today's")

    class Built:
        __file__ = str(tmp_path / "_cpu.so")
        SOURCES = "yesterday's"

    monkeypatch.setattr(extension.importlib, "import_module", lambda name: Built)
    monkeypatch.setattr(extension, "fingerprint", lambda source, folder: "today's")
    found = extension.extension.__wrapped__("fewbit.kernels.nothing._cpu")
    assert found.is_stale
    assert "setup.py build_ext --inplace" in str(found.missing)


@pytest.mark.slow
def test_the_instruction_set_can_be_limited():
    program = f"from fewbit.kernels.extension import extension; print(*(extension(n).isa for n in {extension.EXTENSIONS}))"
    order = ("portable", "avx2", "avxvnni", "avx512", "amx")

    def levels(limit: dict[str, str]) -> list[str]:
        unlimited = {name: value for name, value in os.environ.items() if name != "FEWBIT_ISA"}
        command = [sys.executable, "-c", program]
        return subprocess.run(command, env=unlimited | limit, capture_output=True, text=True, check=True).stdout.split()

    best = levels({})
    for isa in ("portable", "avx2", "avx512", "amx"):
        expected = [level if level not in order else min(level, isa, key=order.index) for level in best]
        assert levels({"FEWBIT_ISA": isa}) == expected
    if "avx512" in best:  # of AVX2's kernels only those of integers have VNNI, where the processor has that form of it
        has_vnni = " avx_vnni " in Path("/proc/cpuinfo").read_text()
        integers = "fewbit.kernels.qmatmul.cpu._int8_gemm"
        expected = ["avxvnni" if name == integers and has_vnni else "avx2" for name in extension.EXTENSIONS]
        assert levels({"FEWBIT_ISA": "avxvnni"}) == expected


def test_an_unknown_instruction_set_is_refused(monkeypatch):
    monkeypatch.setenv("FEWBIT_ISA", "sse2")
    with pytest.raises(QuantError, match="FEWBIT_ISA is 'sse2'; it must be one of portable, avx2"):
        extension.extension.__wrapped__(extension.EXTENSIONS[0])
