"""The command line: each command parses, calls a job, and prints.

This file imports nothing, so that Ctrl-C ends in one line while the rest is imported, too.
"""

import sys


def main() -> None:
    """The console command `fewbit`."""
    try:
        from .commands import run

        run()
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        sys.exit(130)
