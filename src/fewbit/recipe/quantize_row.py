"""Quantizes one parameter by its plan row."""

import dataclasses
import functools
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import PyTree

from .._explicit_mesh import explicit_sharding
from ..array.qarray import QArray
from ..array.scheme import Scheme
from ..array.sharding import shardings_of
from ..errors import QuantError, UnsupportedError
from ..ops.qat.serving_quantize import for_each
from ..ops.qat.serving_tiles import axis_within, cast
from .matching import Leaf
from .method import NEAREST, AbstractMethod
from .rows import PlanRow
from .rule import PRODUCT_OPS


@runtime_checkable
class SupportsObservations(Protocol):
    """Statistics by parameter, such as `fewbit.calibration.Stats`."""

    @property
    def observations(self) -> Mapping[str, Any]:
        """The statistics of each parameter's products, by its path."""
        ...


def check_row(row: PlanRow) -> None:
    """Refuses a policy with delayed scaling."""
    if row.policy is not None and row.policy.delayed is not None:
        raise UnsupportedError(
            f"{row.path}: policy {row.policy} uses delayed scaling, whose scales come from earlier training steps, and "
            "there are none outside training; use a recipe with current scaling, such as te_fp8_currentscaling"
        )


def quantize_row(leaf: Leaf, row: PlanRow, method: AbstractMethod = NEAREST, observation: PyTree = None) -> Any:
    """Quantizes and prunes one parameter as its row of a plan says.

    Args:
        leaf: the parameter; it must be finite where it is quantized or pruned.
        row: its row of a plan.
        method: how scales and codes are chosen.
        observation: the statistics of the parameter's products, see `observation_of`.

    Returns:
        A QArray, a pruned array where the row has a sparsity only, or `leaf` where it has neither.

    Raises:
        QuantError: for another shape than the plan's, a QArray, or values that are not finite, unless they are traced.
        UnsupportedError: for a policy with delayed scaling, and where the method cannot quantize the parameter.
    """
    if row.policy is None and row.sparsity is None:
        return leaf
    return quantize_finite(_finite(leaf, row), row, method, observation)


def check_quantizable(leaf: Leaf, row: PlanRow, method: AbstractMethod = NEAREST, observation: PyTree = None) -> None:
    """Refuses what `quantize_row` refuses, without quantizing.

    Args:
        leaf: as in `quantize_row`.
        row: likewise.
        method: likewise.
        observation: likewise.

    Raises:
        QuantError: as `quantize_row`.
        UnsupportedError: as `quantize_row`.
    """
    if row.policy is None and row.sparsity is None:
        return
    x = _finite(leaf, row)
    _check_statistics(row, method, observation)
    _of_layers(jax.jit(quantized_leaf, static_argnums=(1, 2)).eval_shape, x, row, method, observation)


def _finite(leaf: Leaf, row: PlanRow) -> jax.Array:
    """The parameter of a row, which quantizes or prunes it. Errors as in `quantize_row`."""
    check_row(row)
    if tuple(leaf.shape) != row.shape:
        raise QuantError(f"{row.path} has shape {tuple(leaf.shape)}, but the plan was made for {row.shape}")
    if isinstance(leaf, QArray):
        raise QuantError(
            f"{row.path} is quantized already, as {leaf.scheme.name}, and the plan is for the float parameter; plan the "
            "tree as it is, which leaves QArrays unchanged, or decode it by fb.dequantize"
        )
    x = jnp.asarray(leaf)
    if counts := non_finite_counts([(row.path, x)]):
        raise QuantError(
            non_finite_message(counts, "repair the checkpoint, or exclude the parameter by a rule with policy null")
        )
    return x


def quantize_finite(
    x: jax.Array,
    row: PlanRow,
    method: AbstractMethod = NEAREST,
    observation: PyTree = None,
) -> jax.Array | QArray:
    """Quantizes and prunes a parameter that was checked already, compiled once for identical layers.

    Args:
        x: the finite parameter.
        row: its row of a plan, of the same shape.
        method: as in `quantize_row`.
        observation: as in `quantize_row`.

    Raises:
        QuantError: for statistics that are not finite, unless they are traced.
        UnsupportedError: where the method cannot quantize the parameter, such as for blocks along an axis that no product
            contracts.
    """
    _check_statistics(row, method, observation)
    return _of_layers(jax.jit(quantized_leaf, static_argnums=(1, 2)), x, row, method, observation)


def _check_statistics(row: PlanRow, method: AbstractMethod, observation: PyTree) -> None:
    """Refuses statistics with which a method cannot quantize a parameter. Errors as in `quantize_finite`."""
    if counts := non_finite_counts([(f"the statistics of {row.path}", observation)]):
        raise QuantError(
            non_finite_message(counts, "the activations overflow on the calibration data: check the batches and the model")
        )
    if observation is not None and row.sparsity is not None:
        raise UnsupportedError(
            f"{row.path}: {method.name} would move pruned weights away from zero; prune without a method, or quantize a "
            "model that is pruned already"
        )
    if observation is not None and row.contracted and set(row.contracted) != set(row.axis):
        raise UnsupportedError(
            f"{row.path}: {method.name} takes blocks along the axes that products contract, {row.contracted}, and the plan has them "
            f"along {row.axis}; remove the axis from its rule, or round it to nearest"
        )


def _of_layers(fn: Callable[..., Any], x: jax.Array, row: PlanRow, method: AbstractMethod, observation: PyTree) -> Any:
    """`fn` with a row that is equal for identical layers. Errors name the parameter."""
    alike = dataclasses.replace(row, path=re.sub(r"\d+", "*", row.path), reason="", sites=())
    try:
        return fn(x, alike, method, observation)
    except (QuantError, UnsupportedError) as error:
        if str(error).startswith((f"{row.path}:", f"{row.path} ")):
            raise
        raise type(error)(f"{row.path}: {error}") from error


