"""Gathers the facts of a report on quantized models."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from ..array.qarray import QArray
from ..array.quantize import expanded_offset, expanded_scale, in_units
from ..errors import QuantError, UnsupportedError
from ..evaluate.report.facts import (
    CalibratedExperts,
    Histogram,
    MeasuredQuality,
    ModelFacts,
    Report,
    StoredModel,
    TensorFacts,
)
from ..io.checkpoint import TensorInfo
from ..methods.named import scaled_name
from ..models.installed import default_text_name, find_text
from ..models.names import paths_of_params
from ..recipe.plan import Plan
from ..recipe.role import QUANTIZED_ROLES, Role
from ..recipe.rows import PlanRow
from .compare import Candidate
from .convert.origin import origin
from .engine import as_stored, choose_engine
from .evaluate import (
    Baseline,
    Progress,
    Quality,
    baseline,
    compared,
    engine_of,
    evaluation_windows,
    part_of,
    weight_sqnr,
)
from .inspect import file_bytes
from .methods.calibration_data import calibration_data
from .methods.experts import UNSEEN
from .methods.inputs import measured_inputs
from .model import Model, Value, decoded
from .plan import RecipeSpec, plan_model, split_numbers
from .tensors import Outcome

INPUT_WINDOWS = 8
"""The windows of the calibration text on which the inputs of products are measured."""
_BINS = 96
_NOTHING = {"rules": [{"path": ".*", "policy": None}]}
"""A recipe that quantizes nothing: its plan still has the role of each parameter."""


def report(
    models: Sequence[Model],
    source: Model,
    *,
    text: str | None = None,
    quality: bool = True,
    progress: Callable[[float, str], None] | None = None,
) -> Report:
    """Compares quantized models with their source: sizes, quality, the error of each weight.

    Weights are loaded one at a time; the quality of each model is measured as `evaluate` does. The source is evaluated once for all
    models that one engine runs on the same tokens.

    Args:
        models: the quantized models.
        source: the model that they were quantized from.
        text: the text of the quality, as for `models.find_text`; None takes the default text.
        quality: whether to run the models: perplexity, KL divergence, outliers of the source's activations.
        progress: called with the fraction that is done, and a text.

    Returns:
        The facts. A model that cannot be run has none of its quality, but the reason.

    Raises:
        QuantError: when there is no model, or one has other parameters than the source and is not rotated; or there is no such
            text, or it is too short.
    """
    if not models:
        raise QuantError("a report needs at least one model; pass the quantized models and their source")
    for model in models:
        _check_same_parameters(model, source)
    if quality:
        find_text(text or default_text_name())
    measure, steps = None, len(models) + quality
    if quality:
        measure = _QualityMeasurement(source, text)

    def advance(done: int, name: str, part: float, detail: str) -> None:
        if progress is not None:
            progress((done + part) / steps, f"{name}: {detail}")

    found = [
        _model_facts(model, source, measure, functools.partial(advance, i, model.name)) for i, model in enumerate(models)
    ]
    if not quality:
        return Report(_stored_source(source), tuple(found), None, "not asked for (--no-quality)")
    return source_report(source, found, progress=functools.partial(advance, len(models), source.name))


def source_report(
    source: Model,
    models: Sequence[ModelFacts],
    *,
    windows: int = INPUT_WINDOWS,
    progress: Callable[[float, str], None] | None = None,
) -> Report:
    """The report of models whose facts are known. It measures the inputs of the source's products on the calibration text.

    Args:
        source: the model that they were quantized from.
        models: their facts.
        windows: how many windows of the text.
        progress: called with the fraction that is done, and a text.

    Returns:
        The facts; a source that cannot be run has no inputs, but the reason.
    """

    def advance(done: int, layers: int) -> None:
        if progress is not None:
            progress(0.99 * done / layers, "activations")

    inputs, why_not = None, ""
    try:
        inputs = measured_inputs(source, calibration_data(source, windows=windows), progress=advance)
    except (QuantError, UnsupportedError) as error:
        why_not = str(error)
    return Report(_stored_source(source), tuple(models), inputs, why_not)


def _stored_source(source: Model) -> StoredModel:
    return _stored_model(source, file_bytes(source.path))


def _model_facts(
    model: Model, source: Model, quality: "_QualityMeasurement | None", advance: Callable[[float, str], None]
) -> ModelFacts:
    """Everything about one model."""
    measured, why_not = None, "not asked for (--no-quality)"
    if quality is not None:
        measured, why_not = quality.of(model, lambda done, total: advance(0.5 * done / total, "quality"))
    advance(0.5, "weights")
    if measured is not None and measured.sqnr_db.keys() <= model.info.keys():
        sqnr, notes = measured.sqnr_db, measured.notes
    else:  # not measured, or by names in the files
        sqnr, notes = weight_sqnr(model, source)
    facts = origin(model.facts)
    named = _text(facts, "source", "name")
    if named and named != source.name:
        notes = (*notes, f"its manifest says that it was made from {named}, not from {source.name}")
    recipe, method = _text(facts, "recipe"), ""
    if recipe:
        method = scaled_name(_text(facts, "scaling", "name"), _text(facts, "method", "name") or "rtn")
    made = None
    if recipe and not recipe.endswith(".json"):  # a manifest names no file that we would read
        made = _plan(source, recipe)
    stored = _stored_model(model, file_bytes(model.path))
    found = _facts(model, source, stored, made, sqnr, lambda part: advance(0.8 + 0.2 * part, "histograms"))
    return dataclasses.replace(
        found,
        source=named,
        recipe=recipe,
        method=method,
        quality=measured and _measured_quality(measured),
        why_no_quality=why_not,
        notes=(*model.notes, *notes),
        experts=_calibrated_experts(facts),
    )


def candidate_facts(candidate: Candidate, base: Baseline, text: str, outcome: Outcome | None) -> ModelFacts:
    """The facts of a model that was quantized in memory and compared with its source.

    Args:
        candidate: the model, with its parameters.
        base: the source, run by fewbit's decoder.
        text: the name of the text of its windows.
        outcome: where it was written, if it was.

    Returns:
        The facts; nothing is evaluated again.
    """
    source, plan = base.model, candidate.plan
    values = paths_of_params(candidate.params, source.runnable_config())
    info = {path: _info(value, source.info[path].dtype) for path, value in values.items()}
    facts = {"recipe": plan.recipe, "source": {"name": source.name}}
    path, kind, on_disk = Path(candidate.recipe), "in memory", None
    if outcome is not None:
        path, kind, on_disk = outcome.path, "fewbit", outcome.file_bytes
    model = dataclasses.replace(source, path=path, kind=kind, info=info, load=values.__getitem__, facts=facts)
    sqnr = {
        one.path: one.sqnr_db if one.sqnr_db is not None else math.inf for one in candidate.tensors if len(one.shape) > 1
    }
    found = _facts(model, source, _stored_model(model, on_disk), plan, sqnr)
    quality = MeasuredQuality(text, base.windows.shape[1] - 1, base.engine.title, candidate.quality)
    return dataclasses.replace(found, source=source.name, recipe=plan.recipe, method="rtn", quality=quality)


def quantized_report(
    model: Model,
    source: Model,
    plan: Plan,
    quality: Quality | None,
    *,
    method: str,
    why_no_quality: str = "",
    progress: Callable[[float, str], None] | None = None,
) -> Report:
    """The report of a model that was just quantized. Its quality is not measured again.

    Args:
        model: the model, loaded from where it was written.
        source: its source.
        plan: the plan by which it was quantized.
        quality: its quality against the source, if it was measured.
        method: the name of the method.
        why_no_quality: why it was not.
        progress: called with the fraction that is done, and a text.

    Returns:
        The facts; without a quality no activations are measured, either.
    """
    sqnr, notes = weight_sqnr(model, source) if quality is None else (quality.sqnr_db, quality.notes)
    advance = progress or (lambda part, detail: None)
    stored, charts = _stored_model(model, file_bytes(model.path)), 1.0 if quality is None else 0.5
    facts = dataclasses.replace(
        _facts(model, source, stored, plan, sqnr, lambda part: advance(charts * part, "histograms")),
        source=source.name,
        recipe=plan.recipe,
        method=method,
        quality=quality and _measured_quality(quality),
        why_no_quality=why_no_quality,
        notes=(*model.notes, *notes, *plan.notes),
        experts=_calibrated_experts(origin(model.facts)),
    )
    if quality is None:
        return Report(_stored_source(source), (facts,), None, why_no_quality)
    return source_report(source, [facts], progress=lambda part, detail: advance(charts + (1 - charts) * part, detail))


def _info(value: Value, dtype: str) -> TensorInfo:
    """The description of a parameter in memory."""
    if isinstance(value, QArray):
        return TensorInfo(value.shape, dtype, value.scheme.name, int(value.nbytes), value.scheme)
    return TensorInfo(value.shape, np.dtype(value.dtype).name, np.dtype(value.dtype).name, int(value.nbytes))


def _facts(
    model: Model,
    source: Model,
    stored: StoredModel,
    made: Plan | None,
    sqnr: Mapping[str, float],
    progress: Callable[[float], None] = lambda part: None,
) -> ModelFacts:
    """What the weights of a model say: its tensors and their histograms, one tensor in memory at a time."""
    tensors, histograms = _tensors(model, source, made, sqnr), []
    charted = [tensor for tensor in tensors if tensor.path in sqnr and model.info[tensor.path].scheme is not None]
    for i, tensor in enumerate(charted):
        progress(i / len(charted))
        histograms.append(_histogram(model, source, tensor, sqnr[tensor.path]))
    return ModelFacts(stored, "", "", "", None, "", tensors, tuple(histograms), ())


def _check_same_parameters(model: Model, source: Model) -> None:
    """Refuses a source with other parameters than the model's.

    Names and shapes are compared, unless the rotations differ: rotating may add some.
    """
    if model.facts.get("rotation_seed") != source.facts.get("rotation_seed"):
        return
    advice = "pass the model that it was quantized from as the source (--against)"
    for path, info in model.info.items():
        if path not in source.info:
            raise QuantError(f"{model.path} has {path}, which {source.path} lacks; {advice}")
        if source.info[path].shape != info.shape:
            raise QuantError(
                f"{path} has shape {info.shape} in {model.path} and {source.info[path].shape} in {source.path}; {advice}"
            )
    if missing := [path for path in source.info if path not in model.info]:
        raise QuantError(
            f"{model.path} lacks {', '.join(missing[:5])} of {source.path} ({len(missing)} parameters); {advice}"
        )


class _QualityMeasurement:
    """Measures models against a source. The source is evaluated once for the models of one engine and tokenizer.

    Args:
        source: the model that they were quantized from.
        text: the text, as for `models.find_text`; None takes the default text.
    """

    def __init__(self, source: Model, text: str | None):
        self._source, self._text = source, text
        self._base: tuple[str, Baseline] | None = None  # its logits take up to 1 GiB, so only the last one is kept

    def of(self, model: Model, progress: Progress) -> tuple[Quality | None, str]:
        """The quality of a model, or why it cannot be measured. A text that the user chose must fit."""
        try:
            return self._compared(model, progress), ""
        except UnsupportedError as error:
            return None, str(error)
        except QuantError as error:
            if self._text is not None:
                raise
            return None, str(error)

    def _compared(self, model: Model, progress: Progress) -> Quality:
        name, source = choose_engine("auto", model, self._source), self._source
        if name == "transformers":
            model, source = as_stored(model), as_stored(source)
        found = find_text(self._text or default_text_name())
        windows = evaluation_windows(model, found.content, engine=engine_of(model, name))
        if self._base is None or self._base[0] != name or not np.array_equal(self._base[1].windows, windows):
            self._base = None
            self._base = name, baseline(source, windows, engine=name, progress=part_of(progress, 0))
        return compared(model, self._base[1], text=found.name, progress=part_of(progress, 1))


def _measured_quality(quality: Quality) -> MeasuredQuality:
    assert quality.against is not None  # a source was given
    return MeasuredQuality(quality.text, quality.window, quality.engine, quality.against)


def _stored_model(model: Model, on_disk: int | None) -> StoredModel:
    return StoredModel(model.name, str(model.path), model.kind, model.size, on_disk, model.nbytes)


def _text(facts: Mapping[str, Any], *keys: str) -> str:
    """The text under these keys of a manifest. Empty if there is none: the manifest may be anyone's."""
    value: Any = facts
    for key in keys:
        if not isinstance(value, Mapping):
            return ""
        value = value.get(key)
    if isinstance(value, str):
        return value
    return ""


