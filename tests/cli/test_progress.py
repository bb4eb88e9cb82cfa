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
    """An earlier run finished the first layer."""
    clock = iter((0.0, 1.0, 10.0, 41.0, 50.0, 124.0))
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    with progress_bar("quantizing", 5) as bar:
        for done in range(1, 6):
            bar.advance(done, f"{done}/5 layers")
    assert capsys.readouterr().err.splitlines() == ["quantizing: 60 %, 0:00:40 left, 3/5 layers"]
