"""Runs `fewbit eval` and `fewbit compare`, and prints the results."""

import dataclasses
from pathlib import Path
from typing import Any

from ..errors import QuantError
from ..evaluate.chart import check_chart_path, save_chart
from ..kvcache.policy import KVPolicy
from ..models.installed import default_text_name, find_text
from ..recipe.plan import Plan
from ..workflows.compare import compare, released
from ..workflows.engine import as_stored, choose_engine, transformers_of
from ..workflows.evaluate import baseline, engine_of, evaluate, evaluation_windows
from ..workflows.load import load
from ..workflows.methods.rotate import rotated
from ..workflows.model import Model
from ..workflows.outputs import compare_outputs, evaluate_outputs, model_inputs, output_baseline
from ..workflows.plan import plan_model
from .console import emit_json, say
from .options import comma_separated
from .progress import progress_bar
from .render import activation_lines, candidate_record, chart_points, comparison_table, quality_lines, source_notes
from .render_outputs import output_lines, output_record, output_table


def show_evaluation(
    path: Path,
    against: Path | None,
    *,
    text: str | None,
    tokens: int | None,
    window: int | None,
    kv: KVPolicy | None,
    int8_activations: bool,
    engine: str,
    inputs: Path | None,
    json: bool,
) -> None:
    """Evaluates a model, alone or against a reference, and prints the result."""
    model, reference, against_text = load(path), None, None
    if against is not None:
        reference, against_text = load(against), str(against)
    name = choose_engine(engine, model, reference)
    if name == "transformers":
        model, reference = as_stored(model), reference and as_stored(reference)
    if reference is not None and _has_outputs_only(model, name, inputs):
        if kv is not None:
            raise QuantError("--kv is about causal language models; leave it out")
        if int8_activations:
            raise QuantError("--activations is about causal language models; leave it out")
        with progress_bar("evaluating", 1) as bar:
            found = evaluate_outputs(
                model, reference, inputs=inputs, text=text, tokens=tokens, window=window, progress=bar.examples
            )
        lines = output_lines(found)
    elif inputs is not None:
        raise QuantError("--inputs compares outputs with those of a reference; add --against MODEL")
    else:
        with progress_bar("evaluating", 1) as bar:
            found = evaluate(
                model,
                against=reference,
                text=text,
                tokens=tokens,
                window=window,
                kv=kv,
                int8_activations=int8_activations,
                engine=name,
                progress=bar.windows,
            )
        lines = quality_lines(found)
    if json:
        emit_json({"model": str(path), "against": against_text, "quality": found})
        return
    for line in lines:
        say(line, wrap=True)


def _has_outputs_only(model: Model, engine: str, inputs: Path | None) -> bool:
    """Whether outputs are compared, since inputs are given or the model has no perplexity."""
    if engine == "fewbit":
        if inputs is not None:
            raise QuantError("--inputs needs --engine transformers; fewbit's own decoder reads a text: --text")
        return False
    return inputs is not None or not transformers_of(model).is_language_model


@dataclasses.dataclass(frozen=True)
class _Comparison:
    """What `fewbit compare` prints: records, a title and a table.

    There is one record for the float model, and one for each recipe.
    """

    form: dict[str, Any]
    title: str
    table: str


def show_comparison(
    path: Path,
    recipes: str,
    *,
    text: str | None,
    tokens: int | None,
    window: int | None,
    chart: Path | None,
    rotation_seed: int | None,
    int8_activations: bool,
    engine: str,
    inputs: Path | None,
    json: bool,
) -> None:
    """Quantizes a model in memory by several recipes and prints their results."""
    names = comma_separated("--recipes", recipes)
    if chart is not None:
        check_chart_path(chart)
    source = load(path)
    chosen = choose_engine(engine, source)
    if rotation_seed is not None:
        source = rotated(source, seed=rotation_seed)
    if chosen == "transformers":
        source = as_stored(source)
    has_outputs_only = _has_outputs_only(source, chosen, inputs)
    if has_outputs_only and chart is not None:
        raise QuantError("--chart draws perplexity, and outputs are compared here; leave it out")
    if has_outputs_only and int8_activations:
        raise QuantError("--activations is about causal language models; leave it out")
    plans = [plan_model(source, recipe=name) for name in names]
    if has_outputs_only:
        result = _compared_outputs(source, plans, inputs=inputs, text=text, tokens=tokens, window=window)
    else:
        result = _compared(
            source,
            plans,
            chosen,
            text=text,
            tokens=tokens,
            window=window,
            int8_activations=int8_activations,
            chart=chart,
        )
    if json:
        emit_json({"model": str(path), "notes": source_notes(source), **result.form})
        return
    for line in source_notes(source):
        say(f"note: {line}", wrap=True)
    say(f"{result.title}; bytes and bits/weight are those of the arrays")
    say(result.table)
    if chart is not None:
        say(f"chart: {chart}")


def _compared(
    source: Model,
    plans: list[Plan],
    engine: str,
    *,
    text: str | None,
    tokens: int | None,
    window: int | None,
    int8_activations: bool,
    chart: Path | None,
) -> _Comparison:
    """Compares recipes by perplexity, and draws the chart if it is asked for."""
    found = find_text(text or default_text_name())
    runs = engine_of(source, engine)
    windows = evaluation_windows(source, found.content, tokens=tokens, window=window, engine=runs)
    with progress_bar("comparing", len(plans) + 1) as bar:
        base = baseline(source, windows, engine=engine, int8_activations=int8_activations)
        candidates = []
        for plan in plans:
            bar.advance(1 + len(candidates), plan.recipe)
            candidates.append(released(compare(base, plan)))
    title = f"{source.name} on {base.perplexity.tokens:,} tokens of {found.name}"
    if chart is not None:
        save_chart(chart, chart_points(candidates), reference=base.perplexity.value, title=title)
    form = {"text": found.name, "engine": base.engine.title, "float": base.perplexity}
    form["recipes"] = [candidate_record(c) for c in candidates]
    if engine != "fewbit":
        title += f", by {base.engine.title}"
    return _Comparison(form, title, "\n".join([comparison_table(base, candidates), *activation_lines(candidates)]))


def _compared_outputs(
    source: Model, plans: list[Plan], *, inputs: Path | None, text: str | None, tokens: int | None, window: int | None
) -> _Comparison:
    """Compares recipes by the model's outputs."""
    takes = transformers_of(source).takes
    given = model_inputs(source, takes, inputs=inputs, text=text, tokens=tokens, window=window)
    with progress_bar("comparing", len(plans) + 1) as bar:
        base = output_baseline(source, given)
        candidates = []
        for plan in plans:
            bar.advance(1 + len(candidates), plan.recipe)
            candidates.append(compare_outputs(base, plan))
    form = {"inputs": given.title, "engine": base.engine.title, "recipes": [output_record(c) for c in candidates]}
    title = f"{source.name} on {given.title}, by {base.engine.title}"
    notes = [f"{one.recipe}: {text}" for one in candidates for text in one.quality.notes]
    return _Comparison(form, title, "\n".join([output_table(base, candidates), *notes]))
