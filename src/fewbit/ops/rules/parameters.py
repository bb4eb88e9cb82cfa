"""What each primitive does with a parameter in training: products follow its policy, moves keep it, tables are fake-quantized."""

from typing import Any

import jax
import jax.numpy as jnp

from ...array.straight_through import is_covered, passed_through
from ...kernels.quantize import dequantize, quantize
from ..latent import PARAMETER_RULES, Latent, is_latent, plain
from .products import PRODUCT
from .rule import AbstractEvaluator, NoRuleError, bound

_PRODUCTS = ("dot_general", "conv_general_dilated", "ragged_dot_general")
_MOVES = (
    *("convert_element_type", "copy", "copy_p", "name", "optimization_barrier", "sharding_constraint", "all_gather"),
    *("transpose", "reshape", "squeeze", "expand_dims", "broadcast_in_dim", "slice", "dynamic_slice", "split", "rev"),
)


def _moved(_: AbstractEvaluator, eqn: Any, values: list[Any]) -> list[Any]:
    """A move of the array; its results are the parameter still."""
    outputs = bound(eqn, list(map(plain, values)))
    sources = values if len(values) == len(outputs) else [values[0]] * len(outputs)
    return [s.moved(out) if is_latent(s) else out for s, out in zip(sources, outputs, strict=True)]


def _gather(_: AbstractEvaluator, eqn: Any, values: list[Any]) -> list[Any]:
    """A look-up in a table as it will be served: quantized along the last axis that is not indexed, straight through."""
    table, *others = values
    if not is_latent(table):
        raise NoRuleError("the indices are a parameter")
    indexed = eqn.params["dimension_numbers"].start_index_map
    axis = max((a for a in range(table.ndim) if a not in indexed), default=table.ndim - 1)
    return bound(eqn, [_served(table, axis), *map(plain, others)])


def _served(latent: Latent, axis: int) -> jax.Array:
    """The array quantized and decoded, with a gradient that passes straight through."""
    fixed = jax.lax.stop_gradient(latent.value)
    q = quantize(fixed, latent.policy.weight, axis=axis)
    clips = latent.policy.clips_gradient and latent.policy.weight.calibration.clips
    passes = is_covered(fixed, q) if clips else jnp.ones(q.shape, jnp.bool_)
    return passed_through(latent.value, dequantize(q), passes)


PARAMETER_RULES |= {name: PRODUCT[name] for name in _PRODUCTS} | dict.fromkeys(_MOVES, _moved) | {"gather": _gather}
