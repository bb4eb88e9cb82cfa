"""The compiled product on CPUs beside NumPy in float64: every scheme, both axes contracted, any shape and instruction set."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fewbit as fb
from fewbit._tiles import tile_counts
from fewbit.array.packing import code_capacity, pack
from fewbit.formats import AbstractFormat
from fewbit.kernels.extension import extension
from fewbit.kernels.qmatmul import BACKENDS, Problem
from fewbit.kernels.qmatmul.problem import Operand
from tests.conformance import array_laws as laws

BUILT = extension("fewbit.kernels.qmatmul._cpu")
pytestmark = pytest.mark.skipif(BUILT.missing is not None, reason=str(BUILT.missing))

CPU = BACKENDS["cpu"] if "cpu" in BACKENDS.names() else None
LEVELS = ("portable", "avx2", "avx512")
HERE = LEVELS[: LEVELS.index(BUILT.isa) + 1] if BUILT.isa else ()
ROWS, COLS = 70, 200  # no tile of a preset divides either


def contracting(axis: int):
    """The dimension numbers of x [M, K] and a matrix whose axis is contracted."""
    return (((1,), (axis,)), ((), ()))


def weight(name: str, axis: int, shape=(ROWS, COLS)) -> fb.QArray:
    """A weight of random finite codes and scales, as they are stored, with tiles along an axis."""
    rng = np.random.default_rng(0)

    def stored(holder, counts):
        if isinstance(holder, fb.Scheme):
            one = jnp.full((1, 1), 0.01, jnp.float32)
            codes = jnp.asarray(rng.integers(0, 256, counts, np.uint8))
            return fb.QArray(codes, one, one * 3, None, holder, np.dtype(np.float32))
        if isinstance(holder, AbstractFormat):
            return jnp.asarray(finite_codes(holder, rng, counts, low=0.01, high=100.0))
        return jnp.asarray(rng.uniform(0.1, 2, counts), holder)

    scheme = fb.scheme(name).along(axis, 2)
    codes = jnp.asarray(finite_codes(scheme.format, rng, shape))
    packed = pack(codes, scheme.format.bits, scheme.packing, axis=scheme.pack_axis)
    slack = code_capacity(packed.shape[scheme.pack_axis], scheme.format.bits) - shape[scheme.pack_axis]
    counts = tile_counts(shape, scheme.tiles(2))
    zero = None
    if scheme.zero_point is not None:
        zero = stored(scheme.zero_point, counts)
    tensor = jnp.full((1, 1), 0.37, jnp.float32) if scheme.tensor_scale else None
    return fb.QArray(packed, stored(scheme.scale, counts), zero, tensor, scheme, np.dtype(np.float32), slack)


def finite_codes(fmt, rng, shape, low=-np.inf, high=np.inf):
    """Random codes of the numbers of a format between two bounds."""
    values = fmt.values()
    choices = np.flatnonzero(np.isfinite(values) & (values >= low) & (values <= high))
    return rng.choice(choices, shape).astype(np.uint8)


def beyond_rounding(y: jax.Array, x: np.ndarray, q: fb.QArray, axis: int) -> float:
    """The largest error over what float32 allows: each of the K products and sums rounds by half a step at most.

    A scaled value rounds twice more, and so does a sum with an offset.
    """
    w = np.moveaxis(laws.numpy_dequantize(q).astype(np.float64), axis, 0)
    magnitude = np.abs(x.astype(np.float64)) @ np.abs(w)
    if q.zero_point is not None:  # an offset and a scaled code may be much larger than what they leave
        magnitude = magnitude + np.abs(x).sum(1, keepdims=True) * np.abs(w).max() * 4
    allowed = (w.shape[0] + 4) * 2.0**-24 * magnitude + 1e-35
    return float(np.max(np.abs(np.asarray(y, np.float64) - x.astype(np.float64) @ w) / allowed))


def product(x: np.ndarray, q: fb.QArray, axis: int, isa: str | None = None) -> jax.Array:
    """The product by the compiled kernel."""
    problem = Problem(Operand.of(jnp.asarray(x)), Operand.of(q), contracting(axis))
    backend = dataclasses.replace(CPU, isa=isa)
    assert backend.unsupported(problem) is None
    return backend.run(problem, jnp.asarray(x), q)


def activation(rows: int, length: int) -> np.ndarray:
    return np.random.default_rng(rows).standard_normal((rows, length)).astype(np.float32)


@pytest.mark.parametrize("name", fb.SCHEMES.names())
def test_every_scheme_along_both_axes(name):
    for axis, tiled in ((1, -1), (0, -2)):
        q = weight(name, tiled)
        x = activation(3, q.shape[axis])
        assert beyond_rounding(product(x, q, axis), x, q, axis) < 1


@pytest.mark.parametrize("isa", HERE)
@pytest.mark.parametrize("name", ["nf4", "uint4", "q4_1", "int8", "fp8", "int3", "mxfp6", "ternary", "binary"])
def test_every_instruction_set(name, isa):
    q = weight(name, -1)
    x = activation(2, COLS)
    assert beyond_rounding(product(x, q, 1, isa), x, q, 1) < 1
    g = activation(2, ROWS)
    assert beyond_rounding(product(g, q, 0, isa), g, q, 0) < 1


@pytest.mark.parametrize("rows", [1, 17, 64])
@pytest.mark.parametrize("name", ["nf4", "nvfp4", "q8_0", "mxfp6"])
def test_any_number_of_rows(name, rows):
    for axis in (0, 1):
        q = weight(name, -1, (129, 640))
        x = activation(rows, q.shape[axis])
        assert beyond_rounding(product(x, q, axis), x, q, axis) < 1
