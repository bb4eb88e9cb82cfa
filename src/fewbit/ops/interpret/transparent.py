"""`transparent`: runs unchanged code on quantized leaves.

`transparent(fn)` traces `fn` with the shape and dtype of every leaf, so its code sees ordinary arrays, and evaluates the jaxpr.
An equation without quantized operands is bound unchanged. One with quantized operands goes to the rule of its primitive, in
`fewbit.ops.interpret.rules`: products to `fewbit.ops`, layout operations to the QArray; control flow is rebuilt around a body that is
evaluated in the same way, so `jit` stays jitted and `scan` stays a loop. A primitive without a rule follows `fallback`.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Literal, ParamSpec, TypeAlias, TypeVar

import jax
from jax.core import Tracer
from jax.extend import core as jex_core
from jaxtyping import PyTree

from ...errors import QuantError, UnsupportedError
from ..qat import rules as qat_rules  # noqa: F401 - it fills the rules of Latents
from ..qat.latent import Latent
from .evaluator import ChosenProducts, Evaluator, Rule, logical
from .evaluator import Decoded as Decoded
from .observe import Observed
from .parameter_uses import Product, weightless_products
from .proxy import ArrayProxy, is_proxy, is_proxy_type
from .rules import RULES, SHARED
from .rules.control_flow import CONTROL

P = ParamSpec("P")
R = TypeVar("R")

Choice: TypeAlias = Callable[[tuple[Product, ...]], Mapping[str, Latent | Observed]]
"""Maps the products without a parameter to proxies (without array) for the right operands of those to change, by name."""


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
    """`transparent` of a function whose first argument is the parameters, with policies for products without one.

    `chosen` says which of them follow a policy; UnsupportedError where their place does not allow one. `around` has the rules
    of equations with such a product in their bodies, where no operand has its own.
    """
    if fallback not in ("error", "dequantize"):
        raise QuantError(f"fallback is {fallback!r}; must be 'error' or 'dequantize'")
    pieces: dict[Hashable, tuple[Any, Callable[..., Any]]] = {}
    call: Callable[..., Any] = fn

    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        leaves, treedef = jax.tree.flatten((args, kwargs), is_leaf=is_proxy)
        if chosen is None and not any(map(is_proxy_type, map(type, leaves))):
            return fn(*args, **kwargs)
        places = [i for i, leaf in enumerate(leaves) if is_proxy_type(type(leaf)) or _is_array(leaf)]
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
        is_traced = _has_tracer(dynamic) or _has_tracer(jax.tree.leaves(dynamic))
        products = None
        if chosen is not None:
            count = len(jax.tree.leaves(args[:1], is_leaf=is_proxy))
            products = _chosen(chosen, closed.jaxpr, [place < count for place in places])
        evaluator = Evaluator(fallback, report, pieces, is_traced, RULES, SHARED, around, products)
        outputs = evaluator.evaluate(closed.jaxpr, closed.consts, dynamic)
        assert out_tree is not None
        return jax.tree.unflatten(out_tree, [x.array() if isinstance(x, ArrayProxy) else x for x in outputs])

    wrapped.__name__ = getattr(fn, "__name__", "transparent")
    wrapped.__doc__ = fn.__doc__
    return wrapped


def _chosen(chosen: Choice, jaxpr: jex_core.Jaxpr, are_parameters: Sequence[bool]) -> ChosenProducts:
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
    return ChosenProducts(operands, frozenset(around))


def _has_tracer(values: Sequence[object]) -> bool:
    """Whether one of the values is being traced."""
    return any(isinstance(value, Tracer) for value in values)


def _is_array(x: object) -> bool:
    """Whether a leaf is traced: an array or numpy scalar."""
    return hasattr(x, "shape") and hasattr(x, "dtype")
