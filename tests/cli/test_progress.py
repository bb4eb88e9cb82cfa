"""The peak memory of this process."""

import numpy as np

from fewbit.cli.progress import peak_memory


def test_the_peak_grows_with_what_is_held():
    before = peak_memory()
    held = np.ones(1 << 24, np.float64)  # 128 MiB, all touched
    after = peak_memory()
    assert held.sum() == 1 << 24
    assert before is None or after >= max(before, held.nbytes)
