"""Adapters: the two low-rank factors of a weight, and their initialization."""

import dataclasses
import difflib
import math
import zlib
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Key, PyTree

from ..._registry import near_names
from ...array.qarray import QArray
from ...errors import QuantError
from ...ops.interpret.parameter_uses import Use, parameter_paths, with_leaves
from ...recipe.matching import tile_axes
from ...recipe.recipe import Recipe
from ...recipe.resolution import Resolution, Resolved
from ...recipe.rule import PRODUCT_OPS, Rule
from ...recipe.sparsity import as_axes

Weight: TypeAlias = jax.Array | np.ndarray | QArray
"""A frozen weight, quantized or not."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Adapter:
    """A low-rank update of one weight, `w + (alpha / r) a b`.

    Products are computed as `x w + (alpha / r) (x a) b`. The axes of the weight are of three kinds, which are static:
    contracted ones are the rows of `a`, loop and batch axes (layers, experts) have factors for each of their elements, and
    all others are the columns of `b`. Within a kind they have the order of the weight.

    Attributes:
        a: `[*stacked, *inputs, r]`.
        b: `[*stacked, r, *outputs]`; zero at first.
        alpha: the numerator of the update's factor.
        inputs: the contracted axes of the weight, negative, ascending.
        stacked: the weight's loop and batch axes, negative, ascending.

    Reference: Hu et al., LoRA, arXiv 2106.09685; Dettmers et al., QLoRA, arXiv 2305.14314.
    """

    # Any: JAX puts specs, shardings, gradients of integers and the like in the place of a pytree's leaves.
    a: Any
    b: Any
    alpha: float = dataclasses.field(metadata={"static": True})
    inputs: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    stacked: tuple[int, ...] = dataclasses.field(default=(), metadata={"static": True})

    @property
    def rank(self) -> int:
        """The number of columns of `a`."""
        return self.a.shape[-1]

    @property
    def scale(self) -> float:
        """`alpha / r`."""
        return self.alpha / self.rank

    @property
    def ndim(self) -> int:
        """The number of the weight's axes."""
        return self.a.ndim + self.b.ndim - 2 - len(self.stacked)

    @property
    def outputs(self) -> tuple[int, ...]:
        """The weight's axes that remain in the result of a product, negative, ascending."""
        return tuple(axis for axis in range(-self.ndim, 0) if axis not in self.inputs + self.stacked)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the weight."""
        lengths = dict(zip(self.stacked + self.inputs, self.a.shape, strict=False))
        lengths |= dict(zip(self.outputs, self.b.shape[self.b.ndim - len(self.outputs) :], strict=True))
        return tuple(lengths[axis] for axis in range(-self.ndim, 0))

    def aligned(self) -> tuple[Array, Array]:
        """Both factors with the weight's axes, and the rank's last. An axis that a factor lacks has length 1."""
        b = jnp.moveaxis(self.b, len(self.stacked), -1)
        return self._aligned(self.a, self.stacked + self.inputs), self._aligned(b, self.stacked + self.outputs)

    def _aligned(self, factor: Array, axes: tuple[int, ...]) -> Array:
        order = sorted(range(len(axes)), key=lambda i: axes[i])
        factor = factor.transpose(*order, len(axes))
        return jnp.expand_dims(factor, [axis + self.ndim for axis in range(-self.ndim, 0) if axis not in axes])

    def __repr__(self) -> str:
        if not hasattr(self.a, "shape") or not hasattr(self.b, "shape"):
            return f"Adapter(a={self.a!r}, b={self.b!r}, alpha={self.alpha:g})"
        return f"Adapter(a={list(self.a.shape)}, b={list(self.b.shape)}, alpha={self.alpha:g})"


def init(
    key: Key[Array, ""],
    fn: Callable[..., Any],
    params: PyTree,
    *inputs: PyTree,
    match: str,
    rank: int,
    alpha: float | None = None,
    dtype: DTypeLike = jnp.float32,
    without_product: Literal["error", "skip"] = "error",
    axis: int | tuple[int, ...] | None = None,
) -> dict[str, Adapter]:
    """Makes adapters, without effect at first, for the weights whose path matches.

    `a` is uniform within `sqrt(6 / n)`, n being the product of the contracted lengths (He's bound), and `b` is zero. The
    products of `fn` determine which axes are contracted and which are stacked. The `a` of a convolution kernel has its
    window and input channels, and `b` its output channels, as in PEFT; each expert of a `ragged_dot` has its own factors.
    The factors of a path depend only on the key and the path, so that dictionaries of different ranks can be joined:
    `init(..., rank=4) | init(..., rank=16)`.

    Args:
        key: a JAX random key.
        fn: the function whose products decide the axes, `fn(params, *inputs)`; it is traced with shapes only.
        params: the tree of parameters: arrays, QArrays or `jax.ShapeDtypeStruct`s.
        inputs: example inputs of `fn`, arrays or shapes.
        match: a regular expression that must match the full path: `"layers/[0-9]+/attn/.*"`.
        rank: the columns of `a`.
        alpha: the numerator of the factor `alpha / rank`; None takes the rank, so that the factor is 1.
        dtype: of the factors; products cast them to the dtype of the other operand.
        without_product: for matched parameters that no adapter fits, such as vectors and embeddings that no product contracts:
            "error" raises and names them and their uses; "skip" gives them no adapter.
        axis: the inputs of matched weights whose products contract different axes: the axes that one of these products
            contracts; the update `a b` is the same for all of them. None refuses such weights.

    Returns:
        The adapters by path: a pytree for an optimizer.

    Raises:
        QuantError: when no parameter matches, or none that an adapter fits; under "error", when any matched parameter does
            not; for a weight whose products contract different axes, without `axis`; for a rank below 1.

    >>> def fn(params, x):
    ...     return x @ params["up"] @ params["down"]
    >>> params = {"up": fb.quantize(jnp.ones((4, 64)), "nf4"), "down": jnp.ones((64, 4))}
    >>> init(jax.random.key(0), fn, params, jnp.ones((1, 4)), match="up|down", rank=2)
    {'down': Adapter(a=[64, 2], b=[2, 4], alpha=2), 'up': Adapter(a=[4, 2], b=[2, 64], alpha=2)}
    """
    if rank < 1:
        raise QuantError(f"rank is {rank}, must be at least 1")
    if without_product not in ("error", "skip"):
        raise QuantError(f"without_product is {without_product!r}; must be 'error' or 'skip'")
    resolution = Resolution.of(Recipe((Rule(match, None, optional=True),)), fn, params, *inputs)
    matched = _matched(match, resolution)
    found = {path: _axes(one, axis) for path, one in matched.items()}
    fit = {path: axes for path, axes in found.items() if axes is not None}
    others = [path for path in matched if path not in fit]
    if others and (without_product == "error" or not fit):
        reasons = "; ".join(f"{path} {_without_product(matched[path])}" for path in others[:8])
        remedy = "narrow match, or pass without_product='skip'" if fit else "match the weights of products"
        raise QuantError(f"match {match!r} matches {len(others)} parameters that no adapter fits: {reasons}; {remedy}")
    alpha = float(rank if alpha is None else alpha)
    shapes = {path: matched[path].shape.shape for path in fit}
    return {path: _fresh(path_key(key, path), shapes[path], *axes, rank, alpha, dtype) for path, axes in fit.items()}


def path_key(key: Key[Array, ""], path: str) -> Key[Array, ""]:
    """The random key of one parameter."""
    return jax.random.fold_in(key, zlib.crc32(path.encode()))


def _matched(match: str, resolution: Resolution) -> dict[str, Resolved]:
    """The parameters that match, by path."""
    matched = {path: one for path, one in resolution.parameters.items() if one.rule is not None}
    if not matched:
        near = difflib.get_close_matches(match, list(resolution.parameters), n=5, cutoff=0.0)
        raise QuantError(
            f"match {match!r} matches no parameter; it must match a full path. The nearest are {', '.join(near)}"
        )
    return matched


def _axes(weight: Resolved, axis: int | tuple[int, ...] | None) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """The inputs and the stacked axes of a weight. None for one that no adapter fits."""
    path, leaf = weight.path, weight.shape
    products = tuple(use for use in weight.uses if use.op in PRODUCT_OPS and use.axes)
    if not products or not jnp.issubdtype(leaf.dtype, jnp.floating):
        return None
    use: Use | None = products[0]
    if axis is None:
        tile_axes(path, products, lambda axes: tuple(sorted(axes)), "pass axis=, as one of them contracts it")
    elif len({tuple(sorted(use.axes)) for use in products}) > 1:
        given, ndim = as_axes(axis) or (), len(leaf.shape)
        wanted = sorted(a if a < 0 else a - ndim for a in given)
        use = next((use for use in products if sorted(use.axes) == wanted), None)
    if use is None:
        contracted = ", ".join(str(use.axes) for use in products)
        raise QuantError(
            f"axis is {axis}, and no product of {path} {tuple(leaf.shape)} contracts it; they contract {contracted}"
        )
    inputs, stacked = tuple(sorted(set(use.axes))), tuple(sorted({*use.stacked, *use.batch} - set(use.axes)))
    if len(inputs) + len(stacked) >= len(leaf.shape):
        return None
    return inputs, stacked


def _without_product(weight: Resolved) -> str:
    """The kind of a parameter that no adapter fits, and its uses."""
    kind = f"{weight.shape.dtype.name}{list(weight.shape.shape)}"
    if not weight.uses:
        return f"{kind}, not used"
    return f"{kind}, used by {', '.join(dict.fromkeys(use.op for use in weight.uses))}"


def _fresh(
    key: Array,
    shape: tuple[int, ...],
    inputs: tuple[int, ...],
    stacked: tuple[int, ...],
    rank: int,
    alpha: float,
    dtype: DTypeLike,
) -> Adapter:
    """An adapter with a random `a` and a `b` of zeros."""
    outputs = [axis for axis in range(-len(shape), 0) if axis not in inputs + stacked]
    each, rows, columns = ([shape[axis] for axis in axes] for axes in (stacked, inputs, outputs))
    bound = math.sqrt(6 / max(math.prod(rows), 1))
    a: Float[Array, ...] = jax.random.uniform(key, (*each, *rows, rank), jnp.float32, -bound, bound)
    b = jnp.zeros((*each, rank, *columns), dtype)
    return Adapter(a.astype(dtype), b, alpha, inputs, stacked)


def with_adapters(params: PyTree, adapters: Mapping[str, Adapter], combine: Callable[[str, Weight, Adapter], Any]) -> PyTree:
    """The tree with `combine(path, weight, adapter)` for every adapted weight.

    Raises:
        QuantError: for an adapter of a parameter that is not there, or of another shape.
    """
    leaves = parameter_paths(params)
    for path, adapter in adapters.items():
        if path not in leaves:
            raise QuantError(f"adapters has {path!r}, which is no parameter; {near_names(path, tuple(leaves))}")
        if adapter.shape != tuple(leaves[path].shape):
            raise QuantError(f"the adapter of {path} is for shape {adapter.shape}, but the weight has {leaves[path].shape}")
    return with_leaves(params, {path: combine(path, leaves[path], adapter) for path, adapter in adapters.items()})
