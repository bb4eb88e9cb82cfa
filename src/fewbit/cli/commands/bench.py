"""The command `fewbit bench`."""

from typing import Annotated

import typer

from ..app import app
from ..options import ActivationKind, Json


@app.command()
def bench(
    schemes: Annotated[
        str | None,
        typer.Option("--schemes", "-s", help="Weight schemes, comma-separated; by default those with fast kernels."),
    ] = None,
    sizes: Annotated[
        str | None,
        typer.Option("--sizes", help="Sizes K = N of the weight, comma-separated; default 4096."),
    ] = None,
    rows: Annotated[str | None, typer.Option("--rows", help="Rows M of x, comma-separated; default 1,256.")] = None,
    rounds: Annotated[int | None, typer.Option("--rounds", min=1, help="Runs of each matmul; default 15.")] = None,
    activations: ActivationKind = None,
    json: Json = False,
) -> None:
    """Benchmarks matmuls with quantized weights on this machine, and names the fastest scheme.

    Prints copy bandwidth and dense matmul rates first. Results are checked before any matmul is timed. Each is timed
    interleaved with the dense float32 matmul, and reads its weight from memory.
    """
    from ...workflows.activations import activation_kind
    from ..bench_report import show_times

    int8_activations = activation_kind(activations)
    show_times(schemes=schemes, sizes=sizes, rows=rows, rounds=rounds, int8_activations=int8_activations, json=json)
