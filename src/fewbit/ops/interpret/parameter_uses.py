"""Finds the products that use each parameter.

The function is traced with shapes only, and every parameter is followed through casts, transposes, reshapes, slices, loops and
calls to the equations that use it. Their contraction axes decide the axis along which tiles (blocks) run; nothing is guessed
from shapes. Products without a parameter are listed, too.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.extend import core as jex_core
from jax.extend import source_info_util
from jaxtyping import PyTree

from ..._tiles import contraction_order
from ...array.axis_move import axis_moves
from ...errors import QuantError
from ...formats.format import is_exact_cast
from .indices import CONSTANT, UNKNOWN, Atom, Fact, fact_of, inner_jaxpr, open_jaxpr, scan_operands, shape_of, while_operands
from .lookup import Lookup
from .proxy import is_proxy
from .traced import Traced, is_array

Path: TypeAlias = str
Place: TypeAlias = tuple[Any, ...]
"""An equation, and those whose bodies contain it, the innermost first."""


@dataclasses.dataclass(frozen=True)
class Use:
    """One equation that uses a parameter.

    Attributes:
        op: "dot_general", "conv_general_dilated", "ragged_dot", "take" for look-ups, or the name of another primitive.
        axes: the parameter's axes, negative, that the product contracts, or that the look-up indexes; empty for others.
        stacked: the parameter's axes, negative, that a loop sliced before the use.
        source: the file and line.
        batch: the parameter's batch axes, negative: experts, for example.
        casts: the dtypes, each of lower precision, that the parameter was cast to before the use.
        tiled: the parameter's axes, negative, that tiles run along for this use (the last of several): the contraction axes of a
            product, the last whole axis of a look-up; empty for other uses, and where single elements are looked up.
    """

    op: str
    axes: tuple[int, ...] = ()
    stacked: tuple[int, ...] = ()
    source: str = ""
    batch: tuple[int, ...] = ()
    casts: tuple[str, ...] = ()
    tiled: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Product:
    """A product of two arrays that are no parameters, such as attention scores.

    Attributes:
        name: the names of `jax.named_scope` (and einsum) around it, joined by `/`, with `#2` and so on from the second product
            under the same names; a product under no name has its number in the trace: `#1`, `#2`.
        op: "dot_general", "conv_general_dilated" or "ragged_dot".
        shapes: of the left and the right operand.
        source: the file and line.
    """

    name: str
    op: str
    shapes: tuple[tuple[int, ...], ...]
    source: str


@dataclasses.dataclass(frozen=True)
class _Found:
    """The uses and products found so far.

    Attributes:
        uses: the uses of parameters.
        products: the products without a parameter: the names around each, and its place.
    """

    uses: list[tuple[Path, Use]] = dataclasses.field(default_factory=list)
    products: list[tuple[str, Place]] = dataclasses.field(default_factory=list)

    def named_products(self) -> tuple[Product, ...]:
        """The products, with unique names."""
        counts: dict[str, int] = {}
        named = []
        for scope, (eqn, *_) in self.products:
            count = counts[scope] = counts.get(scope, 0) + 1
            name = scope
            if count > 1 or not scope:
                name += f"#{count}"
            shapes = tuple(tuple(shape_of(atom)) for atom in eqn.invars[:2])
            named.append(Product(name, _PRODUCTS[eqn.primitive.name], shapes, _source(eqn)))
        return tuple(named)


@dataclasses.dataclass(frozen=True)
class _Scope:
    """Where a jaxpr is called: its name scope, and the equations around it, the innermost first."""

    names: str = ""
    around: Place = ()


_PRODUCTS = {
    "dot_general": "dot_general",
    "conv_general_dilated": "conv_general_dilated",
    "ragged_dot": "ragged_dot",
    "ragged_dot_general": "ragged_dot",
}
"""The primitives that are products, with their names in recipes."""


@dataclasses.dataclass(frozen=True)
class _Traced:
    """A variable that is a parameter, perhaps after layout operations.

    Attributes:
        path: the parameter.
        axes: for each axis of the variable, the parameter's axes (negative) that run along it.
        dtype: the dtype whose precision it has: the parameter's own, or the last of `casts`.
        stacked: the parameter's axes that a loop sliced.
        casts: the dtypes of lower precision that it was cast to.
        is_row: whether it is one row selected by a loop counter (see `fewbit.ops.interpret.lookup`).
    """

    path: Path
    axes: tuple[tuple[int, ...], ...]
    dtype: str
    stacked: tuple[int, ...] = ()
    casts: tuple[str, ...] = ()
    is_row: bool = False

    @classmethod
    def whole(cls, path: Path, shape: Sequence[int], dtype: str) -> "_Traced":
        """The parameter itself."""
        return cls(path, tuple((axis,) for axis in range(-len(shape), 0)), dtype)


class _Value(NamedTuple):
    """What is known of a variable. That is the parameter that it is, if any, and facts for look-ups."""

    parameter: _Traced | None = None
    fact: Fact = UNKNOWN


def parameter_paths(params: PyTree) -> dict[Path, Any]:
    """Every leaf of a tree by its path, such as `layers/3/attn/q`. A QArray, or another array proxy, is one leaf.

    Raises:
        QuantError: when two leaves have the same path, such as those of `{"a/b": x, "a": {"b": y}}`.

    >>> parameter_paths({"a": [1, {"b": 2}]})
    {'a/0': 1, 'a/1/b': 2}
    """
    leaves, _ = jax.tree_util.tree_flatten_with_path(params, is_leaf=is_proxy)
    found = {jax.tree_util.keystr(keys, simple=True, separator="/"): leaf for keys, leaf in leaves}
    if len(found) < len(leaves):
        paths = [jax.tree_util.keystr(keys, simple=True, separator="/") for keys, _ in leaves]
        twice = next(path for path in paths if paths.count(path) > 1)
        raise QuantError(
            f"two parameters have the path {twice!r}; rename one, since rules and files identify a parameter by its path"
        )
    return found


def with_leaves(params: PyTree, leaves: Mapping[Path, Any]) -> PyTree:
    """The tree with other leaves at some of its paths.

    >>> with_leaves({"a": [1, {"b": 2}]}, {"a/1/b": 3})
    {'a': [1, {'b': 3}]}
    """
    every = parameter_paths(params) | dict(leaves)
    return jax.tree.unflatten(jax.tree.structure(params, is_leaf=is_proxy), list(every.values()))


def array_paths(params: PyTree) -> dict[Path, Any]:
    """The array leaves of a tree by path. Modules of some frameworks also have functions and numbers.

    >>> list(array_paths({"w": jnp.ones(2), "activation": jnp.tanh, "rate": 0.1}))
    ['w']
    """
    return {path: leaf for path, leaf in parameter_paths(params).items() if is_array(leaf)}


@dataclasses.dataclass(frozen=True)
class Uses:
    """What a traced function does with its parameters.

    Attributes:
        parameters: the uses of each array among the parameters, by path.
        products: the products without a parameter, in the order of the trace.
        places: for each of them, by name, its equation and those around it.
    """

    parameters: dict[Path, tuple[Use, ...]]
    products: tuple[Product, ...]
    places: dict[str, Place]


def parameter_uses(traced: Traced, params: PyTree) -> Uses:
    """The uses of each parameter in a traced function, and its products without a parameter.

    Only shapes and dtypes matter. The body of a loop counts once.

    Args:
        traced: the function of `params` and other arguments. An array that it closes over is an input like its arguments.
        params: the tree of parameters with which it was traced.
    """
    leaves = array_paths(params)
    parameters = [_Value(_Traced.whole(path, leaf.shape, leaf.dtype.name)) for path, leaf in leaves.items()]
    inputs = [_Value()] * (len(traced.closed.jaxpr.invars) - len(parameters))
    found = _Found()
    _follow(traced.closed.jaxpr, [*parameters, *inputs], found, _Scope())
    uses: dict[Path, dict[Use, None]] = {path: {} for path in leaves}
    for path, use in found.uses:
        uses[path][use] = None
    products = found.named_products()
    places = {product.name: place for product, (_, place) in zip(products, found.products, strict=True)}
    return Uses({path: tuple(own) for path, own in uses.items()}, products, places)


def _follow(jaxpr: jex_core.Jaxpr, values: Sequence[_Value], found: _Found, scope: _Scope) -> list[_Value]:
    """Records the uses of the parameters among a jaxpr's inputs. Returns what is known of its outputs.

    `scope` is that of the equation that calls the jaxpr, to which the names of its own equations are appended.
    """
    env: dict[jex_core.Var, _Value] = dict(zip(jaxpr.invars, values, strict=True))

    def read(atom: Atom) -> _Value:
        if isinstance(atom, jex_core.Literal):
            return _Value(fact=CONSTANT)
        return env.get(atom, _Value())  # a constant that is an array, such as token ids that a closure passes

    for eqn in jaxpr.eqns:
        inputs = [read(atom) for atom in eqn.invars]
        names = "/".join(filter(None, (scope.names, str(eqn.source_info.name_stack))))
        inside = _Scope(names, (eqn, *scope.around))
        if eqn.primitive.name in _PRODUCTS and not any(value.parameter for value in inputs[:2]):
            found.products.append((names, inside.around))
        env.update(zip(eqn.outvars, _step(eqn, inputs, found, inside), strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _step(eqn: jex_core.JaxprEqn, inputs: list[_Value], found: _Found, scope: _Scope) -> list[_Value]:
    """Records the uses of one equation; returns what is known of its outputs."""
    name, params = eqn.primitive.name, eqn.params
    if name == "optimization_barrier":
        return inputs
    if name == "scan":
        consts, first, stacks = scan_operands(eqn, inputs)
        elements = list(map(_element, stacks))

        def scanned(carry: list[_Value], found: _Found) -> list[_Value]:
            return _follow(open_jaxpr(params["jaxpr"]), [*consts, *carry, *elements], found, scope)

        return _loop(eqn, scanned, first, found)
    if name == "while":
        cond_consts, consts, first = while_operands(eqn, inputs)

        def repeated(carry: list[_Value], found: _Found) -> list[_Value]:
            _follow(open_jaxpr(params["cond_jaxpr"]), [*cond_consts, *carry], found, scope)
            return _follow(open_jaxpr(params["body_jaxpr"]), [*consts, *carry], found, scope)

        return _loop(eqn, repeated, first, found)
    if name == "cond":
        outcomes = [_follow(open_jaxpr(branch), inputs[1:], found, scope) for branch in params["branches"]]
        return [_of_branches(inputs[0].fact, column) for column in zip(*outcomes, strict=True)]
    inner = inner_jaxpr(eqn)
    if inner is not None:
        return _follow(inner, inputs, found, scope)
    fact = fact_of(eqn, [value.fact for value in inputs])
    parameter = inputs[0].parameter if inputs else None
    if parameter is not None and not any(value.parameter for value in inputs[1:]):
        lookup = Lookup.of(eqn)
        if lookup is not None and _is_counted(eqn, inputs):
            return [_Value(_picked(eqn, parameter, lookup), fact)]
        if lookup is None and (moved := _moved(eqn, parameter)):
            return [_Value(one, fact) for one in moved]
    for position, value in enumerate(inputs):
        if value.parameter is not None:
            found.uses.append((value.parameter.path, _use(eqn, position, inputs)))
    return [_Value(fact=fact)] * len(eqn.outvars)


def _loop(
    eqn: jex_core.JaxprEqn, body: Callable[[list[_Value], _Found], list[_Value]], first: list[_Value], found: _Found
) -> list[_Value]:
    """The outputs of a loop, whose body gives the carry first.

    The body is repeated until what is known of the carry holds in every iteration. A parameter that the loop changes, also by a
    layout operation, is another array from the second iteration on, so the loop is a use of it as a float array.
    """
    carry = first
    while True:
        inside = _Found()
        outputs = body(carry, inside)
        weaker = [
            _Value(one.parameter if out.parameter is one.parameter else None, one.fact.both(out.fact))
            for one, out in zip(carry, outputs, strict=False)
        ]
        if weaker == carry:
            break
        carry = weaker
    changed = [one.parameter for one, last in zip(first, carry, strict=True) if last.parameter is None]
    found.uses.extend((one.path, Use(eqn.primitive.name, source=_source(eqn))) for one in changed if one is not None)
    found.uses.extend(inside.uses)
    found.products.extend(inside.products)
    return [*carry, *(_Value(fact=Fact(out.fact.is_counted)) for out in outputs[len(carry) :])]


def _element(value: _Value) -> _Value:
    """What is known of the element that a scan slices."""
    parameter = value.parameter
    if parameter is not None:
        stacked = (*parameter.stacked, *parameter.axes[0])
        parameter = dataclasses.replace(parameter, axes=parameter.axes[1:], stacked=stacked)
    return _Value(parameter, Fact(value.fact.is_counted))


def _of_branches(index: Fact, outcomes: Sequence[_Value]) -> _Value:
    """What is known of a value that one of several branches gives."""
    parameters, fact = {value.parameter for value in outcomes}, UNKNOWN
    if index.is_counted:
        fact = functools.reduce(Fact.both, (value.fact for value in outcomes))
    return _Value(parameters.pop() if len(parameters) == 1 else None, fact)


def _source(eqn: jex_core.JaxprEqn) -> str:
    """The file and line of an equation."""
    return source_info_util.summarize(eqn.source_info)


def _use(eqn: jex_core.JaxprEqn, position: int, inputs: Sequence[_Value]) -> Use:
    """The use of the operand at a position of an equation."""
    operand = inputs[position].parameter
    assert operand is not None
    name, batch, tiled = eqn.primitive.name, (), None
    # A loop removes the axis that it runs over; an axis of which a slice leaves one element may be contracted.
    stacked = tuple(a for a in operand.stacked if not any(a in axes for axes in operand.axes))
    if name == "dot_general" and position < 2:
        contracting, batches = eqn.params["dimension_numbers"]
        axes, batch = contraction_order(*contracting)[position], batches[position]
        others = contracting[1 - position]
        if len(others) == 1 and others[0] in inputs[1 - position].fact.one_hot:
            shape = shape_of(eqn.invars[position])
            name, tiled = "take", [a for a, n in enumerate(shape) if a not in (*axes, *batch) and n > 1][-1:]
    elif position == 0 and (lookup := Lookup.of(eqn)) is not None:
        name, axes, batch, tiled = "take", lookup.indexed, lookup.batch, lookup.whole[-1:]
    elif name == "conv_general_dilated" and position == 1:
        _, channels, *window = eqn.params["dimension_numbers"].rhs_spec
        axes = (*window, channels)
    elif name in ("ragged_dot", "ragged_dot_general") and position == 1:
        numbers = eqn.params["ragged_dot_dimension_numbers"]
        contracting, batches = numbers.dot_dimension_numbers
        name, axes, batch = "ragged_dot", contracting[1], (*numbers.rhs_group_dimensions, *batches[1])
    else:
        axes = ()
    if operand.is_row and axes:
        # One row of a scanned stack, such as a layer's gain, is multiplied unquantized.
        return Use("dynamic_slice", (), stacked, _source(eqn), (), operand.casts)
    if tiled is None:
        tiled = axes
    # The parts of an axis that was split are that axis, once.
    own, batch, along = (
        tuple(dict.fromkeys(a for axis in group for a in operand.axes[axis])) for group in (axes, batch, tiled)
    )
    return Use(name, own, stacked, _source(eqn), batch, operand.casts, along)


def _is_counted(eqn: jex_core.JaxprEqn, inputs: Sequence[_Value]) -> bool:
    """Whether a look-up has one index, which depends on no input."""
    indices = eqn.invars[1:]
    one = eqn.primitive.name == "dynamic_slice" or all(n == 1 for n in shape_of(indices[0])[:-1])
    return one and all(index.fact.is_counted for index in inputs[1:])


def _picked(eqn: jex_core.JaxprEqn, operand: _Traced, lookup: Lookup) -> _Traced:
    """The element of a stack that a loop counter selects."""
    shape = shape_of(eqn.invars[0])
    axes: list[tuple[int, ...]] = [()] * len(shape_of(eqn.outvars[0]))
    for axis, place in lookup.places.items():
        if axis in lookup.whole or shape[axis] == 1:
            axes[place] = operand.axes[axis]
    taken = tuple(a for axis in lookup.indexed for a in operand.axes[axis] if a not in operand.stacked)
    return dataclasses.replace(
        operand, axes=tuple(axes), stacked=(*operand.stacked, *taken), is_row=operand.is_row or len(lookup.whole) < 2
    )


def _moved(eqn: jex_core.JaxprEqn, operand: _Traced) -> list[_Traced]:
    """The parameter after a layout operation. Empty for other primitives, and for casts to integers and booleans.

    Casts that lose precision are recorded. Axes that a slice reduces to one element count as sliced by a loop.
    """
    if eqn.primitive.name == "convert_element_type":
        dtype = jnp.dtype(eqn.params["new_dtype"])
        if not jnp.issubdtype(dtype, jnp.floating):
            return []
        if not is_exact_cast(dtype, operand.dtype):
            operand = dataclasses.replace(operand, dtype=dtype.name, casts=(*operand.casts, dtype.name))
    results = []
    for move in axis_moves(eqn):
        if move.is_identity:
            results.append(operand)  # the same object: a loop that carries it does not change it
            continue
        taken: tuple[int, ...] = ()
        if eqn.primitive.name != "split":
            taken = tuple(a for axis in move.cut if move.lengths[axis] == 1 for a in operand.axes[axis])
        axes = tuple(tuple(a for source in own for a in operand.axes[source]) for own in move.sources)
        stacked = (*operand.stacked, *(a for a in taken if a not in operand.stacked))
        results.append(dataclasses.replace(operand, axes=axes, stacked=stacked))
    return results
