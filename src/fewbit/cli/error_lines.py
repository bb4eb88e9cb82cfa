"""Lines of text about the errors of weights and blocks."""

import math
from collections.abc import Mapping


def block_lines(blocks: Mapping[str, float]) -> list[str]:
    """The relative error of each block's output, a line each."""
    if not blocks:
        return []
    return ["  relative error of each block's output:", *(f"    {error:9.3e}  {name}" for name, error in blocks.items())]


def worst_weight_lines(sqnr_db: Mapping[str, float]) -> list[str]:
    """The weights of lowest SQNR, a line each."""
    if not sqnr_db:
        return []
    lowest = sorted(sqnr_db.items(), key=lambda item: item[1])[:5]
    return [
        "  lowest signal-to-noise ratio of the weights:",
        *(f"    {decibel_text(value)}  {path}" for path, value in lowest),
    ]


def decibel_text(value: float) -> str:
    """A number of decibels; infinity is "exact"."""
    return " exact   " if value == math.inf else f"{value:6.2f} dB"
