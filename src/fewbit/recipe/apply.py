"""Quantizes a tree of parameters by a plan or a recipe."""

from typing import Any

from jaxtyping import PyTree

from ..errors import QuantError, UnsupportedError
from ..ops.interpret.parameter_uses import array_paths, with_leaves
from .method import NEAREST, AbstractMethod
from .plan import Plan
from .plan import plan as make_plan
from .quantize_row import SupportsObservations, check_row, observation_of, quantize_row
from .recipe import RecipeLike


def quantize_params(
    params: PyTree,
    plan: Plan | RecipeLike,
    *,
    method: AbstractMethod = NEAREST,
    stats: SupportsObservations | None = None,
) -> PyTree:
    """Quantizes and prunes the parameters that a plan names.

    A sparse parameter keeps its largest weights as they are now, whatever the schedule of its training; one that is masked
    already, such as by `fewbit.training.ModelSparsity.apply`, keeps those that its mask left.

    It can be traced: under `jax.jit` with `out_shardings`, parameters are initialised, quantized and sharded in one program;
    `jax.eval_shape` gives the tree to restore a checkpoint into. Traced arrays have no values to check: a NaN or an infinity
    makes its tile NaN, as in `fb.quantize`.

    Args:
        params: the tree of arrays; other leaves are left as they are.
        plan: a Plan; or a recipe, or anything that `fb.recipe` takes, which is resolved without code: what its rules give a
            path and an axis is quantized. Presets need roles, which `fb.plan` finds in the model's function.
        method: how scales and codes are chosen: `fb.methods.RTN()` rounds to nearest, `fb.methods.GPTQ()` minimizes the error
            of each product. Embeddings that no product contracts are rounded to nearest.
        stats: what `fb.observe` collected with `collect=method.collect`; only for a method that needs it.

    Returns:
        A tree of the same structure, with QArrays for the quantized leaves and all others unchanged.

    Raises:
        QuantError: when the plan and the tree do not have the same parameters and shapes, or a parameter that the plan
            quantizes is a QArray already or, not traced, contains NaN or infinity; it names the parameter and counts them.
            When statistics are missing, or given to a method that uses none.
        UnsupportedError: for a policy with delayed scaling, whose scales come from training, and for a plan that gives
            products without a parameter a policy, which no parameter can carry.

    >>> recipe = fb.Recipe((fb.Rule("w", "int8", axis=-1),))
    >>> tree = quantize_params({"w": jnp.ones((4, 64)), "b": jnp.ones(4)}, recipe)
    >>> tree["w"]
    QArray(int8, float32[4, 64], 272 bytes, 8.500 bits/weight)
    """
    if not isinstance(plan, Plan):
        plan = make_plan(None, params, recipe=plan)
    seen, leaves = planned_observations(params, plan, method, stats), array_paths(params)
    return with_leaves(params, {row.path: quantize_row(leaves[row.path], row, method, seen[row.path]) for row in plan})


def planned_observations(
    params: PyTree, plan: Plan, method: AbstractMethod, stats: SupportsObservations | None
) -> dict[str, PyTree]:
    """The statistics with which a method quantizes each parameter of a plan, after all checks of plan and statistics.

    Args:
        params: the tree of arrays.
        plan: the plan.
        method: as in `quantize_params`.
        stats: as in `quantize_params`.

    Returns:
        For the path of each row an observation; None where the method needs none.

    Raises:
        QuantError: when the plan and the tree do not have the same parameters; when statistics are missing, or given to a
            method that uses none.
        UnsupportedError: as in `check_storable`.
    """
    if stats is not None and not method.collect:
        raise QuantError(
            f"stats is given, and method {method.name} uses none; leave it out, or pass method=fb.methods.GPTQ()"
        )
    check_plan(params, plan)
    return {row.path: observation_of(row, method, stats) for row in plan}


def check_plan(params: PyTree, plan: Plan) -> dict[str, Any]:
    """The parameters by path, after all checks of a plan.

    Args:
        params: the tree of arrays.
        plan: the plan.

    Raises:
        QuantError: when the plan and the tree do not have the same parameters.
        UnsupportedError: as in `check_storable`.
    """
    leaves = array_paths(params)
    check_storable(plan)
    rows = {row.path for row in plan}
    if rows != set(leaves):
        missing, extra = sorted(set(leaves) - rows), sorted(rows - set(leaves))
        raise QuantError(
            f"the plan is for another tree: it has no row for {missing[:5]}, and the tree does not have {extra[:5]}; "
            "make a plan of this tree"
        )
    return leaves


def check_storable(plan: Plan) -> None:
    """Refuses a plan that quantized parameters alone cannot carry out.

    Args:
        plan: the plan.

    Raises:
        UnsupportedError: for a policy with delayed scaling, and for a product without a parameter that has a policy.
    """
    if planned := [row.name for row in plan.products if row.policy is not None]:
        raise UnsupportedError(
            f"the plan quantizes products without a parameter ({', '.join(planned[:5])}), and quantized parameters cannot "
            "carry that; set their policy to null"
        )
    for row in plan:
        check_row(row)
