"""Observing what the parameters of unchanged code meet, over calibration batches."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax

from ..array import is_qarray
from ..errors import QuantError, UnsupportedError
from ..ops.observed import Notes, Observed, rules_around
from ..ops.transparent import Decoded, evaluated
from ..ops.uses import Product, Use, parameter_paths
from ..recipe import recipe as as_recipe
from ..recipe.resolution import Resolution
from ..recipe.rule import PRODUCT_OPS
from .measure import Measure, Statistic
from .range_rules import AbsMaxRange
from .ranges import AbstractRange
from .stats import Stats


def observe(
    fn: Callable[..., Any],
    params: Any,
    batches: Iterable[Any],
    recipe: Any,
    *,
    rule: AbstractRange = AbsMaxRange(),  # noqa: B008 - frozen
    collect: Sequence[Statistic] = ("range",),
    **kwargs: Any,
) -> Stats:
    """Runs a function over batches, and measures what each parameter that a recipe quantizes meets in its products.

    The float function runs forwards, compiled once for each shape of the batches; nothing is differentiated and nothing calls
    back. A parameter that a loop takes apart (layers in a `scan`) has a measurement for each layer; where several products use
    one, or one in a loop takes it whole, each use counts like another batch.

    Of a product without a parameter that the recipe's rules for products quantize, the ranges of both operands are measured.

    Args:
        fn: any function that JAX can trace whose first argument is the tree of parameters.
        params: the parameters, floating.
        batches: for each batch the tuple of `fn`'s other arguments, or the one other argument; leaves that are no arrays must
            be hashable. At least one batch.
        recipe: a Recipe, or anything that `fb.recipe` takes: it says which parameters, and which products without one.
        rule: how ranges are estimated; the default takes the largest magnitude of all batches.
        collect: "range"; "absmax", the largest magnitude of each channel, for AWQ and SmoothQuant; "hessian", the sum of
            `x x^T` over all vectors that a product contracts, for GPTQ.
        kwargs: keyword arguments of `fn`.

    Returns:
        The statistics of every such parameter that a product contracts, and of every such product; `stats.recipe(recipe)` makes
        the ranges static.

    Raises:
        QuantError: without batches, for an unknown statistic, when a rule that is not optional matches nothing, and for a
            parameter that `fb.plan` refuses.
        UnsupportedError: for a parameter or a product of which something measured cannot come out: it stands in a `while` loop or
            a `shard_map`, or is of a kind of which a statistic is not collected.

    >>> batches = [jnp.array([[1.0, -3.0]]), jnp.array([[2.0, 0.5]])]
    >>> stats = observe(lambda params, x: x @ params["w"], {"w": jnp.eye(2)}, batches, "w8a8", collect=("range", "absmax"))
    >>> float(stats["w"].range.high), stats["w"].absmax.tolist()
    (3.0, [2.0, 3.0])
    >>> str(stats.recipe("w8a8").rules[0].policy.activation.calibration)
    'fixed,-3,3'
    """
    resolved, measure = as_recipe(recipe), Measure(rule, tuple(collect))
    found: dict[str, Any] | None = None
    uses: Mapping[str, tuple[Use, ...]] = {}
    products: tuple[Product, ...] = ()
    decoded: list[Decoded] = []
    joined = jax.jit(lambda earlier, later: {path: measure.joined(earlier[path], later[path]) for path in earlier})

    @functools.partial(jax.jit, static_argnums=0)
    def measured(others: _Others, arrays: list[Any]) -> dict[str, Any]:
        params, inputs = others.among(arrays)
        notes = Notes(measure)
        chosen = {p.name: Observed(None, _label(p.name), notes, is_parameter=False) for p in products}

        def called(params: Any, *inputs: Any) -> Any:
            return fn(params, *inputs, **kwargs)

        run = evaluated(called, "dequantize", decoded.append, lambda _: chosen, rules_around(notes))
        run(_observed(params, paths, notes), *inputs)
        return notes.found

    for batch in batches:
        inputs = batch if isinstance(batch, tuple) else (batch,)
        if found is None:
            plan = Resolution.of(resolved, fn, params, *inputs, **kwargs)
            uses = {path: one.uses for path, one in plan.parameters.items()}
            paths = [path for path in plan.policies if any(use.op in PRODUCT_OPS for use in uses[path])]
            quantized = plan.product_policies if "range" in collect else {}
            products = tuple(product for product in plan.products if product.name in quantized)
        now = measured(*_apart((params, inputs)))
        _refuse_unseen(set(paths) - set(now), {_label(product.name) for product in products} - set(now), decoded)
        found = now if found is None else joined(found, now)
    if found is None:
        raise QuantError("there is no batch to observe")
    ops = tuple((path, tuple(dict.fromkeys(use.op for use in uses[path]))) for path in found if path in uses)
    pairs = {product.name: found[_label(product.name)] for product in products}
    return Stats({path: found[path] for path, _ in ops}, ops, pairs, tuple((p.name, p.op) for p in products))


def _label(name: str) -> str:
    """What a product without a parameter is called among parameters."""
    return f"product {name}"


@dataclasses.dataclass(frozen=True)
class _Others:
    """A tree without its arrays, for `jit` to compare: modules of some frameworks have functions and numbers beside them.

    Attributes:
        treedef: the structure of the tree; a QArray is one leaf.
        leaves: for each leaf whether it is an array, and what else it is.
    """

    treedef: Any
    leaves: tuple[tuple[bool, Any], ...]

    def among(self, arrays: Sequence[Any]) -> Any:
        """The tree with arrays in their places."""
        rest = iter(arrays)
        return jax.tree.unflatten(self.treedef, [next(rest) if is_array else leaf for is_array, leaf in self.leaves])


def _apart(tree: Any) -> tuple[_Others, list[Any]]:
    """A tree without its arrays, and the arrays."""
    leaves, treedef = jax.tree.flatten(tree, is_leaf=is_qarray)
    are_arrays = [hasattr(leaf, "shape") and hasattr(leaf, "dtype") for leaf in leaves]
    others = tuple((is_array, None if is_array else leaf) for is_array, leaf in zip(are_arrays, leaves, strict=True))
    return _Others(treedef, others), [leaf for is_array, leaf in zip(are_arrays, leaves, strict=True) if is_array]


def _observed(params: Any, paths: Sequence[str], notes: Notes) -> Any:
    """The tree with an Observed in the place of each parameter of `paths`."""
    treedef = jax.tree.structure(params, is_leaf=is_qarray)
    leaves = [Observed(x, path, notes) if path in paths else x for path, x in parameter_paths(params).items()]
    return jax.tree.unflatten(treedef, leaves)


def _refuse_unseen(paths: set[str], products: set[str], decoded: Sequence[Decoded]) -> None:
    """Refuses parameters whose products were not seen, with what hid them, and products without a parameter."""
    hidden = {
        path: next((str(d) for d in decoded if d.array == path), "its products were not reached") for path in sorted(paths)
    }
    hidden |= dict.fromkeys(
        sorted(products), "it stands in a while loop or a shard_map, and what is measured cannot come out"
    )
    if hidden:
        raise UnsupportedError("observe cannot see every product", hidden)
