"""Runs and prints `fewbit compare`; parses the options of the KV cache."""

from pathlib import Path

from ..errors import QuantError
from ..evaluate.chart import check_chart_path, save_chart
from ..kvcache.policy import KVPolicy, kv_policy
from ..models.installed import default_text_name, find_text
from ..workflows.compare import baseline, compare, released
from ..workflows.evaluate import evaluation_windows
from ..workflows.load import load
from ..workflows.plan import plan_model
from ..workflows.rotate import rotated
from .console import emit_json, progress_bar, say
from .render import candidate_record, chart_points, comparison_table, source_notes


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
    source = load(path)
    source.runnable_config()
    if rotation_seed is not None:
        source = rotated(source, seed=rotation_seed)
    plans = [plan_model(source, recipe=name) for name in names]
    found = find_text(text or default_text_name())
    windows = evaluation_windows(source, found.content, tokens=tokens, window=window)
    with progress_bar("comparing", len(names) + 1) as bar:
        base = baseline(source, windows)
        candidates = []
        for plan in plans:
            bar.advance(1 + len(candidates), plan.recipe)
            candidates.append(released(compare(base, plan)))
    title = f"{source.name} on {base.perplexity.tokens:,} tokens of {found.name}"
    if chart is not None:
        save_chart(chart, chart_points(candidates), reference=base.perplexity.value, title=title)
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


def cache_policy(kv: str | None, per: str | None) -> KVPolicy | None:
    """The KV cache's policy, from the two options."""
    if kv is None and per is not None:
        raise QuantError(f"--kv-scale {per} is about a quantized KV cache; it needs --kv, such as --kv int8")
    if kv is None:
        return None
    schemes = [scheme.strip() for scheme in kv.split(",", 1)]
    return kv_policy(*schemes, per=per or "head")
