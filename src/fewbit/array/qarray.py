"""QArray: a quantized array, a pytree of packed codes and scales."""

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
from .indexing import axes_of, indexed, packed_axis
from .layout import Axis, reshaped
from .packing import code_capacity, packed_length
from .scheme import Scheme

PRODUCTS: Registry = Registry("product")
"""The functions behind the operators of a QArray; `fewbit.ops` registers them on import."""


def _product(name: str) -> Any:
    """A product of `fewbit.ops`, imported if necessary."""
    if name not in PRODUCTS:
        importlib.import_module("fewbit.ops")
    return PRODUCTS[name]


@jax.tree_util.register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class QArray:
    """A quantized array: packed codes, one scale per tile (block), and their Scheme.

    It has the shape and dtype of the array that was quantized. `@` in both orders, `.T`, `.mT`, `.transpose`, `.swapaxes`,
    `.reshape`, indexing and `.astype` work without dequantizing, exactly. For anything else use `fb.transparent`, which runs
    unmodified code on quantized leaves, or `fb.dequantize`.

    As a pytree it works with jit, vmap, scan, device_put, donation and checkpointers. The shape is derived from the leaves:
    a slice of stacked leaves is a QArray of the sliced shape.

    Attributes:
        codes: uint8, shaped like the array, but the length of the packed axis is in bytes.
        scale: one element per tile, with as many axes as the array; a QArray for double quantization.
        zero_point: like `scale`, or None.
        tensor_scale: float32, one element, or one for each of stacked arrays, with as many axes as the array; or None.
        scheme: how to decode the leaves. Static, like the following fields.
        dtype: the floating dtype of the array and of `fb.dequantize`.
        slack: padding codes at the end of the packed axis.
        policy: how products with this array are computed, None for weight-only; `fewbit.ops` reads it.
        transposed_from: what `transpose` was called on, and its axis for each of ours; None for any other array. Products under
            jit read the codes there, in place. It is no part of the pytree and no argument: jit, vmap, scan and
            `dataclasses.replace` give arrays without it, and the same numbers.
    """

    codes: jax.Array
    scale: Any
    zero_point: jax.Array | None
    tensor_scale: jax.Array | None
    scheme: Scheme
    dtype: np.dtype
    slack: int = 0
    policy: Hashable | None = None
    transposed_from: "tuple[QArray, tuple[int, ...]] | None" = dataclasses.field(default=None, init=False)

    __array_ufunc__ = None  # NumPy operands then call our operators
    __hash__ = object.__hash__

    def tree_flatten(self) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """The arrays, and the static fields."""
        leaves = self.codes, self.scale, self.zero_point, self.tensor_scale
        return leaves, (self.scheme, self.dtype, self.slack, self.policy)

    def tree_flatten_with_keys(self) -> tuple[list[tuple[Any, Any]], tuple[Any, ...]]:
        """The arrays with their names, and the static fields."""
        leaves, static = self.tree_flatten()
        return list(zip(map(jax.tree_util.GetAttrKey, _LEAVES), leaves, strict=True)), static

    @classmethod
    def tree_unflatten(cls, static: tuple[Any, ...], leaves: Iterable[Any]) -> "QArray":
        """The QArray of its leaves, unchecked: JAX may put any objects in their place."""
        q = object.__new__(cls)
        values = (*leaves, *static)
        for name, value in zip((*_LEAVES, "scheme", "dtype", "slack", "policy"), values, strict=True):
            object.__setattr__(q, name, value)
        return q

    # --- shape and size ---

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the dequantized array."""
        shape = list(self.codes.shape)
        axis = self.scheme.pack_axis
        if -axis > len(shape):
            from .validity import refuse_invalid  # it needs this class

            refuse_invalid(self)
        shape[axis] = code_capacity(shape[axis], self.scheme.format.bits) - self.slack
        return tuple(shape)

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return self.codes.ndim

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all leaves: packed codes, scales, zero points and tensor scale."""
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(self))

    @property
    def bits_per_weight(self) -> float:
        """`8 * nbytes / size`; NaN for an empty array."""
        if not self.size:
            return math.nan
        return 8 * self.nbytes / self.size

    @property
    def tiles(self) -> tuple[Tile, ...]:
        """The actual tile of each axis, from the scale's shape. It is a length, or None for the whole axis."""
        axes = zip(self.scale.shape, self.scheme.tiles(self.ndim), self.shape, strict=True)
        return tuple(_actual_tile(count, tile, n) for count, tile, n in axes)

    @property
    def _named_tiles(self) -> tuple[Tile, ...]:
        """The actual tiles, but the scheme's length on an axis that is shorter than its tile."""
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
        """The array with its axes in the given order, reversed by default."""
        given = _unwrapped(axes) or range(self.ndim)[::-1]
        order = tuple(from_front(a, self.ndim) for a in given)
        if sorted(order) != list(range(self.ndim)):
            raise QuantError(f"transpose axes {tuple(given)} must name each of the {self.ndim} axes once")
        tiles = tuple(self._named_tiles[a] for a in order)
        pack_axis = order.index(self.scheme.pack_axis + self.ndim) - self.ndim
        moved = self._moved(lambda leaf: leaf.transpose(order), self.scheme.with_tiles(tiles, pack_axis))
        source, before = self.transposed_from or (self, tuple(range(self.ndim)))
        return moved._as_transposed_from(source, tuple(before[a] for a in order))

    def reshape(self, *shape: int | tuple[int, ...]) -> "QArray":
        """The array in another shape. QuantError for a scalar, if the sizes differ, or a tile or a byte would be cut."""
        given = _unwrapped(shape)
        wanted = [operator.index(n) for n in given]
        if wanted.count(-1) == 1:
            wanted[wanted.index(-1)] = self.size // max(-int(np.prod(wanted)), 1)
        if int(np.prod(wanted)) != self.size or any(n < 0 for n in wanted):
            raise QuantError(f"cannot reshape {self.shape} into {given}: the sizes differ")
        if not wanted:
            raise QuantError(f"cannot reshape {self.shape} into a scalar; a QArray has at least one axis")
        if tuple(wanted) == self.shape:
            return self
        if not self.size:
            raise QuantError(
                f"cannot reshape {self.shape} into {given}: without elements the tiles of the new axes are undefined"
            )
        axes = reshaped(self._axes, wanted)
        scheme = self.scheme.with_tiles(tuple(a.tile for a in axes), packed_axis(axes))
        return _from_reshaped_leaves(self, tuple(wanted), scheme)

    def astype(self, dtype: DTypeLike) -> "QArray":
        """The same codes and scales with another floating dtype; float64 is float32 where JAX has no 64-bit numbers."""
        dtype = jnp.dtype(jax.dtypes.canonicalize_dtype(dtype))
        if not jnp.issubdtype(dtype, jnp.floating):
            raise QuantError(f"a QArray has a floating dtype; astype({dtype.name}) needs fb.dequantize first")
        result = dataclasses.replace(self, dtype=dtype)
        if self.transposed_from is None:
            return result
        source, order = self.transposed_from
        return result._as_transposed_from(dataclasses.replace(source, dtype=dtype), order)

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self) -> Iterator["QArray"]:
        return (self[i] for i in range(len(self)))

    def __getitem__(self, index: object) -> "QArray":
        """The elements at integers, slices, `...` and None, aligned with tiles.

        Raises:
            QuantError: when a tile or a byte would be cut, or for an index array (use `fb.take`).
        """
        found = indexed(self.scheme, self._axes, self.scale.shape, index)
        codes, packed = self.codes[found.codes], found.scheme.pack_axis
        slack = code_capacity(codes.shape[packed], self.scheme.format.bits) - found.shape[packed]

        def on_tiles(leaf: Any) -> Any:
            return leaf[found.of_leaf(leaf.shape, self.scale.shape)]

        zero, tensor = jax.tree.map(on_tiles, (self.zero_point, self.tensor_scale))
        return QArray(codes, on_tiles(self.scale), zero, tensor, found.scheme, self.dtype, slack, self.policy)

    @property
    def _axes(self) -> list[Axis]:
        """The axes for the shape arithmetic of `layout`."""
        return axes_of(self.scheme, self.shape, self.tiles)

    def _moved(self, move: Callable[[Any], Any], scheme: Scheme) -> "QArray":
        """Applies `move` to every leaf; `scheme` describes the result."""
        zero, tensor = jax.tree.map(move, (self.zero_point, self.tensor_scale))
        return QArray(move(self.codes), move(self.scale), zero, tensor, scheme, self.dtype, self.slack, self.policy)

    def _as_transposed_from(self, source: "QArray", order: tuple[int, ...]) -> "QArray":
        """This new array, as `source` with its axes in the given order."""
        object.__setattr__(self, "transposed_from", (source, order))
        return self

    # --- placement ---

    @property
    def sharding(self) -> Sharding | None:
        """The sharding of the array. None if unknown, as under jit with an auto mesh."""
        from .sharding import logical_sharding  # it needs this class

        return logical_sharding(self)

    def with_sharding(self, sharding: NamedSharding | tuple[Mesh | AbstractMesh, PartitionSpec]) -> "QArray":
        """Shards the array: codes and scales take its spec, axes of one element are replicated.

        Outside jit the leaves are moved. Under jit they are constrained, or resharded on an explicit mesh; before a product
        this all-gathers codes where XLA would gather dequantized floats.

        Args:
            sharding: of the array, or its mesh and spec.

        Raises:
            QuantError: when a shard would cut a tile or a byte.
        """
        from .sharding import placed  # it needs this class

        if type(sharding) is tuple and len(sharding) == 2:  # not isinstance: a PartitionSpec may be a tuple
            sharding = NamedSharding(*sharding)
        return placed(self, sharding)  # type: ignore[arg-type]

    # --- products; other operations need transparent ---

    def __matmul__(self, other: object) -> Any:
        return _product("matmul")(self, other)

    def __rmatmul__(self, other: object) -> Any:
        return _product("matmul")(other, self)

    def _refuse(self, *_: object) -> NoReturn:
        raise TypeError(
            "a QArray has @, .T, .mT, .transpose, .swapaxes, .reshape, [...] and .astype; for other operations run the code "
            "through fb.transparent(fn), or call fb.dequantize(q) first"
        )

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refuse
    __pow__ = __rpow__ = __neg__ = __abs__ = __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = _refuse  # type: ignore
    __array__ = __bool__ = __float__ = __int__ = _refuse  # type: ignore


