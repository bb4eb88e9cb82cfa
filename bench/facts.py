"""What a measurement was made on, and the file that keeps it."""

import json
import pathlib
from collections.abc import Sequence
from typing import Any

from fewbit.workflows.bench.roofline import circumstances


def save(name: str, packages: Sequence[str], **facts: Any) -> None:
    """Writes facts and the machine they were measured on to `bench/results/NAME.json`.

    Args:
        name: the name of the file.
        packages: whose versions are told, beside those of JAX and numpy.
        facts: the rest, the rows among them.
    """
    path = pathlib.Path(__file__).parent / "results" / f"{name}.json"
    path.write_text(json.dumps(circumstances(packages) | facts, indent=1) + "\n")


def headline(packages: Sequence[str]) -> str:
    """The device, and the version of each package, or that it is not installed and so stays out of the tables."""
    facts = circumstances(packages)
    return f"{facts['device']}, {facts['date']}: {', '.join(f'{name} {version}' for name, version in facts['versions'].items())}"
