"""Quantizes a checkpoint under a limit of memory, and prints what it took as JSON: `SOURCE OUT METHOD LIMIT_BYTES`.

The limits are on the whole address space, and on all private memory (what is allocated; files that are mapped to be read do not
count). glibc reserves an arena of 64 MB or more for each thread of JAX, of which little is used: start it with MALLOC_ARENA_MAX=1.
"""

import json
import resource
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from fewbit import workflows
from fewbit.methods import method
from fewbit.workflows.methods.calibration_data import CalibrationData
from tests.workflows.checkpoints import last_axis


def status() -> dict[str, int]:
    """The bytes in the lines of /proc/self/status."""
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    return {words[0].rstrip(":"): 1024 * int(words[1]) for words in lines if words[-1] == "kB"}


def main() -> None:
    """Runs the job."""
    source, out, name, limit = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
    jax.block_until_ready(jnp.ones((256, 256)) @ jnp.ones((256, 256)))
    start = status()
    for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA):
        resource.setrlimit(kind, (limit, limit))
    model = workflows.load(source)
    chosen, calibration, recipe = method(name), None, last_axis("int4_g64")
    if chosen.collect:
        windows = np.random.default_rng(0).integers(0, model.runnable_config().vocab, (16, 256))
        calibration, recipe = CalibrationData("random", windows), "int4_g64"
    plan = workflows.plan_model(model, recipe=recipe)
    outcome = workflows.quantize(model, plan, out, method=chosen, calibration=calibration)
    end = status()
    found = {"reserved at the start": start["VmSize"], "reserved": end["VmPeak"], "resident": end["VmHWM"]}
    sys.stdout.write(json.dumps({**found, "tensors": len(outcome.tensors), "file_bytes": outcome.file_bytes}))


if __name__ == "__main__":
    main()
