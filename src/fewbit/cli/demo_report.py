"""Runs `fewbit demo`; prints results, writes the report and the chart."""

import dataclasses
import json as jsonlib
import os
import time
from pathlib import Path
from typing import Any

from ..errors import QuantError
from ..evaluate.chart import check_chart_path, save_chart
from ..evaluate.report.facts import ModelFacts
from ..evaluate.report.page import check_page_path, save_page
from ..workflows.compare import released
from ..workflows.demo import RECIPES, SAMPLE_TOKENS, WRITTEN, Demo, DemoStep, demo, steps
from ..workflows.plan import plan_model
from ..workflows.report import candidate_facts, source_report
from .console import emit_json, plain, say
from .progress import peak_memory, progress_bar
from .render import (
    candidate_record,
    chart_points,
    command_lines,
    comparison_lines,
    comparison_table,
    plan_table,
    quantized_source_note,
    size_lines,
    source_notes,
    worst_lines,
)

CHART, REPORT, PAGE = "quality.svg", "report.json", "report.html"
INPUT_WINDOWS = 2
"""The windows of the calibration text on which the page's outliers of inputs are measured."""


def show_demo(
    path: Path, output: Path, *, text: str | None, tokens: int | None, rotation_seed: int | None, full: bool, json: bool
) -> None:
    """Runs the demo and prints it, as text or as one JSON object at the end."""
    _check_earlier_files(output)
    start = time.perf_counter()
    if not json:
        say(f"fewbit demo: {path}, {len(RECIPES)} recipes, one after another")
    with progress_bar("float model", len(RECIPES) + 1) as bar:
        started = demo(path, output, text=text, tokens=tokens, rotation_seed=rotation_seed)
        check_chart_path(output / CHART)
        check_page_path(output / PAGE)
        if not json:
            _show_start(started, full=full)
        done: list[DemoStep] = []
        facts: list[ModelFacts] = []
        bar.advance(1, RECIPES[0])
        for step in steps(started):
            facts.append(candidate_facts(step.candidate, started.base, started.text, step.outcome))
            step = dataclasses.replace(step, candidate=released(step.candidate))
            done.append(step)
            bar.advance(1 + len(done), (*RECIPES, "")[len(done)])
            if not json:
                say("\n".join(step_lines(step, started)))
    candidates = [step.candidate for step in done]
    reference = started.base.perplexity
    title = f"{started.base.model.name} on {reference.tokens:,} tokens of {started.text}"
    save_page(output / PAGE, source_report(started.base.model, facts, windows=INPUT_WINDOWS))
    save_chart(output / CHART, chart_points(candidates), reference=reference.value, title=title)
    form = plain(report(started, done))
    form_text = jsonlib.dumps(form, ensure_ascii=False, indent=1, allow_nan=False)
    (output / REPORT).write_text(form_text + "\n", encoding="utf-8")
    seconds = time.perf_counter() - start
    if json:
        emit_json({**form, "seconds": seconds})
        return
    _show_end(started, done, output, seconds)


def _check_earlier_files(output: Path) -> None:
    """Refuses a directory with files that the demo would replace and did not write: it writes its page before the others."""
    for name in (CHART, REPORT):
        if os.path.lexists(output / name) and not os.path.lexists(output / PAGE):
            raise QuantError(
                f"{output / name} is not of an earlier demo, which writes a {PAGE}, too; choose another --output"
            )


def step_lines(step: DemoStep, started: Demo) -> list[str]:
    """The lines of one recipe's result."""
    candidate = step.candidate
    lines = ["", f"== {candidate.recipe} =="]
    if step.outcome is not None:
        lines += size_lines(step.outcome, started.base.model)
        lines.append("  (the results below are of the model loaded from there)")
    else:
        lines.append(f"  arrays, in memory: {candidate.nbytes:,} bytes ({candidate.bits_per_weight:.3f} bits/weight)")
        lines += worst_lines(candidate.worst)
    lines += [f"  perplexity {candidate.quality.candidate}", *comparison_lines(candidate.quality)]
    return [*lines, f"  generates: {one_line(step.sample.text)}"]


def report(started: Demo, done: list[DemoStep]) -> dict[str, Any]:
    """The results as JSON, without times, so that the report is reproducible."""
    base = started.base
    return {
        "model": base.model.name,
        "text": started.text,
        "notes": source_notes(base.model),
        "prompt": started.sample.prompt,
        "float": {"perplexity": plain(base.perplexity), "sample": started.sample.text},
        "recipes": [_step_form(step) for step in done],
    }


def one_line(text: str) -> str:
    """Joins the words of a text by single spaces."""
    return " ".join(text.split())


def _show_start(started: Demo, *, full: bool) -> None:
    base = started.base
    for line in source_notes(base.model):
        say(f"note: {line}")
    if quantized_source_note(base.model):
        say("note: for a fair baseline, `fewbit demo --rotate` first rotates the weights of this quantized source.")
    say(plan_table(plan_model(base.model, recipe=RECIPES[-1]), full=full))
    say(f"float model on {base.perplexity.tokens:,} tokens of {started.text}: perplexity {base.perplexity}")
    say(f"for {started.sample.prompt!r} (at most {SAMPLE_TOKENS} tokens) it generates: {one_line(started.sample.text)}")


def _show_end(started: Demo, done: list[DemoStep], output: Path, seconds: float) -> None:
    say()
    say(comparison_table(started.base, [step.candidate for step in done]))
    say(f"bytes are those of the arrays; the {WRITTEN} model is written to {output / f'model-{WRITTEN}'}")
    for line in command_lines(output / f"model-{WRITTEN}", started.source, can_run=True, can_evaluate=True):
        say(line)
    say(f"chart:     {output / CHART}")
    say(f"report:    {output / PAGE}; the numbers as JSON: {output / REPORT}")
    peak = peak_memory()
    say(f"{seconds:.0f} seconds" + ("" if peak is None else f", peak memory {peak / 1e9:.2f} GB"))


def _step_form(step: DemoStep) -> dict[str, Any]:
    record = {key: value for key, value in candidate_record(step.candidate).items() if not key.startswith("seconds")}
    written = None
    if step.outcome is not None:
        written = {"file_bytes": step.outcome.file_bytes, "file_bits_per_weight": step.outcome.file_bits_per_weight}
    return {**record, "sample": step.sample.text, "written": written}
