"""Options and arguments that several commands have."""

import os
from pathlib import Path
from typing import Annotated

import typer

from ..errors import QuantError

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def path_argument(text: str | os.PathLike[str]) -> Path:
    """The path of an argument; an empty one, which `Path` would take for the working directory, is refused."""
    if not os.fspath(text):
        raise typer.BadParameter("the path is empty")
    return Path(text)


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
        "--recipe", "-r", help="A recipe's name, a scheme's name, or a .json file of rules; 'keep' changes nothing."
    ),
]
Full = Annotated[bool, typer.Option("--full", help="Show every parameter, and not alike layers as one row.")]
Strict = Annotated[
    bool, typer.Option("--strict", help="Refuse where the role of a tensor is unknown, instead of leaving it as it is.")
]
Rotate = Annotated[
    bool,
    typer.Option(
        "--rotate",
        help="First rotate the residual stream at random: same function, weights off their old grid. Needs memory.",
    ),
]
Seed = Annotated[int | None, typer.Option("--seed", help="Draws the rotation; 0 when not given.")]


def rotation_seed(rotate: bool, seed: int | None) -> int | None:
    """What draws the rotation; None without one."""
    if seed is not None and not rotate:
        raise QuantError(f"--seed {seed} draws the rotation; it needs --rotate")
    return (seed or 0) if rotate else None
