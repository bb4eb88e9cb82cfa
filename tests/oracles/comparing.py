"""What the comparisons with other packages share: data, and where rounding makes a difference legitimate."""

import contextlib
from collections.abc import Iterator

import jax
import numpy as np

import fewbit as fb
from fewbit.formats import AbstractFormat
from tests.conformance import array_laws as laws

quantize = jax.jit(fb.quantize, static_argnums=1)


def weights(shape: tuple[int, ...] = (32, 128), seed: int = 0) -> np.ndarray:
    """Normal numbers with a few outliers."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape).astype(np.float32)
    return np.where(rng.uniform(size=shape) < 0.01, x * np.float32(8), x).astype(np.float32)


@contextlib.contextmanager
def lenient_jax() -> Iterator[None]:
    """The promotion rules that other JAX packages count on."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def ratios(x: np.ndarray, q: fb.QArray) -> np.ndarray:
    """Every element in units of its scale, float64."""
    return x.astype(np.float64) / laws.spread(laws.scale_of(q), q)


def is_clear(ratio: np.ndarray, fmt: AbstractFormat) -> np.ndarray:
    """Which ratios lie far enough from every midpoint that no order of float32 roundings can change their code.

    A scale that was divided or multiplied by its reciprocal, and a product with it, are off by at most 4 half units in the
    last place, `2**-22` of the ratio.
    """
    values = fmt.values()
    numbers = np.unique(values[np.isfinite(values) & (values >= fmt.min) & (values <= fmt.max)])
    middles = (numbers[1:] + numbers[:-1]) / 2
    place = np.clip(np.searchsorted(middles, ratio), 1, len(middles) - 1) if len(middles) > 1 else np.zeros(ratio.shape, int)
    distance = np.minimum(np.abs(ratio - middles[place - 1]), np.abs(ratio - middles[place]))
    return distance > np.abs(ratio) * 2.0**-22


def assert_same_codes(theirs: np.ndarray, q: fb.QArray, x: np.ndarray) -> None:
    """The same codes wherever they are clear, which is nearly everywhere.

    A full signed range maps the largest element of a tile to half a step beyond its largest code. On the negative side that
    is a midpoint, so one element a tile is unclear by design.
    """
    ratio = ratios(x, q)
    clear = is_clear(ratio, q.scheme.format)
    by_design = q.scheme.format.bound != q.scheme.format.max
    assert (clear | (by_design & (np.abs(ratio) > q.scheme.format.max))).mean() > 0.999
    np.testing.assert_array_equal(theirs[clear], laws.unpacked(q)[clear])
