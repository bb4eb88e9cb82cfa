"""The device's name in latency tables, and their cache directory."""

import os
import pathlib
import platform
import re

import jax

CACHE_VARIABLE = "FEWBIT_CACHE_DIR"
"""The environment variable that names the cache directory."""


def device_name() -> str:
    """The name of JAX's default device: an accelerator's kind, or a CPU's model and core count."""
    device = jax.devices()[0]
    if device.platform != "cpu":
        return device.device_kind
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return f"{_processor()}, {cores} cores"


def cache_directory() -> pathlib.Path:
    """The cache directory: `$FEWBIT_CACHE_DIR`, else `fewbit` in `$XDG_CACHE_HOME`, else `~/.cache/fewbit`."""
    if named := os.environ.get(CACHE_VARIABLE):
        return pathlib.Path(named)
    if base := os.environ.get("XDG_CACHE_HOME"):
        return pathlib.Path(base) / "fewbit"
    return pathlib.Path.home() / ".cache" / "fewbit"


def file_name(device: str) -> str:
    """The file name of a device's table.

    >>> file_name("Intel(R) Xeon(R) Processor (family 6, model 207), 2 cores")
    'intel-xeon-processor-family-6-model-207-2-cores.json'
    """
    words = re.sub(r"\((r|tm|c)\)", " ", device.lower())
    return re.sub(r"[^a-z0-9]+", "-", words).strip("-") + ".json"


def _processor() -> str:
    """The processor's model from /proc/cpuinfo, else from `platform`."""
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
