"""One tensor scale for weights that a server multiplies at once."""

import dataclasses
from collections.abc import Collection, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from ...array.qarray import QArray
from ...recipe.method import NEAREST, AbstractMethod
from ...recipe.plan import Plan
from ...recipe.quantize_row import quantize_finite
from ...recipe.rows import PlanRow
from ..model import Model, is_kept


def fused_rows(model: Model, plan: Plan, sets: Collection[tuple[str, ...]]) -> dict[str, tuple[PlanRow, ...]]:
    """The rows of weights that share a tensor scale, by the path of each.

    Args:
        model: the source, named as a Hugging Face checkpoint.
        plan: its plan.
        sets: names of modules of one parent that are multiplied at once, such as `("gate_proj", "up_proj")`.

    Returns:
        For each path of a set whose weights have one scheme with a tensor scale: the rows of the set, in its order.
    """
    named = {model.names.get(row.path, row.path): row for row in plan if _has_tensor_scale(model, row)}
    found = {}
    for name in named:
        parent, _, last = name.removesuffix(".weight").rpartition(".")
        for members in (members for members in sets if members[0] == last):
            rows = [named.get(f"{parent}.{member}.weight") for member in members]
            together = tuple(row for row in rows if row is not None)
            if len(together) == len(members) and len({(row.policy, row.shape[1], row.dtype) for row in together}) == 1:
                found |= dict.fromkeys((row.path for row in together), together)
    return found


def _has_tensor_scale(model: Model, row: PlanRow) -> bool:
    """Whether a row quantizes a float matrix in a scheme with a tensor scale."""
    if row.policy is None or row.sparsity is not None or is_kept(row, model.info[row.path]):
        return False
    return len(row.shape) == 2 and row.axis == (-1,) and bool(row.policy.weight.tensor_scale)


def quantized_together(
    weights: Mapping[str, np.ndarray | jax.Array],
    row: PlanRow,
    method: AbstractMethod = NEAREST,
    observation: PyTree = None,
) -> dict[str, QArray]:
    """Quantizes matrices with one tensor scale, as the rows of one matrix.

    Args:
        weights: the matrices `[out, in]` by path, all with the same number of columns.
        row: the plan's row of one of them.
        method: how scales and codes are chosen.
        observation: the statistics of their inputs, which are the same.
    """
    whole = jnp.concatenate([jnp.asarray(x) for x in weights.values()])
    q = quantize_finite(whole, dataclasses.replace(row, shape=whole.shape), method, observation)
    assert isinstance(q, QArray)
    found, start = {}, 0
    for path, x in weights.items():
        found[path] = q[start : start + x.shape[0]]
        start += x.shape[0]
    return found
