"""How much memory this process has held at most."""

import sys


def peak_memory() -> int | None:
    """The largest resident set so far, in bytes; None where the system does not tell (Windows)."""
    try:
        import resource
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
