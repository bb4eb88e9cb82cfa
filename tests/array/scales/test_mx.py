"""Power-of-two scales: every rule against exact arithmetic at the edges, the search against every exponent there is."""

from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fewbit as fb
from fewbit.array.scales import MX
from fewbit.formats import FORMATS, Minifloat
from tests.conformance import array_laws as laws

ELEMENTS = ["e2m1", "e2m3", "e3m2", "e4m3fn", "e5m2", "mxint8_element"]

_quantize = jax.jit(fb.quantize, static_argnums=1, static_argnames="axis")


def scheme(element: str, rule: str = "optimal", tile: int = 32) -> fb.Scheme:
    return fb.Scheme(FORMATS[element], {...: 1, -1: tile}, scale=FORMATS["e8m0"], calibration=MX(rule))


def edges(element: str) -> np.ndarray:
    """Largest magnitudes at every exponent, at every mantissa where a rule may turn, and one float32 beside each."""
    top = np.float32(FORMATS[element].max)
    turns = np.float32([1, 1.25, 1.5, 1.75, 1.875, 1.9375, 1.96875, 1.9921875, top / 2 ** np.floor(np.log2(top))])
    mantissas = np.concatenate([turns, np.nextafter(turns, np.float32(0)), np.nextafter(turns, np.float32(9))])
    mantissas = np.unique(mantissas[(mantissas >= 1) & (mantissas < 2)])
    return np.ldexp(mantissas, np.arange(-126, 128)[:, None]).ravel().astype(np.float32)


def expected_exponent(amax: np.float32, element: str, rule: str) -> int:
    """The rule in exact rational arithmetic."""
    fmt = FORMATS[element]
    value, largest = Fraction(float(amax)), Fraction(fmt.max)
    exponent = int(np.frexp(amax)[1]) - 1
    largest_exponent = int(np.frexp(fmt.max)[1]) - 1
    if rule == "floor":
        return exponent - largest_exponent
    if rule == "rceil":
        found = exponent - largest_exponent - 1
        while value > largest * Fraction(2) ** found:
            found += 1
        return found
    bits = fmt.mantissa if isinstance(fmt, Minifloat) else fmt.bits - 2
    rounds_up = value / Fraction(2) ** exponent >= 2 - Fraction(1, 2 ** (bits + 1))
    return exponent + rounds_up - largest_exponent


@pytest.mark.slow
@pytest.mark.parametrize(
    "element", [pytest.param(e, marks=[] if e in ("e2m1", "e4m3fn") else [pytest.mark.slow]) for e in ELEMENTS]
)
@pytest.mark.parametrize("rule", ["floor", "rceil", "even"])
def test_rules_are_exact_at_every_exponent_and_edge(element: str, rule: str):
    amax = edges(element)
    x = np.stack([amax, -amax / 2], axis=1)
    got = np.asarray(_quantize(jnp.asarray(x), scheme(element, rule)).scale)[:, 0].astype(int) - 127
    highest = 127 - int(
        np.floor(np.log2(FORMATS[element].max))
    )  # above it the largest code stands for more than float32 holds
    expected = [min(max(expected_exponent(a, element, rule), -126), highest) for a in amax]
    assert np.array_equal(got, expected)


@pytest.mark.parametrize(("threshold", "element"), [(1.75, "e2m1"), (1.9375, "e2m3"), (1.875, "e3m2"), (1.9375, "e4m3fn")])
def test_even_turns_at_the_published_mantissa(threshold: float, element: str):
    below = np.nextafter(np.float32(threshold), np.float32(0))
    x = jnp.asarray(np.float32([[below], [threshold]]))
    scale = np.asarray(_quantize(x, scheme(element, "even")).scale)[:, 0]
    assert scale[1] == scale[0] + 1


