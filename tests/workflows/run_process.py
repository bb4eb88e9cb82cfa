"""Runs jobs in processes that start fast: each is a fork of one that has imported everything, and not begun to use JAX.

Each line of stdin is `source out to`; it answers with the process and, when that has ended, with its exit status.
"""

import os
import sys
from pathlib import Path

from fewbit.workflows.load import load
from tests.workflows.checkpoints import last_axis
from tests.workflows.resuming import Job


def main() -> None:
    """Serves the lines of stdin."""
    for line in sys.stdin:
        source, out, to = line.split()
        child = os.fork()
        if not child:
            try:
                Job(load(source), last_axis("int8"), to).run(Path(out))
                os._exit(0)
            finally:
                os._exit(1)
        say(child)
        say(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


def say(number: int) -> None:
    """One line of answer."""
    sys.stdout.write(f"{number}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
