"""A format that a user writes, a table or a class of its own, works everywhere once it is registered."""

import dataclasses
import json
from collections.abc import Iterator
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fewbit as fb
from fewbit.array import pack, unpack
from fewbit.formats import FORMATS, AbstractFormat, Codebook
from fewbit.formats.format import rounded, widened
from tests.conformance import format_laws as laws


@dataclasses.dataclass(frozen=True)
class SignMagnitude(AbstractFormat):
    """The whole numbers -3 .. 3 as a sign and a magnitude, both zeros among them."""

    kind: ClassVar[str] = "sign_magnitude"

    @property
    def bits(self) -> int:
        return 3

    @property
    def max(self) -> float:
        return 3.0

    @property
    def min(self) -> float:
        return -3.0

    def encode(self, x, *, key=None):
        x = jnp.nan_to_num(jnp.clip(widened(x), -3.0, 3.0))
        return rounded(jnp.abs(x), key).astype(jnp.uint8) | (jnp.signbit(x).astype(jnp.uint8) << 2)

    def decode(self, codes, dtype=jnp.float32):
        magnitude = (codes & 3).astype(jnp.float32)
        return jnp.where(codes > 3, -magnitude, magnitude).astype(dtype)

    def values(self) -> np.ndarray:
        return np.array([0.0, 1.0, 2.0, 3.0, -0.0, -1.0, -2.0, -3.0])


quantize = jax.jit(fb.quantize, static_argnums=1)

NEW = [SignMagnitude("sm3"), Codebook("lloyd8", (-2.15, -1.34, -0.76, -0.245, 0.245, 0.76, 1.34, 2.15))]


@pytest.fixture(params=NEW, ids=lambda f: f.name)
def new_format(request: pytest.FixtureRequest) -> Iterator[AbstractFormat]:
    """A format that is registered during one test."""
    yield FORMATS.add(request.param.name, request.param)
    assert FORMATS.remove(request.param.name) is request.param
    assert request.param.name not in FORMATS


@pytest.mark.slow
def test_it_keeps_every_law(new_format: AbstractFormat):
    laws.check_format(new_format)


@pytest.mark.slow
def test_it_packs_quantizes_and_goes_through_json(new_format: AbstractFormat):
    codes = jnp.arange(21, dtype=jnp.uint8) % 8
    packed, back = jax.jit(lambda c: (pack(c, new_format.bits), unpack(pack(c, new_format.bits), new_format.bits, 21)))(
        codes
    )
    assert packed.shape == (8,) and np.array_equal(back, codes)
    scheme = fb.Scheme(new_format, {...: 1, -1: 16})
    x = jax.random.normal(jax.random.key(0), (3, 37))
    q = quantize(x, scheme)
    assert q.nbytes == 3 * 14 + 3 * 3 * 4
    step = float(np.diff(laws.numbers_of(new_format)[0]).max())
    scale = np.repeat(np.asarray(q.scale), 16, axis=1)[:, :37]
    assert (np.abs(fb.dequantize(q) - x) <= step / 2 * scale * (1 + 1e-6)).all()
    read_back = fb.scheme(json.loads(json.dumps(scheme.to_json())))
    assert read_back == scheme
    assert np.array_equal(quantize(x, read_back).codes, q.codes)
    # A format without a zero still decodes an all-zero tile to zeros, by its scale.
    assert np.array_equal(fb.dequantize(quantize(jnp.zeros((3, 37)), scheme)), np.zeros((3, 37)))
