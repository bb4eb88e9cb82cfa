"""`transparent`: a jaxpr interpreter that runs unchanged code on quantized leaves.

`transparent(fn)` traces `fn` with the shape and dtype of every leaf, so its code sees ordinary arrays, and evaluates the jaxpr.
An equation without quantized operands is bound unchanged. One with quantized operands goes to the rule of its primitive, in
`fewbit.ops.interpret.rules`: products to `fewbit.ops`, layout operations to the QArray; control flow is rebuilt around a body that is
evaluated in the same way, so `jit` stays jitted and `scan` stays a loop. A primitive without a rule follows `fallback`.
"""

import dataclasses
import itertools
import operator
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Literal, ParamSpec, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.extend import core as jex_core
from jax.extend import source_info_util
from jaxtyping import PyTree

from ...errors import QuantError, UnsupportedError
from ..qat.latent import Latent
from .indices import Atom, open_jaxpr, shape_of
from .observe import Observed
from .parameter_uses import Product, weightless_products
from .proxy import ArrayProxy, array_of, is_proxy, is_proxy_type
from .rules import RULES, SHARED
from .rules.control_flow import CONTROL
from .rules.rule import AbstractEvaluator, NoRuleError, Rule, bound, logical
from .rules.sharding import constrained

P = ParamSpec("P")
R = TypeVar("R")

Choice: TypeAlias = Callable[[tuple[Product, ...]], Mapping[str, Latent | Observed]]
"""Maps the products without a parameter to proxies (without array) for the right operands of those to change, by name."""


@dataclasses.dataclass(frozen=True)
class Decoded:
    """One place where a quantized array was decoded for lack of a rule.

    Attributes:
        primitive: the name of the primitive.
        array: the array's shape and scheme.
        source: the file and line of the user's code.
        reason: why it could not stay quantized.
    """

    primitive: str
    array: str
    source: str
    reason: str

    def __str__(self) -> str:
        return f"{self.source}: {self.primitive} decodes {self.array} ({self.reason})"


def transparent(
    fn: Callable[P, R],
    *,
    fallback: Literal["error", "dequantize"] = "error",
    report: Callable[[Decoded], None] | None = None,
) -> Callable[P, R]:
    """Makes a function accept quantized leaves in its arguments, without changing its code.

    Matrix products, einsums and embedding look-ups compute from the QArrays; transposes, reshapes, casts and slices that do not
    cut a tile (block) stay quantized; jit, scan, while, cond, remat, vmap and grad with respect to float arguments work
    unchanged. Leaves that are not arrays are passed through.

    Args:
        fn: any function of pytrees that JAX can trace.
        fallback: what to do with a quantized operand of a primitive without a rule: "error" raises, naming the primitive and
            the line; "dequantize" decodes it there.
        report: called for each array that the fallback decodes, while tracing.

    Returns:
        A function of the same arguments. Quantized outputs are QArrays.

    Raises:
        UnsupportedError: under "error", for the first operation that needs a decoded array.

    >>> from fewbit.kernels.quantize import quantize
    >>> def layer(w, x):
    ...     return jnp.tanh(x @ w["kernel"].T)
    >>> w = {"kernel": quantize(jnp.ones((8, 4)), "int8")}
    >>> transparent(layer)(w, jnp.ones((2, 4))).shape
    (2, 8)
    """
    return evaluated(fn, fallback, report, None)


