"""Writes the tables of docs/models.md: `python docs/model_table.py`."""

import re
from collections.abc import Iterator
from pathlib import Path

from fewbit.models.families.gguf.config import ARCHITECTURES
from fewbit.models.families.table import FAMILIES
from fewbit.models.roles.families import families

PAGE = Path(__file__).parent / "models.md"


def runnable() -> Iterator[str]:
    """The rows of the families that the decoder runs."""
    yield "| family | `model_type` | plan | run | generate | GGUF architecture |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for family in FAMILIES.values():
        gguf = "-"
        if family.gguf in ARCHITECTURES:
            gguf = f"`{family.gguf}`"
        yield f"| {family.title} | `{family.model_type}` | from the trace | yes | yes | {gguf} |"


def planned() -> Iterator[str]:
    """The rows of the families that can only be planned and quantized."""
    yield "| parameter names | `model_type` |"
    yield "| --- | --- |"
    for names in families():
        others = [kind for kind in names.model_types if kind not in FAMILIES and kind != "gguf"]
        if others:
            yield f"| {names.name} | {', '.join(f'`{kind}`' for kind in others)} |"


def page(text: str) -> str:
    """The page with its tables replaced."""
    for name, rows in (("runnable", runnable()), ("planned", planned())):
        block = f"<!-- {name} -->\n" + "\n".join(rows) + f"\n<!-- end {name} -->"
        text = re.sub(rf"<!-- {name} -->\n.*?<!-- end {name} -->", lambda _, block=block: block, text, flags=re.DOTALL)
    return text


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
