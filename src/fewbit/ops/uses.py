"""Where each parameter of a function is used: which products contract it, over which axes; and the products without one.

The function is traced with shapes only, and every parameter is followed through casts, transposes, reshapes, slices, loops
and calls to the equations that use it. What those equations contract tells the axes that scales must not vary along, and so
the axis along which tiles run; nothing is guessed from shapes.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.extend import core as jex_core
from jax.extend import source_info_util

from ..array import is_qarray
from ..array.layout import regrouped
from .dot import in_order
from .indices import Facts, inner_jaxpr, open_jaxpr, scan_counts
from .lookup import Lookup
from .served import holds_numbers_of

Path: TypeAlias = str
Place: TypeAlias = tuple[Any, ...]
"""An equation, and the equations whose bodies it is in, the innermost first."""


@dataclasses.dataclass(frozen=True)
class Use:
    """One equation that uses a parameter.

    Attributes:
        op: "dot_general", "conv_general_dilated", "ragged_dot", "take" for look-ups, or the name of any other primitive.
        axes: the parameter's axes, negative, that the product contracts, or that the look-up indexes; empty for others.
        stacked: the parameter's axes, negative, that a loop took one element of at a time before the use.
        source: the file and line.
        batch: the parameter's axes, negative, that run beside those of the other operand: experts, for example.
        casts: the dtypes, of fewer numbers than the one before, that the parameter was cast to on the way to the use.
        tiled: the parameter's axes, negative, that tiles run along for this use, along the last of several: those that a product
            contracts, the last of those that a look-up takes whole; empty for other uses, and where single elements are looked up.
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
    """A product of two arrays of which none is a parameter, such as attention's scores and its mean of values.

    Attributes:
        name: the names of `jax.named_scope` (and of einsum) around it, joined by `/`, with `#2` and so on from the second
            product under the same names; a product under no name has its place in the trace alone: `#1`, `#2`.
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
    """What following the parameters has found so far.

    Attributes:
        uses: the uses of each parameter.
        products: the products without a parameter: the names around each, and the equation with those around it.
        facts: what is known of the indices in the trace.
    """

    uses: dict[Path, list[Use]]
    products: list[tuple[str, Place]]
    facts: Facts

    def named_products(self) -> tuple[Product, ...]:
        """The products, each with a name of its own."""
        counts: dict[str, int] = {}
        named = []
        for scope, (eqn, *_) in self.products:
            count = counts[scope] = counts.get(scope, 0) + 1
            name = f"{scope}#{count}" if count > 1 or not scope else scope
            shapes = tuple(tuple(atom.aval.shape) for atom in eqn.invars[:2])
            named.append(Product(name, _PRODUCTS[eqn.primitive.name], shapes, _source(eqn)))
        return tuple(named)


@dataclasses.dataclass(frozen=True)
class _Scope:
    """Where a jaxpr is called: the names there, and the equations whose bodies it is in, the innermost first."""

    names: str = ""
    around: Place = ()


_PRODUCTS = {
    "dot_general": "dot_general",
    "conv_general_dilated": "conv_general_dilated",
    "ragged_dot": "ragged_dot",
    "ragged_dot_general": "ragged_dot",
}
"""The primitives that are products, by the word of a rule."""


@dataclasses.dataclass(frozen=True)
class _Traced:
    """A variable that holds a parameter, perhaps with its axes moved.

    Attributes:
        path: the parameter.
        axes: for each axis of the variable, the parameter's axes (negative) that run along it.
        dtype: the dtype whose numbers it holds: the parameter's own, or the last of `casts`.
        stacked: the parameter's axes that a loop has taken apart.
        casts: the dtypes of fewer numbers that it was cast to.
        is_row: whether it is one row that a loop's counter picked; `fewbit.ops.lookup` says what that is.
    """

    path: Path
    axes: tuple[tuple[int, ...], ...]
    dtype: str
    stacked: tuple[int, ...] = ()
    casts: tuple[str, ...] = ()
    is_row: bool = False

    @classmethod
    def whole(cls, path: Path, like: Any) -> "_Traced":
        """The parameter itself, of the shape and dtype of an array."""
        return cls(path, tuple((axis,) for axis in range(-len(like.shape), 0)), like.dtype.name)


def parameter_paths(params: Any) -> dict[Path, Any]:
    """Every leaf of a tree by its path, such as `layers/3/attn/q`; a QArray is one leaf.

    >>> parameter_paths({"a": [1, {"b": 2}]})
    {'a/0': 1, 'a/1/b': 2}
    """
    leaves, _ = jax.tree_util.tree_flatten_with_path(params, is_leaf=is_qarray)
    return {jax.tree_util.keystr(keys, simple=True, separator="/"): leaf for keys, leaf in leaves}


def array_paths(params: Any) -> dict[Path, Any]:
    """The leaves of a tree that are arrays, by their paths; modules of some frameworks have functions and numbers beside them.

    >>> list(array_paths({"w": jnp.ones(2), "activation": jnp.tanh, "rate": 0.1}))
    ['w']
    """
    return {
        path: leaf for path, leaf in parameter_paths(params).items() if hasattr(leaf, "shape") and hasattr(leaf, "dtype")
    }


def parameter_uses(
    fn: Callable[..., Any], params: Any, *inputs: Any
) -> tuple[dict[Path, tuple[Use, ...]], tuple[Product, ...]]:
    """The uses of each parameter in `fn(params, *inputs)`, and the products without a parameter, in the order of the trace.

    Args:
        fn: a function of a tree of parameters and further inputs.
        params: the tree; arrays or `jax.ShapeDtypeStruct`s, of which only shapes and dtypes matter.
        inputs: example inputs, likewise; leaves that are not arrays are passed as they are.

    Returns:
        For every array of `params`, by its path, its uses, none for a parameter that the function does not use; and the products. The body of a
        loop counts once.
    """
    paths = parameter_paths(params)
    leaves, treedef = jax.tree.flatten((params, inputs), is_leaf=is_qarray)
    places = [i for i, leaf in enumerate(leaves) if hasattr(leaf, "shape") and hasattr(leaf, "dtype")]

    def flat(*arrays: Any) -> Any:
        filled = list(leaves)
        for place, array in zip(places, arrays, strict=True):
            filled[place] = array
        inner_params, inner_inputs = jax.tree.unflatten(treedef, filled)
        return fn(inner_params, *inner_inputs)

    shapes = [jax.ShapeDtypeStruct(leaves[i].shape, leaves[i].dtype) for i in places]
    closed = jax.make_jaxpr(flat)(*shapes)
    names = list(paths)
    start = [
        _Traced.whole(names[place], shape) if place < len(names) else None
        for place, shape in zip(places, shapes, strict=True)
    ]
    found = _Found({path: [] for path in array_paths(params)}, [], Facts.of(closed.jaxpr))
    _follow(closed.jaxpr, start, found, _Scope())
    return {path: tuple(dict.fromkeys(uses)) for path, uses in found.uses.items()}, found.named_products()


def weightless_products(jaxpr: Any, are_parameters: Sequence[bool]) -> tuple[tuple[Product, Place], ...]:
    """The products of a trace of which no operand is a parameter, and where they are, in the order of the trace.

    Args:
        jaxpr: the trace.
        are_parameters: for each input of it, whether it is a parameter.

    Returns:
        The products, named as `parameter_uses` names them, each with its equation and those around it.
    """
    inputs = list(zip(jaxpr.invars, are_parameters, strict=True))
    start = [_Traced.whole(str(i), var.aval) if is_parameter else None for i, (var, is_parameter) in enumerate(inputs)]
    found = _Found({str(i): [] for i in range(len(inputs))}, [], Facts.of(jaxpr))
    _follow(jaxpr, start, found, _Scope())
    return tuple(zip(found.named_products(), (place for _, place in found.products), strict=True))


def _follow(jaxpr: Any, values: Sequence[_Traced | None], found: _Found, scope: _Scope) -> list[_Traced | None]:
    """Follows the parameters among the inputs of a jaxpr, notes their uses, and says which outputs still hold one.

    `scope` is that of the equation that calls the jaxpr; the names of its own equations count from there.
    """
    env: dict[Any, _Traced | None] = dict(zip(jaxpr.invars, values, strict=True))

    def read(atom: Any) -> _Traced | None:
        return None if isinstance(atom, jex_core.Literal) else env.get(atom)

    for eqn in jaxpr.eqns:
        operands = [read(atom) for atom in eqn.invars]
        names = "/".join(filter(None, (scope.names, str(eqn.source_info.name_stack))))
        inside = _Scope(names, (eqn, *scope.around))
        if eqn.primitive.name in _PRODUCTS and not any(operands[:2]):
            found.products.append((names, inside.around))
        env.update(zip(eqn.outvars, _step(eqn, operands, found, inside), strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _step(eqn: Any, operands: list[_Traced | None], found: _Found, scope: _Scope) -> list[_Traced | None]:
    """One equation: what its outputs hold, with its uses noted."""
    name = eqn.primitive.name
    table = operands[0] if operands and not any(operands[1:]) else None
    lookup = None if table is None else Lookup.of(eqn)
    if table is not None and lookup is not None and _is_counted(eqn, found.facts):
        return [_picked(eqn, table, lookup)]
    if name in _MOVES and lookup is None and operands[0] is not None and not any(operands[1:]):
        moved = _MOVES[name](eqn, operands[0])
        if moved is not None:
            return [moved] * len(eqn.outvars)
    if name in ("optimization_barrier",):
        return list(operands)
    if name == "scan":
        return _follow_scan(eqn, operands, found, scope)
    if name == "while":
        return _follow_while(eqn, operands, found, scope)
    if name == "cond":
        outcomes = [_follow(open_jaxpr(branch), operands[1:], found, scope) for branch in eqn.params["branches"]]
        return [column[0] if len(set(column)) == 1 else None for column in zip(*outcomes, strict=True)]
    inner = inner_jaxpr(eqn)
    if inner is not None:
        return _follow(inner, operands, found, scope)
    for position, operand in enumerate(operands):
        if operand is not None:
            found.uses[operand.path].append(_use(eqn, position, operand, _source(eqn), found.facts))
    return [None] * len(eqn.outvars)


def _source(eqn: Any) -> str:
    """The file and line of an equation."""
    return source_info_util.summarize(eqn.source_info)


def _use(eqn: Any, position: int, operand: _Traced, source: str, facts: Facts) -> Use:
    """The use that an equation makes of the operand at a position."""
    name, batch, tiled = eqn.primitive.name, (), None
    lookup = Lookup.of(eqn) if position == 0 else None
    if name == "dot_general" and position < 2:
        contracting, beside = eqn.params["dimension_numbers"]
        axes, batch = in_order(*contracting)[position], beside[position]
        others = contracting[1 - position]
        if len(others) == 1 and others[0] in facts[eqn.invars[1 - position]].one_hot:
            free = [
                a for a in range(len(operand.axes)) if a not in (*axes, *batch) and eqn.invars[position].aval.shape[a] > 1
            ]
            name, tiled = "take", free[-1:]
    elif lookup is not None:
        name, axes, batch, tiled = "take", lookup.indexed, lookup.batch, lookup.whole[-1:]
    elif name == "conv_general_dilated" and position == 1:
        _, inputs, *window = eqn.params["dimension_numbers"].rhs_spec
        axes = (*window, inputs)
    elif name in ("ragged_dot", "ragged_dot_general") and position == 1:
        numbers = eqn.params["ragged_dot_dimension_numbers"]
        contracting, beside = numbers.dot_dimension_numbers
        name, axes, batch = "ragged_dot", contracting[1], (*numbers.rhs_group_dimensions, *beside[1])
    else:
        axes = ()
    if operand.is_row and axes:
        # One row of a stack that a loop counts, such as a layer's gain, is multiplied as the numbers that it has.
        return Use("dynamic_slice", (), operand.stacked, source, (), operand.casts)
    # The parts of an axis that was split are that axis, once.
    own, beside, along = (
        tuple(dict.fromkeys(a for axis in group for a in operand.axes[axis]))
        for group in (axes, batch, axes if tiled is None else tiled)
    )
    return Use(name, own, operand.stacked, source, beside, operand.casts, along)


def _is_counted(eqn: Any, facts: Facts) -> bool:
    """Whether a look-up has one index, and no input decides it."""
    indices = eqn.invars[1:]
    one = eqn.primitive.name == "dynamic_slice" or all(n == 1 for n in indices[0].aval.shape[:-1])
    return one and all(facts[index].is_counted for index in indices)


def _picked(eqn: Any, operand: _Traced, lookup: Lookup) -> _Traced:
    """The element of a stack that a loop's counter picks."""
    shape, new = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    axes: list[tuple[int, ...]] = [()] * len(new)
    for axis, place in lookup.places.items():
        axes[place] = operand.axes[axis] if axis in lookup.whole or shape[axis] == 1 else ()
    taken = tuple(a for axis in lookup.indexed for a in operand.axes[axis] if a not in operand.stacked)
    return dataclasses.replace(
        operand, axes=tuple(axes), stacked=(*operand.stacked, *taken), is_row=operand.is_row or len(lookup.whole) < 2
    )