_LEAVES = ("codes", "scale", "zero_point", "tensor_scale")


def is_qarray(x: object) -> bool:
    """Whether `x` is a QArray. The `is_leaf` of tree functions that treat QArrays as leaves.

    Args:
        x: anything.

    Returns:
        True for a QArray.
    """
    return isinstance(x, QArray)


def _actual_tile(count: int, tile: Tile, length: int) -> Tile:
    """The tile of an axis with `count` scales. Stacking gives each element its own."""
    if count == 1 and (tile is None or tile >= length) and length != 1:
        return None
    if count == length:
        return 1
    return tile


def _from_reshaped_leaves(q: QArray, shape: tuple[int, ...], scheme: Scheme) -> QArray:
    """Reshapes every leaf to its shape in a QArray of `shape` under `scheme`."""
    counts = tile_counts(shape, scheme.tiles(len(shape)))
    bytes_shape = list(shape)
    axis = scheme.pack_axis
    bytes_shape[axis] = packed_length(shape[axis], scheme.format.bits, scheme.packing)
    slack = code_capacity(bytes_shape[axis], scheme.format.bits) - shape[axis]

    if q.tensor_scale is not None and q.tensor_scale.size != 1:
        raise QuantError("stacked arrays with a tensor scale each cannot be reshaped; slice or vmap over them")

    def on_tiles(leaf: Any) -> Any:
        if leaf.size == int(np.prod(counts)):
            return leaf.reshape(counts)
        return leaf.reshape((1,) * len(counts))

    zero, tensor = jax.tree.map(on_tiles, (q.zero_point, q.tensor_scale))
    return QArray(q.codes.reshape(bytes_shape), on_tiles(q.scale), zero, tensor, scheme, q.dtype, slack, q.policy)


def _unwrapped(numbers: tuple[Any, ...]) -> Sequence[Any]:
    """Integers given as `f(1, 2)` or `f((1, 2))`; empty for `f(None)`."""
    if len(numbers) == 1 and numbers[0] is None:
        return ()
    if len(numbers) == 1 and isinstance(numbers[0], Sequence):
        return numbers[0]
    return numbers
