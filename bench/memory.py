"""The peak memory of a part of a process, on Linux."""

import ctypes
import gc
from pathlib import Path

SELF = Path("/proc/self")


def reset_peak() -> None:
    """Gives unused memory back to the system, and lets the peak of the resident memory start anew."""
    gc.collect()
    if (SELF / "clear_refs").exists():
        ctypes.CDLL(None).malloc_trim(0)
        (SELF / "clear_refs").write_text("5")


def peak_bytes() -> int | None:
    """The largest resident memory since `reset_peak`, in bytes. None where the system does not tell it."""
    if not (SELF / "clear_refs").exists():
        return None
    (peak,) = [row.split()[1] for row in (SELF / "status").read_text().splitlines() if row.startswith("VmHWM:")]
    return 1024 * int(peak)
