"""Plans with the scheme of each weight chosen for a budget of bits.

The loss of quantizing a weight is estimated by a second-order expansion: for parameters `W + E` the KL divergence of a model from
itself is `E^T F E / 2`, with the Fisher information `F`, the mean of `g g^T` over texts that the model itself continues, where `g`
is the gradient of their log-likelihood. So one gradient for each window serves every weight and every scheme. The divergence of the
model with one group of weights in one scheme can be measured, too, by a run of the model for each.
"""

import dataclasses
import functools
import itertools
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key
from scipy.stats import rankdata

from ...array.scheme import scheme as as_scheme
from ...errors import QuantError, UnsupportedError
from ...io.journal import Journal
from ...io.parts import FinishedParts
from ...methods.allocation import Choice, allocate
from ...models.config import DecoderConfig
from ...models.decoder import forward, stack_layers
from ...models.joined import stack_experts
from ...models.names import params_from_paths, shapes
from ...ops.policy import Policy
from ...recipe.method import NEAREST, AbstractMethod
from ...recipe.plan import Plan, recounted
from ...recipe.quantize_row import quantize_finite
from ...recipe.rows import PlanRow
from ..convert.provenance import file_hashes, method_facts, provenance, versions
from ..model import Model, decoded, is_kept
from .calibrated import calibrated_weights
from .calibration_data import CalibrationData

WINDOWS = 64
WINDOW = 64
MEASURED_WINDOWS = 8


@dataclasses.dataclass(frozen=True)
class Sensitivity:
    """What each scheme costs weights that get the same one.

    Attributes:
        paths: the weights: q, k and v of a layer, its gate and up, the same weight of all experts, or a single one.
        estimates: the estimated KL divergence by scheme, in nats a token.
        nbytes: their bytes by scheme.
        measured: the measured KL divergence by scheme, with these weights alone in it; empty where it was not measured.
    """

    paths: tuple[str, ...]
    estimates: dict[str, float]
    nbytes: dict[str, int]
    measured: dict[str, float] = dataclasses.field(default_factory=dict)

    @property
    def losses(self) -> dict[str, float]:
        """The KL divergence by scheme, measured if it was."""
        return self.measured or self.estimates


def sensitivities(
    model: Model,
    plan: Plan,
    candidates: Sequence[str],
    windows: Int[np.ndarray, "N T"],
    *,
    method: AbstractMethod = NEAREST,
    calibration: CalibrationData | None = None,
    seed: int = 0,
    measure: bool = False,
    refusals: Callable[[Plan], Mapping[str, str]] = lambda plan: {},
    progress: Callable[[int, int], None] | None = None,
    out: str | os.PathLike[str] | None = None,
) -> tuple[Sensitivity, ...]:
    """Estimates what each scheme would cost the weights that a plan quantizes.

    The float parameters, their gradient, and the errors of all candidates in bfloat16 are in memory. With `out`, finished layers
    and windows are kept next to it until `forget` is called: the same call resumes after an interruption.

    Args:
        model: a model that can be run.
        plan: its plan; what it leaves in float has no sensitivity.
        candidates: the names of schemes.
        windows: token ids; a gradient is computed for each window.
        method: how codes are chosen.
        calibration: what a method with statistics learns from.
        seed: of the labels, which are drawn from the model's own predictions.
        measure: whether the losses are measured, too, on the first `MEASURED_WINDOWS` windows: a run of the model for each candidate and
            group of weights.
        refusals: why weights of a plan cannot be stored, by path; such a candidate is not considered for these weights.
        progress: called with the number of steps done and of all steps: a window is one, a layer by a method with calibration
            data for each candidate another.
        out: the output that the measurements are for; None: nothing is kept.

    Returns:
        The sensitivities, in the order of the plan.

    Raises:
        QuantError: for an unknown scheme, one that fits no weight, and a weight that none fits.
        UnsupportedError: when the model cannot be run.
    """
    config, groups = model.runnable_config(), tied(row for row in plan if row.policy is not None)
    plans = _plans(plan, candidates, groups, refusals)
    before, after = 0, 0
    if method.collect:
        before = config.layers * len(candidates)
    if measure:
        after = len(groups)

    def report(done: int) -> None:
        if progress is not None:
            progress(done, before + len(windows) + after)

    def errors(parts: Mapping[str, FinishedParts]) -> dict[str, dict[str, Array]]:
        found = {}
        for i, (name, one) in enumerate(plans.items()):
            on_layer = functools.partial(lambda start, done, _: report(start + done), i * config.layers)
            found[name] = _errors(model, one, method, calibration, parts.get(name), on_layer)
        return found

    def lines(errors: Mapping[str, Mapping[str, Array]], begin: int) -> Iterator[dict[str, Any]]:
        done, stop = begin, len(windows)
        squares = _squared_scores(model, groups, windows, errors, seed, begin=begin)
        losses = _measured_losses(model, groups[max(begin - stop, 0) : after], windows[:MEASURED_WINDOWS], errors)
        for line in itertools.chain(squares, losses):
            done += 1
            yield line
            report(before + done)

    if out is None:
        kept = list(lines(errors({}), 0))
    else:
        with Journal(_kept_at(out), _job(model, plans, windows, method, calibration, seed)) as journal:
            kept = _kept_lines(journal, len(windows) + after, errors, lines, plans)
    squares, measured = kept[: len(windows)], kept[len(windows) :]
    sums = {name: sum((np.asarray(one[name]) for one in squares), np.zeros(len(groups))) for name in candidates}
    found = []
    for index, paths in enumerate(groups):
        nbytes = _sizes(plans, paths)
        estimates = {name: float(sums[name][index] / (2 * windows.size)) for name in nbytes}
        losses = {name: measured[index][name] for name in nbytes} if measure else {}
        found.append(Sensitivity(paths, estimates, nbytes, losses))
    return tuple(found)


