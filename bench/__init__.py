"""Benchmarks of fewbit and other packages, measured in one run.

`python -m bench` runs them. `--isa avx2` limits every program to that instruction set, as far as it has an option for it: this
package, XLA, torch. It must be known before they are imported, so it is read here.
"""

import argparse
import os
import sys

LIMITS = {
    "avx2": {
        "FEWBIT_ISA": "avx2",
        "ATEN_CPU_CAPABILITY": "avx2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "XLA_FLAGS": "--xla_cpu_max_isa=AVX2",
    },
}
"""The environment variables that limit programs to an instruction set."""


def limit(arguments: list[str]) -> str | None:
    """Sets the environment by `--isa NAME` among the arguments of a command; returns the name."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--isa")
    isa = parser.parse_known_args(arguments)[0].isa
    for name, value in LIMITS.get(isa, {}).items():
        if name == "XLA_FLAGS":
            value = f"{os.environ.get(name, '')} {value}"
        os.environ[name] = value
    return isa


ISA = limit(sys.argv[1:])
"""The instruction set that this run is limited to, or None."""
