"""Progress without a terminal, and the peak memory of this process."""

import numpy as np

from fewbit.cli import progress
from fewbit.cli.progress import peak_memory, progress_bar


def test_the_peak_grows_with_what_is_held():
    before = peak_memory()
    held = np.ones(1 << 24, np.float64)  # 128 MiB, all touched
    after = peak_memory()
    assert held.sum() == 1 << 24
    assert before is None or after >= max(before, held.nbytes)


def test_lines_tell_the_time_left_where_there_is_no_terminal(monkeypatch, capsys):
    clock = iter((0.0, 10.0, 31.0, 50.0, 124.0))
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    with progress_bar("quantizing", 4) as bar:
        for done in range(1, 5):
            bar.advance(done, f"{done}/4 layers")
    assert capsys.readouterr().err.splitlines() == ["quantizing: 50 %, 0:00:31 left, 2/4 layers"]