def _squared_scores(
    model: Model,
    groups: tuple[tuple[str, ...], ...],
    windows: np.ndarray,
    errors: Mapping[str, Mapping[str, Array]],
    seed: int,
    *,
    begin: int,
) -> Iterator[dict[str, list[float]]]:
    """The squared scores of the groups for each window from `begin` on, by candidate."""
    if begin >= len(windows):
        return
    params = _float_params(model)
    for i in range(begin, len(windows)):
        key, tokens = jax.random.fold_in(jax.random.key(seed), i), jnp.asarray(windows[i][None])
        scores = _scores(params, errors, tokens, key, config=model.runnable_config(), groups=groups)
        yield {name: np.square(np.asarray(found, np.float64)).tolist() for name, found in scores.items()}


def _measured_losses(
    model: Model, groups: Sequence[tuple[str, ...]], windows: np.ndarray, errors: Mapping[str, Mapping[str, Array]]
) -> Iterator[dict[str, float]]:
    """The KL divergence of the model with one group alone in a candidate from the float model, in nats a token, by candidate."""
    if not groups:
        return
    params, config, tokens = _float_params(model), model.runnable_config(), jnp.asarray(windows)
    exact = _log_probabilities(params, tokens, config=config)
    for paths in groups:
        found = {}
        for name, by_path in errors.items():
            if all(path in by_path for path in paths):
                changed = {path: params[path] + by_path[path].astype(jnp.float32) for path in paths}
                found[name] = float(_divergence(params | changed, exact, tokens, config=config))
        yield found


def _float_params(model: Model) -> dict[str, Array]:
    """The parameters in float32 by path."""
    return {path: jnp.asarray(decoded(model.load(path)), jnp.float32) for path in shapes(model.runnable_config())}


def _kept_lines(
    journal: Journal,
    count: int,
    errors: Callable[[Mapping[str, FinishedParts]], Mapping[str, Mapping[str, Array]]],
    lines: Callable[[Mapping[str, Mapping[str, Array]], int], Iterator[dict[str, Any]]],
    names: Iterable[str],
) -> list[dict[str, Any]]:
    """The lines of a measurement. Those that an earlier run noted in the journal are not computed again."""
    parts = {name: FinishedParts(journal, f"candidate-{i}") for i, name in enumerate(names)}
    begin = len(journal.lines)
    if begin < count:
        for found in lines(errors(parts), begin):
            journal.note({"scores": found})
    for one in parts.values():
        one.clear()
    return [line["scores"] for line in journal.lines]


