"""One command from a checkpoint to a GGUF file of a given size, by GPTQ, with a report."""

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from fewbit import io, methods
from fewbit.cli.commands import app
from fewbit.cli.quantize_report import ChosenMethod, candidate_names, default_output, page_path, written
from fewbit.errors import QuantError
from fewbit.evaluate.report.template import MARKER
from fewbit.models import is_installed
from fewbit.workflows import Outcome, plan_model
from tests.io.gguf.families import COMMON, save_tokenizer
from tests.workflows.checkpoints import last_axis, llama_directory, needs_tokenizers, text_file
from tests.workflows.resuming import npz_model

needs_matplotlib = pytest.mark.skipif(not is_installed("matplotlib"), reason="needs pip install fewbit[plot]")


def run(*arguments, status=0):
    result = CliRunner().invoke(app, ["quantize", *map(str, arguments)])
    assert result.exit_code == status, result.output
    return result


@pytest.fixture
def model(tmp_path):
    """A Llama with a hidden width of 256, which ternary blocks of GGUF divide, and a byte-level BPE."""
    from safetensors.numpy import save_file

    path, draw = tmp_path / "tiny", np.random.default_rng(0).normal
    save_tokenizer(path)
    tokenizer = json.loads((path / "tokenizer.json").read_text())
    steps = [{"type": "Digits", "individual_digits": True}]
    steps.append({"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True})
    tokenizer["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": steps}
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = {**COMMON, "model_type": "llama", "vocab_size": 300, "intermediate_size": 256, "num_hidden_layers": 1}
    config |= {"rms_norm_eps": 1e-5, "rope_theta": 1e4, "tie_word_embeddings": True}
    (path / "config.json").write_text(json.dumps(config))
    shapes = {f"self_attn.{name}_proj": (rows, 64) for name, rows in (("q", 64), ("k", 32), ("v", 32), ("o", 64))}
    shapes |= {"mlp.gate_proj": (256, 64), "mlp.up_proj": (256, 64), "mlp.down_proj": (64, 256)}
    arrays = {f"model.layers.0.{name}.weight": draw(size=shape) / 8 for name, shape in shapes.items()}
    arrays |= {f"model.layers.0.{name}_layernorm.weight": np.ones(64) for name in ("input", "post_attention")}
    arrays |= {"model.embed_tokens.weight": draw(size=(300, 64)), "model.norm.weight": np.ones(64)}
    save_file({name: array.astype(np.float32) for name, array in arrays.items()}, str(path / "model.safetensors"))
    return path


@pytest.mark.slow
@needs_tokenizers
@needs_matplotlib
def test_bits_gguf_and_a_report_in_one_command(model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("fewbit.cli.quantize_report.SENSITIVITY_WINDOWS", 8)
    text = text_file(tmp_path)
    options = ["--method", "gptq", "--bits", 4.4, "--to", "gguf", "--report", "--text", text, "--calibration-text", text]
    said = run(model, *options, "--calibration-windows", 4).stdout
    out = tmp_path / "tiny-4.4bit-gptq.gguf"
    assert "report:    tiny-4.4bit-gptq.gguf.report.html" in said and "estimated KL" in said
    info = io.read(out).tensors.info
    assert 8 * sum(one.nbytes for one in info.values()) <= 4.4 * sum(np.prod(one.shape) for one in info.values())
    schemes = {one.scheme.name for one in info.values() if one.scheme is not None}
    assert len(schemes) > 1 and schemes <= {"tq2_0", "mxfp4", "iq4_nl", "q8_0"}
    page = (tmp_path / "tiny-4.4bit-gptq.gguf.report.html").read_text()
    assert page.startswith(MARKER) and "4.4 bits of" in page and "<td>gptq</td>" in page
    assert "estimated KL" in page and 'id="inputs-chart-title"' in page and 'id="quality-chart-title"' in page


@needs_tokenizers
def test_candidates_that_the_layout_cannot_store(model, tmp_path):
    options = ["-o", tmp_path / "x.gguf", "--bits", 4.5, "--to", "gguf"]
    refused = run(model, *options, "--candidates", "nf4,q4_0", status=2).stderr
    assert "candidate nf4 fits no weight: GGUF has no type for nf4; the nearest schemes that fit are q4_0" in refused
    refused = run(model, *options, "--candidates", "tq2_0", status=2).stderr
    assert "none of tq2_0 can store" in refused and "blocks of 256, which do not divide the last axis" in refused
    assert not (tmp_path / "x.gguf").exists()


@needs_tokenizers
def test_what_does_not_go_with_bits(tmp_path):
    model = llama_directory(tmp_path / "hf")
    assert "--bits makes the plan itself; leave out --plan and --keep" in run(model, "--bits", 4, "--keep", status=2).stderr
    assert "pass exactly one of --recipe, --plan, --keep and --bits" in run(model, status=2).stderr
    assert "--candidates int8 are the schemes of --bits" in run(model, "--candidates", "int8", status=2).stderr
    (tmp_path / "out.report.html").write_text("mine")
    refused = run(model, "-o", tmp_path / "out", "-r", "int8", "--report", status=2).stderr
    assert "is no report of fewbit" in refused and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "name", ["rtn", "awq", "smoothquant", "smoothquant+gptq", "awq+gptq", "qep+gptq_mse", "awq+qep+gptq_mse"]
)
def test_a_chosen_method_has_the_name_that_it_was_asked_for(name):
    scaling, method = methods.scaled_method(name)
    assert methods.scaled_method(ChosenMethod(method, None, scaling).name) == (scaling, method)


def test_names_of_outputs_and_candidates(tmp_path, monkeypatch):
    path = tmp_path / "Qwen3-0.6B"
    (path / "inner").mkdir(parents=True)
    for place, given in ((path, "."), (path / "inner", "..")):
        monkeypatch.chdir(place)
        assert str(default_output(Path(given), "nf4", None, None, "rtn", "fewbit")) == "Qwen3-0.6B-nf4"
    assert str(default_output(path, None, None, 4.25, "gptq", "gguf")) == "Qwen3-0.6B-4.25bit-gptq.gguf"
    assert str(default_output(path.with_suffix(".6B.gguf"), "nf4", None, None, "rtn", "fewbit")) == "Qwen3-0.6B-nf4"
    assert str(default_output(path, str(tmp_path / "mine.json"), None, None, "rtn", "fewbit")) == "Qwen3-0.6B-mine"
    assert str(default_output(path, "maxtext/int8", None, None, "rtn", "fewbit")) == "Qwen3-0.6B-maxtext-int8"
    assert str(default_output(path, None, tmp_path / "a.json", None, "rtn", "fewbit")) == "Qwen3-0.6B-a"
    assert page_path(tmp_path / "a.gguf").name == "a.gguf.report.html"
    assert candidate_names(4.5, None, "gguf")[0] == "tq2_0" and candidate_names(None, None) == []
    assert candidate_names(4.6, None, "gguf") == [*candidate_names(4.5, None, "gguf"), "q5_1"]
    assert candidate_names(4.5, "int8, nf4") == ["int8", "nf4"]
    with pytest.raises(QuantError, match="--candidates is 'int8,int8'; give at least one, each once"):
        candidate_names(4.5, "int8,int8")
    with pytest.raises(QuantError, match="unknown scheme 'int5_x'"):
        candidate_names(4.5, "int5_x")


@pytest.mark.parametrize(
    ("reached", "said"),
    [
        ([0, 1, 2, 3, 4], ""),
        ([3, 4], "resuming: 3 of 4 layers were finished by an earlier run\n"),
        ([0, 1, 2, 2, 3, 4], ""),
        ([0, 1, 2, 4], "resuming: 2 of 4 layers were finished by an earlier run\n"),
    ],
    ids=["new", "resumed", "new with a scaling", "resumed with a scaling"],
)
def test_layers_of_an_earlier_run_are_said(reached, said, tmp_path, monkeypatch, capsys):
    model = npz_model(tmp_path / "a.npz")
    plan = plan_model(model, recipe=last_axis("int8"))

    def quantize(*_, on_layer, **options):
        for done in reached:
            on_layer(done, reached[-1])
        return Outcome(tmp_path / "m", (), 0, 0, 0, 0, 0.0)

    monkeypatch.setattr("fewbit.cli.quantize_report.quantize", quantize)
    written(model, plan, tmp_path / "m", to="fewbit", overwrite=False, log=None)
    assert capsys.readouterr().err == said


def test_the_log_of_a_resumed_run_has_every_tensor(tmp_path):
    source, log, arrays = tmp_path / "a.npz", tmp_path / "log", {name: np.ones((4, 64), np.float32) for name in "abc"}
    np.savez(source, **arrays | {"c": np.full((4, 64), np.nan, np.float32)})
    (tmp_path / "r.json").write_text(json.dumps(last_axis("int8")))
    command = ["quantize", str(source), "-o", str(tmp_path / "m"), "-r", str(tmp_path / "r.json"), "--log", str(log)]
    assert CliRunner().invoke(app, command).exit_code == 2
    np.savez(source, **arrays)
    done = CliRunner().invoke(app, command)
    assert (done.exit_code, "resuming: 2 of 3 tensors" in done.stderr) == (0, True)
    assert [line.split()[0] for line in log.read_text().splitlines()] == ["a", "b", "c"]
