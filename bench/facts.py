"""Writes a measurement with its device and versions to a file."""

import argparse
import json
import pathlib
from collections.abc import Sequence
from typing import Any

from fewbit.workflows.bench.roofline import circumstances

from . import ENDING, LIMITS


def add_isa(parser: argparse.ArgumentParser) -> None:
    """Adds the options that `bench` reads before anything is imported."""
    parser.add_argument(
        "--isa", choices=LIMITS, help="limit fewbit, XLA and torch to an instruction set; saved in a file of its own"
    )
    parser.add_argument("--machine", help="what to call another machine, such as avx2-only; saved in a file of its own")


def save(name: str, packages: Sequence[str], **facts: Any) -> None:
    """Writes facts and the machine they were measured on to `bench/results/NAME.json`.

    Args:
        name: the name of the file; `--isa` and `--machine` are added to it.
        packages: whose versions are recorded, after those of JAX and numpy.
        facts: the rest, the rows among them.
    """
    _file(name).write_text(json.dumps(circumstances(packages) | facts, indent=1) + "\n")


def add_keep(parser: argparse.ArgumentParser) -> None:
    """Adds the option of `kept_rows` next to `--save`."""
    parser.add_argument(
        "--keep", action="store_true", help="with --save: keep the rows of the file that this run does not measure"
    )


def kept_rows(name: str, options: argparse.Namespace, *keys: str) -> dict[tuple[str, ...], dict[str, Any]]:
    """The rows of a file by what these keys say, each with its date and device; none without `--keep`."""
    if not options.keep:
        return {}
    if not options.save:
        raise SystemExit("--keep keeps rows of the file that --save writes; pass both")
    found = json.loads(_file(name).read_text())
    origin = {"date": found["date"], "device": found["device"]}
    return {tuple(row[key] for key in keys): origin | row for row in found["rows"]}


def _file(name: str) -> pathlib.Path:
    """The file of a name, with this run's ending."""
    return pathlib.Path(__file__).parent / "results" / f"{name}{ENDING}.json"


def headline(packages: Sequence[str]) -> str:
    """The device, and the version of each package, or that it is not installed and so stays out of the tables."""
    facts = circumstances(packages)
    return f"{facts['device']}, {facts['date']}: {', '.join(f'{name} {version}' for name, version in facts['versions'].items())}"
