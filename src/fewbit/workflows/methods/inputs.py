"""What the products of a float decoder read: outliers, tokens of experts."""

import dataclasses
from collections.abc import Callable, Collection

import numpy as np

from ...calibration.measure import Measure, Observation
from ...calibration.range_rules import AbsMaxRange
from ...evaluate.report.facts import InputFacts, MeasuredInputs
from ...models.joined import JOINED
from ...recipe.plan import Plan
from ..model import Model
from .calibrated import float_layers
from .calibration_data import CalibrationData
from .experts import ExpertTokens, check_unseen

_MEASURE = Measure(AbsMaxRange(), ("absmax", "squares"))
_SAME_INPUT = {f"/{name}": "/" + ",".join(names) for names in JOINED.values() for name in names[:1]}
_LEFT_OUT = ("router", "shared_expert_gate", "embed", "head", "z", "beta", "alpha", "ba")
_FIRST = {name: names[0] for names in JOINED.values() for name in names[1:]}
"""The first of the weights with the same input, which is measured in place of the others."""


def measured_inputs(
    model: Model, data: CalibrationData, *, progress: Callable[[int, int], None] | None = None
) -> MeasuredInputs:
    """Measures the inputs of the float model's products.

    Args:
        model: a model that can be run.
        data: the calibration data.
        progress: called with the number of layers done and of all layers.

    Returns:
        A row for each product of a layer; q, k and v have one, and gate and up.

    Raises:
        UnsupportedError: when the model cannot be run.
    """
    found, experts = [], {}
    for layer in float_layers(model, data.windows, progress):
        for path, one in layer.statistics(_MEASURE, _measured(layer.paths)).items():
            found.append(_facts(path, layer.index, one))
            if np.ndim(one.count) == 1:
                path = path.rsplit("/", 1)[0]
                experts[path] = ExpertTokens(path, tuple(np.asarray(one.count).astype(int).tolist()))
    return MeasuredInputs(data.text, data.windows.size, tuple(found), {path: one.counts for path, one in experts.items()})


def with_expert_tokens(plan: Plan, inputs: MeasuredInputs, unseen: str) -> Plan:
    """The plan with the number of tokens of each layer's experts. It also says what happens to experts without any.

    Args:
        plan: the plan.
        inputs: the result of `measured_inputs`.
        unseen: one of `experts.UNSEEN`.
    """
    check_unseen(unseen)
    layers = [ExpertTokens(path, counts) for path, counts in inputs.expert_tokens.items()]
    what = {"nearest": "rounded to nearest", "share": "takes the statistics of the others", "error": "an error"}[unseen]
    rows = []
    for row in plan:
        tokens = [count for layer in layers for count in layer.of(row.path)]
        if row.policy is not None and 0 in tokens:
            reason = f"no token of {inputs.text}: {what}"
            if len(tokens) > 1:
                reason = f"{tokens.count(0)} of {len(tokens)} experts have no token of {inputs.text}: {what}"
            row = dataclasses.replace(row, reason="; ".join(part for part in (row.reason, reason) if part))
        rows.append(row)
    notes = (f"experts on {inputs.tokens:,} tokens of {inputs.text}", *map(str, layers))
    return dataclasses.replace(plan, rows=tuple(rows), notes=(*plan.notes, *notes))


def _measured(paths: Collection[str]) -> list[str]:
    """The parameters of a layer that may be the weights of measured products. Of those with the same input, one is measured."""
    weights = [path for path in paths if "norm" not in path and not path.endswith("bias")]
    found = []
    for path in weights:
        head, _, name = path.rpartition("/")
        if name not in _LEFT_OUT and f"{head}/{_FIRST.get(name)}" not in weights:
            found.append(path)
    return found


def _facts(path: str, layer: int, one: Observation) -> InputFacts:
    """The facts of one product."""
    count = float(np.sum(one.count))
    squares = np.asarray(one.squares, np.float64)  # [*B, K]
    squares = squares.reshape(-1, squares.shape[-1]).sum(0)
    rms = np.sqrt(squares / max(count, 1))
    middle, amax = float(np.median(rms)), np.asarray(one.absmax, np.float64).reshape(-1, len(rms)).max(0)
    channel = int(np.argmax(amax))
    whole = float(np.sqrt(np.mean(np.square(rms))))
    head, last = path.rsplit("/", 1)
    return InputFacts(
        path=head + _SAME_INPUT.get(f"/{last}", f"/{last}"),
        layer=layer,
        channels=len(rms),
        amax=float(amax[channel]),
        rms=whole,
        channel=channel,
        channel_ratio=float(rms.max()) / middle if middle > 0 else float("inf"),
    )
