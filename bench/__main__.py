"""Runs the speed benchmarks, each compared with other packages.

    python -m bench [--only SUBJECT ...] [--isa avx2] [--machine NAME] [--save]

The subjects are quantizing, products, products of integers, attention and generating text. Each subject is a process of its
own; `python -m bench.SUBJECT --help` lists its options. The exit status is that of the first that failed: one that
computes a wrong value prints no times.
"""

import argparse
import subprocess
import sys

from .facts import add_isa

SUBJECTS = ("quantize", "qmatmul", "integers", "attention", "generation")


def main() -> int:
    """Runs the subjects one after another."""
    parser = argparse.ArgumentParser(prog="python -m bench", description="fewbit against other packages on this machine")
    parser.add_argument("--only", nargs="+", choices=SUBJECTS, default=SUBJECTS, help="these subjects; all by default")
    add_isa(parser)
    parser.add_argument("--save", action="store_true", help="write bench/results/SUBJECT.json")
    options = parser.parse_args()
    passed = [word for name in ("isa", "machine") if (value := getattr(options, name)) for word in (f"--{name}", value)]
    passed += ["--save"] * options.save
    status = 0
    for subject in options.only:
        print(f"\n{subject}", flush=True)
        command = [sys.executable, "-m", f"bench.{subject}", *passed]
        failed = subprocess.run(command, check=False).returncode
        status = status or failed
    return status


if __name__ == "__main__":
    sys.exit(main())
