"""fewbit report: the page, its JSON, its messages."""

import json
import shutil

import pytest
from typer.testing import CliRunner

from fewbit.cli.commands import app
from fewbit.evaluate.report.template import MARKER
from fewbit.models import is_installed
from fewbit.workflows import load, plan_model, quantize
from tests.workflows.checkpoints import llama_directory, needs_tokenizers, text_file

pytestmark = [needs_tokenizers, pytest.mark.skipif(not is_installed("matplotlib"), reason="needs pip install fewbit[plot]")]


def run(*arguments, status=0, command="report"):
    result = CliRunner().invoke(app, [command, *map(str, arguments)])
    assert result.exit_code == status, result.output
    return result


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A source and a model that was quantized from it."""
    directory = tmp_path_factory.mktemp("models")
    source = load(llama_directory(directory / "hf"))
    quantize(source, plan_model(source, recipe="nf4"), directory / "nf4")
    return directory / "nf4", directory / "hf"


@pytest.mark.slow
def test_a_page_of_two_models_with_their_quality(models, tmp_path):
    model, source = models
    out = tmp_path / "r.html"
    done = run(model, model, "--against", source, "-o", out, "--text", text_file(tmp_path))
    assert done.stdout == f"wrote {out}: 2 models, {out.stat().st_size:,} bytes\n"
    page = out.read_text()
    assert page.startswith(MARKER) and page.count("<h3>") >= 6
    assert (
        page.count("layers/1/mlp/down</a></th>") == 2
        and 'id="inputs-chart-title"' in page
        and 'id="quality-chart-title"' in page
    )


@pytest.mark.slow
def test_the_same_facts_as_json_and_the_same_bytes_again(models, tmp_path):
    model, source = models
    pages = [tmp_path / name for name in ("a.html", "b.html")]
    first, second = (
        json.loads(run(model, "--against", source, "-o", page, "--no-quality", "--json").stdout) for page in pages
    )
    assert first.pop("output") == str(pages[0]) and second.pop("output") == str(pages[1])
    assert first == second and pages[0].read_bytes() == pages[1].read_bytes()
    one = first["models"][0]
    assert (one["recipe"], one["quality"], one["why_no_quality"]) == ("nf4", None, "not asked for (--no-quality)")
    quantized = [tensor["path"] for tensor in one["tensors"] if tensor["is_quantized"]]
    assert one["tensors"][0]["bits_per_weight"] > 0 and [found["path"] for found in one["histograms"]] == quantized
    assert one["left_in_float"][0]["count"] == sum(not tensor["is_quantized"] for tensor in one["tensors"])


def test_messages(models, tmp_path):
    model, source = models
    assert "drop one of the two" in run(model, "--against", source, "--no-quality", "--text", "pydoc", status=2).stderr
    assert (
        "is a directory, so it is not replaced; name a file"
        in run(model, "--against", source, "-o", tmp_path, status=2).stderr
    )
    (tmp_path / "mine.html").write_text("mine")
    message = run(model, "--against", source, "-o", tmp_path / "mine.html", status=2).stderr
    assert "is no report of fewbit" in message and message.count("error:") == 1
    weights = source / "model.safetensors"
    message = run(model, "--against", source, "-o", weights, "--overwrite", "--no-quality", status=2).stderr
    assert f"{weights} is a file of {source}, the model that is read; choose another output" in message
    assert "nothing.gguf does not exist" in run(model, "--against", tmp_path / "nothing.gguf", status=2).stderr
    assert (tmp_path / "mine.html").read_text() == "mine"


def content(directory):
    return {file.name: file.read_bytes() for file in directory.iterdir()}


@pytest.mark.slow
def test_the_source_is_the_one_that_quantize_read(models, tmp_path):
    _, source = models
    work, page = tmp_path / "work", tmp_path / "r.html"
    shutil.copytree(source, work / "hf")
    run(work / "hf", "-o", work / "out", "-r", "nf4", "--no-check", command="quantize")
    run(source, "-o", tmp_path / "elsewhere", "-r", "nf4", "--no-check", command="quantize")
    assert content(work / "out") == content(tmp_path / "elsewhere"), "no path is in the output"
    run(work / "out", "-o", page, "--no-quality", "--json")
    first = page.read_bytes()
    run(work / "out", "--against", work / "hf", "-o", page, "--no-quality")
    assert page.read_bytes() == first

    run(work / "out", work / "copy", command="convert")
    moved = work.rename(tmp_path / "moved")
    run(moved / "out", moved / "copy", "-o", page, "--no-quality")
    assert f"{moved / 'hf'}" in page.read_text()

    shutil.rmtree(moved / "hf")
    message = run(moved / "out", "-o", page, "--no-quality", status=2).stderr
    assert f"{moved / 'hf'}, from which {moved / 'out'} was quantized, does not exist" in message
    assert "pass the source: --against SOURCE" in message
    run(moved / "out", "--against", source, "-o", page, "--no-quality")


def test_a_model_without_a_record_needs_the_source(models, tmp_path):
    message = run(models[0], "-o", tmp_path / "r.html", status=2).stderr
    assert "nf4 has no record of its source" in message and "pass the source: --against SOURCE" in message
    assert not (tmp_path / "r.html").exists()
