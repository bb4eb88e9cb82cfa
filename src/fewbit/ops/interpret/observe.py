"""Calibration proxies: measure operands of products.

Chosen products without a parameter have both operands measured. Only the forward pass runs, without callbacks: measurements
in a loop or branch are extra results of it, so the code may be jitted.
"""

import abc
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex_core
from jaxtyping import PyTree

from ..._tiles import contraction_order
from ...errors import UnsupportedError
from ..conv_vjp import Window
from ..qat.latent import MOVES, PRODUCTS
from .evaluator import Evaluator, Rule, bound
from .indices import scan_operands
from .lookup import Lookup
from .parameter_uses import parameter_paths, with_leaves
from .proxy import ArrayProxy, NoRuleError
from .rules.control_flow import inlined

_OBSERVED_RULES: dict[str, Any] = {}


@dataclasses.dataclass(frozen=True)
class ProductOperand:
    """The other operand of a product with a parameter.

    Attributes:
        x: the operand.
        contracted: its contraction axes; None for a convolution.
        batch: its batch axes, such as experts.
        group_sizes: of a ragged product, how many of its rows are multiplied by each group of the weight; else None.
        window: how the parameter, a convolution's kernel, slides over it; else None.
        kernel: the shape of that kernel.
    """

    x: jax.Array
    contracted: tuple[int, ...] | None
    batch: tuple[int, ...] = ()
    group_sizes: jax.Array | None = None
    window: Window | None = None
    kernel: tuple[int, ...] = ()


class AbstractMeasure(abc.ABC):
    """A statistic of a product's operands that can be accumulated; zeros are the empty one."""

    @abc.abstractmethod
    def of(self, met: ProductOperand) -> PyTree:
        """The measurement of one product of a parameter: a pytree of arrays."""

    @abc.abstractmethod
    def of_both(self, left: jax.Array, right: jax.Array) -> PyTree:
        """The measurement of one product without a parameter: a pytree of arrays."""

    @abc.abstractmethod
    def joined(self, earlier: PyTree, later: PyTree) -> PyTree:
        """The accumulated measurement; elements of a stack stay separate."""


@dataclasses.dataclass(eq=False)
class Measurements:
    """The measurements of the body that is being evaluated.

    Attributes:
        measure: what is measured.
        found: the measurements so far, by parameter or product name.
    """

    measure: AbstractMeasure
    found: dict[str, Any] = dataclasses.field(default_factory=dict)

    def add(self, path: str, measurement: PyTree) -> None:
        """Accumulates a measurement."""
        before = self.found.get(path)
        if before is not None:
            if _shapes(before) != _shapes(measurement):
                raise UnsupportedError(f"{path} is sliced by a loop and also used in another way; it cannot be observed")
            measurement = self.measure.joined(before, measurement)
        self.found[path] = measurement

    def of(self, body: Callable[..., list[Any]], values: list[Any], arrays: list[Any]) -> tuple[list[Any], dict[str, Any]]:
        """The results of a body and its measurements. `values` says which of `arrays` are observed."""
        inside = _with_arrays(values, arrays)
        outside, self.found = self.found, {}
        try:
            outputs = [_array(out) for out in body(*inside)]
            return outputs, self.found
        finally:
            self.found = outside


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Observed(ArrayProxy):
    """A parameter whose products are measured; everywhere else it is the array.

    Attributes:
        value: the array.
        path: the parameter; or the name of a product without one, whose right operand this is.
        notes: where measurements go.
        is_parameter: whether it is a parameter; otherwise both operands of the product are measured.
    """

    rules: ClassVar[Mapping[str, Any]] = _OBSERVED_RULES

    value: Any
    path: str = dataclasses.field(metadata={"static": True})
    notes: Measurements = dataclasses.field(metadata={"static": True})
    is_parameter: bool = dataclasses.field(default=True, metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        return self.value.shape

    @property
    def dtype(self) -> np.dtype:
        return self.value.dtype

    def __repr__(self) -> str:
        return self.path

    def array(self) -> jax.Array:
        return self.value

    def stacked(self) -> "Observed":
        return self


def observed(params: PyTree, paths: Sequence[str], notes: Measurements) -> PyTree:
    """The tree of parameters with each of `paths` as an Observed."""
    leaves = parameter_paths(params)
    return with_leaves(params, {path: Observed(leaves[path], path, notes) for path in paths})


def _array(x: PyTree) -> PyTree:
    return x.value if isinstance(x, Observed) else x


def _with_arrays(values: list[Any], arrays: list[Any]) -> list[Any]:
    """The arrays, observed where the values are."""
    return [dataclasses.replace(v, value=a) if isinstance(v, Observed) else a for v, a in zip(values, arrays, strict=True)]


def _shapes(tree: PyTree) -> list[tuple[int, ...]]:
    return [leaf.shape for leaf in jax.tree.leaves(tree)]


def _notes(values: list[Any]) -> Measurements:
    return next(value.notes for value in values if isinstance(value, Observed))


def _product(_: Evaluator, eqn: jex_core.JaxprEqn, values: list[Any]) -> list[Any]:
    """The unchanged product; measures the operand that is not the weight. Of two parameters, the right one is the weight."""
    side = int(not isinstance(values[1], Observed))
    x = _array(values[side])
    if eqn.primitive.name == "conv_general_dilated":
        operand = ProductOperand(x, None)
        if side == 0:
            operand = ProductOperand(x, None, window=_window(eqn.params), kernel=tuple(values[1].shape))
    elif eqn.primitive.name == "dot_general":
        numbers, batches = eqn.params["dimension_numbers"]
        operand = ProductOperand(x, contraction_order(numbers[side], numbers[1 - side])[0], batches[side])
    else:
        numbers, batches = eqn.params["ragged_dot_dimension_numbers"].dot_dimension_numbers
        sizes = jnp.asarray(values[2])  # which may be a constant
        operand = ProductOperand(x, contraction_order(numbers[side], numbers[1 - side])[0], batches[side], sizes)
    if isinstance(values[0], Observed) or isinstance(values[1], Observed):
        weight = values[1 - side]
        measure = weight.notes.measure
        if weight.is_parameter:
            weight.notes.add(weight.path, measure.of(operand))
        else:
            weight.notes.add(weight.path, measure.of_both(x, weight.value))
    return bound(eqn, list(map(_array, values)))


def _window(params: Mapping[str, Any]) -> Window:
    """The window of a convolution with these parameters."""
    left, kernel, out = map(tuple, params["dimension_numbers"])
    return Window(
        tuple(params["window_strides"]),
        tuple(params["padding"]),
        tuple(params["lhs_dilation"]),
        tuple(params["rhs_dilation"]),
        left,
        kernel,
        out,
        params["feature_group_count"],
        params["batch_group_count"],
        params["precision"],
    )


def _moved(_: Evaluator, eqn: jex_core.JaxprEqn, values: list[Any]) -> list[Any]:
    """A layout operation; its results are still the parameter, except a looked-up row."""
    outputs = bound(eqn, list(map(_array, values)))
    if Lookup.of(eqn) is not None:
        return outputs
    if len(values) != len(outputs):
        values = [values[0]] * len(outputs)
    return _with_arrays(values, outputs)


def _scan(evaluator: Evaluator, eqn: jex_core.JaxprEqn, values: list[Any], notes: Measurements | None = None) -> list[Any]:
    """A loop; measurements accumulate over its iterations. A parameter that it slices has one measurement per iteration."""
    params, notes, body = eqn.params, notes or _notes(values), evaluator.function(eqn.params["jaxpr"])
    consts, carry, xs = scan_operands(eqn, list(map(_array, values)))
    carries = len(carry)

    def step(carry: PyTree, x: PyTree) -> tuple[PyTree, PyTree]:
        outputs, found = notes.of(body, values, [*consts, *carry, *x])
        return tuple(outputs[:carries]), (tuple(outputs[carries:]), found)

    settings = {name: params[name] for name in ("length", "reverse", "unroll")}
    carry, (ys, found) = jax.lax.scan(step, tuple(carry), tuple(xs), **settings)
    sliced = {value.path for value in scan_operands(eqn, values)[2] if isinstance(value, Observed)}
    for path, stack in found.items():
        notes.add(path, stack if path in sliced else folded(notes.measure, stack))
    return [*carry, *ys]


def folded(measure: AbstractMeasure, stack: PyTree) -> PyTree:
    """The accumulated measurement of all elements of a stack."""
    none = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape[1:], leaf.dtype), stack)
    return jax.lax.scan(lambda before, one: (measure.joined(before, one), None), none, stack)[0]