def non_finite_counts(values: Iterable[tuple[str, PyTree]]) -> dict[str, tuple[int, int]]:
    """Counts NaN and infinity.

    Args:
        values: names, and for each an array or a tree of arrays. Traced arrays, which have no values yet, and integers count as
            finite.

    Returns:
        For each name with NaN or infinity how many there are, and of how many elements.
    """
    found = {}
    for name, tree in values:
        leaves = jax.tree.leaves(tree)
        if count := sum(map(_non_finite, leaves)):
            found[name] = count, sum(leaf.size for leaf in leaves)
    return found


def _non_finite(x: np.ndarray | jax.Array) -> int:
    if isinstance(x, Tracer) or not jnp.issubdtype(x.dtype, jnp.inexact):
        return 0
    if isinstance(x, np.ndarray) and x.dtype.kind in "fc":  # in host memory, and float64 as it is
        return int(x.size - np.count_nonzero(np.isfinite(x)))
    return int(_non_finite_count(x))


@jax.jit  # one program for each shape, not one for each operation
def _non_finite_count(x: jax.Array) -> jax.Array:
    return jnp.sum(~jnp.isfinite(x))


def non_finite_message(counts: Mapping[str, tuple[int, int]], advice: str) -> str:
    """The message about NaN and infinity.

    Args:
        counts: what `non_finite_counts` found; the first 20 are named.
        advice: what to do.

    Returns:
        The text of an error.
    """
    named = [f"{name} ({count:,} of {size:,})" for name, (count, size) in counts.items()]
    listed = ", ".join(named[:20])
    if len(named) > 20:
        listed += f" and {len(named) - 20} more parameters"
    return f"NaN or infinite values in {listed}; {advice}. A tile that is quantized with one dequantizes to NaN"


def observation_of(row: PlanRow, method: AbstractMethod, stats: SupportsObservations | None) -> PyTree:
    """The statistics with which a method quantizes a parameter.

    Args:
        row: the parameter's row of a plan.
        method: the method.
        stats: the statistics that `fb.observe` collected; None: none.

    Returns:
        The parameter's observation; None where nothing is to be quantized, the method needs none, or the parameter is an
        embedding that no product contracts, which is rounded to nearest.

    Raises:
        QuantError: where the parameter has no statistics.
    """
    if row.policy is None or not method.collect:
        return None
    if stats is not None and row.path in stats.observations:
        found = stats.observations[row.path]
        missing = [name for name in method.collect if getattr(found, name) is None]
        if missing:
            raise QuantError(f"{method.name} needs {', '.join(missing)} of {row.path}; {_remedy(method)}")
        layers = tuple(row.shape[a] for a in row.stacked)
        if any(leaf.shape[: len(layers)] != layers for leaf in jax.tree.leaves(found)):
            raise QuantError(
                f"{row.path} has {layers} layers, which are quantized one by one, and its statistics are those of all layers "
                "together: fb.observe has statistics of each layer for a loop over a whole axis of them and for indices such as w[0], not "
                "for slices. Scan over the layers, make each a parameter of its own, or use a method without statistics"
            )
        return found
    if row.ops and not set(row.ops) & set(PRODUCT_OPS):
        return None
    raise QuantError(f"{method.name} needs statistics of {row.path}, and there are none; {_remedy(method)}")


def _remedy(method: AbstractMethod) -> str:
    """How to collect the statistics of a method."""
    if "cross" in method.collect:
        return (
            "it compares the inputs of two models; fb.methods.quantize_sequentially(fn, params, batches, recipe, method=...) and "
            f"`fewbit quantize --method {method.name}` collect them"
        )
    return f"pass stats=fb.observe(fn, params, batches, recipe, collect={method.collect})"


def quantized_leaf(
    x: jax.Array,
    row: PlanRow,
    method: AbstractMethod = NEAREST,
    observation: PyTree = None,
) -> jax.Array | QArray:
    """Prunes, casts and quantizes a parameter, each element of its stacked axes on its own."""
    if method.collect and (sharding := explicit_sharding(x)) is not None:
        # JAX has some operations of these methods on no explicit mesh: XLA chooses the shardings within, but not of the result.
        fn = functools.partial(quantized_leaf, row=row, method=method)
        like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), (x, observation))
        out = shardings_of(jax.eval_shape(lambda x, seen: fn(x, observation=seen), *like), sharding.mesh, sharding.spec)
        by_xla: Any = jax.sharding.auto_axes(lambda x, seen: fn(x, observation=seen), out_sharding=out)
        return by_xla(x, observation)
    if row.sparsity is not None:
        x = row.sparsity.pruned(x)
    if row.policy is None:
        return x
    scheme: Scheme = row.policy.weight
    axis = axis_within(row.axis, row.stacked, len(row.shape))
    if getattr(observation, "batch", None):
        observation = dataclasses.replace(observation, batch=axis_within(observation.batch, row.stacked, len(row.shape)))
    if "take" in row.ops and getattr(observation, "cross", None) is not None:
        # A tied embedding: correcting the product of the output head would change the input embeddings, which have no errors.
        observation = dataclasses.replace(observation, cross=None)
    if observation is None:
        chosen = NEAREST if method.collect else method
        q = for_each(row.stacked, lambda x: chosen.quantized(x, scheme, axis, None), cast(x, row.casts))
    else:
        q = for_each(row.stacked, lambda x, seen: method.quantized(x, scheme, axis, seen), cast(x, row.casts), observation)
    q = q.astype(x.dtype)
    if row.policy.is_weight_only:
        return q
    return dataclasses.replace(q, policy=row.policy)
