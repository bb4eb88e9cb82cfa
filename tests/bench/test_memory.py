"""The peak memory of a part of a process."""

import sys

import numpy as np
import pytest

from bench.memory import peak_bytes, reset_peak


@pytest.mark.skipif(sys.platform != "linux", reason="Linux tells it")
def test_the_peak_is_of_what_ran_since():
    reset_peak()
    before = peak_bytes()
    np.ones(2**26, np.uint8)
    assert peak_bytes() - before > 2**25
    reset_peak()
    assert peak_bytes() - before < 2**25
