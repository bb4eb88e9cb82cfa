"""The rates of a machine, and the circumstances of a measurement."""

import datetime

import jax
import numpy as np
import pytest

from fewbit.kernels.extension import Extension
from fewbit.workflows.bench import roofline


def test_rates_are_work_over_seconds(monkeypatch):
    """Three rounds of 1, 2 and 4 seconds: the slowest gives the lowest rate."""

    class Times:
        seconds = np.array([2.0, 1.0, 4.0])

    monkeypatch.setattr(roofline, "timed", lambda runs, rounds: dict.fromkeys(runs, Times))
    found = roofline.machine(nbytes=1 << 10, size=8, rounds=3)
    assert found.copy == pytest.approx([1e-9 * 2048 / seconds for seconds in (4, 2, 1)], rel=1e-3)
    assert found.float32 == found.bfloat16 == pytest.approx([1e-9 * 1024 / seconds for seconds in (4, 2, 1)], rel=1e-3)


def test_the_circumstances_name_versions_and_the_device():
    found = roofline.circumstances(["no-such-package"])
    assert found["date"] == datetime.date.today().isoformat()
    assert found["versions"]["jax"] == jax.__version__
    assert found["versions"]["no-such-package"] == "not installed"
    assert found["device"].endswith(" cores")


@pytest.mark.parametrize(
    ("missing", "line"),
    [
        ((), "avx2"),
        (("_int8_gemm",), "avx2; NOT built for this Python or older than their sources: int8_gemm, so the slower reference"),
        (
            ("_dequant_gemm", "_attention"),
            "avx2; NOT built for this Python or older than their sources: dequant_gemm, attention, so the slower reference",
        ),
    ],
    ids=["all built", "one missing", "two missing"],
)
def test_every_missing_extension_is_named(monkeypatch, missing, line):
    def loaded(module: str) -> Extension:
        return Extension(missing="not built here") if module.endswith(missing) else Extension(isa="avx2")

    monkeypatch.setattr(roofline, "extension", loaded)
    assert roofline.circumstances()["kernels"].startswith(line)
    assert ("fewbit --version" in roofline.circumstances()["kernels"]) == bool(missing)
