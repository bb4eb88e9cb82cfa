"""Folds scales of products' inputs into a model's parameters, or keeps them."""

import dataclasses
import math
import types
from collections.abc import Container, Mapping

import numpy as np

from ...errors import QuantError
from ...io.checkpoint import TensorInfo
from ...methods.scaling import AbstractScaling
from ...models.config import ChangedInput
from ...models.input_scales import FoldedScales, ScalableInput, scalable_inputs, why_not_scaled
from ...models.names import shapes
from ...recipe.plan import Plan
from ...recipe.rows import PlanRow
from ...recipe.rule import PRODUCT_OPS
from ..model import Model, Value, check_alone, decoded, is_kept


def scaled_inputs(model: Model, plan: Plan) -> tuple[ScalableInput, ...]:
    """The inputs of a model that get scales.

    They are those of quantized weights, where every parameter that changes may change.

    Args:
        model: a model that can be run.
        plan: its plan. What it prunes, or keeps as the file stores it quantized, may not change.

    Returns:
        The inputs, layer by layer.

    Raises:
        UnsupportedError: when the model cannot be run.
    """
    rows = {row.path: row for row in plan}

    def may_change(path: str) -> bool:
        row, info = rows[path], model.info[path]
        return row.sparsity is None and (info.scheme is None or (row.policy is not None and not is_kept(row, info)))

    return tuple(
        one
        for one in scalable_inputs(model.runnable_config())
        if all(map(may_change, one.paths)) and any(rows[part.path].policy is not None for part in one.readers)
    )


def with_scaled_inputs(model: Model, products: tuple[ChangedInput, ...]) -> Model:
    """The model in fewbit's own form, whose decoder multiplies the inputs of some products by vectors.

    AWQ and SmoothQuant keep the scales of these inputs there, one for each channel, in place of folding them into the weights before.
    So every activation can have them, and grouped heads have scales of their own. The vectors are ones until then. Only fewbit's
    decoder runs such a model, and only fewbit's own layouts store it.

    Args:
        model: a model that can be run.
        products: "o", after attention, and "down", after the activation; of experts, too.

    Returns:
        A model with the same logits, and the parameters `o_input_scale` and `down_input_scale`, float32.

    Raises:
        QuantError: for another product, or when inputs are scaled already.
        UnsupportedError: when the model cannot be run, or has other parts than a language model.
    """
    config = model.runnable_config()
    check_alone(model, "keeping scales of inputs")
    if config.scaled_inputs:
        raise QuantError(
            f"{model.name} scales the inputs of {', '.join(config.scaled_inputs)} already; start from its source"
        )
    config = dataclasses.replace(config, scaled_inputs=products)
    info = {
        path: model.info[path] if path in model.info else TensorInfo(shape, "float32", "F32", math.prod(shape) * 4)
        for path, shape in shapes(config).items()
    }

    def load(path: str) -> Value:
        return model.load(path) if path in model.info else np.ones(info[path].shape, np.float32)

    note = f"scales of the inputs of {' and '.join(products)} are kept, and multiplied when the model runs"
    return dataclasses.replace(
        model, config=config, info=types.MappingProxyType(info), load=load, notes=(*model.notes, note), metadata={}, names={}
    )


def scaled_paths(model: Model, plan: Plan, scaling: AbstractScaling, scales: Container[str] | None = None) -> dict[str, str]:
    """What scales do to each parameter that they change, by path.

    Args:
        model: the model.
        plan: its plan.
        scaling: the scaling.
        scales: the names of the inputs that have scales; None: all that get some.

    Returns:
        A phrase for each parameter.
    """
    changes: dict[str, list[str]] = {}
    for one in scaled_inputs(model, plan):
        if scales is None or one.name in scales:
            readers = ", ".join(dict.fromkeys(_last(part.path) for part in one.readers))
            place = f"folded into {_last(one.name)}"
            if one.name.endswith("_input_scale"):
                place = f"kept in {_last(one.name)}"
            for part in one.readers:
                changes.setdefault(part.path, []).append(f"{scaling.name} scales of its input, {place}")
            for part in one.sources:
                changes.setdefault(part.path, []).append(f"divided by the {scaling.name} scales of {readers}")
    return {path: "; ".join(said) for path, said in changes.items()}


def with_scaling(plan: Plan, model: Model, scaling: AbstractScaling) -> Plan:
    """The plan whose rows say which weights are multiplied by scales, and what absorbs them.

    Args:
        plan: the plan.
        model: its model, which can be run.
        scaling: the scaling.

    Returns:
        The plan, with a note on how many weights have scaled inputs.
    """
    inputs, config = scaled_inputs(model, plan), model.runnable_config()
    said, scaled = scaled_paths(model, plan, scaling), {part.path for one in inputs for part in one.readers}
    foldable = {part.path for one in scalable_inputs(config) for part in one.readers}
    rows, without = [], 0
    for row in plan:
        reasons = [row.reason, said.get(row.path, "")]
        if _is_product(row) and row.path not in scaled:
            why = "a parameter that would change is kept as stored"
            if row.path not in foldable:
                why = why_not_scaled(row.path, config)
            reasons.append(f"{scaling.name} does not scale its input: {why}")
            without += 1
        rows.append(dataclasses.replace(row, reason="; ".join(filter(None, reasons))))
    count = sum(map(_is_product, plan))
    note = (
        f"{scaling.name} scales the inputs of {count - without} of {count} quantized weights; what produces them is divided"
    )
    return dataclasses.replace(plan, rows=tuple(rows), notes=(*plan.notes, note))


def scaled_model(model: Model, plan: Plan, scales: Mapping[str, np.ndarray]) -> Model:
    """The model with scales folded into its parameters: the same network, other numbers.

    Quantized weights are float32 before they are quantized. Parameters that stay float are rounded to the dtype of the file, after
    which the ratio of a norm's old and new gain is the scale that its readers get.

    Args:
        model: a model that can be run.
        plan: its plan.
        scales: the scales of inputs by their name, as `calibrated_scales` gives them.

    Returns:
        The model; it loads a parameter of the old one at a time.
    """
    config, rows = model.runnable_config(), {row.path: row for row in plan}
    changes = FoldedScales.of(scaled_inputs(model, plan), scales, config, lambda path: np.asarray(model.load(path)))

    def load(path: str) -> Value:
        value = model.load(path)
        if path not in changes.paths:
            return value
        x = np.asarray(decoded(value))
        dtype = x.dtype if rows[path].policy is None else np.float32
        return changes.applied(path, x).astype(dtype)

    return dataclasses.replace(model, load=load)


def _is_product(row: PlanRow) -> bool:
    """Whether a row quantizes a weight that is multiplied."""
    return row.policy is not None and bool(set(row.ops) & set(PRODUCT_OPS))


def _last(path: str) -> str:
    """The last name of a path, so that the same product of all layers has one row."""
    return path.rsplit("/", 1)[-1]
