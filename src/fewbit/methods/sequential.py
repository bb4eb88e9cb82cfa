"""Sequential quantization of the parameters of any function.

Each parameter is calibrated on the inputs that the parameters quantized before it produce, so that it can make up for their errors.
Parameters that share an input go together, and what does not depend on the others any more is computed once: see
`fewbit.calibration.stepwise`. `fewbit quantize` knows its decoders, and runs them layer by layer.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from ..calibration.measure import Statistic
from ..calibration.observe import as_float, collected, split_arrays
from ..calibration.range_rules import AbsMaxRange
from ..calibration.stepwise import Stepwise
from ..errors import QuantError
from ..ops.interpret.observe import AbstractMeasure, Measured, Measurements, ProductOperand, calibration_rules, observed
from ..ops.interpret.parameter_uses import with_leaves
from ..ops.interpret.traced import Traced, array_leaves
from ..ops.interpret.transparent import evaluate, evaluator
from ..recipe.apply import check_plan
from ..recipe.method import AbstractMethod
from ..recipe.plan import Plan
from ..recipe.plan import plan as make_plan
from ..recipe.quantize_row import quantize_row
from ..recipe.recipe import RecipeLike
from ..recipe.rule import PRODUCT_OPS
from .bias_correction import corrected_biases


def quantize_sequentially(
    fn: Callable[..., Any],
    params: PyTree,
    batches: Iterable[PyTree],
    recipe: RecipeLike | Plan,
    *,
    method: AbstractMethod,
    correct_biases: bool = False,
    **kwargs: object,
) -> PyTree:
    """Quantizes parameters in the order of their use, with statistics of the partially quantized model.

    Parameters of products with one and the same input, such as those of queries, keys and values, go together. For each such group
    the piece of `fn` between its products and those of the group before is compiled and run with all batches, whose values there
    stay in memory; a function that is one `jit` is one piece, and runs for each group. Layers stacked for a `scan` are one
    parameter, and quantized together: their statistics have the errors of other parameters in all layers, not of their own.

    Args:
        fn: any function that JAX can trace whose first argument is the tree of parameters.
        params: the parameters, floating.
        batches: as for `fb.observe`.
        recipe: a Recipe, or anything that `fb.recipe` takes; or a Plan of `params`.
        method: how scales and codes are chosen; `fb.methods.QEP()` also corrects each weight for the errors of its inputs.
        correct_biases: whether biases take the mean error of their products, as by `fb.methods.correct_biases`, which includes
            what the mean of the quantized model's inputs differs by. What is quantized later sees the new biases.
        kwargs: keyword arguments of `fn`.

    Returns:
        The tree with QArrays for what the recipe quantizes, as from `fb.quantize_params`.

    Raises:
        QuantError: without batches, and for what `fb.plan` and `fb.quantize_params` refuse.
        UnsupportedError: for what `fb.observe` and `fb.quantize_params` refuse.

    >>> import fewbit as fb
    >>> def fn(params, x):
    ...     return jnp.tanh(x @ params["a"]) @ params["b"]
    >>> a, b, x = (jax.random.normal(jax.random.key(i), (64, 64)) for i in range(3))
    >>> quantize_sequentially(fn, {"a": a, "b": b}, [x], "w4", method=fb.methods.QEP())["b"]
    QArray(int4, float32[64, 64], 2,304 bytes, 4.500 bits/weight)
    """
    batches, fn = list(batches), functools.partial(fn, **kwargs)
    if not batches:
        raise QuantError("batches is empty; pass at least one batch")
    first = batches[0] if isinstance(batches[0], tuple) else (batches[0],)
    plan = recipe if isinstance(recipe, Plan) else make_plan(fn, params, *first, recipe=recipe)
    leaves, found = check_plan(params, plan), dict[str, Any]()
    rows = {row.path: row for row in plan}
    collect = cast(Sequence[Statistic], tuple(dict.fromkeys((*method.collect, "sum"))) if correct_biases else method.collect)
    measured = [row.path for row in plan if collect and row.policy is not None and set(row.ops) & set(PRODUCT_OPS)]
    for path in set(rows) - set(measured):
        found[path] = quantize_row(leaves[path], rows[path], method)
    if not measured:
        return with_leaves(params, found)
    means = dict[str, Any]()
    if correct_biases:
        means = collected(fn, params, batches, lambda *_: (measured, ()), AbsMaxRange(), ("sum",))
    now = with_leaves(params, {path: as_float(x) for path, x in found.items()})
    stepwise = Stepwise.of(fn, params, batches, measured, collect)
    for group in input_groups(fn, params, first, measured):
        seen, stepwise = stepwise.measured(group, now)
        new = {path: jax.block_until_ready(quantize_row(leaves[path], rows[path], method, seen[path])) for path in group}
        if correct_biases:
            new |= corrected_biases(leaves, leaves | found | new, [rows[path] for path in group], means, seen)
        found |= new
        now = with_leaves(now, {path: as_float(x) for path, x in new.items()})
    return with_leaves(params, found)


def input_groups(
    fn: Callable[..., Any], params: PyTree, inputs: tuple[PyTree, ...], paths: Sequence[str]
) -> list[list[str]]:
    """Groups parameters by the input of their first product, in the order of these products.

    Args:
        fn: the function, `fn(params, *inputs)`.
        params: the tree of parameters.
        inputs: example inputs.
        paths: the parameters to group.

    Returns:
        The groups; the last one has the parameters whose products were not reached.
    """
    others, arrays = split_arrays((params, inputs))
    traced, groups = Traced.of(fn, (params, *inputs), {}), dict[int, list[str]]()

    def run(arrays: list[Any]) -> None:
        (params, inputs), sources = others.merged(arrays), _Sources(_Operand())
        interpreter = evaluator("dequantize", None, calibration_rules(sources))
        evaluate(interpreter, traced, array_leaves((observed(params, paths, sources), *inputs)))
        for path, operand in sources.operands.items():
            groups.setdefault(id(operand), []).append(path)

    jax.eval_shape(run, arrays)
    reached = set(itertools.chain(*groups.values()))
    if missing := [path for path in paths if path not in reached]:
        return [*groups.values(), missing]  # which `collected` refuses with the reason
    return list(groups.values())


class _Operand(AbstractMeasure):
    """The other operand of a product."""

    def of(self, met: ProductOperand) -> jax.Array:
        return met.x

    def of_both(self, left: jax.Array, right: jax.Array) -> None:
        return None

    def joined(self, earlier: PyTree, later: PyTree) -> PyTree:
        return later


@dataclasses.dataclass(eq=False)
class _Sources(Measurements):
    """The other operand of each parameter's first product.

    Attributes:
        operands: these arrays, by parameter.
    """

    operands: dict[str, jax.Array] = dataclasses.field(default_factory=dict)

    def add(self, path: str, measurement: Measured) -> None:
        self.operands.setdefault(path, measurement.value)
        self.found[path] = Measured(jnp.zeros(()))  # a loop returns what its body measured
