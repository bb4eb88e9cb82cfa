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
from ...array.axis_move import AxisMove, axis_moves
from ...errors import UnsupportedError
from ..conv_vjp import Window
from ..qat.latent import MOVES, PRODUCTS
from .evaluator import Evaluator, Rule, bound
from .indices import scan_operands
from .lookup import Lookup
from .offsets import Offsets
from .parameter_uses import parameter_paths, with_leaves
from .proxy import ArrayProxy, NoRuleError
from .rules.control_flow import inlined, switched

_OBSERVED_RULES: dict[str, Any] = {}


@dataclasses.dataclass(frozen=True)
class ProductOperand:
    """The other operand of a product with a parameter.

    Attributes:
        x: the operand.
        contracted: its contraction axes; None for a convolution.
        batch: its batch axes, such as experts.
        weight: where the elements of the other operand, the weight, are in the parameter.
        weight_contracted: the weight's contraction axes, in the same order.
        weight_batch: its batch axes: one for each of `batch`, or that of the groups of a ragged product; None for a convolution.
        group_sizes: of a ragged product, how many of its rows are multiplied by each group of the weight; else None.
        window: how the parameter, a convolution's kernel, slides over it; else None.
        kernel: the shape of that kernel.
    """

    x: jax.Array
    contracted: tuple[int, ...] | None
    weight: Offsets
    weight_contracted: tuple[int, ...] = ()
    weight_batch: tuple[int, ...] | None = None
    batch: tuple[int, ...] = ()
    group_sizes: jax.Array | None = None
    window: Window | None = None
    kernel: tuple[int, ...] = ()


class AbstractMeasure(abc.ABC):
    """A statistic of a product's operands that can be accumulated; zeros are the empty one.

    Attributes:
        grows: whether accumulated measurements are longer than each along axis -2, so that a loop cannot carry them.
    """

    grows: ClassVar[bool] = False

    @abc.abstractmethod
    def of(self, met: ProductOperand) -> PyTree:
        """The measurement of one product of a parameter: a pytree of arrays."""

    @abc.abstractmethod
    def of_both(self, left: jax.Array, right: jax.Array) -> PyTree:
        """The measurement of one product without a parameter: a pytree of arrays."""

    @abc.abstractmethod
    def joined(self, earlier: PyTree, later: PyTree) -> PyTree:
        """The accumulated measurement; elements of a stack stay separate."""

    def folded(self, stack: PyTree) -> PyTree:
        """The accumulated measurement of all elements of a stack, which are along the first axis."""
        none = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape[1:], leaf.dtype), stack)
        return jax.lax.scan(lambda before, one: (self.joined(before, one), None), none, stack)[0]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Measured:
    """The measurement of one layer, or of all layers that are stacked in a parameter.

    Attributes:
        value: what the measure returns; its leaves have an axis for each of `layers` first.
        layers: the parameter's axes, negative and ascending, of which loops and indices take one element. Static.
    """

    value: Any
    layers: tuple[int, ...] = dataclasses.field(default=(), metadata={"static": True})

    def of_loop(self, axis: int, step: int) -> "Measured":
        """The measurements of all iterations of a loop, which are along the first axis, in the order of the parameter.

        Args:
            axis: the parameter's axis that the loop runs over, negative.
            step: -1 where it runs over the reversed axis, else 1.
        """
        place = sum(layer < axis for layer in self.layers)
        value = jax.tree.map(lambda leaf: jnp.moveaxis(leaf[::step], 0, place), self.value)
        return Measured(value, (*self.layers[:place], axis, *self.layers[place:]))


