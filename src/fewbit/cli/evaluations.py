"""What `fewbit eval`, `compare` and `generate` do and print."""

from pathlib import Path
from typing import Any

from .. import jobs, models
from ..errors import QuantError
from ..evaluate.chart import check_chart_path, save_chart
from ..kvcache import KVPolicy, kv_policy
from .demonstration import points
from .output import emit_json, note, progress_bar, say
from .views import candidate_record, comparison_table, quality_lines, quantized_source_note


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
    """Measures a model on a text and prints its quality."""
    policy = _policy(kv, kv_scale)
    model = jobs.load(path)
    reference = None if against is None else jobs.load(against)
    with progress_bar("evaluating", 1) as bar:
        quality = jobs.evaluate(
            model, against=reference, text=text, tokens=tokens, window=window, kv=policy, progress=bar.windows
        )
    if json:
        emit_json({"model": str(path), "against": None if against is None else str(against), "quality": quality})
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
    """Quantizes a model in memory by several recipes and prints them side by side."""
    names = [name.strip() for name in recipes.split(",") if name.strip()]
    if not names or len(set(names)) < len(names):
        raise QuantError(f"--recipes is {recipes!r}; give at least one recipe, each once, separated by commas")
    if chart is not None:
        check_chart_path(chart)
    opened = jobs.load(path)
    opened.runnable_config()
    source = opened if rotation_seed is None else jobs.rotated(opened, seed=rotation_seed)
    plans = [jobs.plan_model(source, recipe=name) for name in names]
    found = models.find_text(text or models.default_text_name())
    windows = jobs.evaluation_windows(source, found.content, tokens=tokens, window=window)
    with progress_bar("comparing", len(names) + 1) as bar:
        base = jobs.baseline(source, windows)
        candidates = []
        for plan in plans:
            bar.advance(1 + len(candidates), plan.recipe)
            candidates.append(jobs.released(jobs.compare(base, plan)))
    title = f"{opened.name} on {base.perplexity.tokens:,} tokens of {found.name}"
    if chart is not None:
        save_chart(chart, points(candidates), reference=base.perplexity.value, title=title)
    sentence = quantized_source_note(source)
    if json:
        form = {"model": str(path), "text": found.name, "notes": [*source.notes, *([sentence] if sentence else [])]}
        emit_json({**form, "float": base.perplexity, "recipes": [candidate_record(c) for c in candidates]})
        return
    for line in [*source.notes, *([sentence] if sentence else [])]:
        say(f"note: {line}", wrap=True)
    say(f"{title}; bytes and bits/weight are those of the arrays")
    say(comparison_table(base, candidates))
    if chart is not None:
        say(f"chart: {chart}")


def show_sample(path: Path, prompt: str, *, kv: str | None, kv_scale: str | None, json: bool, **options: Any) -> None:
    """Prints what a model writes on from a prompt."""
    policy = _policy(kv, kv_scale)
    sample = jobs.write_on(jobs.load(path), prompt, kv=policy, **options)
    if json:
        emit_json({"model": str(path), **vars(sample)})
    else:
        say(sample.text if sample.is_chat else prompt + sample.text)
        note(sample.speed())


def _policy(kv: str | None, per: str | None) -> KVPolicy | None:
    """How keys and values are kept, as the two options say."""
    if kv is None and per is not None:
        raise QuantError(f"--kv-scale {per} is about keys and values in few bits; it needs --kv, such as --kv int8")
    if kv is None:
        return None
    keys, both, values = kv.partition(",")
    return kv_policy(keys.strip(), values.strip() if both else None, per=per or "head")
