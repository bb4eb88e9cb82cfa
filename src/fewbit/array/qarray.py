"""QArray: a stored quantized tensor, an array by its shape and dtype, a pytree of packed codes and scales."""

import dataclasses
import importlib
import math
import operator
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, Sharding
from jax.typing import DTypeLike

from .._registry import Registry
from .._tiles import Tile, from_front, tile_counts
from ..errors import QuantError
from .layout import Axis, reshaped
from .packing import code_capacity, codes_per_unit, packed_length
from .scheme import Scheme

PRODUCTS: Registry = Registry("product")
"""The products that the operators of a QArray reach; `fewbit.ops` adds them when it is imported."""


def _product(name: str) -> Any:
    """A product of `fewbit.ops`, which may not be imported yet."""
    if name not in PRODUCTS:
        importlib.import_module("fewbit.ops")
    return PRODUCTS[name]


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class QArray:
    """A quantized tensor: packed codes, a scale for each tile, and the Scheme that says what they mean.

    It has the shape and the dtype of the array that it stands for. `@` in both orders, `.T`, `.mT`, `.transpose`,
    `.swapaxes`, `.reshape`, indexing and `.astype` work on it as it is, exactly: codes and scales move, nothing is quantized
    anew. Anything else is for `fb.transparent`, which runs unchanged code on quantized leaves, or `fb.dequantize`.

    It is a pytree, so jit, vmap, scan, device_put, donation and checkpointers see its arrays. The shape is derived from
    them: a slice of stacked leaves is a QArray of the sliced shape.

    Attributes:
        codes: uint8, shaped like the array but for the packed axis, whose length is that of the bytes.
        scale: one element a tile, with as many axes as the array; a QArray itself when the scales are quantized.
        zero_point: like `scale`, or None.
        tensor_scale: float32, one element, with as many axes as the array; or None.
        scheme: what the leaves mean. Static, like the fields that follow.
        dtype: the floating dtype of the array, which `fb.dequantize` gives.
        slack: how many codes the bytes of the packed axis could hold beyond its length.
        policy: how products with this array are computed, None for weight-only; `fewbit.ops` reads it.
    """

    codes: jax.Array
    scale: Any
    zero_point: jax.Array | None
    tensor_scale: jax.Array | None
    scheme: Scheme
    dtype: np.dtype
    slack: int = 0
    policy: Hashable | None = None

    __array_ufunc__ = None  # so that a numpy operand leaves the operation to us
    __hash__ = object.__hash__

    def tree_flatten(self) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """The arrays, and what is static."""
        leaves = self.codes, self.scale, self.zero_point, self.tensor_scale
        return leaves, (self.scheme, self.dtype, self.slack, self.policy)

    def tree_flatten_with_keys(self) -> tuple[list[tuple[Any, Any]], tuple[Any, ...]]:
        """The arrays with their names, and what is static."""
        leaves, static = self.tree_flatten()
        return list(zip(map(jax.tree_util.GetAttrKey, _LEAVES), leaves, strict=True)), static

    @classmethod
    def tree_unflatten(cls, static: tuple[Any, ...], leaves: Iterable[Any]) -> "QArray":
        """The QArray of its leaves, which may be anything that JAX puts in their place."""
        q = object.__new__(cls)
        values = (*leaves, *static)
        for name, value in zip((*_LEAVES, "scheme", "dtype", "slack", "policy"), values, strict=True):
            object.__setattr__(q, name, value)
        return q

    # --- what it is ---

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array that this one stands for."""
        shape = list(self.codes.shape)
        axis = self.scheme.pack_axis
        shape[axis] = code_capacity(shape[axis], self.scheme.format.bits) - self.slack
        return tuple(shape)

    @property
    def ndim(self) -> int:
        """How many axes it has."""
        return self.codes.ndim

    @property
    def size(self) -> int:
        """How many elements it has."""
        return int(np.prod(self.shape))

    @property
    def nbytes(self) -> int:
        """The bytes that are really held: packed codes, scales, zero points and tensor scale."""
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(self))

    @property
    def bits_per_weight(self) -> float:
        """`8 * nbytes / size`; NaN for an array without elements."""
        return 8 * self.nbytes / self.size if self.size else math.nan

    @property
    def tiles(self) -> tuple[Tile, ...]:
        """The tile of each axis as the scale has it: a length, or None for the whole axis."""
        return tuple(
            None if count == 1 and (tile is None or tile >= n) and n != 1 else 1 if count == n else tile
            for count, tile, n in zip(self.scale.shape, self.scheme.tiles(self.ndim), self.shape, strict=True)
        )

    @property
    def _named_tiles(self) -> tuple[Tile, ...]:
        """The tiles with the lengths that the scheme names, also where an axis is shorter than its tile."""
        named = self.scheme.tiles(self.ndim)
        counts = tile_counts(self.shape, named)
        return tuple(t if n == m else own for t, own, n, m in zip(named, self.tiles, counts, self.scale.shape, strict=True))

    def __repr__(self) -> str:
        if not hasattr(self.codes, "shape"):
            return f"QArray({self.scheme.name}, leaves={jax.tree.leaves(self)})"
        shape = ", ".join(map(str, self.shape))
        return (
            f"QArray({self.scheme.name}, {self.dtype.name}[{shape}], {self.nbytes:,} bytes, "
            f"{self.bits_per_weight:.3f} bits/weight)"
        )

    # --- layout, exact ---

    @property
    def T(self) -> "QArray":
        """The array with its axes reversed."""
        return self.transpose()

    @property
    def mT(self) -> "QArray":
        """The array with its last two axes exchanged."""
        return self.swapaxes(-1, -2)

    def swapaxes(self, axis1: int, axis2: int) -> "QArray":
        """The array with two axes exchanged."""
        order = list(range(self.ndim))
        one, other = (from_front(axis, self.ndim) for axis in (axis1, axis2))
        order[one], order[other] = other, one
        return self.transpose(*order)

    def transpose(self, *axes: int | tuple[int, ...] | None) -> "QArray":
        """The array with its axes in the given order, reversed by default; codes and scales permute alike."""
        given = _unwrapped(axes)
        order = tuple(from_front(a, self.ndim) for a in given) if given else tuple(reversed(range(self.ndim)))
        if sorted(order) != list(range(self.ndim)):
            raise QuantError(f"transpose axes {tuple(given)} must name each of the {self.ndim} axes once")
        tiles = tuple(self._named_tiles[a] for a in order)
        pack_axis = order.index(self.scheme.pack_axis + self.ndim) - self.ndim
        moved = self._moved(lambda leaf: leaf.transpose(order), self.scheme.with_tiles(tiles, pack_axis))
        source, before = self.untransposed
        object.__setattr__(moved, "_source", (source, tuple(before[a] for a in order)))
        return moved

    @property
    def untransposed(self) -> tuple["QArray", tuple[int, ...]]:
        """The array that this one is a transpose of, and which of its axes each of ours is; else itself and its own axes.

        A product may as well read the one as the other, and need not wait for bytes to be moved. It is known where
        `transpose` was called, and forgotten by whatever takes the array apart, as jit and vmap do.
        """
        return getattr(self, "_source", (self, tuple(range(self.ndim))))

    def reshape(self, *shape: int | tuple[int, ...]) -> "QArray":
        """The array in another shape, as long as no tile and no byte is torn.

        Raises:
            QuantError: when the sizes differ, or a scale's elements would no longer lie in one run of one axis.
        """
        given = _unwrapped(shape)
        wanted = [operator.index(n) for n in given]
        if wanted.count(-1) == 1:
            wanted[wanted.index(-1)] = self.size // max(-int(np.prod(wanted)), 1)
        if int(np.prod(wanted)) != self.size or any(n < 0 for n in wanted):
            raise QuantError(f"cannot reshape {self.shape} into {given}: the sizes differ")
        if tuple(wanted) == self.shape:
            return self
        if not self.size:
            raise QuantError(
                f"cannot reshape {self.shape} into {given}: without elements nothing says the tiles of new axes"
            )
        axes = reshaped(self._axes, wanted)
        scheme = self.scheme.with_tiles(tuple(a.tile for a in axes), _packed_axis(axes))
        return _from_reshaped_leaves(self, tuple(wanted), scheme)

    def astype(self, dtype: DTypeLike) -> "QArray":
        """The same codes and scales, standing for an array of another floating dtype."""
        dtype = jnp.dtype(dtype)
        if not jnp.issubdtype(dtype, jnp.floating):
            raise QuantError(f"a QArray stands for floating numbers; astype({dtype.name}) needs fb.dequantize first")
        result = dataclasses.replace(self, dtype=dtype)
        source, order = self.untransposed
        if source is not self:
            object.__setattr__(result, "_source", (dataclasses.replace(source, dtype=dtype), order))
        return result

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self) -> Iterator["QArray"]:
        return (self[i] for i in range(len(self)))

    def __getitem__(self, index: Any) -> "QArray":
        """The elements at integers, slices, `...` and None; slices of tiled and packed axes must keep tiles whole.

        Raises:
            QuantError: when a tile or a byte would be cut, or for an index array (that is `fb.take`).
        """
        steps = _expanded_index(index, self.ndim)
        codes_index, scale_index, kept = [], [], []
        axes = iter(zip(self._axes, self.scale.shape, strict=True))
        for step in steps:
            if step is None:
                codes_index.append(None)
                scale_index.append(None)
                kept.append(Axis(1, 1))
                continue
            axis, count = next(axes)
            on_codes, on_scale, new_axis = _indexed(axis, count, step, self.scheme.format.bits)
            codes_index.append(on_codes)
            scale_index.append(on_scale)
            kept += [] if new_axis is None else [new_axis]
        if not kept:
            raise QuantError("an integer for every axis leaves none; a QArray has at least one axis")
        packed = _packed_axis(kept)
        scheme = self.scheme.with_tiles(tuple(a.tile for a in kept), packed)
        codes = self.codes[tuple(codes_index)]
        slack = code_capacity(codes.shape[packed], self.scheme.format.bits) - kept[packed].length

        def on_tiles(leaf: Any) -> Any:
            fits = tuple(_on_unit_axis(i, n, m) for i, n, m in _beside(scale_index, leaf.shape, self.scale.shape))
            return leaf[fits]

        return QArray(
            codes,
            on_tiles(self.scale),
            None if self.zero_point is None else on_tiles(self.zero_point),
            None if self.tensor_scale is None else on_tiles(self.tensor_scale),
            scheme,
            self.dtype,
            slack,
            self.policy,
        )

    @property
    def _axes(self) -> list[Axis]:
        """The axes of the array, for the algebra of layouts."""
        packed = self.scheme.pack_axis + self.ndim
        unit = codes_per_unit(self.scheme.format.bits, self.scheme.packing)
        return [
            Axis(n, tile, unit if i == packed else 1, i == packed and unit > 1)
            for i, (n, tile) in enumerate(zip(self.shape, self.tiles, strict=True))
        ]

    def _moved(self, move: Callable[[Any], Any], scheme: Scheme) -> "QArray":
        """The same arrays, each after `move`, under another scheme."""
        zero = None if self.zero_point is None else move(self.zero_point)
        tensor = None if self.tensor_scale is None else move(self.tensor_scale)
        return QArray(move(self.codes), move(self.scale), zero, tensor, scheme, self.dtype, self.slack, self.policy)

    # --- placement ---

    @property
    def sharding(self) -> Sharding | None:
        """The sharding of the array that this one stands for; None when the leaves tell none, as under jit with an auto mesh."""
        from .sharding import logical_sharding  # it needs this class

        return logical_sharding(self)

    def with_sharding(self, sharding: NamedSharding | tuple[Mesh | AbstractMesh, PartitionSpec]) -> "QArray":
        """The same array laid over a mesh: codes take the spec, scales the part of it that they have more than one element for.

        Outside jit the leaves are moved. Under jit they are constrained, or resharded on an explicit mesh: before a product
        this gathers codes where XLA would gather decoded floats.

        Args:
            sharding: that of the array which this one stands for, or its mesh and spec.

        Raises:
            QuantError: when a shard would cut a tile or a byte.
        """
        from .sharding import placed  # it needs this class

        is_pair = type(sharding) is tuple and len(sharding) == 2  # a PartitionSpec is no pair
        return placed(self, NamedSharding(*sharding) if is_pair else sharding)  # type: ignore[arg-type]

    # --- products, and what needs transparent ---

    def __matmul__(self, other: Any) -> Any:
        return _product("matmul")(self, other)

    def __rmatmul__(self, other: Any) -> Any:
        return _product("matmul")(other, self)

    def _refuse(self, *_: Any) -> NoReturn:
        raise TypeError(
            "a QArray has @, .T, .mT, .transpose, .swapaxes, .reshape, [...] and .astype; for other operations run the code "
            "through fb.transparent(fn), or call fb.dequantize(q) first"
        )

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refuse
    __pow__ = __rpow__ = __neg__ = __abs__ = __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = _refuse  # type: ignore
    __array__ = __bool__ = __float__ = __int__ = _refuse  # type: ignore


_LEAVES = ("codes", "scale", "zero_point", "tensor_scale")


def is_qarray(x: Any) -> bool:
    """Whether `x` is a QArray: the `is_leaf` of every tree walk that keeps them whole.

    Args:
        x: anything.

    Returns:
        True for a QArray.
    """
    return isinstance(x, QArray)


def _from_reshaped_leaves(q: QArray, shape: tuple[int, ...], scheme: Scheme) -> QArray:
    """The QArray of `shape` under `scheme`, every leaf reshaped to what they make of its shape."""
    counts = tile_counts(shape, scheme.tiles(len(shape)))
    bytes_shape = list(shape)
    axis = scheme.pack_axis
    bytes_shape[axis] = packed_length(shape[axis], scheme.format.bits, scheme.packing)
    slack = code_capacity(bytes_shape[axis], scheme.format.bits) - shape[axis]

    def on_tiles(leaf: Any) -> Any:
        return leaf.reshape(counts if leaf.size == int(np.prod(counts)) else (1,) * len(counts))

    zero = None if q.zero_point is None else on_tiles(q.zero_point)
    tensor = q.tensor_scale
    if tensor is not None:
        if tensor.size != 1:
            raise QuantError("stacked arrays with a tensor scale each cannot be reshaped; slice or vmap over them")
        tensor = tensor.reshape((1,) * len(shape))
    return QArray(q.codes.reshape(bytes_shape), on_tiles(q.scale), zero, tensor, scheme, q.dtype, slack, q.policy)


def _unwrapped(numbers: tuple[Any, ...]) -> Sequence[Any]:
    """Numbers that were given one by one, or all as one sequence; a single None is none."""
    single = numbers[0] if len(numbers) == 1 else numbers
    return () if single is None else single if isinstance(single, Sequence) else numbers


def _packed_axis(axes: list[Axis]) -> int:
    """The axis whose codes share bytes; where each has its own byte any would do, and it is the last."""
    return next((i - len(axes) for i, axis in enumerate(axes) if axis.is_packed), -1)


def _expanded_index(index: Any, ndim: int) -> list[Any]:
    """The index as a list with one integer, slice or None for each step, `...` written out."""
    steps = list(index) if isinstance(index, tuple) else [index]
    for step in steps:
        if not (step is None or step is ... or isinstance(step, int | np.integer | slice)) or isinstance(step, bool):
            raise QuantError(
                f"a QArray is indexed with integers, slices, ... and None, not {type(step).__name__}; "
                "fb.take(q, indices, axis) gathers rows"
            )
    missing = ndim - sum(step is not None and step is not ... for step in steps)
    if missing < 0:
        raise QuantError(f"too many indices: {len(steps)} for an array of {ndim} axes")
    if ... not in steps:
        steps.append(...)
    place = steps.index(...)
    if ... in steps[place + 1 :]:
        raise QuantError("an index has at most one ...")
    return [*steps[:place], *([slice(None)] * missing), *steps[place + 1 :]]


def _indexed(axis: Axis, count: int, step: int | slice, bits: int) -> tuple[Any, Any, Axis | None]:
    """What an index of one axis does to the codes and to the scales, and the axis that is left (None: dropped)."""
    tile = axis.length if axis.tile is None else axis.tile
    if not isinstance(step, slice):
        at = int(step)
        if not -axis.length <= at < axis.length:
            raise IndexError(f"index {at} is out of bounds for an axis of {axis.length}")
        if axis.is_packed:
            raise QuantError(f"the integer {at} on the packed axis would cut bytes; fb.take(q, {at}, axis) decodes it")
        at %= axis.length
        return at, 0 if count == 1 else at // tile, None
    start, stop, stride = step.indices(axis.length)
    whole = (start, stop, stride) == (0, axis.length, 1)
    if whole:
        return slice(None), slice(None), axis
    length = len(range(start, stop, stride))
    if not length:
        raise QuantError(f"the slice {start}:{stop}:{stride} of an axis of {axis.length} leaves no element")
    reaches_end = stop == axis.length
    fits_tiles = tile == 1 or count == 1 or (stride == 1 and start % tile == 0 and (stop % tile == 0 or reaches_end))
    if not fits_tiles:
        raise QuantError(f"the slice {start}:{stop}:{stride} cuts tiles of {tile}; slice at their multiples")
    strided = slice(start, stop if stop >= 0 else None, stride)
    on_scale = slice(None) if count == 1 else strided if tile == 1 else slice(start // tile, -(-stop // tile))
    left = dataclasses.replace(axis, length=length)
    if not axis.is_packed:
        return strided, on_scale, left
    if stride != 1 or start % axis.unit or (stop % axis.unit and not reaches_end):
        raise QuantError(
            f"codes share bytes in runs of {axis.unit}; slice the packed axis at their multiples, by steps of 1"
        )
    return slice(start * bits // 8, None if reaches_end else stop * bits // 8), on_scale, left


def _beside(index: list[Any], leaf_shape: tuple[int, ...], scale_shape: tuple[int, ...]) -> Iterator[tuple[Any, int, int]]:
    """Each step of an index with the lengths of the leaf's and the scale's axis that it meets."""
    lengths = iter(zip(leaf_shape, scale_shape, strict=True))
    for step in index:
        length, scale_length = (1, 1) if step is None else next(lengths)
        yield step, length, scale_length


def _on_unit_axis(step: Any, length: int, scale_length: int) -> Any:
    """The step for a leaf whose axis has one element where the scale's has more."""
    if step is None or length == scale_length:
        return step
    return slice(None) if isinstance(step, slice) else 0