@pytest.mark.parametrize(
    ("element", "constant", "doubles", "between"), [("e2m1", 12 / 7, 6.986328, 6.99), ("e4m3fn", 60 / 31, 462.0292, 465.0)]
)
def test_no_rule_doubles_where_qwix_after_0_1_8_does(element: str, constant: float, doubles: float, between: float):
    """Its scale is `amax / max * constant` in bfloat16, cut to a power of two; docs/divergences.md has where that doubles."""
    top = np.float32(FORMATS[element].max)
    amax = np.float32(
        [np.nextafter(np.float32(doubles), np.float32(0)), np.nextafter(np.float32(doubles), np.float32(999)), between]
    )
    theirs = 2.0 ** np.floor(np.log2((amax / top * np.float32(constant)).astype(jnp.bfloat16).astype(np.float32)))
    assert theirs.tolist() == [1, 2, 2]
    even, rceil = (np.asarray(_quantize(jnp.asarray(amax[:, None]), scheme(element, r)).scale) for r in ("even", "rceil"))
    assert even.ravel().tolist() == [127, 127, 127] and rceil.ravel().tolist() == [128, 128, 128]  # scales of 1, and of 2


def brute_force(x: np.ndarray, element: str, weights: np.ndarray | None = None) -> np.ndarray:
    """The squared error of each row for each of the 255 exponents, float64: `[row, code]`."""
    numbers = np.unique(FORMATS[element].values()[np.isfinite(FORMATS[element].values())])
    numbers = numbers[(numbers >= FORMATS[element].min) & (numbers <= FORMATS[element].max)]
    middles = (numbers[1:] + numbers[:-1]) / 2
    x = x.astype(np.float64)
    errors = np.empty((len(x), 255))
    for code in range(255):
        scale = 2.0 ** (code - 127)
        squared = (numbers[np.searchsorted(middles, x / scale)] * scale - x) ** 2
        errors[:, code] = (squared if weights is None else squared * weights).sum(1)
    return errors


def blocks(kind: str, tile: int, count: int = 400) -> np.ndarray:
    """Rows of one tile each, of a distribution or built to be hard."""
    rng = np.random.default_rng(tile)
    if kind == "gaussian":
        return rng.standard_normal((count, tile)).astype(np.float32)
    if kind == "laplace":
        return rng.laplace(size=(count, tile)).astype(np.float32)
    # Small elements on quarter and three-quarter steps, where halving the scale gains most, and one near the top.
    x = rng.choice([0.25, 0.75, -0.25, -0.75], (count, tile)) + rng.normal(0, 0.03, (count, tile))
    x[:, 0] = rng.uniform(3.5, 8, count)
    return (x * 2.0 ** rng.integers(-20, 20, (count, 1))).astype(np.float32)


def chosen_error(errors: np.ndarray, x: np.ndarray, spec: fb.Scheme, weights: np.ndarray | None = None) -> np.ndarray:
    codes = np.asarray(fb.quantize(jnp.asarray(x), spec, error_weights=weights).scale)[:, 0]
    return errors[np.arange(len(x)), codes]


# Errors within 2**-16 of each other are a tie for the search, and each sum of at most 128 float32 squares may be off by 2**-17.
SLACK = 1 + 2.0**-15


@pytest.mark.parametrize("kind", ["gaussian", "laplace", "adversarial"])
@pytest.mark.parametrize("tile", [16, 32, *(pytest.param(t, marks=pytest.mark.slow) for t in (64, 128, 145))])
def test_the_search_finds_the_best_of_all_exponents(kind: str, tile: int):
    x = blocks(kind, tile)
    errors = brute_force(x, "e2m1")
    assert (chosen_error(errors, x, scheme("e2m1", tile=tile)) <= errors.min(1) * SLACK).all()


@pytest.mark.parametrize("element", [ELEMENTS[0], *(pytest.param(e, marks=pytest.mark.slow) for e in ELEMENTS[1:])])
def test_the_search_is_optimal_for_every_element_format(element: str):
    x = np.concatenate([blocks(kind, 32, 200) for kind in ("gaussian", "laplace", "adversarial")])
    errors = brute_force(x, element)
    best = chosen_error(errors, x, scheme(element))
    assert (best <= errors.min(1) * SLACK).all()
    for rule in ("floor", "rceil", "even"):
        assert (best <= chosen_error(errors, x, scheme(element, rule)) * SLACK).all(), rule