def evaluated(
    fn: Callable[P, R],
    fallback: str,
    report: Callable[[Decoded], None] | None,
    chosen: Choice | None,
    around: Mapping[str, Rule] = RULES,
) -> Callable[P, R]:
    """`transparent` with policies for products without a parameter.

    Args:
        fn: as in `transparent`; its first argument is the tree of parameters.
        fallback: as in `transparent`.
        report: as in `transparent`.
        chosen: which products without a parameter follow a policy; None: none.
        around: the rules of equations with such a product in their bodies, where no operand has its own.

    Returns:
        As `transparent`.

    Raises:
        UnsupportedError: as `transparent`, and for a product whose place does not allow a policy.
    """
    if fallback not in ("error", "dequantize"):
        raise QuantError(f"fallback is {fallback!r}; must be 'error' or 'dequantize'")
    pieces: dict[Hashable, tuple[Any, Callable[..., Any]]] = {}
    call: Callable[..., Any] = fn

    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        leaves, treedef = jax.tree.flatten((args, kwargs), is_leaf=is_proxy)
        places = [i for i, leaf in enumerate(leaves) if is_proxy(leaf) or _is_array(leaf)]
        if chosen is None and not any(is_proxy(leaf) for leaf in leaves):
            return fn(*args, **kwargs)
        out_tree = None

        def flat(*arrays: PyTree) -> list[Any]:
            nonlocal out_tree
            filled = list(leaves)
            for place, array in zip(places, arrays, strict=True):
                filled[place] = array
            inner_args, inner_kwargs = jax.tree.unflatten(treedef, filled)
            outputs, out_tree = jax.tree.flatten(call(*inner_args, **inner_kwargs))
            return outputs

        dynamic = [leaves[i] for i in places]
        closed = jax.make_jaxpr(flat)(*map(logical, dynamic))
        is_traced = any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(dynamic))
        products = None
        if chosen is not None:
            count = len(jax.tree.leaves(args[:1], is_leaf=is_proxy))
            products = _chosen(chosen, closed.jaxpr, [place < count for place in places])
        evaluator = _Evaluator(fallback, report, pieces, is_traced, around, products)
        outputs = evaluator.evaluate(closed.jaxpr, closed.consts, dynamic)
        assert out_tree is not None
        return jax.tree.unflatten(out_tree, [x.array() if isinstance(x, ArrayProxy) else x for x in outputs])

    wrapped.__name__ = getattr(fn, "__name__", "transparent")
    wrapped.__doc__ = fn.__doc__
    return wrapped


@dataclasses.dataclass(frozen=True)
class _Chosen:
    """Products without a parameter that follow a policy.

    Attributes:
        operands: the proxy (without array) of each right operand, by the ids of its equation and those around it.
        around: the ids of the equations that have one in their bodies, with those around them.
    """

    operands: Mapping[tuple[int, ...], Latent | Observed]
    around: frozenset[tuple[int, ...]]


def _chosen(chosen: Choice, jaxpr: jex_core.Jaxpr, are_parameters: Sequence[bool]) -> _Chosen:
    """The products of a trace that follow a policy."""
    found = weightless_products(jaxpr, are_parameters)
    latents = chosen(tuple(product for product, _ in found))
    operands, around = {}, set()
    for product, place in found:
        if product.name not in latents:
            continue
        for eqn in place[1:]:
            if eqn.primitive.name not in (*CONTROL, "shard_map"):
                reason = f"it is inside {eqn.primitive.name}, whose derivative rule would not follow the policy"
                raise UnsupportedError(
                    f"product {product.name} at {product.source} cannot follow a policy", {product.op: reason}
                )
        ids = tuple(map(id, place))
        operands[ids] = latents[product.name]
        around |= {ids[i:] for i in range(1, len(ids))}
    return _Chosen(operands, frozenset(around))


def _is_array(x: object) -> bool:
    """Whether a leaf is traced: an array or numpy scalar."""
    return hasattr(x, "shape") and hasattr(x, "dtype")


_SOURCE = operator.attrgetter("source_info.traceback", "source_info.name_stack")

_PIECES = 1024  # the size of a transparent function's cache of jitted pieces; code with new bodies in each call fills it