@dataclasses.dataclass(eq=False)
class Measurements:
    """The measurements of the body that is being evaluated.

    Attributes:
        measure: what is measured.
        found: the measurements so far, by parameter or product name.
    """

    measure: AbstractMeasure
    found: dict[str, Measured] = dataclasses.field(default_factory=dict)

    @property
    def values(self) -> dict[str, Any]:
        """What the measure returned, by parameter or product name."""
        return {path: one.value for path, one in self.found.items()}

    def add(self, path: str, measurement: Measured) -> None:
        """Accumulates a measurement."""
        before = self.found.get(path)
        self.found[path] = measurement if before is None else self.joined(path, before, measurement)

    def joined(self, path: str, earlier: Measured, later: Measured) -> Measured:
        """Two accumulated measurements of one parameter or product."""
        self.check_alike(path, earlier, later)
        return dataclasses.replace(earlier, value=self.measure.joined(earlier.value, later.value))

    def check_alike(self, path: str, one: Measured, other: Measured) -> None:
        """Refuses measurements of which each element belongs to another one of the parameter."""
        shapes = [[self._shape(leaf) for leaf in jax.tree.leaves(each)] for each in (one, other)]
        if one.layers != other.layers:
            what = f"are in loops over its axes {one.layers} and {other.layers}, or at indices of these"
        elif jax.tree.structure(one) != jax.tree.structure(other):
            what = "have different batch axes, or the same in another order"
        elif shapes[0] != shapes[1]:
            what = "have statistics of different shapes, such as those of different contraction axes"
        else:
            return
        raise UnsupportedError(
            f"the products of {path} {what}; its statistics cannot be joined, so use it in one way, or exclude it"
        )

    def _shape(self, leaf: jax.Array | jax.ShapeDtypeStruct) -> tuple[int, ...]:
        """The shape of a leaf, without the axis along which it grows."""
        return (*leaf.shape[:-2], *leaf.shape[-1:]) if self.measure.grows else leaf.shape

    def of(
        self, body: Callable[..., list[Any]], values: list[Any], arrays: list[Any]
    ) -> tuple[list[Any], dict[str, Measured]]:
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
        offsets: where its elements are in the parameter; None for a product without one.
        indices: the indices, known at run time, of the parameter's axes (negative) of which this is one element.
    """

    rules: ClassVar[Mapping[str, Any]] = _OBSERVED_RULES

    value: Any
    path: str = dataclasses.field(metadata={"static": True})
    notes: Measurements = dataclasses.field(metadata={"static": True})
    offsets: Offsets | None = dataclasses.field(default=None, metadata={"static": True})
    indices: Mapping[int, jax.Array] = dataclasses.field(default_factory=dict)

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
    return with_leaves(params, {path: Observed(leaves[path], path, notes, Offsets.of(leaves[path].shape)) for path in paths})


def _array(x: PyTree) -> PyTree:
    return x.value if isinstance(x, Observed) else x


def _with_arrays(values: list[Any], arrays: list[Any]) -> list[Any]:
    """The arrays, observed where the values are."""
    return [dataclasses.replace(v, value=a) if isinstance(v, Observed) else a for v, a in zip(values, arrays, strict=True)]


def _notes(values: list[Any]) -> Measurements:
    return next(value.notes for value in values if isinstance(value, Observed))


def _product(_: Evaluator, eqn: jex_core.JaxprEqn, values: list[Any]) -> list[Any]:
    """The unchanged product; measures the operand that is not the weight. Of two parameters, the right one is the weight."""
    side = int(not isinstance(values[1], Observed))
    x, weight = _array(values[side]), values[1 - side]
    if isinstance(weight, Observed):
        notes = weight.notes
        if weight.offsets is None:
            notes.add(weight.path, Measured(notes.measure.of_both(x, weight.value)))
        else:
            try:
                measurement = notes.measure.of(_operand(eqn, side, x, weight.offsets, values))
                measurement = _of_layer(notes.measure, measurement, weight.offsets, weight.indices)
            except UnsupportedError as error:
                raise UnsupportedError(f"{weight.path}: {error}") from error
            notes.add(weight.path, measurement)
    return bound(eqn, list(map(_array, values)))


def _of_layer(measure: AbstractMeasure, measurement: PyTree, weight: Offsets, indices: Mapping[int, jax.Array]) -> Measured:
    """A measurement among those of all layers that are stacked in the parameter, zeros for the others, as a loop would give.

    `indices` are those known at run time, of the parameter's axes.
    """
    layer = weight.layer()
    if not layer:
        return Measured(measurement)
    lengths = tuple(weight.shape[axis] for axis in layer)
    if measure.grows:
        raise UnsupportedError(
            f"its {lengths} layers are taken by an index, and the inputs of all would be kept for each; for statistics of two models "
            "scan over the layers, or make each a parameter of its own"
        )
    index = tuple(indices.get(axis, known) for axis, known in layer.items())
    every = jax.tree.map(lambda leaf: jnp.zeros((*lengths, *leaf.shape), leaf.dtype).at[index].set(leaf), measurement)
    return Measured(every, tuple(layer))


def _operand(eqn: jex_core.JaxprEqn, side: int, x: jax.Array, weight: Offsets, values: list[Any]) -> ProductOperand:
    """The operand of a product that is not the weight."""
    if eqn.primitive.name == "conv_general_dilated":
        if side == 1:
            return ProductOperand(x, None, weight)
        window = _window(eqn.params)
        return ProductOperand(
            x, None, weight, tuple(sorted(window.kernel[1:])), window=window, kernel=tuple(values[1].shape)
        )
    if eqn.primitive.name == "dot_general":
        contracting, batches = eqn.params["dimension_numbers"]
        groups, sizes = (), None
    else:
        numbers = eqn.params["ragged_dot_dimension_numbers"]
        contracting, batches = numbers.dot_dimension_numbers
        groups, sizes = tuple(numbers.rhs_group_dimensions), jnp.asarray(values[2])  # which may be a constant
    contracted, other = contraction_order(contracting[side], contracting[1 - side])
    weight_batch = (*groups, *batches[1 - side])
    return ProductOperand(x, contracted, weight, other, weight_batch, batches[side], sizes)


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
    if eqn.primitive.name == "optimization_barrier":
        return _with_arrays(values, outputs)
    weight = values[0]
    if isinstance(weight, Observed) and weight.offsets is not None:
        moved = [_of_move(weight, weight.offsets, move, values[1:]) for move in axis_moves(eqn)]
    else:
        moved = [weight] * len(outputs)
    return _with_arrays(moved, outputs)


def _of_move(weight: Observed, offsets: Offsets, move: AxisMove, starts: Sequence[Any]) -> Observed:
    """A parameter after a layout operation, whose array is not moved yet. `starts` are those of a slice at run time."""
    indices = {own: jnp.clip(_array(starts[axis]), 0, move.shape[axis] - 1) for axis, own in offsets.indexed(move).items()}
    return dataclasses.replace(weight, offsets=offsets.moved(move), indices={**weight.indices, **indices})


def _scan(evaluator: Evaluator, eqn: jex_core.JaxprEqn, values: list[Any], notes: Measurements | None = None) -> list[Any]:
    """A loop; it carries the measurements of its iterations. A parameter of which it slices a whole axis has one per iteration."""
    params, notes, body = eqn.params, notes or _notes(values), evaluator.function(eqn.params["jaxpr"])
    whole = scan_operands(eqn, values)
    inside = [*whole[0], *whole[1], *map(_element, whole[2])]
    consts, carry, xs = scan_operands(eqn, list(map(_array, values)))
    carries, stacked = len(carry), _looped_axes(whole[2])

    def step(state: PyTree, x: PyTree) -> tuple[PyTree, PyTree]:
        carry, sums = state
        outputs, found = notes.of(body, inside, [*consts, *carry, *x])
        sums = {path: notes.joined(path, before, found.pop(path)) for path, before in sums.items()}
        return (tuple(outputs[:carries]), sums), (tuple(outputs[carries:]), found)

    none = dict[str, Any]()
    carried = params["length"] and not notes.measure.grows
    if carried and any(isinstance(x, Observed) and x.path not in stacked for x in values):
        _, (_, shapes) = jax.eval_shape(lambda *at: step(at[0], [x[0] for x in at[1]]), (tuple(carry), none), tuple(xs))
        none = _zeros({path: one for path, one in shapes.items() if path not in stacked})
    settings = {name: params[name] for name in ("length", "reverse", "unroll")}
    (carry, sums), (ys, found) = jax.lax.scan(step, (tuple(carry), none), tuple(xs), **settings)
    for path, each in found.items():
        if path in stacked:
            notes.add(path, each.of_loop(*stacked[path]))
        else:
            notes.add(path, dataclasses.replace(each, value=notes.measure.folded(each.value)))
    for path, measurement in sums.items():
        notes.add(path, measurement)
    return [*carry, *ys]


def _looped_axes(stacks: Sequence[PyTree]) -> dict[str, tuple[int, int]]:
    """For each parameter of which a loop slices a whole axis, that axis, negative, and the step along it.

    Without those that it slices twice in different ways.
    """
    found: dict[str, set[tuple[int, int] | None]] = {}
    for x in stacks:
        if isinstance(x, Observed) and x.offsets is not None:
            found.setdefault(x.path, set()).add(x.offsets.whole_axis(0))
    return {path: axis for path, (axis, *others) in found.items() if axis is not None and not others}


def _zeros(shapes: PyTree) -> PyTree:
    """The empty measurement of some shapes."""
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)


def _element(x: PyTree) -> PyTree:
    """A value of which a loop takes one element."""
    if not isinstance(x, Observed) or x.offsets is None:
        return x
    return dataclasses.replace(x, offsets=x.offsets.element())


def _cond(evaluator: Evaluator, eqn: jex_core.JaxprEqn, values: list[Any], notes: Measurements | None = None) -> list[Any]:
    """A `cond`; a branch without a parameter's product, or with fewer vectors in it, gives zeros for them."""
    index, *operands = values
    notes, arrays = notes or _notes(operands), list(map(_array, operands))
    branches = [_branch(notes, evaluator.function(body), operands) for body in eqn.params["branches"]]
    every: dict[str, Measured] = {}
    for branch in branches:
        for path, one in jax.eval_shape(branch, *arrays)[1].items():
            before = every.setdefault(path, one)
            notes.check_alike(path, before, one)
            every[path] = jax.tree.map(lambda *leaves: max(leaves, key=lambda leaf: leaf.size), before, one)
    none = _zeros(every)

    def padded(x: jax.Array, zeros: jax.Array) -> jax.Array:
        return zeros.at[tuple(map(slice, x.shape))].set(x)

    def filled(branch: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arrays: jax.Array) -> tuple[tuple[Any, ...], dict[str, Measured]]:
            outputs, found = branch(*arrays)
            return outputs, none | {path: jax.tree.map(padded, one, none[path]) for path, one in found.items()}

        return run

    outputs, found = switched(eqn, index, list(map(filled, branches)), arrays)
    for path, measurement in found.items():
        notes.add(path, measurement)
    return list(outputs)


def _branch(notes: Measurements, body: Callable[..., list[Any]], values: list[Any]) -> Callable[..., Any]:
    def run(*arrays: jax.Array) -> tuple[tuple[Any, ...], dict[str, Measured]]:
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