def test_the_counterexample_to_floor_and_its_double():
    x = np.tile(np.float32([0.25, 0.75]), 16)
    x[0] = 4.0
    q = _quantize(jnp.asarray(x[None]), scheme("e2m1"))
    assert np.asarray(q.scale).item() == 126
    assert np.sum((np.asarray(fb.dequantize(q))[0] - x) ** 2) == 1.0
    floor = _quantize(jnp.asarray(x[None]), scheme("e2m1", "floor"))
    assert np.sum((np.asarray(fb.dequantize(floor))[0] - x) ** 2) == 31 / 16


def test_a_tie_goes_to_the_larger_scale():
    # Every element lies on both grids.
    x = np.float32([[3.0, 2.0, 1.0, -1.0]])
    assert np.asarray(_quantize(jnp.asarray(x), scheme("e2m1")).scale).item() == 126
    x = np.float32([[4.0, 2.0, 1.0, -1.0]])
    assert np.asarray(_quantize(jnp.asarray(x), scheme("e2m1")).scale).item() == 127


@pytest.mark.slow
@pytest.mark.parametrize("length", [32, 70])
@pytest.mark.parametrize("axis", [0, 1])
def test_equal_errors_are_a_tie_in_whatever_order_they_are_added(axis: int, length: int):
    # Between 1 and 3.5 both scales have the same numbers, 1, 1.5, 2 and 3, so the errors are equal; their float32 sums,
    # which XLA compiles once for the first candidate and once for the others, need not be.
    x = np.random.default_rng(0).uniform(1, 3.4, (500, length)).astype(np.float32)
    x[:, ::32] = 3.45
    q = _quantize(jnp.asarray(x if axis else x.T), scheme("e2m1"), axis=axis)
    assert (np.asarray(q.scale) == 127).all()


def test_weights_can_make_the_largest_element_worthless():
    x = blocks("gaussian", 32, 200)
    x[:, 0] = 40.0
    weights = np.ones_like(x)
    weights[:, 0] = 0
    errors = brute_force(x, "e2m1", weights)
    assert (chosen_error(errors, x, scheme("e2m1"), weights) <= errors.min(1) * SLACK).all()
    assert (chosen_error(errors, x, scheme("e2m1"), weights) < 0.2 * chosen_error(errors, x, scheme("e2m1"))).all()


def test_short_tiles_and_axes():
    x = blocks("gaussian", 40, 64)
    q = _quantize(jnp.asarray(x), scheme("e2m1"))
    for part, column in ((x[:, :32], 0), (x[:, 32:], 1)):
        errors = brute_force(part, "e2m1")
        codes = np.asarray(q.scale)[:, column]
        assert (errors[np.arange(64), codes] <= errors.min(1) * SLACK).all()


@pytest.mark.parametrize("rule", ["floor", "rceil", "even", "optimal"])
def test_ends_of_the_range(rule: str):
    x = np.zeros((3, 32), np.float32)
    x[0, 0], x[1, 0] = 2.0**-126, 2.0**127
    q = _quantize(jnp.asarray(x), scheme("e2m1", rule))
    assert np.asarray(q.scale)[:, 0].tolist() == [1, 252, 127]
    assert np.array_equal(fb.dequantize(q), x)


def test_huge_numbers_are_not_lost():
    # The divisor 2**127 has a reciprocal that is not a normal number.
    x = np.full((1, 32), 3e38, np.float32)
    q = _quantize(jnp.asarray(x), scheme("mxint8_element", "rceil"))
    assert np.asarray(q.scale).item() == 254
    np.testing.assert_allclose(laws.numpy_dequantize(q), x, rtol=2.0**-7)