def _cond(evaluator: Evaluator, eqn: jex_core.JaxprEqn, values: list[Any], notes: Measurements | None = None) -> list[Any]:
    """A `cond`; a branch without a parameter's product gives zeros for it."""
    index, *operands = values
    if eqn.params.get("branches_platforms") is not None:
        raise NoRuleError("the platform decides between branches")
    notes, arrays = notes or _notes(operands), list(map(_array, operands))
    branches = [_branch(notes, evaluator.function(body), operands) for body in eqn.params["branches"]]
    every: dict[str, Any] = {}
    for branch in branches:
        every |= jax.eval_shape(branch, *arrays)[1]
    none = {path: jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes) for path, shapes in every.items()}

    def filled(branch: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arrays: jax.Array) -> tuple[tuple[Any, ...], dict[str, Any]]:
            outputs, found = branch(*arrays)
            return outputs, none | found

        return run

    outputs, found = jax.lax.switch(index, list(map(filled, branches)), *arrays)
    for path, measurement in found.items():
        notes.add(path, measurement)
    return list(outputs)


def _branch(notes: Measurements, body: Callable[..., list[Any]], values: list[Any]) -> Callable[..., Any]:
    def run(*arrays: jax.Array) -> tuple[tuple[Any, ...], dict[str, Any]]:
        outputs, found = notes.of(body, values, list(arrays))
        return tuple(outputs), found

    return run


def _unseen(_: Evaluator, eqn: jex_core.JaxprEqn, values: list[Any]) -> list[Any]:
    raise NoRuleError("measurements inside it cannot be returned")


_CALLS = (
    *("jit", "pjit", "closed_call", "eval_jaxpr", "composite"),
    *("remat2", "checkpoint", "custom_jvp_call", "custom_vjp_call"),
)
_RULES: dict[str, Rule] = dict.fromkeys(PRODUCTS, _product) | dict.fromkeys(MOVES, _moved) | dict.fromkeys(_CALLS, inlined)
_OBSERVED_RULES |= _RULES | {"scan": _scan, "cond": _cond} | dict.fromkeys(("while", "shard_map"), _unseen)


def calibration_rules(notes: Measurements) -> dict[str, Rule]:
    """The rules of equations whose bodies have a measured product, without an observed operand."""
    return _RULES | {
        "scan": functools.partial(_scan, notes=notes),
        "cond": functools.partial(_cond, notes=notes),
        **dict.fromkeys(("while", "shard_map"), _unseen),
    }