def _follow_scan(eqn: Any, operands: list[_Traced | None], found: _Found, scope: _Scope) -> list[_Traced | None]:
    constants, carries = scan_counts(eqn)
    inside = list(operands)
    for i in range(constants + carries, len(operands)):
        operand = operands[i]
        if operand is not None:
            taken = (*operand.stacked, *operand.axes[0])
            inside[i] = dataclasses.replace(operand, axes=operand.axes[1:], stacked=taken)
    outputs = _follow(open_jaxpr(eqn.params["jaxpr"]), inside, found, scope)
    carried = [o if o == i else None for o, i in zip(outputs[:carries], inside[constants:], strict=False)]
    return [*carried, *([None] * (len(eqn.outvars) - carries))]


def _follow_while(eqn: Any, operands: list[_Traced | None], found: _Found, scope: _Scope) -> list[_Traced | None]:
    in_cond, in_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    carry = operands[in_cond + in_body :]
    _follow(open_jaxpr(eqn.params["cond_jaxpr"]), [*operands[:in_cond], *carry], found, scope)
    outputs = _follow(open_jaxpr(eqn.params["body_jaxpr"]), [*operands[in_cond : in_cond + in_body], *carry], found, scope)
    return [o if o == i else None for o, i in zip(outputs, carry, strict=True)]


