"""`transparent`: runs unchanged code on quantized leaves.

`transparent(fn)` traces `fn` with the shape and dtype of every leaf, so its code sees ordinary arrays, and evaluates the jaxpr.
An equation without quantized operands is bound unchanged. One with quantized operands goes to the rule of its primitive, in
`fewbit.ops.interpret.rules`: products to `fewbit.ops`, layout operations to the QArray; control flow is rebuilt around a body that is
evaluated in the same way, so `jit` stays jitted and `scan` stays a loop. A primitive without a rule follows `fallback`.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, ParamSpec, TypeVar

import jax
from jax.core import Tracer
from jaxtyping import PyTree

from ..._wrapping import copy_signature
from ...errors import QuantError, UnsupportedError
from ..qat import rules as qat_rules  # noqa: F401 - it fills the rules of Latents
from ..qat.latent import Latent
from .evaluator import ChosenProducts, Evaluator, Rule
from .evaluator import Decoded as Decoded
from .observe import Observed
from .parameter_uses import Place, Product
from .proxy import ArrayProxy, is_proxy_type
from .rules import RULES, SHARED
from .rules.control_flow import CONTROL
from .traced import Traced, array_leaves

P = ParamSpec("P")
R = TypeVar("R")


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
    return evaluated(fn, fallback, report)


def evaluated(
    fn: Callable[P, R],
    fallback: str,
    report: Callable[[Decoded], None] | None,
    around: Mapping[str, Rule] = RULES,
) -> Callable[P, R]:
    """`transparent` with the rules of equations that have a chosen product in their bodies, see `evaluate`."""
    interpreter = evaluator(fallback, report, around)

    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        values = array_leaves((args, kwargs))
        if not any(map(is_proxy_type, map(type, values))):
            return fn(*args, **kwargs)
        result: R = evaluate(interpreter, Traced.of(fn, args, kwargs), values)
        return result

    copy_signature(fn, wrapped)
    return wrapped


def evaluator(fallback: str, report: Callable[[Decoded], None] | None, around: Mapping[str, Rule] = RULES) -> Evaluator:
    """An evaluator with every rule, for a program that is traced.

    Args:
        fallback: as in `transparent`.
        report: as in `transparent`.
        around: the rules of equations with a chosen product in their bodies, where no operand has its own.
    """
    if fallback not in ("error", "dequantize"):
        raise QuantError(f"fallback is {fallback!r}; must be 'error' or 'dequantize'")
    return Evaluator(fallback, report, {}, True, RULES, SHARED, around)


def evaluate(
    interpreter: Evaluator,
    traced: Traced,
    values: Sequence[PyTree],
    chosen: Sequence[tuple[Product, Place, Latent | Observed]] = (),
) -> Any:
    """Evaluates a traced function.

    Args:
        interpreter: the evaluator.
        traced: the function.
        values: the `array_leaves` of its arguments, with proxies in the place of any of them.
        chosen: the products without a parameter to change, their places, and proxies (without array) for their right operands.

    Raises:
        UnsupportedError: where the place of a chosen product does not allow a policy.
    """
    if not (_has_tracer(values) or _has_tracer(jax.tree.leaves(values))):
        interpreter = dataclasses.replace(interpreter, is_traced=False)
    if chosen:
        interpreter = dataclasses.replace(interpreter, chosen=_chosen(chosen))
    outputs = interpreter.evaluate(traced.closed.jaxpr, traced.closed.consts, values)
    return jax.tree.unflatten(traced.out_tree, [x.array() if isinstance(x, ArrayProxy) else x for x in outputs])


def _chosen(chosen: Sequence[tuple[Product, Place, Latent | Observed]]) -> ChosenProducts:
    """The proxies of chosen products by their places."""
    operands, around = {}, set()
    for product, place, proxy in chosen:
        for eqn in place[1:]:
            if eqn.primitive.name not in (*CONTROL, "shard_map"):
                reason = f"it is inside {eqn.primitive.name}, whose derivative rule would not follow the policy"
                raise UnsupportedError(
                    f"product {product.name} at {product.source} cannot follow a policy", {product.op: reason}
                )
        ids = tuple(map(id, place))
        operands[ids] = proxy
        around |= {ids[i:] for i in range(1, len(ids))}
    return ChosenProducts(operands, frozenset(around))


def _has_tracer(values: Sequence[object]) -> bool:
    """Whether one of the values is being traced."""
    return any(isinstance(value, Tracer) for value in values)
