"""Two quantized operands on TPUs: their codes meet in the matrix unit, as int8 or as 8-bit floats, and the sums take the scales.

**What bounds it.** One row or a few: the bytes of the weight, each read once as it is stored. Many rows: the matrix unit, which
multiplies int8 twice as fast as bfloat16 on v5e, v5p and v6e. Codes become bytes in VMEM, and nothing becomes a float before
it is summed, so decoding is cheap: by the compiler's schedules for v5e a block of 1024 x 512 int4 codes in tiles of 64 takes
467 cycles for 16 rows, where decoding them to scaled bfloat16 takes 708 (`pallas_tpu.py`), and their bytes take 530 to arrive.

**Bytes from nibbles without planes.** A register's bytes are stacked along sublanes, and two nibbles of a byte as two rows of
an int4 register are: byte i holds the rows 2i (low) and 2i + 1 (high), which is fewbit's packing. So `pltpu.bitcast` makes
`[K, N]` numbers of `[K/2, N]` bytes without an operation, and one conversion makes bytes of them; the activations stay in
order. Bytes that are packed along lanes are transposed first. Unsigned codes lose half of their range by one exclusive or of
the byte, and their zero points lose as much.

**Scales along the contraction.** The product of each tile is summed alone, exactly, then scaled and added in float32. A tile
shorter than the matrix unit is deep wastes the rest of it (128 codes on v5e, 256 on v6e). For many rows the vector unit, which
scales and adds `M x N` sums a tile, bounds the product; so one scale for a row of x is left to the total. Scales come as
float32, laid as the result is: one for each tile and column of it, one for each tile and row of x.

**Zero points.** With codes c and d and zero points z and w, `sum((c - z) (d - w)) = sum(c d) - w sum(c - z) - z sum(d)`. The
sums of x's numbers are made before the kernel, which has x anyway; those of the weight's codes by a product with ones, which
are zero beyond the contraction. All of it is exact in int32.

**Any shape.** x is filled with zero bytes up to whole blocks, so what lies beyond the weight's end counts for nothing: an integer
times zero is zero. Of floats, which may be NaN there, the bytes beyond are replaced.

**What was not kept.** A product of int8 with int4 codes as they are: Mosaic has none of two types. Nibbles cut out by masks,
two planes, x cut apart for them: as fast without tiles, but a tile then has half its depth in each plane. v4 is refused, since
Mosaic has no int8 product there.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import ManualAxisType

from ...array import QArray
from ...array.quantize import expanded_scale, expanded_zero_point
from ...formats import AbstractFormat
from .codes import native_float
from .pallas_blocks import PAIRS, Block, Config
from .pallas_pair_blocks import Pair
from .pallas_step import varying_axes


def paired_stacks(
    x: QArray, q: QArray, *, contracts_last: bool, result: Any, config: Config = PAIRS, interpret: bool = False
) -> jax.Array:
    """`y[b] = x[b] @ w[b]` or `x[b] @ w[b].T`, for the matrices that two stacks of codes stand for.

    Args:
        x: `[B, M, K]`, of codes in bytes and tiles along K only.
        q: `[B, R, C]`. Where scales vary along K on both sides, their tiles are equal.
        contracts_last: whether K is C, or R.
        result: the dtype of the result.
        config: the sizes of blocks.
        interpret: whether JAX evaluates the kernel step by step, on any device, instead of compiling it.

    Returns:
        `[B, M, N]`, N being the other one of R and C. Sums of whole codes are exact within a tile; tiles are added in float32.
    """
    pair = Pair.of(x, q, contracts_last=contracts_last, result=result, config=config)
    arrays = arrays_of(pair, x, q)
    call = _call(pair, list(arrays), [a.dtype for a in arrays.values()], counts_of(arrays), interpret, varying_axes(x, q))
    mapped = [None if len(array) == 1 and len(x.codes) > 1 else 0 for array in arrays.values()]
    alone = (array[0] if axis is None else array for array, axis in zip(arrays.values(), mapped, strict=True))
    if len(x.codes) == 1:
        y = call(*(array[0] for array in arrays.values()))[None]
    else:
        y = jax.vmap(call, mapped)(*alone)
    return y[..., : pair.n].astype(result)


def arrays_of(pair: Pair, x: QArray, q: QArray) -> dict[str, jax.Array]:
    """What the kernel reads, by name, each with the axis of the stack first: bytes, float32 scales and int32 zero points."""
    at, wide = 2 if pair.contracts_last else 1, pair.grid[2] * pair.blocks[1]
    arrays = {"x": jnp.pad(_numbers(pair.left, x.codes), ((0, 0), (0, 0), (0, wide - pair.k))), "codes": q.codes}
    arrays["x_scale"] = _along(expanded_scale(x, but=2), 2, pair.lengths[0])
    arrays["scale"] = _along(expanded_scale(q, but=at), at, pair.lengths[2])
    x_zero = None if x.zero_point is None else expanded_zero_point(x, but=2)
    less = 2 ** (q.scheme.format.bits - 1) if pair.is_whole and q.scheme.format.min == 0 else 0
    zero = jnp.zeros((1, 1, 1), jnp.int32) if q.zero_point is None else expanded_zero_point(q, but=at)
    if q.zero_point is not None or less:
        arrays["x_sums"] = _along(_sums(pair, x.codes, x_zero), 2, pair.lengths[0])
        arrays["zero"] = _along(zero - less, at, pair.lengths[2])
    if x_zero is not None:
        arrays["x_zero"] = _along(x_zero, 2, pair.lengths[0])
        arrays["ones"] = jnp.broadcast_to((jnp.arange(wide, dtype=jnp.int32) < pair.k).astype(jnp.int8), (1, 8, wide))
    return arrays


def counts_of(arrays: dict[str, jax.Array]) -> list[int]:
    """How many elements each array has along the contraction, for what lies beside the codes."""
    return [array.shape[1] for array in arrays.values()]


def blocks_of(pair: Pair, x: QArray, q: QArray) -> list[Block]:
    """Every array of a product as it is cut: what the kernel reads, and the result.

    Args:
        pair: the product.
        x: the bytes, or their shapes.
        q: the stack of codes, or its shapes.
    """
    arrays = jax.eval_shape(functools.partial(arrays_of, pair), x, q)
    read = [pair.array(name, array.dtype, array.shape[1]) for name, array in arrays.items()]
    return [*read, pair.array("y", pair.result, 1)]


def _along(beside: jax.Array, at: int, length: int) -> jax.Array:
    """What lies beside an operand whose contracted axis is `at`, as `[B, tiles, length]`, filled with zeros beyond its end."""
    beside = beside.swapaxes(1, 2) if at == 2 else beside
    if beside.shape[2] == 1:
        return jnp.broadcast_to(beside, (*beside.shape[:2], length))
    return jnp.pad(beside, ((0, 0), (0, 0), (0, length - beside.shape[2])))


def _sums(pair: Pair, codes: jax.Array, zero: jax.Array | None) -> jax.Array:
    """The sums of x's numbers, less their zero points, in each tile, `[B, M, tiles]`."""
    tile = pair.tile or pair.k
    numbers = jax.lax.bitcast_convert_type(codes, jnp.int8).astype(jnp.int32)
    cut = jnp.pad(numbers, ((0, 0), (0, 0), (0, -pair.k % tile))).reshape(*numbers.shape[:2], -1, tile)
    lengths = np.minimum(tile, pair.k - tile * np.arange(pair.tiles, dtype=np.int32)).astype(np.int32)
    sums = cut.sum(3)
    return sums if zero is None else sums - zero * jnp.asarray(lengths)[None, None]


