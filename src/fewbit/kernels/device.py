"""What tables of measured times call this machine, and where they lie."""

import os
import pathlib
import platform
import re

import jax

CACHE_VARIABLE = "FEWBIT_CACHE_DIR"
"""The environment variable that names the directory of what fewbit measured for this user."""


def device_name() -> str:
    """The name of JAX's default device: of an accelerator JAX's own, of a CPU the processor and its cores."""
    device = jax.devices()[0]
    return device.device_kind if device.platform != "cpu" else f"{_processor()}, {_cores()} cores"


def cache_directory() -> pathlib.Path:
    """Where a user's own measurements lie: `$FEWBIT_CACHE_DIR`, or `fewbit` in `$XDG_CACHE_HOME`, or `~/.cache/fewbit`."""
    if named := os.environ.get(CACHE_VARIABLE):
        return pathlib.Path(named)
    if base := os.environ.get("XDG_CACHE_HOME"):
        return pathlib.Path(base) / "fewbit"
    return pathlib.Path.home() / ".cache" / "fewbit"


def file_name(device: str) -> str:
    """The name of a device's file.

    >>> file_name("Intel(R) Xeon(R) Processor (family 6, model 207), 2 cores")
    'intel-xeon-processor-family-6-model-207-2-cores.json'
    """
    words = re.sub(r"\((r|tm|c)\)", " ", device.lower())
    return re.sub(r"[^a-z0-9]+", "-", words).strip("-") + ".json"


def _processor() -> str:
    """The processor as Linux tells it; elsewhere as Python knows it."""
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    facts = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    if "model name" in facts and "cpu family" in facts:
        return f"{facts['model name']} (family {facts['cpu family']}, model {facts.get('model', '?')})"
    if "CPU implementer" in facts:
        return f"{platform.machine()} (implementer {facts['CPU implementer']}, part {facts.get('CPU part', '?')})"
    return facts.get("model name") or platform.machine()


def _cores() -> int:
    """How many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