# --- equations that only move a parameter's axes ---


def _kept(eqn: Any, operand: _Traced) -> _Traced:
    return operand


def _cast(eqn: Any, operand: _Traced) -> _Traced | None:
    """A cast, noted where the new dtype lacks numbers of the parameter; integers and booleans are no parameter any more."""
    dtype = jnp.dtype(eqn.params["new_dtype"])
    if not jnp.issubdtype(dtype, jnp.floating):
        return None
    if holds_numbers_of(dtype, operand.dtype):
        return operand
    return dataclasses.replace(operand, dtype=dtype.name, casts=(*operand.casts, dtype.name))


def _transposed(eqn: Any, operand: _Traced) -> _Traced:
    return dataclasses.replace(operand, axes=tuple(operand.axes[a] for a in eqn.params["permutation"]))


def _regrouped(eqn: Any, operand: _Traced) -> _Traced:
    """Merged axes run along one; the parts of a split axis each run along it."""
    shape, new_shape = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    axes: list[tuple[int, ...]] = []
    for old, new in regrouped(shape, new_shape):
        along = [operand.axes[i] for i in old]
        same = [shape[i] for i in old] == [new_shape[j] for j in new]
        whole = tuple(a for group in along for a in group)
        axes += along if same else [whole] * len(new)
    return dataclasses.replace(operand, axes=tuple(axes))