def _numbers(fmt: AbstractFormat, codes: jax.Array) -> jax.Array:
    """Bytes as the matrix unit takes them."""
    native = native_float(fmt)
    return jax.lax.bitcast_convert_type(codes, jnp.int8 if native is None else native)


# --- the kernel ---


def _call(
    pair: Pair, names: list[str], dtypes: list[Any], counts: list[int], interpret: bool, varying: ManualAxisType
) -> Any:
    """The kernel as a function of one matrix's arrays."""
    read = [pair.array(*those) for those in zip(names, dtypes, counts, strict=True)]
    out = pair.array("y", pair.result, 1)
    sums = jnp.int32 if pair.is_whole and pair.tiles == 1 else jnp.float32
    return pl.pallas_call(
        functools.partial(_kernel, pair, tuple(names)),
        grid=pair.grid,
        in_specs=[pl.BlockSpec(block.block, block.index) for block in read],
        out_specs=pl.BlockSpec(out.block, out.index),
        out_shape=jax.ShapeDtypeStruct(out.shape, out.dtype, manual_axis_type=varying),
        scratch_shapes=[pltpu.VMEM(out.block, sums)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=32 << 20
        ),
        interpret=interpret,
        name="fewbit_paired_qmatmul",
    )


def _kernel(pair: Pair, names: tuple[str, ...], *refs: Any) -> None:
    """One step of the grid: the products of the tiles of a block."""
    *read, y, total = refs
    held, step = dict(zip(names, read, strict=True)), pl.program_id(2)

    @pl.when(step == 0)
    def _() -> None:
        total[...] = jnp.zeros_like(total)

    beside = {name: _columns(name, held[name]) for name in names if name not in ("x", "codes", "ones")}
    codes, axis = _decoded(pair, held["codes"][...], step)
    for turn in range(pair.block_tiles):
        place = slice(turn * (pair.tile or 0), min((turn + 1) * (pair.tile or pair.blocks[1]), pair.blocks[1]))
        own = jax.lax.slice_in_dim(codes, place.start, place.stop, axis=axis)
        sums = _dot(held["x"][:, place], own, axis)
        if "x_zero" in held:
            sums = sums - _of_tile("x_zero", beside, turn) * _dot(held["ones"][:, place], own, axis)[:1]
        if pair.tiles == 1:
            total[...] += sums
        else:
            scaled = _scaled(sums, beside, turn, but_rows=_is_one_a_row(beside))
            is_tile = step * pair.block_tiles + turn < pair.tiles
            total[...] += scaled if pair.tiles % pair.block_tiles == 0 else jnp.where(is_tile, scaled, 0.0)

    @pl.when(step == pair.grid[2] - 1)
    def _() -> None:
        sums = total[...]
        if pair.tiles == 1:
            sums = _scaled(sums, beside, 0)
        elif _is_one_a_row(beside):
            sums = sums * beside["x_scale"]
        y[...] = sums.astype(y.dtype)


