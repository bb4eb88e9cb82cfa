"""Runs and prints `fewbit eval`, `compare` and `generate`."""

from pathlib import Path
from typing import Any

from .. import models, workflows
from ..errors import QuantError
from ..evaluate.chart import check_chart_path, save_chart
from ..kvcache import KVPolicy, kv_policy
from .console import emit_json, note, progress_bar, say
from .demo_report import points
from .render import candidate_record, comparison_table, quality_lines, source_notes


def show_quality(
    path: Path,
    *,
    against: Path | None,
    text: str | None,
    tokens: int | None,
    window: int | None,
    kv: str | None,
    kv_scale: str | None,
    json: bool,
) -> None:
    """Evaluates a model on a text and prints its quality."""
    policy = _policy(kv, kv_scale)
    model, reference, against_text = workflows.load(path), None, None
    if against is not None:
        reference, against_text = workflows.load(against), str(against)
    with progress_bar("evaluating", 1) as bar:
        quality = workflows.evaluate(
            model, against=reference, text=text, tokens=tokens, window=window, kv=policy, progress=bar.windows
        )
    if json:
        emit_json({"model": str(path), "against": against_text, "quality": quality})
        return
    for line in quality_lines(quality):
        say(line, wrap=True)


def show_comparison(
    path: Path,
    recipes: str,
    *,
    text: str | None,
    tokens: int | None,
    window: int | None,
    chart: Path | None,
    rotation_seed: int | None,
    json: bool,
) -> None:
    """Quantizes a model in memory by several recipes and prints their results."""
    names = [name.strip() for name in recipes.split(",") if name.strip()]
    if not names or len(set(names)) < len(names):
        raise QuantError(f"--recipes is {recipes!r}; give at least one recipe, each once, separated by commas")
    if chart is not None:
        check_chart_path(chart)
    source = workflows.load(path)
    source.runnable_config()
    if rotation_seed is not None:
        source = workflows.rotated(source, seed=rotation_seed)
    plans = [workflows.plan_model(source, recipe=name) for name in names]
    found = models.find_text(text or models.default_text_name())
    windows = workflows.evaluation_windows(source, found.content, tokens=tokens, window=window)
    with progress_bar("comparing", len(names) + 1) as bar:
        base = workflows.baseline(source, windows)
        candidates = []
        for plan in plans:
            bar.advance(1 + len(candidates), plan.recipe)
            candidates.append(workflows.released(workflows.compare(base, plan)))
    title = f"{source.name} on {base.perplexity.tokens:,} tokens of {found.name}"
    if chart is not None:
        save_chart(chart, points(candidates), reference=base.perplexity.value, title=title)
    if json:
        form = {"model": str(path), "text": found.name, "notes": source_notes(source)}
        emit_json({**form, "float": base.perplexity, "recipes": [candidate_record(c) for c in candidates]})
        return
    for line in source_notes(source):
        say(f"note: {line}", wrap=True)
    say(f"{title}; bytes and bits/weight are those of the arrays")
    say(comparison_table(base, candidates))
    if chart is not None:
        say(f"chart: {chart}")


def show_sample(path: Path, prompt: str, *, kv: str | None, kv_scale: str | None, json: bool, **options: Any) -> None:
    """Generates text after a prompt and prints it; a chat prints the answer only."""
    policy = _policy(kv, kv_scale)
    sample = workflows.generate_text(workflows.load(path), prompt, kv=policy, **options)
    if json:
        emit_json({"model": str(path), **vars(sample)})
        return
    say(sample.text if sample.is_chat else prompt + sample.text)
    note(sample.speed())


def _policy(kv: str | None, per: str | None) -> KVPolicy | None:
    """The KV cache's policy, from the two options."""
    if kv is None and per is not None:
        raise QuantError(f"--kv-scale {per} is about a quantized KV cache; it needs --kv, such as --kv int8")
    if kv is None:
        return None
    schemes = [scheme.strip() for scheme in kv.split(",", 1)]
    return kv_policy(*schemes, per=per or "head")
