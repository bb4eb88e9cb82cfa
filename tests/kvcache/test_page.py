"""The table of the page on caches is that of the measurement that is committed."""

import json
import math
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def line(row: dict) -> str:
    """A row of the measurement as the page shows it."""
    cells = [row["cache"], f"{row['bytes_per_token']:,}", f"{row['perplexity']:.3f}"]
    if "kl" not in row:
        return f"| {' | '.join(cells)} | | | |"
    against = f"{100 * math.expm1(row['log_ratio']):+.2f} ± {100 * row['log_ratio_error']:.2f} %"
    return f"| {' | '.join([*cells, against])} | {row['kl']:.4f} | {100 * row['top1']:.1f} % |"


def test_the_page_shows_what_was_measured():
    result = json.loads((ROOT / "bench" / "results" / "kvcache.json").read_text())
    page = (ROOT / "docs" / "kvcache.md").read_text()
    table = [text for text in page.splitlines() if text.startswith("| ")]
    assert table[2:] == [line(row) for row in result["rows"]]
    assert f"{result['windows'] * result['window']:,} tokens of `{result['text']}` in windows of {result['window']}" in page
