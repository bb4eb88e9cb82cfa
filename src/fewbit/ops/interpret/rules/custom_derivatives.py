"""Custom JVPs and VJPs on quantized operands.

The function's equation is differentiated by JAX on plain arrays, and the trace of that is evaluated with the rules. A quantized
operand has the derivative of its decoded array, propagated to its scales.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jax.extend import core as jex_core
from jax.tree_util import Partial
from jaxtyping import PyTree

from ..evaluator import Evaluator, Rule, array_of, bound
from ..proxy import ArrayProxy, is_proxy
from ..traced import Traced, array_leaves


def _traced(evaluator: Evaluator, fn: Callable[..., Any], *args: PyTree) -> PyTree:
    """`fn` of values that may be proxies. It is traced on arrays, then evaluated with the rules. Returns any pytree."""
    traced = Traced.of(fn, args, {})
    outputs = evaluator.evaluate(traced.closed.jaxpr, traced.closed.consts, array_leaves(args))
    return jax.tree.unflatten(traced.out_tree, outputs)


def _merged(all_values: Sequence[Any], places: Sequence[int], values: Sequence[Any]) -> list[Any]:
    merged = list(all_values)
    for place, value in zip(places, values, strict=True):
        merged[place] = value
    return merged


def _custom_jvp(evaluator: Evaluator, eqn: jex_core.JaxprEqn, values: list[Any]) -> list[Any]:
    body = evaluator.function(eqn.params["call_jaxpr"])

    @jax.custom_jvp
    def call(*args: PyTree) -> tuple[Any, ...]:
        return tuple(body(*args))

    def rule(primals: Sequence[Any], tangents: Sequence[Any]) -> PyTree:
        moving = [i for i, t in enumerate(tangents) if not all(map(_is_zero, jax.tree.leaves(t, is_leaf=_is_zero)))]
        tangents = [_logical_tangent(primals[i], tangents[i]) for i in moving]

        def out_and_linear(*arrays: PyTree) -> PyTree:
            def of(*args: PyTree) -> tuple[Any, ...]:
                return tuple(bound(eqn, _merged(arrays, moving, args)))

            return jax.linearize(of, *(arrays[i] for i in moving))

        outputs, linear = _traced(evaluator, out_and_linear, *primals)
        leaves, treedef = jax.tree.flatten(linear, is_leaf=is_proxy)
        return outputs, _called(evaluator, treedef, *map(_saved, leaves), tangents)

    call.defjvp(rule, symbolic_zeros=True)
    return list(call(*values))


def _is_zero(x: object) -> bool:
    return isinstance(x, SymbolicZero)


def _logical_tangent(primal: PyTree, tangent: PyTree) -> PyTree:
    """The tangent of a value; of a proxy, the tangent of its array."""
    if not is_proxy(primal):
        return tangent
    full = jax.tree.map(_instantiated, tangent, is_leaf=_is_zero)
    return jax.jvp(array_of, (primal,), (full,))[1]


def _instantiated(tangent: PyTree) -> PyTree:
    if not _is_zero(tangent):
        return tangent
    if tangent.dtype == jax.dtypes.float0:
        return np.zeros(tangent.shape, tangent.dtype)
    return jnp.zeros(tangent.shape, tangent.dtype)


def _custom_vjp(evaluator: Evaluator, eqn: jex_core.JaxprEqn, values: list[Any]) -> list[Any]:
    body = evaluator.function(eqn.params["call_jaxpr"])
    # The dtypes are those of the equation: a literal among the values may be a number of Python.
    floats = [i for i, var in enumerate(eqn.invars) if jnp.issubdtype(var.aval.dtype, jnp.inexact)]  # type: ignore[attr-defined]

    @jax.custom_vjp
    def call(*args: PyTree) -> tuple[Any, ...]:
        return tuple(body(*args))

    def forward(*primals: PyTree) -> PyTree:
        args = jax.tree.map(lambda primal: primal.value, primals)
        # A rule with symbolic zeros may refuse operands that do not move, so only the others are differentiated.
        moving = [i for i in floats if any(primal.perturbed for primal in jax.tree.leaves(primals[i]))]

        def out_and_pullback(*arrays: PyTree) -> PyTree:
            def of(*args: PyTree) -> tuple[Any, ...]:
                return tuple(bound(eqn, _merged(arrays, moving, args)))

            return jax.vjp(of, *(arrays[i] for i in moving))

        outputs, pullback = _traced(evaluator, out_and_pullback, *args)
        # The rule's residuals may be QArrays; they are leaves of the pullback, and stay quantized until it is called.
        leaves, treedef = jax.tree.flatten(pullback, is_leaf=is_proxy)
        pullback = Partial(functools.partial(_called, evaluator, treedef), *map(_saved, leaves))
        return outputs, ({i: args[i] for i in moving}, pullback)

    def backward(saved: tuple[dict[int, Any], Any], gradients: PyTree) -> tuple[Any, ...]:
        args, pullback = saved
        gradients = pullback([jax.tree.map(_instantiated, gradients, is_leaf=_is_zero)])
        cotangents = [_cotangent(x, gradient) for x, gradient in zip(args.values(), gradients, strict=True)]
        return tuple(_merged([None] * len(values), tuple(args), cotangents))

    call.defvjp(forward, backward, symbolic_zeros=True)
    return list(call(*values))


def _saved(x: PyTree) -> PyTree:
    """A value that a derivative rule saves."""
    return x.saved() if isinstance(x, ArrayProxy) else x


def _called(evaluator: Evaluator, treedef: Any, *leaves_and_args: PyTree) -> PyTree:
    """A linear function, given as a pytree whose leaves may be proxies, of arguments (the last value)."""
    *leaves, args = leaves_and_args

    def call(leaves: list[Any], args: Sequence[PyTree]) -> PyTree:
        return jax.tree.unflatten(treedef, leaves)(*args)

    return _traced(evaluator, call, leaves, args)


def _cotangent(x: PyTree, gradient: PyTree) -> PyTree:
    """The cotangent of a value. Of a QArray it is that of its scales, through its decoded array."""
    if not is_proxy(x):
        return gradient
    return jax.vjp(array_of, x)[1](gradient)[0]


DERIVATIVES: dict[str, Rule] = {"custom_jvp_call": _custom_jvp, "custom_vjp_call": _custom_vjp}
"""The rules of functions with a custom JVP or VJP."""