def _calibrated_experts(facts: Mapping[str, Any]) -> CalibratedExperts | None:
    """What a manifest says of the tokens of experts. It may be anyone's, so what has another form counts as nothing."""
    method = facts.get("method")
    if not isinstance(method, Mapping) or not isinstance(method.get("expert_tokens"), Mapping):
        return None
    counts = {}
    for path, tokens in method["expert_tokens"].items():
        if not isinstance(tokens, Sequence) or not tokens or not all(isinstance(n, int) and n >= 0 for n in tokens):
            return None
        counts[str(path)] = tuple(tokens)
    calibration = method.get("calibration")
    windows = calibration.get("windows") if isinstance(calibration, Mapping) else None
    unseen = _text(facts, "method", "calibration", "unseen_experts")
    if not isinstance(windows, Sequence) or not all(isinstance(n, int) for n in windows) or unseen not in UNSEEN:
        return None
    return CalibratedExperts(_text(facts, "method", "calibration", "text"), math.prod(windows), unseen, counts)


def _tensors(model: Model, source: Model, made: Plan | None, sqnr: Mapping[str, float]) -> tuple[TensorFacts, ...]:
    """A row for each tensor, with the reasons of the plan if it is known."""
    roles = made or _plan(source, _NOTHING)
    rows: dict[str, PlanRow] = {}
    if roles is not None:
        rows = {row.path: row for row in roles}
    found = []
    for path, info in model.info.items():
        texts, numbers = split_numbers(path)
        role, is_quantized = Role.UNKNOWN, _is_quantized(info)
        if path in rows:
            role = rows[path].role
        reason, bytes_before = _role_reason(role, is_quantized), None
        if path in source.info:
            bytes_before = source.info[path].nbytes
        if made is not None and path in rows:
            reason = _planned_reason(made.recipe, rows[path], is_quantized)
        found.append(
            TensorFacts(
                path=path,
                kind="*".join(texts),
                layer=next(iter(numbers), None),
                shape=info.shape,
                stored=info.stored,
                is_quantized=is_quantized,
                role=str(role),
                reason=reason,
                bytes_before=bytes_before,
                bytes_after=info.nbytes,
                sqnr_db=sqnr.get(path),
            )
        )
    return tuple(found)