def _columns(name: str, ref: Any) -> jax.Array:
    """What lies beside the rows of x, as columns; what lies beside the result's columns, as it is."""
    return ref[...].T if name.startswith("x_") else ref[...]


def _of_tile(name: str, beside: dict[str, jax.Array], turn: int) -> jax.Array:
    """What lies beside one tile of a block: a column of numbers for x, a row for the result's columns."""
    numbers, axis = beside[name], 1 if name.startswith("x_") else 0
    at = min(turn, numbers.shape[axis] - 1)
    return jax.lax.slice_in_dim(numbers, at, at + 1, axis=axis)


def _is_one_a_row(beside: dict[str, jax.Array]) -> bool:
    """Whether one scale serves a row of x, which the total can take, and not each tile's sums."""
    return beside["x_scale"].shape[1] == 1


def _scaled(sums: jax.Array, beside: dict[str, jax.Array], turn: int, *, but_rows: bool = False) -> jax.Array:
    """The sums of one tile, less what the zero points of the weight add, times the scales; or those of the weight alone."""
    if "zero" in beside:
        sums = sums - _of_tile("x_sums", beside, turn) * _of_tile("zero", beside, turn)
    wide = sums.astype(jnp.float32)
    wide = wide if but_rows else wide * _of_tile("x_scale", beside, turn)
    return wide * _of_tile("scale", beside, turn)


def _dot(x: jax.Array, codes: jax.Array, axis: int) -> jax.Array:
    kind = jnp.int32 if codes.dtype == jnp.int8 else jnp.float32
    return jax.lax.dot_general(x, codes, (((1,), (axis,)), ((), ())), preferred_element_type=kind)


def _decoded(pair: Pair, packed: jax.Array, step: Any) -> tuple[jax.Array, int]:
    """The numbers of a block of bytes, and their contracted axis."""
    k_axis = int(pair.contracts_last)
    if not pair.is_whole:
        if pair.grid[2] * pair.blocks[1] > pair.lengths[1]:
            place = jax.lax.broadcasted_iota(jnp.int32, packed.shape, k_axis) + step * pair.blocks[1]
            packed = jnp.where(place < pair.k, packed.astype(jnp.int32), 0).astype(jnp.uint8)
        return _numbers(pair.right, packed), k_axis
    if pair.right.min == 0:
        packed = packed ^ jnp.uint8(0x80 if pair.codes == 1 else 0x88)
    if pair.codes == 1:
        return _numbers(pair.right, packed), k_axis
    if pair.packs_last:
        packed, k_axis = packed.T, 1 - k_axis
    return pltpu.bitcast(packed, jnp.int4).astype(jnp.int8), k_axis
