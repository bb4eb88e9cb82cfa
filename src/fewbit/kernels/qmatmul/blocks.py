"""Products of int8 activations and small integers with block scales.

With codes `c` of x, integers `d` of the weight, a zero point `z` and a float offset `o` for each block `t` of the contraction,

    y[m, n] = sum over t of  s_x[m, t] (s_w[n, t] sum over k in t of c[m, k] (d[n, k] - z[n, t])  +  o[n, t] sum over k in t of c[m, k])

The sums over k are exact in int32. Blocks are added in float32, from the first to the last. They are those of x or of the weight,
whichever are shorter; a longer block of the other gives its scale to each of them.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

from ...array.packing import codes_per_unit, unpack
from ...array.qarray import QArray
from ...array.quantize import scale_values
from ...array.scheme import Scheme
from ...errors import QuantError
from ...formats.format import AbstractFormat
from ...formats.integer import Integer
from .integer_codes import is_whole
from .matrix_view import contracted_axis
from .problem import Problem, refused_precision

LARGEST_NUMBER = 127
"""The largest magnitude of the integers of a format of fewer than 8 bits, which kernels look up in int8."""


def block_refusal(problem: Problem) -> str | None:
    """Why two operands cannot be multiplied by blocks, or None."""
    try:
        at, view = problem.weight
    except QuantError as refusal:
        return str(refusal)
    x = (problem.lhs, problem.rhs)[1 - at]
    axes = problem.dimension_numbers[0][1 - at]
    assert x.scheme is not None
    tiles = x.scheme.tiles(len(x.shape))
    if len(axes) != 1:
        return f"{x} has {len(axes)} contracted axes; one is expected"
    if x.scheme.zero_point is not None or not is_whole(x.scheme):
        return f"{x} does not have signed integer codes without zero points"
    if problem.accumulator not in (None, "int32"):
        return f"it sums in int32, but accumulator={problem.accumulator!r} was requested"
    if problem.out_sharding is not None:
        return "out_sharding is supported by XLA's own products only"
    x_tile = tiles[axes[0]]
    if x_tile is not None and x_tile >= x.shape[axes[0]]:
        x_tile = None
    own = view.contraction
    return refused_precision(problem.precision) or refused_weight(
        view.scheme, own.length, own.tile, x_tile, contracts_cols=view.contracts_cols
    )


def refused_weight(scheme: Scheme, length: int, tile: int | None, x_tile: int | None, *, contracts_cols: bool) -> str | None:
    """Why a weight `[B, R, C]` is not multiplied by blocks, or None.

    Args:
        scheme: its scheme.
        length: the length of the contraction.
        tile: its block size along the contraction; None: one block.
        x_tile: that of the activation.
        contracts_cols: whether C is contracted.
    """
    bits = scheme.format.bits
    if bits < 8 and scheme.pack_axis + 3 != contracted_axis(contracts_cols):
        return "its codes are packed along its outputs; they must be packed along the contraction"
    numbers = block_numbers(scheme.format)
    if numbers is None:
        return f"the numbers of {scheme.format.name} are not small integers times one step"
    if tile is None or tile >= length:
        if is_whole(scheme) and bits in (4, 8):
            return "its scales do not vary along the contraction"
        tile = None
    block = min(tile or length, x_tile or length)
    if x_tile is not None and tile is not None and max(x_tile, tile) % block:
        return f"the block sizes along the contraction are {x_tile} and {tile}; one must be a multiple of the other"
    group = 1
    if scheme.packing != type(scheme.packing)():
        group = codes_per_unit(bits, scheme.packing)
    if block < length and block % math.lcm(16, group):
        return f"the shorter block size is {block}; it must be a multiple of {math.lcm(16, group)}"
    if isinstance(scheme.scale, Scheme) and scheme.scale.format.bits != 8:
        return f"its scales are {scheme.scale.name}; quantized scales must have 8 bits"
    reach = int(np.abs(numbers[0]).max())
    if isinstance(scheme.zero_point, AbstractFormat):
        if numbers[1] != 1 or not isinstance(scheme.zero_point, Integer):
            return "its zero points are not integers in units of its codes"
        reach += int(np.abs(scheme.zero_point.values()).max())
    if reach * 128 * block >= 2**31:
        return f"sums of {block} products of its codes may not fit in int32"
    return None


def of_blocks(values: jax.Array, tile: int, block: int, count: int) -> jax.Array:
    """Numbers `[.., tiles]` of tiles along a contraction, one for each of `count` blocks: `[.., count]`."""
    if tile == block:
        return values
    return jnp.repeat(values, -(-tile // block), axis=-1)[..., :count]


def block_numbers(fmt: AbstractFormat) -> tuple[np.ndarray, float] | None:
    """The integers of a format's codes, and their step. `value == float32(integer * step)`; None without such integers.

    The step is the smallest magnitude, or a 127th of the largest. Codes without a number repeat the last one.

    >>> from fewbit.formats.format import FORMATS
    >>> numbers, step = block_numbers(FORMATS["e2m1"])
    >>> numbers[:8].tolist(), step
    ([0, 1, 2, 3, 4, 6, 8, 12], 0.5)
    """
    if fmt.bits == 8 and isinstance(fmt, Integer):
        return np.rint(fmt.values() / fmt.step).astype(np.int32), fmt.step
    values = fmt.values().astype(np.float64)
    if fmt.bits == 8 or not np.isfinite(values).all():
        return None
    magnitudes = np.abs(values)
    for step in (float(magnitudes[values != 0].min()), float(magnitudes.max()) / LARGEST_NUMBER):
        numbers = np.rint(values / step)
        is_exact = (np.float32(numbers * step) == np.float32(values)).all()
        if is_exact and np.abs(numbers).max() <= LARGEST_NUMBER:
            missing = 2**fmt.bits - len(numbers)
            return np.append(numbers, np.repeat(numbers[-1:], missing)).astype(np.int32), step
    return None


def block_product(x: QArray, q: QArray, *, contracts_cols: bool = True) -> jax.Array:
    """The product `[B, M, N]`, float32, in plain JAX.

    Inside jit XLA may round a product and a sum at once (a fused multiply-add), as kernels do where the processor can.

    Args:
        x: `[B, M, K]`, one int8 code per byte.
        q: `[B or 1, N, K]`, or `[B or 1, K, N]`, of a scheme that `refused_weight` accepts.
        contracts_cols: whether `q` is `[B or 1, N, K]`.
    """
    at = contracted_axis(contracts_cols)
    length, fmt = q.shape[at], q.scheme.format
    tile, x_tile = q.tiles[at] or length, x.tiles[2] or length
    block = min(tile, x_tile)
    numbers = block_numbers(fmt)
    assert numbers is not None
    codes = jnp.moveaxis(unpack(q.codes, fmt.bits, length, q.scheme.packing, axis=at), at, 2)  # [B, N, K]
    d = jnp.asarray(numbers[0])[codes.astype(jnp.int32)]
    c = jax.lax.bitcast_convert_type(x.codes, jnp.int8).astype(jnp.int32)
    c, d = (jnp.pad(a, ((0, 0), (0, 0), (0, -length % block))) for a in (c, d))
    c, d = (a.reshape(*a.shape[:2], -1, block) for a in (c, d))  # [B, M or N, t, k]
    sums = jnp.sum(c[:, :, None] * d[:, None], axis=-1)  # [B, M, N, t]
    of_x = jnp.sum(c, axis=-1)[:, :, None]  # [B, M, 1, t]
    count = sums.shape[-1]
    s_x = jnp.broadcast_to(of_blocks(scale_values(x), x_tile, block, count), (*x.scale.shape[:2], count))[:, :, None]

    def of_outputs(values: jax.Array) -> jax.Array:
        return of_blocks(_of_outputs(values, q, at), tile, block, count)[:, None]

    s_w = of_outputs(scale_values(q) * np.float32(numbers[1]))
    zero = q.zero_point
    if isinstance(q.scheme.zero_point, AbstractFormat):
        assert zero is not None
        sums = sums - of_outputs(q.scheme.zero_point.decode(zero)).astype(jnp.int32) * of_x
        zero = None
    is_one_scale = x.scale.shape[2] == 1 and count > 1
    wide, of_x = sums.astype(jnp.float32), of_x.astype(jnp.float32)
    if not is_one_scale:
        wide, of_x = wide * s_x, of_x * s_x
    total = wide[..., 0] * s_w[..., 0]
    for t in range(count):
        if t > 0:
            total = total + wide[..., t] * s_w[..., t]
        if zero is not None:
            total = total + of_outputs(zero.astype(jnp.float32))[..., t] * of_x[..., t]
    if is_one_scale:
        total = total * s_x[..., 0]
    return total


def _of_outputs(values: jax.Array, q: QArray, at: int) -> jax.Array:
    """Scales or zero points `[B, N, t]`, one for each output. `at` is the contracted axis."""
    outputs = q.shape[3 - at]
    wide = jnp.repeat(jnp.moveaxis(values, at, 2), q.tiles[3 - at] or outputs, axis=1)[:, :outputs]
    return jnp.broadcast_to(wide, (*wide.shape[:2], q.scale.shape[at]))
