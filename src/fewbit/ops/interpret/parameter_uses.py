"""Finds the uses of each parameter: which products contract it, over which axes.

The function is traced with shapes only, and every parameter is followed through casts, transposes, reshapes, slices, loops and
calls to the equations that use it. Their contraction axes decide the axis along which tiles (blocks) run; nothing is guessed
from shapes. Products without a parameter are listed, too.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex_core
from jax.extend import source_info_util
from jax.sharding import AxisType, NamedSharding
from jaxtyping import PyTree

from ...array import is_qarray
from ...array.layout import regrouped
from ..dot import in_order
from ..qat.serving_tiles import is_exact_cast
from .indices import Atom, Facts, inner_jaxpr, open_jaxpr, scan_counts, shape_of
from .lookup import Lookup

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
        uses: the uses of each parameter.
        products: the products without a parameter: the names around each, and its place.
        facts: loop-counter indices and one-hot arrays of the trace.
    """

    uses: dict[Path, list[Use]]
    products: list[tuple[str, Place]]
    facts: Facts

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
    def whole(cls, path: Path, shape: Sequence[int], dtype: np.dtype) -> "_Traced":
        """The parameter itself."""
        return cls(path, tuple((axis,) for axis in range(-len(shape), 0)), dtype.name)


def parameter_paths(params: PyTree) -> dict[Path, Any]:
    """Every leaf of a tree by its path, such as `layers/3/attn/q`; a QArray is one leaf.

    >>> parameter_paths({"a": [1, {"b": 2}]})
    {'a/0': 1, 'a/1/b': 2}
    """
    leaves, _ = jax.tree_util.tree_flatten_with_path(params, is_leaf=is_qarray)
    return {jax.tree_util.keystr(keys, simple=True, separator="/"): leaf for keys, leaf in leaves}


def array_paths(params: PyTree) -> dict[Path, Any]:
    """The array leaves of a tree by path; modules of some frameworks also have functions and numbers.

    >>> list(array_paths({"w": jnp.ones(2), "activation": jnp.tanh, "rate": 0.1}))
    ['w']
    """
    return {path: leaf for path, leaf in parameter_paths(params).items() if _is_array(leaf)}


def _is_array(leaf: object) -> bool:
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def _typed(leaf: Any) -> jax.ShapeDtypeStruct:
    """The shape and dtype of a leaf, and its sharding on an explicit mesh, where JAX has it in the type."""
    like = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    array = jax.tree.leaves(leaf)[0]  # of a QArray the codes, which have its axes
    if isinstance(array, jax.Array):
        sharding = jax.typeof(array).sharding
    else:
        sharding = getattr(array, "sharding", None)
    if isinstance(sharding, NamedSharding) and AxisType.Explicit in sharding.mesh.axis_types:
        like = like.update(sharding=sharding)
    return like


def parameter_uses(
    fn: Callable[..., Any], params: PyTree, *inputs: PyTree
) -> tuple[dict[Path, tuple[Use, ...]], tuple[Product, ...]]:
    """The uses of each parameter in `fn(params, *inputs)`, and the products without a parameter.

    Args:
        fn: a function of a tree of parameters and further inputs.
        params: the tree; arrays or `jax.ShapeDtypeStruct`s, of which only shapes and dtypes matter.
        inputs: example inputs, likewise; leaves that are not arrays are passed through.

    Returns:
        The uses of every array of `params`, by its path (empty for unused ones), and the products in the order of the trace.
        The body of a loop counts once.
    """
    names = list(parameter_paths(params))
    leaves, treedef = jax.tree.flatten((params, inputs), is_leaf=is_qarray)
    places = [i for i, leaf in enumerate(leaves) if _is_array(leaf)]

    def flat(*arrays: jax.Array) -> PyTree:
        filled = list(leaves)
        for place, array in zip(places, arrays, strict=True):
            filled[place] = array
        inner_params, inner_inputs = jax.tree.unflatten(treedef, filled)
        return fn(inner_params, *inner_inputs)

    shapes = [_typed(leaves[i]) for i in places]
    closed = jax.make_jaxpr(flat)(*shapes)
    start: list[_Traced | None] = [None] * len(places)
    for i, (place, like) in enumerate(zip(places, shapes, strict=True)):
        if place < len(names):
            start[i] = _Traced.whole(names[place], like.shape, like.dtype)
    found = _Found({path: [] for path in array_paths(params)}, [], Facts.of(closed.jaxpr))
    _follow(closed.jaxpr, start, found, _Scope())
    return {path: tuple(dict.fromkeys(uses)) for path, uses in found.uses.items()}, found.named_products()


