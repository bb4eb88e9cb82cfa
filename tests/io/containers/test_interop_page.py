"""The tables of docs/interop.md are those that docs/interop_table.py writes."""

import importlib.util
from pathlib import Path

import pytest

DOCS = Path(__file__).parent.parent.parent.parent / "docs"


@pytest.mark.slow
@pytest.mark.once
def test_the_page_is_up_to_date():
    spec = importlib.util.spec_from_file_location("interop_table", DOCS / "interop_table.py")
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    text = script.PAGE.read_text(encoding="utf-8")
    assert script.page(text) == text, "run python docs/interop_table.py"
    assert all(f"`{name}`" in text for name in script.ORACLES)