def check_bits(
    plan: Plan,
    candidates: Sequence[str],
    bits: float,
    refusals: Callable[[Plan], Mapping[str, str]] = lambda plan: {},
    check: Callable[[Plan], None] = lambda plan: None,
) -> None:
    """Refuses candidates that cannot make a plan of so many bits per weight; before they are measured.

    Args:
        plan: as in `allocated`.
        candidates: as in `sensitivities`.
        bits: as in `allocated`.
        refusals: as in `sensitivities`.
        check: refuses a plan that the layout cannot store as a whole, such as one of two group sizes.

    Raises:
        QuantError: when even the smallest candidates take more.
        UnsupportedError: for two candidates that `check` refuses in one plan.
    """
    groups = tied(row for row in plan if row.policy is not None)
    plans = _plans(plan, candidates, groups, refusals)
    _check_smallest(plan, {paths: _sizes(plans, paths).values() for paths in groups}, bits)
    for pair in itertools.combinations(plans, 2):
        try:
            check(_mixture(plan, plans, pair, groups))
        except UnsupportedError as error:
            raise UnsupportedError(f"candidates {' and '.join(pair)} cannot be in one model: {error}") from error


def _mixture(plan: Plan, plans: Mapping[str, Plan], pair: Sequence[str], groups: Sequence[tuple[str, ...]]) -> Plan:
    """The plan with two candidates, as often each as they fit; with another one for weights that neither of them can store."""
    used, taken = dict.fromkeys(plans, 0), dict[str, Plan]()
    for paths in groups:
        fitting = [name for name in pair if _has_all(plans[name], paths)]
        name = min(fitting or [name for name in plans if _has_all(plans[name], paths)], key=used.__getitem__)
        used[name] += 1
        taken |= dict.fromkeys(paths, plans[name])
    rows = tuple(taken[row.path][row.path] if row.path in taken else row for row in plan)
    return dataclasses.replace(plan, rows=rows)


def _check_smallest(plan: Plan, sizes: Mapping[tuple[str, ...], Iterable[int]], bits: float) -> int:
    """Checks that the smallest choices fit. Returns the bytes of everything that is no choice."""
    size, chosen = sum(row.size for row in plan), {path for paths in sizes for path in paths}
    fixed = sum(row.bytes_after for row in plan if row.path not in chosen)
    smallest = fixed + sum(map(min, sizes.values()))
    if not math.isfinite(bits):
        raise QuantError(f"bits per weight are {bits}; pass a finite number, as in 4.5")
    if 8 * smallest > bits * size:
        raise QuantError(f"{bits} bits per weight cannot be reached: the smallest candidates take {8 * smallest / size:.3f}")
    return fixed


def _plans(
    plan: Plan,
    candidates: Sequence[str],
    groups: Sequence[tuple[str, ...]],
    refusals: Callable[[Plan], Mapping[str, str]],
) -> dict[str, Plan]:
    """The plan with each candidate for all weights that it can store; each weight needs one."""
    plans = {name: _storable(_with_scheme(plan, name), name, refusals) for name in candidates}
    for paths in groups:
        if not any(_has_all(one, paths) for one in plans.values()):
            reason = refusals(_with_scheme(plan, candidates[0])).get(paths[0], "")
            raise QuantError(f"none of {', '.join(candidates)} can store {paths[0]}: {reason}")
    return plans


def _sizes(plans: Mapping[str, Plan], paths: Sequence[str]) -> dict[str, int]:
    """The bytes of weights by candidate, of those that can store them all."""
    fitting = {name: one for name, one in plans.items() if _has_all(one, paths)}
    return {name: sum(one[path].bytes_after for path in paths) for name, one in fitting.items()}


def forget(out: str | os.PathLike[str]) -> None:
    """Removes what `sensitivities` kept for an output, when that is complete."""
    Journal(_kept_at(out), {}).remove()


def _kept_at(out: str | os.PathLike[str]) -> Path:
    """The path whose journal has the measurements for an output: the job that writes the output has a journal of its own."""
    return Path(out).with_name(f"{Path(out).name}.bits")


def _job(
    model: Model,
    plans: Mapping[str, Plan],
    windows: np.ndarray,
    method: AbstractMethod,
    calibration: CalibrationData | None,
    seed: int,
) -> dict[str, Any]:
    """What identifies measurements: equal ones have equal results."""
    plan = next(iter(plans.values()))
    facts = provenance(model, plan, {"sha256": file_hashes(model)}) | method_facts(method, calibration)
    candidates = {name: one.sha256 for name, one in plans.items()}
    facts |= {"config": model.runnable_config().to_json(), "windows": windows.tolist(), "seed": seed}
    return {**facts, "candidates": candidates, "versions": versions()}


