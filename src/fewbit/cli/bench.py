"""The command that measures this machine: bench."""

from pathlib import Path
from typing import Annotated

import typer

from .app import app
from .options import Json, path_argument


@app.command()
def bench(
    schemes: Annotated[
        str | None,
        typer.Option(
            "--schemes", "-s", help="Schemes of the weight, separated by commas; those that kernels read when not given."
        ),
    ] = None,
    sizes: Annotated[
        str | None,
        typer.Option("--sizes", help="Sizes of the square weight, separated by commas; 4096, with --tune 512,2048,4096."),
    ] = None,
    rows: Annotated[
        str | None, typer.Option("--rows", help="Rows of x, separated by commas; 1,256, with --tune 1,8,64,256.")
    ] = None,
    rounds: Annotated[
        int | None, typer.Option("--rounds", min=1, help="How many times each product runs; 15, with --tune 7.")
    ] = None,
    tune: Annotated[bool, typer.Option("--tune", help="Keep the times of this machine, for fb.explain to tell.")] = False,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="PATH",
            parser=path_argument,
            help="The directory for the table of --tune; your cache when not given.",
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Measures products with quantized weights on this machine, and says which scheme is fastest.

    Copy bandwidth and rates of dense products come first. Each product is checked before any is timed, takes turns with the
    dense float32 product, and reads its weight from memory.
    """
    from .times import show_times

    show_times(schemes=schemes, sizes=sizes, rows=rows, rounds=rounds, tune=tune, output=output, json=json)
