"""Rules of primitives with a Latent operand."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core as jex_core
from jax.sharding import AxisType

from ...array.axis_move import axis_moves
from ...array.covered import is_covered
from ...array.qarray import QArray, is_qarray
from ...array.scheme import Scheme
from ...array.straight_through import passed_through
from ...errors import QuantError, UnsupportedError
from ...kernels.quantize.dispatch import dequantize, quantize
from ..interpret.evaluator import Evaluator, NoRuleError, bound
from ..interpret.lookup import Lookup
from ..interpret.rules.custom_derivatives import DERIVATIVES
from ..interpret.rules.products import PRODUCT
from ..interpret.rules.sharding import SHARDING
from ..psum_scatter import psum_scatter
from .delayed_scales import StepScales, noted, widest
from .latent import MOVES, PARAMETER_RULES, PRODUCTS, Latent, is_latent, plain
from .serving_quantize import quantized_latent
from .serving_tiles import ServingTiles

_ON_LEADING_AXES = ("slice", "dynamic_slice", "squeeze", "rev")
"""The layout primitives that delayed scales of leading axes follow."""
_BETWEEN_DEVICES = ("all_gather", "sharding_constraint", "reshard")
"""The layout primitives that move a parameter between devices, which codes are cheaper for."""


def _moved(evaluator: Evaluator, eqn: jex_core.JaxprEqn, values: list[Any]) -> list[Any]:
    """A layout operation, whose results are still the parameter.

    They have its serving tiles, or the codes to which it is quantized by then.
    """
    latent, *others = values
    if eqn.primitive.name == "all_gather" and is_latent(latent) and latent.reduction is not None:
        outputs = [_gathered(eqn, latent.value, latent.reduction)]
    else:
        outputs = bound(eqn, list(map(plain, values)))
    if eqn.primitive.name == "optimization_barrier":
        pairs = zip(values, outputs, strict=True)
        return [dataclasses.replace(value, value=out) if is_latent(value) else out for value, out in pairs]
    if not is_latent(latent):
        return outputs
    served: list[ServingTiles | None] = [None] * len(outputs)
    prequantized: list[Any] = [None] * len(outputs)
    if (codes := _codes_on_other_devices(evaluator, eqn, latent)) is not None:
        prequantized = [codes]
    else:
        try:
            if latent.served is not None and latent.prequantized is None:
                served[:] = latent.served.on_last(latent.ndim).after(eqn, latent.policy.weight)
        except QuantError:
            pass
        if served[0] is None and (q := quantized_latent(latent)) is not None:
            prequantized = evaluator.equation(eqn, [q, *map(plain, others)])
    results = []
    for out, tiles, q in zip(outputs, served, prequantized, strict=True):
        one, latent = latent.forked()
        if q is None or is_qarray(q):
            scales = _scales_after(eqn, one, values)
            results.append(dataclasses.replace(one, value=out, scales=scales, served=tiles, prequantized=q))
        else:  # it had to be decoded: the values it had, straight-through
            results.append(passed_through(out, q, jnp.ones_like(out, jnp.bool_)))
    return results


def _codes_on_other_devices(evaluator: Evaluator, eqn: jex_core.JaxprEqn, latent: Latent) -> QArray | None:
    """The quantized parameter after a move between devices. None for other primitives, and where floats must be moved."""
    if eqn.primitive.name not in _BETWEEN_DEVICES or latent.scales is not None:
        return None
    mesh, here = jax.typeof(latent.value).sharding.mesh, jax.sharding.get_abstract_mesh()
    is_explicit = AxisType.Explicit in mesh.axis_types
    if is_explicit and not here.empty and AxisType.Explicit not in here.axis_types:  # it enters `jax.sharding.auto_axes`
        return None
    q = quantized_latent(latent)
    if q is None:
        return None
    try:
        return SHARDING[eqn.primitive.name](evaluator, eqn, [q])[0]
    except NoRuleError:  # shards would cut tiles or bytes
        return None


def _gathered(eqn: jex_core.JaxprEqn, value: jax.Array, reduction: Scheme) -> jax.Array:
    """`all_gather`, whose transpose exchanges the gradient in few bits."""
    params = eqn.params
    if params["axis_index_groups"] is not None:
        raise UnsupportedError("reduction= does not support axis_index_groups; gather over a mesh axis of its own")

    @jax.custom_vjp
    def gather(x: jax.Array) -> jax.Array:
        return bound(eqn, [x])[0]

    def backward(_: None, gradient: jax.Array) -> tuple[jax.Array]:
        axis, name = params["all_gather_dimension"], params["axis_name"]
        return (psum_scatter(gradient, name, scheme=reduction, scatter_dimension=axis, tiled=params["tiled"]),)

    gather.defvjp(lambda x: (gather(x), None), backward)
    return gather(value)


def _scales_after(eqn: jex_core.JaxprEqn, latent: Latent, values: list[Any]) -> StepScales | None:
    """The delayed scales of a parameter after a layout operation.

    They are of its leading axes, or their maximum where axes are lost.
    """
    scales, name = latent.scales, eqn.primitive.name
    if scales is None or not scales.ndim:
        return scales
    move, n = axis_moves(eqn)[0], scales.ndim
    if move.is_identity and name != "all_gather":
        return scales
    if name not in _ON_LEADING_AXES:
        return widest(scales)
    rest = (1,) * (latent.ndim - n)
    count = sum(len(new) for old, new in move.groups if old and old[0] < n)

    def moved(leaf: jax.Array) -> jax.Array:
        out = move(leaf.reshape(leaf.shape + rest), values[1:])
        return out.reshape(out.shape[:count])

    return jax.tree.map(moved, scales)


def _derivative(evaluator: Evaluator, eqn: jex_core.JaxprEqn, values: list[Any]) -> list[Any]:
    """A function with a custom JVP or VJP, which cannot return the amax of delayed scaling."""
    delayed = {
        repr(v): "its amax cannot come out of a custom derivative rule"
        for v in values
        if is_latent(v) and v.scales is not None
    }
    if delayed:
        raise UnsupportedError(f"delayed scaling cannot follow a parameter into {eqn.primitive.name}", delayed)
    return DERIVATIVES[eqn.primitive.name](evaluator, eqn, values)


def _gather(_: Evaluator, eqn: jex_core.JaxprEqn, values: list[Any]) -> list[Any]:
    """A look-up in the table quantized as at serving time, straight-through."""
    table, *others = values
    if not is_latent(table):
        raise NoRuleError("the indices are a parameter")
    return bound(eqn, [_looked_up(table, eqn), *map(plain, others)])


def _dynamic_slice(evaluator: Evaluator, eqn: jex_core.JaxprEqn, values: list[Any]) -> list[Any]:
    """A looked-up row, quantized as at serving time. A larger slice is a layout operation."""
    moved = _moved(evaluator, eqn, values)
    if Lookup.of(eqn) is None or not is_latent(moved[0]):
        return moved
    return [_looked_up(moved[0], eqn)]


def _looked_up(latent: Latent, eqn: jex_core.JaxprEqn) -> jax.Array:
    """The fake-quantized array with a straight-through gradient; each row has its own scales."""
    lookup = Lookup.of(eqn)
    assert lookup is not None
    fixed = jax.lax.stop_gradient(latent.value)
    scale = None
    if latent.scales is not None:
        scale = widest(latent.scales).weight
    q = quantized_latent(latent)
    if q is None:
        axis = max(lookup.whole, default=latent.ndim - 1)
        q = quantize(fixed, latent.policy.weight, axis=axis, scale=jax.lax.stop_gradient(scale))
    passes = jnp.ones_like(fixed, jnp.bool_)
    if latent.policy.clips_gradient and latent.policy.weight.calibration.clips:
        passes = is_covered(fixed, q)
    table = passed_through(latent.value, dequantize(q), passes)
    if scale is None:
        return table
    return noted(table, fixed, scale)


PARAMETER_RULES |= {name: PRODUCT[name] for name in PRODUCTS} | dict.fromkeys(MOVES, _moved)
PARAMETER_RULES |= {"gather": _gather, "dynamic_slice": _dynamic_slice, "shard_map": SHARDING["shard_map"]} | dict.fromkeys(
    DERIVATIVES, _derivative
)