def _squeezed(eqn: Any, operand: _Traced) -> _Traced:
    dropped = {a % len(operand.axes) for a in eqn.params["dimensions"]}
    return dataclasses.replace(operand, axes=tuple(a for i, a in enumerate(operand.axes) if i not in dropped))


def _spread(eqn: Any, operand: _Traced) -> _Traced:
    """A broadcast: along an axis that it adds, or repeats, no axis of the parameter runs."""
    shape, places, before = eqn.params["shape"], eqn.params["broadcast_dimensions"], eqn.invars[0].aval.shape
    along = {p: axes if shape[p] == n else () for p, axes, n in zip(places, operand.axes, before, strict=True)}
    return dataclasses.replace(operand, axes=tuple(along.get(i, ()) for i in range(len(shape))))


def _row_taken(eqn: Any, operand: _Traced) -> _Traced:
    """A slice: axes of which one element is left have been taken apart like those of a loop."""
    before, after = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    taken = tuple(a for axes, n, m in zip(operand.axes, before, after, strict=True) if m == 1 and n != 1 for a in axes)
    return dataclasses.replace(operand, stacked=(*operand.stacked, *(a for a in taken if a not in operand.stacked)))


_MOVES: dict[str, Callable[[Any, _Traced], _Traced | None]] = {
    "convert_element_type": _cast,
    "copy": _kept,
    "copy_p": _kept,
    "stop_gradient": _kept,
    "name": _kept,
    "stage": _kept,
    "rev": _kept,
    "sharding_constraint": _kept,
    "reshard": _kept,
    "all_gather": _kept,
    "ppermute": _kept,
    "pvary": _kept,
    "transpose": _transposed,
    "reshape": _regrouped,
    "squeeze": _squeezed,
    "expand_dims": _regrouped,
    "broadcast_in_dim": _spread,
    "slice": _row_taken,
    "dynamic_slice": _row_taken,
    "split": _kept,
}