def fitting(plan: Plan, candidates: Iterable[str], refusals: Callable[[Plan], Mapping[str, str]]) -> list[str]:
    """The candidates that can store any of the weights of a plan. `refusals` is as for `sensitivities`.

    Raises:
        QuantError: when there is none.
    """
    weights = [row.path for row in plan if row.policy is not None]
    refused = {name: refusals(_with_scheme(plan, name)) for name in candidates}
    found = [name for name in refused if len(refused[name]) < len(weights)]
    if refused and not found:
        path, reason = next(iter(next(iter(refused.values())).items()))
        raise QuantError(
            f"none of the default candidates {', '.join(refused)} fits a weight: {path}: {reason}; name --candidates that fit"
        )
    return found


def allocated(plan: Plan, found: Sequence[Sensitivity], bits: float) -> Plan:
    """The plan with the best scheme for each weight under a budget.

    Args:
        plan: the plan whose weights were measured.
        found: their sensitivities.
        bits: how many bits an element of the model may take on average, all parameters and their scales counted.

    Returns:
        The plan; its rows say what their scheme is estimated to cost.

    Raises:
        QuantError: when the smallest schemes take more.
    """
    fixed = _check_smallest(plan, {one.paths: one.nbytes.values() for one in found}, bits)
    size, items = sum(row.size for row in plan), {}
    for one in found:
        items[one.paths[0]] = [Choice(name, one.nbytes[name], loss) for name, loss in one.losses.items()]
    taken = allocate(items, int(bits * size / 8) - fixed)
    by_path = {path: one for one in found for path in one.paths}
    rows = []
    for row in plan:
        if (group := by_path.get(row.path)) is not None:
            choice = taken[group.paths[0]]
            reason = f"{'measured' if group.measured else 'estimated'} KL {choice.loss:.2g}"
            if len(group.paths) > 1:
                reason += f" of {len(group.paths)} weights together"
            row = dataclasses.replace(_row_with_scheme(row, choice.name), reason=reason)
        rows.append(row)
    names = dict.fromkeys(name for one in found for name in one.losses)
    total = sum(choice.loss for choice in taken.values())
    notes = [f"the estimated KL divergence of all weights together is {total:.3g} nats a token"]
    if any(one.measured for one in found):
        notes = [f"the KL divergences measured for each of {len(found)} groups of weights sum to {total:.3g} nats a token"]
        if ranks := [f"{correlation:.2f} for {name}" for name, correlation in rank_correlations(found).items()]:
            notes.append(f"the rank correlation of the measured and the estimated ones is {', '.join(ranks)}")
    return dataclasses.replace(
        plan, rows=tuple(rows), recipe=f"{bits:g} bits of {', '.join(names)}", notes=(*plan.notes, *notes)
    )


def rank_correlations(found: Iterable[Sensitivity]) -> dict[str, float]:
    """Spearman's rank correlation of measured and estimated losses, by scheme.

    Schemes whose losses are all equal, measured or estimated, have none: such as the one that a file has its weights in already.
    """
    pairs: dict[str, list[tuple[float, float]]] = {}
    for one in found:
        for name, loss in one.measured.items():
            pairs.setdefault(name, []).append((one.estimates[name], loss))
    return {
        name: float(np.corrcoef(rankdata(some, axis=0), rowvar=False)[0, 1])
        for name, some in pairs.items()
        if np.ptp(some, axis=0).all()
    }


def tied(rows: Iterable[PlanRow]) -> tuple[tuple[str, ...], ...]:
    """The groups of weights that must have one scheme. They are multiplied at once: q, k and v; qkv and z; gate and up; all experts."""
    groups: dict[str, list[str]] = {}
    for row in rows:
        name = re.sub(r"/experts/\d+/", "/experts/", row.path)
        name = re.sub(r"/attn/(?:[qkvz]|qkv)$", "/attn/qkv", re.sub(r"/(gate|up)$", "/gate+up", name))
        groups.setdefault(name, []).append(row.path)
    return tuple(map(tuple, groups.values()))


