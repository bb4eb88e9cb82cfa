"""AQT: narrow-range integers, with the largest element on the last code or on its edge."""

import jax.numpy as jnp
import numpy as np
import pytest

import fewbit as fb
from fewbit.array import pack
from fewbit.array.scales import AbsMax
from fewbit.formats import FORMATS
from tests.conformance.array_laws import unpacked
from tests.oracles.comparing import assert_same_codes, lenient_jax, quantize, weights

pytestmark = pytest.mark.oracle
pytest.importorskip("aqt")
aqt_quantizer = pytest.importorskip("aqt.jax.v2.aqt_quantizer")


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("preserve_max_val", [False, True], ids=["edge", "centre"])
def test_codes_and_scales(bits: int, preserve_max_val: bool):
    x = weights()
    quantizer = aqt_quantizer.quantizer_make(bits, initialize_calibration=False)
    quantizer.numerics = quantizer.numerics.replace(preserve_max_val=preserve_max_val)
    quantizer.init_calibration()
    with lenient_jax():
        other, _ = quantizer.quant(jnp.asarray(x), calibration_axes=1)
    codes = np.asarray(other.qvalue).astype(np.int64) % 2**bits
    # AQT maps the largest element to the edge of the last code (127.5) unless told to preserve it (127).
    top = 2 ** (bits - 1) - 1
    factor = 1.0 if preserve_max_val else top / (top + 0.5)
    q = quantize(jnp.asarray(x), fb.Scheme(FORMATS[f"int{bits}_narrow"], {...: 1, -1: None}, calibration=AbsMax(factor)))
    # A product with the factor and its division instead of one division: two roundings more; theirs is by a reciprocal.
    np.testing.assert_allclose(np.asarray(other.scale[0]), q.scale, rtol=2.0**-22)
    ratio = np.abs(x / np.asarray(q.scale))
    inside = ratio < top + 0.49
    assert inside.mean() > 0.98
    assert_same_codes(np.where(inside, codes, 0), q_inside(q, inside), np.where(inside, x, 0).astype(np.float32))
    assert set(np.unique(codes)) <= set(range(top + 1)) | set(range(2**bits - top, 2**bits)), "narrow"


def q_inside(q: fb.QArray, inside: np.ndarray) -> fb.QArray:
    """The same scales with codes of zero for what lies at the end of the range, where both saturate."""
    codes = pack(jnp.asarray(np.where(inside, unpacked(q), 0).astype(np.uint8)), q.scheme.format.bits)
    return fb.QArray(codes, q.scale, None, None, q.scheme, q.dtype, q.slack)


def test_saturated_elements_take_the_last_code():
    x = weights()
    quantizer = aqt_quantizer.quantizer_make(8, initialize_calibration=False)
    quantizer.init_calibration()
    with lenient_jax():
        other, _ = quantizer.quant(jnp.asarray(x), calibration_axes=1)
    spec = fb.Scheme(FORMATS["int8_narrow"], {...: 1, -1: None}, calibration=AbsMax(127 / 127.5))
    ours = np.asarray(quantize(jnp.asarray(x), spec).codes).view(np.int8)
    largest = np.abs(x) == np.abs(x).max(1, keepdims=True)
    assert np.array_equal(np.asarray(other.qvalue)[largest].astype(int), ours[largest])
    assert (np.abs(ours[largest].astype(int)) == 127).all()


def test_simulated_floats_round_ties_away_from_zero():
    """Every number of E2M1, every midpoint and its neighbours: the same but for ties, which go to the even code here."""
    numerics = pytest.importorskip("aqt.jax.v2.numerics.fp_numerics")
    fmt = FORMATS["e2m1"]
    numbers = np.unique(np.abs(fmt.values())).astype(np.float32)
    ties = (numbers[1:] + numbers[:-1]) / 2
    x = np.concatenate([numbers, np.nextafter(ties, np.float32(0)), np.nextafter(ties, np.float32(9)), ties])
    with lenient_jax():
        other = np.asarray(numerics.fp_round(jnp.asarray(x), cfg=numerics.e2m1_ocp, key=None, stochastic_rounding=False))
    ours = np.asarray(fmt.nearest(jnp.asarray(x)))
    np.testing.assert_array_equal(other[: -len(ties)], ours[: -len(ties)])
    # 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5: AQT rounds up, but below 1 to even.
    assert other[-len(ties) :].tolist() == [0, 1, 1.5, 2, 3, 4, 6]
    assert ours[-len(ties) :].tolist() == [0, 1, 1, 2, 2, 4, 4]
