"""Which precisions the Pallas and Triton kernels take, and what they make of them."""

import jax
import pytest

from fewbit.kernels.qmatmul.precision import float32_precision, refused_float32_precision

HIGHEST, DEFAULT = jax.lax.Precision.HIGHEST, jax.lax.Precision.DEFAULT


@pytest.mark.parametrize(
    ("precision", "expected"),
    [
        (None, HIGHEST),
        ("high", HIGHEST),
        (HIGHEST, HIGHEST),
        ("default", DEFAULT),
        ((DEFAULT, DEFAULT), DEFAULT),
        ((DEFAULT, "highest"), HIGHEST),
        ((None, "default"), HIGHEST),
    ],
    ids=str,
)
def test_only_default_is_less_than_highest(precision: object, expected: jax.lax.Precision) -> None:
    assert refused_float32_precision(precision) is None
    assert float32_precision(precision) is expected


@pytest.mark.parametrize(
    "precision", ["BF16_BF16_F32_X3", jax.lax.DotAlgorithmPreset.F32_F32_F32, ("default", "best")], ids=str
)
def test_algorithms_are_refused(precision: object) -> None:
    assert refused_float32_precision(precision) == (
        f"precision is {precision!r}; None or a name of jax.lax.Precision is expected"
    )