@dataclasses.dataclass(frozen=True)
class _Evaluator(AbstractEvaluator):
    """Evaluates jaxprs whose variables may be QArrays and other proxies.

    Attributes:
        fallback: as in `transparent`.
        report: as in `transparent`.
        pieces: a cache of the jitted functions of inner `jit`s, with the jaxprs they were made from, so that JAX's own cache
            hits for the next equal equation or call.
        is_traced: whether the evaluation is being traced.
        rules: as `around` in `evaluated`.
        chosen: the products without a parameter that follow a policy; None where there are none.
        around: the equations whose bodies are being evaluated, the innermost first.
    """

    fallback: str
    report: Callable[[Decoded], None] | None
    pieces: dict[Hashable, tuple[Any, Callable[..., Any]]]
    is_traced: bool
    rules: Mapping[str, Rule]
    chosen: _Chosen | None = None
    around: tuple[Any, ...] = ()

    def evaluate(self, jaxpr: jex_core.Jaxpr, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
        """The outputs of a jaxpr for values that may be proxies."""
        env: dict[jex_core.Var, Any] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))

        def read(atom: Atom) -> Any:
            if isinstance(atom, jex_core.Literal):
                return atom.val
            value = env[atom]
            if isinstance(value, ArrayProxy):
                value, env[atom] = value.forked()
            return value

        # Most equations have no proxy, and these loops are what tracing costs, so they make few calls.
        outer = source_info_util.current_name_stack()
        for ctx, in_context in itertools.groupby(jaxpr.eqns, key=operator.attrgetter("ctx")):
            with ctx.manager:
                for (traceback, name_stack), eqns in itertools.groupby(in_context, key=_SOURCE):
                    if outer.stack:
                        name_stack = outer + name_stack
                    with source_info_util.user_context(traceback, name_stack=name_stack):
                        for eqn in eqns:
                            values = [x.val if isinstance(x, jex_core.Literal) else env[x] for x in eqn.invars]
                            if self.chosen is None and not any(map(is_proxy_type, map(type, values))):
                                outputs = bound(eqn, values)
                            else:
                                outputs = self.equation(eqn, self._operands(eqn, jaxpr, read))
                            env.update(zip(eqn.outvars, outputs, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def _operands(self, eqn: jex_core.JaxprEqn, jaxpr: jex_core.Jaxpr, read: Callable[[Atom], Any]) -> list[Any]:
        """The operands of an equation."""
        values = [read(atom) for atom in eqn.invars]
        if eqn.primitive.name == "select_n" and _has_proxy(values):
            values[0] = _as_made(eqn.invars[0], jaxpr, read)
        return values

    def function(self, inner: jex_core.Jaxpr | jex_core.ClosedJaxpr) -> Callable[..., list[Any]]:
        """An equation's body as a function of values that may be proxies."""
        within = dataclasses.replace(self, is_traced=True)
        jaxpr, consts = open_jaxpr(inner), getattr(inner, "consts", ())
        return lambda *args: within.evaluate(jaxpr, consts, args)

    def inside(self) -> list[ArrayProxy]:
        """The proxies (without array) of the chosen products in the body of the equation."""
        if self.chosen is None:
            return []
        return [self.chosen.operands[place] for place in self._places_inside()]

    def with_inside(self, stand_ins: Sequence[Any]) -> "_Evaluator":
        """An evaluator with other proxies for those products."""
        if self.chosen is None or not stand_ins:
            return self
        operands = {**self.chosen.operands, **dict(zip(self._places_inside(), stand_ins, strict=True))}
        return dataclasses.replace(self, chosen=dataclasses.replace(self.chosen, operands=operands))

    def _places_inside(self) -> list[tuple[int, ...]]:
        """The places of the chosen products in the body of the equation whose rule is running."""
        assert self.chosen is not None
        around = tuple(map(id, self.around))
        return [place for place in self.chosen.operands if place[-len(around) :] == around and len(place) > len(around)]

    def jitted(self, eqn: jex_core.JaxprEqn) -> Callable[..., list[Any]]:
        """The jitted body of an inner `jit`; the same function for the same body."""
        params = eqn.params
        body, closed = self.function(params["jaxpr"]), params["jaxpr"]

        def inner(*args: PyTree) -> list[Any]:
            outputs = body(*map(_placed, args, params["in_shardings"]))
            return list(map(_placed, outputs, params["out_shardings"]))

        inner.__name__ = params["name"]
        settings = {"inline": params["inline"], "keep_unused": params["keep_unused"]}
        if options := dict(params["compiler_options_kvs"]):
            settings["compiler_options"] = options

        key = ("jit", id(closed), params["in_shardings"], params["out_shardings"], tuple(settings.items()))
        has_own = closed.consts or options or (self.chosen is not None and tuple(map(id, self.around)) in self.chosen.around)
        if has_own:
            return jax.jit(inner, **settings)
        if key not in self.pieces:
            if len(self.pieces) >= _PIECES:
                self.pieces.pop(next(iter(self.pieces)))
            self.pieces[key] = (closed, jax.jit(inner, **settings))
        return self.pieces[key][1]

    def equation(self, eqn: jex_core.JaxprEqn, values: list[Any]) -> list[Any]:
        """The results of one equation, by the rule of its primitive where an operand is a proxy."""
        has_stand_in = _has_proxy(values)
        is_around = False
        if self.chosen is not None and not has_stand_in:
            place = (id(eqn), *map(id, self.around))
            if place in self.chosen.operands:
                values = [values[0], dataclasses.replace(self.chosen.operands[place], value=values[1]), *values[2:]]
                has_stand_in = True
            is_around = place in self.chosen.around
        if not has_stand_in and not is_around:
            return bound(eqn, values)
        rule = self._rule_of(eqn.primitive.name, values)
        reason = "fewbit has no rule for it"
        if rule is not None:
            try:
                return rule(dataclasses.replace(self, around=(eqn, *self.around)), eqn, values)
            except NoRuleError as error:
                reason = str(error)
        values = [self.decoded(eqn, value, reason) for value in values]
        if eqn.primitive.name == "select_n":
            values[0] = jnp.broadcast_to(values[0], shape_of(eqn.invars[0]))  # as it was before `_as_made`
        return bound(eqn, values)

    def _rule_of(self, name: str, values: Sequence[Any]) -> Rule | None:
        """The rule of a primitive: a ArrayProxy's own, or that of every operand kind (control flow)."""
        rules = self.rules
        if _has_proxy(values):
            rules = next((value.rules for value in values if isinstance(value, ArrayProxy)), RULES)
        return rules.get(name, SHARED.get(name))

    def decoded(self, eqn: jex_core.JaxprEqn, value: PyTree, reason: str) -> Any:
        """The decoded value, where the fallback allows it."""
        if not is_proxy(value):
            return value
        place = Decoded(eqn.primitive.name, repr(value), _source_of(eqn, *self.around), reason)
        if self.fallback == "error":
            raise UnsupportedError(f"{place}; pass fallback='dequantize' to allow it, or leave this parameter a plain array")
        if self.report is not None:
            self.report(place)
        return array_of(value)


def _has_proxy(values: Sequence[Any]) -> bool:
    """Whether an operand is a proxy; without a call for each."""
    return any(map(is_proxy_type, map(type, values)))


def _placed(x: PyTree, sharding: object) -> PyTree:
    """A value with the sharding that an inner `jit` asks for, if any."""
    return constrained(x, sharding) if isinstance(sharding, jax.sharding.Sharding) else x


def _as_made(predicate: Atom, jaxpr: jex_core.Jaxpr, read: Callable[[Atom], Any]) -> Any:
    """A predicate before its broadcast, with axes of length 1 instead: `vmap` of `cond` broadcasts it."""
    for eqn in jaxpr.eqns:
        if predicate in eqn.outvars and eqn.primitive.name == "broadcast_in_dim":
            value, places = read(eqn.invars[0]), eqn.params["broadcast_dimensions"]
            lengths = dict(zip(places, value.shape, strict=True))
            return value.reshape([lengths.get(axis, 1) for axis in range(len(eqn.params["shape"]))])
    return read(predicate)


def _source_of(*eqns: jex_core.JaxprEqn) -> str:
    """The file and line of an equation, or of the nearest one around it with a line outside JAX."""
    return next(filter(None, (source_info_util.summarize(eqn.source_info) for eqn in eqns)), "within JAX")