def weightless_products(jaxpr: jex_core.Jaxpr, are_parameters: Sequence[bool]) -> tuple[tuple[Product, Place], ...]:
    """The products of a trace without a parameter among their operands, and their places.

    Args:
        jaxpr: the trace.
        are_parameters: for each input of it, whether it is a parameter.

    Returns:
        The products in the order of the trace, named as in `parameter_uses`, each with its equation and those around it.
    """
    start: list[_Traced | None] = [None] * len(jaxpr.invars)
    for i, (var, is_parameter) in enumerate(zip(jaxpr.invars, are_parameters, strict=True)):
        if is_parameter:
            start[i] = _Traced.whole(str(i), shape_of(var), var.aval.dtype)  # type: ignore[attr-defined]
    found = _Found({str(i): [] for i in range(len(start))}, [], Facts.of(jaxpr))
    _follow(jaxpr, start, found, _Scope())
    return tuple(zip(found.named_products(), (place for _, place in found.products), strict=True))


def _follow(jaxpr: jex_core.Jaxpr, values: Sequence[_Traced | None], found: _Found, scope: _Scope) -> list[_Traced | None]:
    """Records the uses of the parameters among a jaxpr's inputs; returns which outputs are still parameters.

    `scope` is that of the equation that calls the jaxpr, to which the names of its own equations are appended.
    """
    env: dict[jex_core.Var, _Traced | None] = dict(zip(jaxpr.invars, values, strict=True))

    def read(atom: Atom) -> _Traced | None:
        return None if isinstance(atom, jex_core.Literal) else env.get(atom)

    for eqn in jaxpr.eqns:
        operands = [read(atom) for atom in eqn.invars]
        names = "/".join(filter(None, (scope.names, str(eqn.source_info.name_stack))))
        inside = _Scope(names, (eqn, *scope.around))
        if eqn.primitive.name in _PRODUCTS and not any(operands[:2]):
            found.products.append((names, inside.around))
        env.update(zip(eqn.outvars, _step(eqn, operands, found, inside), strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _step(eqn: jex_core.JaxprEqn, operands: list[_Traced | None], found: _Found, scope: _Scope) -> list[_Traced | None]:
    """Records the uses of one equation; returns which outputs are still parameters."""
    name = eqn.primitive.name
    if operands and operands[0] is not None and not any(operands[1:]):
        lookup = Lookup.of(eqn)
        if lookup is not None and _is_counted(eqn, found.facts):
            return [_picked(eqn, operands[0], lookup)]
        if lookup is None and name in _MOVES:
            moved = _MOVES[name](eqn, operands[0])
            if moved is not None:
                return [moved] * len(eqn.outvars)
    if name == "optimization_barrier":
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


def _source(eqn: jex_core.JaxprEqn) -> str:
    """The file and line of an equation."""
    return source_info_util.summarize(eqn.source_info)


def _use(eqn: jex_core.JaxprEqn, position: int, operand: _Traced, source: str, facts: Facts) -> Use:
    """The use of the operand at a position of an equation."""
    name, batch, tiled = eqn.primitive.name, (), None
    if name == "dot_general" and position < 2:
        contracting, batches = eqn.params["dimension_numbers"]
        axes, batch = in_order(*contracting)[position], batches[position]
        others = contracting[1 - position]
        if len(others) == 1 and others[0] in facts[eqn.invars[1 - position]].one_hot:
            shape = shape_of(eqn.invars[position])
            name, tiled = "take", [a for a, n in enumerate(shape) if a not in (*axes, *batch) and n > 1][-1:]
    elif position == 0 and (lookup := Lookup.of(eqn)) is not None:
        name, axes, batch, tiled = "take", lookup.indexed, lookup.batch, lookup.whole[-1:]
    elif name == "conv_general_dilated" and position == 1:
        _, inputs, *window = eqn.params["dimension_numbers"].rhs_spec
        axes = (*window, inputs)
    elif name in ("ragged_dot", "ragged_dot_general") and position == 1:
        numbers = eqn.params["ragged_dot_dimension_numbers"]
        contracting, batches = numbers.dot_dimension_numbers
        name, axes, batch = "ragged_dot", contracting[1], (*numbers.rhs_group_dimensions, *batches[1])
    else:
        axes = ()
    if operand.is_row and axes:
        # One row of a scanned stack, such as a layer's gain, is multiplied unquantized.
        return Use("dynamic_slice", (), operand.stacked, source, (), operand.casts)
    if tiled is None:
        tiled = axes
    # The parts of an axis that was split are that axis, once.
    own, batch, along = (
        tuple(dict.fromkeys(a for axis in group for a in operand.axes[axis])) for group in (axes, batch, tiled)
    )
    return Use(name, own, operand.stacked, source, batch, operand.casts, along)


def _is_counted(eqn: jex_core.JaxprEqn, facts: Facts) -> bool:
    """Whether a look-up has one index, which depends on no input."""
    indices = eqn.invars[1:]
    one = eqn.primitive.name == "dynamic_slice" or all(n == 1 for n in shape_of(indices[0])[:-1])
    return one and all(facts[index].is_counted for index in indices)


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


def _follow_scan(
    eqn: jex_core.JaxprEqn, operands: list[_Traced | None], found: _Found, scope: _Scope
) -> list[_Traced | None]:
    constants, carries = scan_counts(eqn)
    inside = list(operands)
    for i in range(constants + carries, len(operands)):
        operand = operands[i]
        if operand is not None:
            taken = (*operand.stacked, *operand.axes[0])
            inside[i] = dataclasses.replace(operand, axes=operand.axes[1:], stacked=taken)
    outputs = _follow(open_jaxpr(eqn.params["jaxpr"]), inside, found, scope)
    carried = _unchanged(inside[constants : constants + carries], outputs[:carries])
    return [*carried, *([None] * (len(eqn.outvars) - carries))]


def _follow_while(
    eqn: jex_core.JaxprEqn, operands: list[_Traced | None], found: _Found, scope: _Scope
) -> list[_Traced | None]:
    in_cond, in_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    carry = operands[in_cond + in_body :]
    _follow(open_jaxpr(eqn.params["cond_jaxpr"]), [*operands[:in_cond], *carry], found, scope)
    outputs = _follow(open_jaxpr(eqn.params["body_jaxpr"]), [*operands[in_cond : in_cond + in_body], *carry], found, scope)
    return _unchanged(carry, outputs)


def _unchanged(carry: Sequence[_Traced | None], outputs: Sequence[_Traced | None]) -> list[_Traced | None]:
    """The carry of a loop, without parameters that an iteration changes."""
    return [o if o == i else None for o, i in zip(outputs, carry, strict=True)]


# --- layout operations ---


def _kept(eqn: jex_core.JaxprEqn, operand: _Traced) -> _Traced:
    return operand


def _cast(eqn: jex_core.JaxprEqn, operand: _Traced) -> _Traced | None:
    """A cast, recorded where it loses precision; integers and booleans are no parameter any more."""
    dtype = jnp.dtype(eqn.params["new_dtype"])
    if not jnp.issubdtype(dtype, jnp.floating):
        return None
    if is_exact_cast(dtype, operand.dtype):
        return operand
    return dataclasses.replace(operand, dtype=dtype.name, casts=(*operand.casts, dtype.name))


def _transposed(eqn: jex_core.JaxprEqn, operand: _Traced) -> _Traced:
    return dataclasses.replace(operand, axes=tuple(operand.axes[a] for a in eqn.params["permutation"]))


def _regrouped(eqn: jex_core.JaxprEqn, operand: _Traced) -> _Traced:
    """A merged axis has all axes that were merged; each part of a split axis has that axis."""
    shape, new_shape = shape_of(eqn.invars[0]), shape_of(eqn.outvars[0])
    axes: list[tuple[int, ...]] = []
    for old, new in regrouped(shape, new_shape):
        along = [operand.axes[i] for i in old]
        if [shape[i] for i in old] != [new_shape[j] for j in new]:
            along = [tuple(a for group in along for a in group)] * len(new)
        axes += along
    return dataclasses.replace(operand, axes=tuple(axes))


def _squeezed(eqn: jex_core.JaxprEqn, operand: _Traced) -> _Traced:
    dropped = {a % len(operand.axes) for a in eqn.params["dimensions"]}
    return dataclasses.replace(operand, axes=tuple(a for i, a in enumerate(operand.axes) if i not in dropped))


def _spread(eqn: jex_core.JaxprEqn, operand: _Traced) -> _Traced:
    """A broadcast: the axes that it adds or repeats are none of the parameter's."""
    shape, places, before = eqn.params["shape"], eqn.params["broadcast_dimensions"], shape_of(eqn.invars[0])
    along = {p: axes for p, axes, n in zip(places, operand.axes, before, strict=True) if shape[p] == n}
    return dataclasses.replace(operand, axes=tuple(along.get(i, ()) for i in range(len(shape))))


def _row_taken(eqn: jex_core.JaxprEqn, operand: _Traced) -> _Traced:
    """A slice: axes that it reduces to one element count as sliced by a loop."""
    before, after = shape_of(eqn.invars[0]), shape_of(eqn.outvars[0])
    taken = tuple(a for axes, n, m in zip(operand.axes, before, after, strict=True) if m == 1 and n != 1 for a in axes)
    return dataclasses.replace(operand, stacked=(*operand.stacked, *(a for a in taken if a not in operand.stacked)))


_UNMOVED = (
    *("copy", "copy_p", "stop_gradient", "name", "stage", "rev", "split"),
    *("sharding_constraint", "reshard", "all_gather", "ppermute", "pvary"),
)
_MOVES: Mapping[str, Callable[[jex_core.JaxprEqn, _Traced], _Traced | None]] = dict.fromkeys(_UNMOVED, _kept) | {
    "convert_element_type": _cast,
    "transpose": _transposed,
    "reshape": _regrouped,
    "squeeze": _squeezed,
    "expand_dims": _regrouped,
    "broadcast_in_dim": _spread,
    "slice": _row_taken,
    "dynamic_slice": _row_taken,
}
