"""Collects activation statistics over calibration batches."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import jax
from jaxtyping import PyTree

from ..array.qarray import is_qarray
from ..errors import QuantError, UnsupportedError
from ..kernels.quantize.dispatch import dequantize
from ..ops.interpret.observe import AbstractMeasure, Measurements, Observed, calibration_rules, observed
from ..ops.interpret.parameter_uses import Place, Product
from ..ops.interpret.traced import Traced, array_leaves
from ..ops.interpret.transparent import Decoded, evaluate, evaluator
from ..recipe import recipe as as_recipe
from ..recipe.recipe import RecipeLike
from ..recipe.resolution import Resolution
from ..recipe.rule import PRODUCT_OPS
from .measure import Inputs, Measure, Statistic, with_cross
from .range_rules import AbsMaxRange
from .ranges import AbstractRange
from .stats import Stats


def observe(
    fn: Callable[..., Any],
    params: PyTree,
    batches: Iterable[PyTree],
    recipe: RecipeLike,
    *,
    rule: AbstractRange = AbsMaxRange(),  # noqa: B008 - frozen
    collect: Sequence[Statistic] = ("range",),
    quantized: PyTree = None,
    **kwargs: object,
) -> Stats:
    """Collects activation statistics of the parameters that a recipe quantizes.

    The float function runs forward only, compiled once for each shape of the batches, without gradients or callbacks. Layers
    stacked for a `scan` over a whole axis, in either direction, or taken as `w[i]`, have statistics each; a loop over a part of an
    axis, or over merged axes, has those of all its layers together. Where several products use one parameter, or a loop uses all
    of it in each iteration, each use counts like another batch.

    Of products without a parameter that the recipe quantizes, the ranges of both operands are collected.

    Args:
        fn: any function that JAX can trace whose first argument is the tree of parameters.
        params: the parameters, floating.
        batches: for each batch the tuple of `fn`'s other arguments, or the one other argument; leaves that are no arrays
            must be hashable. At least one batch.
        recipe: a Recipe, or anything that `fb.recipe` takes; it selects the parameters and the products.
        rule: how ranges are estimated; the default is the amax of all batches.
        collect: "range"; "absmax", the amax of each channel, for SmoothQuant; "sum", the sum of each channel, for bias
            correction; "abssum", the sum of magnitudes of each channel, for AWQ; "squares", the sum of `x**2` of each channel,
            for imatrix; "hessian", the sum of `x x^T` over all vectors that a product contracts, for GPTQ and AWQ; "cross", the
            sum of `f x^T` with the same vector `f` of the float model, for QEP.
        quantized: `params` with some parameters quantized. The statistics are then those of `fn` with these; "cross" needs it, and
            runs `fn` with `params`, too. None: `params`.
        kwargs: keyword arguments of `fn`.

    Returns:
        The statistics of every such parameter and product; `stats.recipe(recipe)` makes the ranges static.

    Raises:
        QuantError: without batches, for an unknown statistic, "cross" without `quantized`, when a rule that is not optional
            matches nothing, and for a parameter that `fb.plan` refuses.
        UnsupportedError: for a product inside a `while` loop or a `shard_map`, from which no statistics can be returned, and
            for a kind of product that has no such statistic.

    >>> batches = [jnp.array([[1.0, -3.0]]), jnp.array([[2.0, 0.5]])]
    >>> stats = observe(lambda params, x: x @ params["w"], {"w": jnp.eye(2)}, batches, "w8a8", collect=("range", "absmax"))
    >>> float(stats["w"].range.high), stats["w"].absmax.tolist()
    (3.0, [2.0, 3.0])
    >>> str(stats.recipe("w8a8").rules[0].policy.activation.calibration)
    'fixed,-3,3'
    """
    resolved = as_recipe(recipe)
    plan: Resolution | None = None  # of the first batch

    def chosen(traced: Traced, params: PyTree) -> Chosen:
        nonlocal plan
        here = Resolution.of_traced(resolved, traced, params)
        plan = plan or here
        products = [(product, here.places.get(product.name)) for product in _measured_products(plan, collect)]
        return _measured_paths(plan), products

    found = collected(functools.partial(fn, **kwargs), params, batches, chosen, rule, collect, quantized)
    assert plan is not None
    products, known = _measured_products(plan, collect), plan.parameters
    ops = tuple((path, tuple(dict.fromkeys(use.op for use in known[path].uses))) for path in found if path in known)
    pairs = {product.name: found[_label(product.name)] for product in products}
    own = tuple(known[path].role for path, _ in ops)
    return Stats({path: found[path] for path, _ in ops}, ops, own, pairs, tuple((p.name, p.op) for p in products))


Chosen: TypeAlias = tuple[Sequence[str], Sequence[tuple[Product, Place | None]]]
"""The parameters to measure, and the products without a parameter with their places in the trace; None: not in this one."""


def collected(
    fn: Callable[..., Any],
    params: PyTree,
    batches: Iterable[PyTree],
    chosen: Callable[[Traced, PyTree], Chosen],
    rule: AbstractRange,
    collect: Sequence[Statistic],
    quantized: PyTree = None,
) -> dict[str, Any]:
    """Statistics of chosen parameters and products, by their names.

    Args:
        fn: as for `observe`.
        params: likewise.
        batches: likewise.
        chosen: what to measure in the trace of a batch, given the parameters.
        rule: as for `observe`.
        collect: likewise.
        quantized: likewise.

    Raises:
        QuantError: as `observe`.
        UnsupportedError: likewise.
    """
    if "cross" in collect and quantized is None:
        raise QuantError("cross compares two models; pass quantized=, the parameters of which some are quantized")
    measure = Measure(rule, tuple(collect))
    found: dict[str, Any] | None = None
    decoded: list[Decoded] = []
    wanted: set[str] = set()
    joined = jax.jit(lambda earlier, later: {path: measure.joined(earlier[path], later[path]) for path in earlier})

    @functools.partial(jax.jit, static_argnums=0)
    def measured(others: StaticPart, arrays: list[Any]) -> dict[str, Any]:
        params, quantized, inputs = others.merged(arrays)
        traced = Traced.of(fn, (params, *inputs), {})
        paths, products = chosen(traced, params)
        wanted.update(paths, (_label(product.name) for product, _ in products))

        def run(tree: PyTree, measure: AbstractMeasure) -> dict[str, Any]:
            notes = Measurements(measure)
            interpreter = evaluator("dequantize", decoded.append, calibration_rules(notes))
            pairs = [
                (product, place, Observed(None, _label(product.name), notes))
                for product, place in products
                if place is not None
            ]
            evaluate(interpreter, traced, array_leaves((observed(tree, paths, notes), *inputs)), pairs)
            return notes.values

        ours = params if quantized is None else jax.tree.map(as_float, quantized, is_leaf=is_qarray)
        found = run(ours, measure)
        if "cross" in collect:
            return with_cross(found, run(params, Inputs()), run(ours, Inputs()))
        return found

    for batch in batches:
        inputs = batch if isinstance(batch, tuple) else (batch,)
        now = measured(*split_arrays((params, quantized, inputs)))
        refuse_missing(wanted - set(now), decoded)
        found = now if found is None else joined(found, now)
    if found is None:
        raise QuantError("batches is empty; pass at least one batch")
    return found


def as_float(x: PyTree) -> PyTree:
    """A parameter, dequantized if it is a QArray."""
    return dequantize(x) if is_qarray(x) else x


def _measured_paths(plan: Resolution) -> list[str]:
    """The parameters that have a policy and a product."""
    return [path for path in plan.policies if any(use.op in PRODUCT_OPS for use in plan.parameters[path].uses)]


def _measured_products(plan: Resolution, collect: Sequence[Statistic]) -> list[Product]:
    """The products without a parameter that have a policy, where ranges are collected."""
    if "range" not in collect:
        return []
    return [product for product, _ in plan.chosen_products.values()]


def _label(name: str) -> str:
    """The name of a product without a parameter among parameters."""
    return f"product {name}"


@dataclasses.dataclass(frozen=True)
class StaticPart:
    """A tree without its arrays: functions, numbers and the like, which `jit` compares.

    Attributes:
        treedef: the structure of the tree; a QArray is one leaf.
        leaves: the leaves that are not arrays, by their places.
    """

    treedef: Any
    leaves: tuple[tuple[int, Any], ...]

    def merged(self, arrays: Sequence[Any]) -> PyTree:
        """The tree with its arrays."""
        leaves = list(arrays)
        for place, leaf in self.leaves:  # ascending
            leaves.insert(place, leaf)
        return jax.tree.unflatten(self.treedef, leaves)


def split_arrays(tree: PyTree) -> tuple[StaticPart, list[Any]]:
    """A tree without its arrays, and the arrays."""
    leaves, treedef = jax.tree.flatten(tree, is_leaf=is_qarray)
    arrays, static = [], []
    for place, leaf in enumerate(leaves):
        if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
            arrays.append(leaf)
        else:
            static.append((place, leaf))
    return StaticPart(treedef, tuple(static)), arrays


def refuse_missing(missing: set[str], decoded: Sequence[Decoded]) -> None:
    """Refuses parameters and products of which no statistics were collected."""
    reasons = {d.array: str(d) for d in reversed(decoded)}
    inside = "it is inside a while loop or a shard_map, from which no statistics can be returned"
    if missing:
        raise UnsupportedError(
            "observe cannot collect statistics of every product",
            {
                name: inside if name.startswith(_label("")) else reasons.get(name, "its products were not reached")
                for name in sorted(missing)
            },
        )
