"""Peak memory of this process."""

import sys


def peak_memory() -> int | None:
    """The peak resident set size in bytes; None where the system does not report it (Windows)."""
    try:
        import resource
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if sys.platform != "darwin":  # macOS counts bytes, all others KiB
        peak *= 1024
    return peak
