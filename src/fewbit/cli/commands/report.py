"""The command that writes a page about quantized models: report."""

from pathlib import Path
from typing import Annotated

import typer

from ...errors import QuantError
from ..app import app
from ..options import Json, path_argument, path_option
from .evaluate import TextName


@app.command()
def report(
    models: Annotated[
        list[Path],
        typer.Argument(metavar="MODEL", parser=path_argument, help="One or several quantized models of one source."),
    ],
    against: Annotated[
        Path | None,
        path_option(
            "--against",
            help="The model that they were quantized from; default the one that `fewbit quantize` read, if it is there.",
        ),
    ] = None,
    output: Annotated[Path, path_option("--output", "-o", help="The page to write.")] = Path("report.html"),
    text: TextName = None,
    quality: Annotated[
        bool,
        typer.Option("--quality/--no-quality", help="Run the models: perplexity, KL divergence, outliers of activations."),
    ] = True,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace OUTPUT even if it is no report of fewbit.")
    ] = False,
    json: Json = False,
) -> None:
    """Writes one HTML page about quantized models.

    It shows sizes, quality, the error of each weight, and what stayed in float.
    """
    from ...evaluate.report.page import check_page_path, save_page
    from ...workflows.convert.origin import source_of
    from ...workflows.load import load
    from ...workflows.report import report as reported
    from ..console import emit_json, note, plain, say
    from ..progress import progress_bar

    if text is not None and not quality:
        raise QuantError("--text is the text of the quality, but --no-quality leaves it out; drop one of the two")
    check_page_path(output, overwrite=overwrite)
    opened = [load(path) for path in models]
    source = load(against) if against is not None else source_of(opened)
    read = [model.path for model in (*opened, source)]
    check_page_path(output, overwrite=overwrite, sources=read)
    with progress_bar("reporting", 1) as bar:
        facts = reported(opened, source, text=text, quality=quality, progress=bar.advance)
    save_page(output, facts, overwrite=overwrite, sources=read)
    if json:
        emit_json({"output": str(output), **plain(facts)})
        return
    for model in facts.models:
        if quality and model.quality is None:
            note(f"{model.stored.path}: quality was not measured: {model.why_no_quality}")
    say(f"wrote {output}: {len(opened)} model{'s' * (len(opened) > 1)}, {output.stat().st_size:,} bytes")