def _plan(source: Model, recipe: RecipeSpec) -> Plan | None:
    """The plan of a recipe for the source. None if there is no such recipe, or it does not fit."""
    try:
        return plan_model(source, recipe=recipe)
    except (QuantError, UnsupportedError):
        return None


def _planned_reason(recipe: str, row: PlanRow, is_quantized: bool) -> str:
    """Why the recipe does not quantize a tensor, or a note about it."""
    is_planned = row.policy is not None
    if is_planned == is_quantized or is_quantized:
        return row.reason
    return f"recipe {recipe} quantizes it, but the file has it in float"


def _role_reason(role: Role, is_quantized: bool) -> str:
    """Why a tensor of this role is usually left in float."""
    if is_quantized or role == Role.UNKNOWN or role in QUANTIZED_ROLES:
        return ""
    return f"rules leave {role.words} in float by default"


def _is_quantized(info: TensorInfo) -> bool:
    """Whether the file stores a tensor quantized. That is as a QArray, or in fewer bits than it decodes to."""
    return info.scheme is not None or info.nbytes < math.prod(info.shape) * jnp.dtype(info.dtype).itemsize


def _histogram(model: Model, source: Model, tensor: TensorFacts, sqnr_db: float) -> Histogram:
    """The float weights over their blocks' scales, and the numbers of the format."""
    q, x = model.load(tensor.path), np.asarray(decoded(source.load(tensor.path)), np.float32)
    assert isinstance(q, QArray)
    units = _in_units(x, q)
    numbers = np.unique(q.scheme.format.values())
    numbers = numbers[np.isfinite(numbers)]
    smallest, largest = float(numbers[0]), float(numbers[-1])
    reach = largest - smallest
    low = max(smallest - reach, min(smallest - 0.05 * reach, float(units.min(initial=smallest))))
    high = min(largest + reach, max(largest + 0.05 * reach, float(units.max(initial=largest))))
    low, high = float(np.float32(low)), float(np.float32(high))  # as units are, so that clipped ones stay inside
    # A scale that was rounded down leaves the largest element a little beyond the largest number.
    below, above = smallest - (numbers[1] - numbers[0]) / 2, largest + (numbers[-1] - numbers[-2]) / 2
    outside = np.count_nonzero(units < below) + np.count_nonzero(units > above)
    counts, _ = np.histogram(np.clip(units, low, high, out=units), bins=_BINS, range=(low, high))
    return Histogram(
        path=tensor.path,
        stored=tensor.stored,
        format=q.scheme.format.name,
        sqnr_db=sqnr_db,
        amax=float(np.abs(x).max(initial=0.0)),
        low=low,
        high=high,
        counts=tuple(counts.tolist()),
        numbers=tuple(numbers.tolist()),
        clipped=float(outside / max(units.size, 1)),
    )


def _in_units(x: np.ndarray, q: QArray) -> np.ndarray:
    """`(x - offset) / scale` of each element, flat. Blocks of scale zero and what is not finite are left out."""
    units = np.ravel(in_units(jnp.asarray(x), expanded_scale(q), expanded_offset(q)))
    return units[np.isfinite(units)]
