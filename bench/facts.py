"""What a measurement was made on, and the file that keeps it."""

import datetime
import importlib.metadata
import json
import pathlib
import platform
from typing import Any

import jax


def save(name: str, packages: tuple[str, ...], **facts: Any) -> None:
    """Writes facts and the machine they were measured on to `bench/results/NAME.json`.

    Args:
        name: the name of the file.
        packages: whose versions are told, beside those of JAX and numpy.
        facts: the rest, the rows among them.
    """
    versions = {package: _version(package) for package in ("jax", "jaxlib", "numpy", *packages)}
    measured_on = {
        "date": datetime.date.today().isoformat(),
        "device": f"{jax.devices()[0].device_kind}, {platform.machine()}",
        "python": platform.python_version(),
        "versions": versions,
    }
    path = pathlib.Path(__file__).parent / "results" / f"{name}.json"
    path.write_text(json.dumps(measured_on | facts, indent=1) + "\n")


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