def _with_scheme(plan: Plan, name: str) -> Plan:
    """The plan with one scheme for all quantized weights."""
    rows = tuple(row if row.policy is None else _row_with_scheme(row, name) for row in plan)
    return dataclasses.replace(plan, rows=rows)


def _storable(plan: Plan, name: str, refusals: Callable[[Plan], Mapping[str, str]]) -> Plan:
    """The plan without the weights that cannot be stored. A scheme that fits none of them is an error."""
    refused = refusals(plan)
    rows = tuple(dataclasses.replace(row, policy=None) if row.path in refused else row for row in plan)
    if refused and all(row.policy is None for row in rows):
        raise QuantError(f"candidate {name} fits no weight: {next(iter(refused.values()))}")
    return dataclasses.replace(plan, rows=rows)


def _has_all(plan: Plan, paths: Sequence[str]) -> bool:
    """Whether a plan quantizes all of these weights."""
    return all(plan[path].policy is not None for path in paths)


def _row_with_scheme(row: PlanRow, name: str) -> PlanRow:
    """The row with another weight scheme."""
    assert row.policy is not None
    policy: Policy = dataclasses.replace(row.policy, weight=as_scheme(name))
    return recounted(dataclasses.replace(row, policy=policy))


def _errors(
    model: Model,
    plan: Plan,
    method: AbstractMethod,
    calibration: CalibrationData | None,
    parts: FinishedParts | None,
    progress: Callable[[int, int], None],
) -> dict[str, Array]:
    """The error of each weight under a plan, in bfloat16; 0 where the file has the scheme already. `parts` are as for `calibrated_weights`."""
    values, errors = {}, {}
    if method.collect:
        assert calibration is not None
        values = calibrated_weights(model, plan, method, calibration, parts=parts, progress=progress)
    for row in plan:
        if is_kept(row, model.info[row.path]):  # its codes are copied
            errors[row.path] = jnp.zeros(row.shape, jnp.bfloat16)
        elif row.policy is not None:
            x = jnp.asarray(decoded(model.load(row.path)), jnp.float32)
            q = values.get(row.path)
            if q is None:
                q = quantize_finite(x, row, method)
            errors[row.path] = jax.block_until_ready((decoded(q) - x).astype(jnp.bfloat16))
    return errors


@functools.partial(jax.jit, static_argnames="config")
def _log_probabilities(
    params: Mapping[str, Array], tokens: Int[Array, "N T"], *, config: DecoderConfig
) -> Float[Array, "N T V"]:
    tree = stack_layers(stack_experts(params_from_paths(dict(params), config)))
    return jax.nn.log_softmax(forward(tree, tokens, config))


@functools.partial(jax.jit, static_argnames="config")
def _divergence(
    params: Mapping[str, Array], exact: Float[Array, "N T V"], tokens: Int[Array, "N T"], *, config: DecoderConfig
) -> Float[Array, ""]:
    """The mean KL divergence of a model from exact log-probabilities."""
    ours = _log_probabilities(params, tokens, config=config)
    return jnp.mean(jnp.sum(jnp.exp(exact) * (exact - ours), axis=-1))


@functools.partial(jax.jit, static_argnames=("config", "groups"))
def _scores(
    params: Mapping[str, Array],
    errors: Mapping[str, Mapping[str, Array]],
    tokens: Int[Array, "1 T"],
    key: Key[Array, ""],
    *,
    config: DecoderConfig,
    groups: tuple[tuple[str, ...], ...],
) -> dict[str, Float[Array, " groups"]]:
    """`g^T E` of each group of weights, by scheme. `g` is the gradient of the log-likelihood of drawn labels."""

    def log_likelihood(params: Mapping[str, Array]) -> Array:
        tree = stack_layers(stack_experts(params_from_paths(dict(params), config)))
        logits = forward(tree, tokens, config)
        labels = jax.random.categorical(key, jax.lax.stop_gradient(logits))
        chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], axis=-1)
        return jnp.sum(chosen)

    gradient = jax.grad(log_likelihood)(params)
    scores = {}
    for name, by_path in errors.items():
        dots = {path: jnp.vdot(gradient[path], error.astype(jnp.float32)) for path, error in by_path.items()}
        scores[name] = jnp.stack([sum((dots[path] for path in paths if path in dots), jnp.float32(0)) for paths in groups])
    return scores
