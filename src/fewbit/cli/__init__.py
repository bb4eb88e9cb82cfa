"""The command line: commands parse, call a job and print.

This file imports nothing, so that Ctrl-C prints one line even while the rest is being imported.
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
