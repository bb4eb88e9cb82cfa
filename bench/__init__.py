"""Benchmarks of fewbit and other packages, measured in one run.

`python -m bench` runs them. `--isa avx2` (or `avxvnni`) limits every program to that instruction set, as far as it has an option
for it: this package, XLA, torch. It must be known before they are imported, so it is read here. `--machine NAME` keeps the figures
of another machine in files of its own.
"""

import argparse
import os
import sys

_AVX2 = {
    "FEWBIT_ISA": "avx2",
    "ATEN_CPU_CAPABILITY": "avx2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "XLA_FLAGS": "--xla_cpu_max_isa=AVX2",
}
LIMITS = {"avx2": _AVX2, "avxvnni": _AVX2 | {"FEWBIT_ISA": "avxvnni", "ONEDNN_MAX_CPU_ISA": "AVX2_VNNI"}}
"""The environment variables that limit programs to an instruction set."""


def limit(arguments: list[str]) -> str:
    """Sets the environment by `--isa NAME` among the arguments of a command.

    Returns:
        What the names of this run's files end with: `-NAME` of `--isa` and of `--machine`.
    """
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--isa")
    parser.add_argument("--machine")
    options = parser.parse_known_args(arguments)[0]
    for name, value in LIMITS.get(options.isa, {}).items():
        if name == "XLA_FLAGS":
            value = f"{os.environ.get(name, '')} {value}"
        os.environ[name] = value
    return "".join(f"-{name}" for name in (options.isa, options.machine) if name)


ENDING = limit(sys.argv[1:])
"""What the names of the files that this run saves end with."""
