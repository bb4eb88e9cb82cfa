"""An independent NumPy reading of QArrays, and what every scheme promises, as functions of a scheme."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

import fewbit as fb
from fewbit._tiles import tile_counts
from fewbit.array.packing import code_capacity, packed_length
from fewbit.formats import AbstractFormat

SHAPE = (20, 70)
"""The shape of the cases: no tile length of a preset divides both of its axes."""

CASES = ("normal", "zeros", "constant", "denormal", "huge", "outlier", "nan", "inf", "zero_tile", "scaled")
SPOT = (3, 41)
"""Where the NaN, the infinity and the outlier stand."""


def case(name: str) -> np.ndarray:
    """A float32 array of `SHAPE` with the property that its name says."""
    x = np.random.default_rng(0).standard_normal(SHAPE).astype(np.float32)
    if name == "constant":
        return np.full(SHAPE, 0.37, np.float32)
    if name == "huge":
        return np.where(x > 0, np.float32(1e38), np.float32(-1e38))
    factor = {"zeros": 0.0, "denormal": 1e-42, "outlier": 0.01, "scaled": 2.0**-60}.get(name, 1.0)
    x = (x * np.float32(factor)).astype(np.float32)
    if name == "zero_tile":
        x[2:4], x[:, :64] = 0, 0
    x[SPOT] = {"outlier": 1000.0, "nan": np.nan, "inf": np.inf}.get(name, x[SPOT])
    return x


@functools.cache
def results(scheme: str) -> tuple[fb.QArray, dict[str, np.ndarray], dict[str, fb.QArray]]:
    """All cases quantized in one compiled call: stacked, then each case dequantized, and quantized."""

    def both(x: jax.Array) -> tuple[fb.QArray, jax.Array]:
        q = fb.quantize(x, scheme)
        return q, fb.dequantize(q)

    stacked, dense = jax.jit(jax.vmap(both))(jnp.stack([jnp.asarray(case(name)) for name in CASES]))
    each = {name: jax.tree.map(lambda leaf, i=i: leaf[i], stacked) for i, name in enumerate(CASES)}
    return stacked, dict(zip(CASES, np.asarray(dense), strict=True)), each


def unpacked(q: fb.QArray) -> np.ndarray:
    """The codes, read bit by bit."""
    axis, bits, packing = q.scheme.pack_axis, q.scheme.format.bits, q.scheme.packing
    stream = np.moveaxis(np.asarray(q.codes), axis, -1)
    order = "big" if packing.high_first else "little"
    digits = np.unpackbits(stream, axis=-1, bitorder=order)
    count = digits.shape[-1] // bits
    digits = digits[..., : count * bits].reshape(*stream.shape[:-1], count, bits).astype(np.int64)
    weights = 2 ** (np.arange(bits)[::-1] if packing.high_first else np.arange(bits))
    codes = digits @ weights
    if group := len(packing.interleave):
        codes = codes[..., : count // group * group].reshape(*codes.shape[:-1], -1, group)
        codes = codes[..., np.argsort(packing.interleave)].reshape(*stream.shape[:-1], -1)
    return np.moveaxis(codes[..., : q.shape[axis]], -1, axis)


def spread(leaf: np.ndarray, q: fb.QArray) -> np.ndarray:
    """A value for each element from one for each tile, which is as long as its axis says, the last one shorter."""
    for axis, (n, count) in enumerate(zip(q.shape, leaf.shape, strict=True)):
        tile = q.scheme.tiles(q.ndim)[axis]
        length = n if count == 1 else 1 if count == n else tile
        leaf = np.repeat(leaf, length, axis=axis)[(slice(None),) * axis + (slice(n),)]
    return leaf


def scale_of(q: fb.QArray) -> np.ndarray:
    """The scale of each tile, float64, exact but for the one rounding of a product with the tensor scale."""
    holder = q.scheme.scale
    if isinstance(holder, fb.Scheme):
        return numpy_dequantize(q.scale).astype(np.float64)
    scale = holder.values()[np.asarray(q.scale)] if isinstance(holder, AbstractFormat) else np.asarray(q.scale, np.float64)
    if q.tensor_scale is None:
        return scale
    return (scale * np.asarray(q.tensor_scale, np.float64)).astype(np.float32).astype(np.float64)


def numpy_dequantize(q: fb.QArray) -> np.ndarray:
    """What the docstring of Scheme says, in NumPy: float32, each operation rounded once."""
    scheme = q.scheme
    values = scheme.format.values()[unpacked(q)]
    if isinstance(scheme.zero_point, AbstractFormat):
        values = values - spread(scheme.zero_point.values()[np.asarray(q.zero_point)], q)
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        product = (values * spread(scale_of(q), q)).astype(np.float32)
        if scheme.zero_point is not None and not isinstance(scheme.zero_point, AbstractFormat):
            product = product + spread(np.asarray(q.zero_point, np.float32), q)
    return product


def random_qarray(scheme: fb.Scheme, shape: tuple[int, ...], seed: int = 0) -> fb.QArray:
    """A QArray of random codes and scales whose leaves are NumPy arrays: operations on it need no compilation."""
    rng = np.random.default_rng(seed)
    bytes_shape = list(shape)
    bytes_shape[scheme.pack_axis] = packed_length(shape[scheme.pack_axis], scheme.format.bits, scheme.packing)
    slack = code_capacity(bytes_shape[scheme.pack_axis], scheme.format.bits) - shape[scheme.pack_axis]
    counts = tile_counts(shape, scheme.tiles(len(shape)))
    leaves = (
        rng.integers(0, 256, bytes_shape, np.uint8),
        rng.integers(1, 99, counts).astype(np.uint8 if isinstance(scheme.scale, AbstractFormat) else np.dtype(scheme.scale)),
        None if scheme.zero_point is None else rng.integers(0, 2**scheme.format.bits, counts).astype(np.uint8),
        np.full((1,) * len(shape), 0.5, np.float32) if scheme.tensor_scale else None,
    )
    return fb.QArray.tree_unflatten((scheme, np.dtype(np.float32), slack, None), leaves)


def expected_bits(scheme: fb.Scheme, shape: tuple[int, ...]) -> int:
    """How many bits an array takes: whole bytes of codes, and a scale (and zero point) for each tile, by arithmetic."""
    tiles = scheme.tiles(len(shape))
    rows = math.prod(shape) // shape[scheme.pack_axis]
    code_bits = rows * -(-shape[scheme.pack_axis] * scheme.format.bits // 8) * 8
    tile_count = math.prod(1 if t is None else -(-n // t) for n, t in zip(shape, tiles, strict=True))

    def width(holder: object) -> int:
        return 8 if isinstance(holder, AbstractFormat) else 8 * np.dtype(holder).itemsize

    if isinstance(scheme.scale, fb.Scheme):
        # 8-bit scales, one float32 scale for them and their float32 mean.
        scale_bits = tile_count * 8 + 64
    else:
        scale_bits = tile_count * width(scheme.scale)
    zero_bits = 0 if scheme.zero_point is None else tile_count * width(scheme.zero_point)
    return code_bits + scale_bits + zero_bits + 32 * scheme.tensor_scale


def tile_mask(q: fb.QArray, spot: tuple[int, ...]) -> np.ndarray:
    """The elements that share a tile with the one at `spot`."""
    counts = q.scale.shape
    number = spread(np.arange(math.prod(counts)).reshape(counts), q)
    return number == number[spot]
