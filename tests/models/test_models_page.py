"""The tables of docs/models.md are those that docs/model_table.py writes."""

import importlib.util
from pathlib import Path

DOCS = Path(__file__).parent.parent.parent / "docs"


def test_the_page_is_up_to_date():
    spec = importlib.util.spec_from_file_location("model_table", DOCS / "model_table.py")
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    text = script.PAGE.read_text(encoding="utf-8")
    assert script.page(text) == text, "run python docs/model_table.py"
    assert all(f"`{kind}`" in text for kind in ("gpt_oss", "gemma3_text", "gpt2"))
