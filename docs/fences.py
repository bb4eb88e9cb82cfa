"""A hook of mkdocs: fences whose info string has a word for the tests (```python no-run) become plain ones.

pymdownx.superfences takes a fence with an unknown word for text, and shows all that follows as one code block.
"""

import re
from typing import Any

FENCE = re.compile(r"^([ \t]*```python) (?:no-run|torch)[ \t]*$", re.MULTILINE)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Called for each page; the words are those of `tests/test_docs.py`."""
    return FENCE.sub(r"\1", markdown)
