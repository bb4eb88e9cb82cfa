"""Bad input ends in one message on stderr and exit status 2, without a traceback and with nothing written."""

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from fewbit import io
from fewbit.cli.commands import app
from tests.workflows.checkpoints import llama_directory, needs_tokenizers


def fail(*arguments, status=2):
    """The message that a command ends with."""
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    assert result.exit_code == status, result.output
    assert "Traceback" not in result.output
    assert result.stderr.count("error:") == 1
    return result.stderr


@pytest.fixture
def flat(tmp_path):
    """A model of two flat tensors."""
    np.savez(tmp_path / "a.npz", **{"lm_head.weight": np.ones((6, 40), np.float32), "bias": np.ones(6, np.float32)})
    return tmp_path / "a.npz"


def rules(tmp_path, *forms):
    path = tmp_path / "rules.json"
    path.write_text(json.dumps({"rules": list(forms)}))
    return path


@pytest.mark.parametrize("command", ["plan", "inspect", "verify", "eval", "compare"])
def test_a_missing_file(command, tmp_path):
    more = ["--recipe", "int8"] if command == "plan" else []
    assert "nothing.gguf does not exist" in fail(command, tmp_path / "nothing.gguf", *more)


def test_an_unknown_recipe_names_the_near_ones(flat):
    assert "unknown recipe 'nf5'; did you mean 'nf4'?" in fail("plan", flat, "-r", "nf5")


def test_a_recipe_file_that_is_missing(flat, tmp_path):
    assert "no.json does not exist" in fail("plan", flat, "-r", tmp_path / "no.json")


def test_a_rule_that_matches_nothing(flat, tmp_path):
    recipe = rules(tmp_path, {"path": "layers/.*", "policy": "int8"}, {"path": ".*", "policy": None})
    message = fail("quantize", flat, "-o", tmp_path / "out", "-r", recipe)
    assert "rule 1 of recipe 'rules' (layers/.* -> int8) matches nothing" in message
    assert "weight" in message


def test_an_axis_that_a_parameter_does_not_have(flat, tmp_path):
    recipe = rules(tmp_path, {"path": "lm_head.weight", "policy": "int8", "axis": [-3]})
    message = fail("quantize", flat, "-o", tmp_path / "out", "-r", recipe)
    assert "lm_head.weight (6, 40): axis is -3, must be from -2 to 1" in message


def test_an_unknown_scheme_in_a_recipe(flat, tmp_path):
    assert "unknown scheme 'nf44'; did you mean" in fail(
        "plan", flat, "-r", rules(tmp_path, {"path": ".*", "policy": "nf44"})
    )


def test_weights_that_are_not_finite(tmp_path):
    np.savez(tmp_path / "a.npz", **{"lm_head.weight": np.full((2, 32), np.nan, np.float32)})
    assert "lm_head.weight (64 of 64)" in fail("quantize", tmp_path / "a.npz", "-o", tmp_path / "out", "-r", "int8")
    assert not (tmp_path / "out").exists()


def test_an_output_that_exists(flat, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("mine")
    assert "exists; choose another output, or allow it to be replaced (overwrite=True, --overwrite)" in fail(
        "quantize", flat, "-o", tmp_path / "out", "-r", "int8"
    )
    message = fail("quantize", flat, "-o", tmp_path / "out", "-r", "int8", "--overwrite")
    assert "was not written by fewbit as safetensors files, so it is not replaced" in message
    assert (tmp_path / "out" / "mine").read_text() == "mine"


def test_a_directory_is_not_named_as_a_file(flat, tmp_path):
    message = fail("quantize", flat, "-o", tmp_path / "m.gguf", "-r", "nf4")
    assert "is the name of a .gguf file, and --to fewbit writes a directory; add --to gguf, or name a directory" in message
    assert not (tmp_path / "m.gguf").exists()


def test_an_output_below_a_file(flat, tmp_path):
    message = fail("quantize", flat, "-o", flat / "out", "-r", "int8")
    assert f"{flat} is not a directory" in message


@pytest.mark.finding(3)
def test_an_output_that_holds_its_source_or_foreign_files_is_refused_before_the_work(flat, tmp_path):
    """The inspection lost a model and a note to `quantize ov/inner -o ov --overwrite`."""
    outer = io.write(tmp_path / "ov", {"x": np.ones(3, np.float32)})
    inner = io.write(outer / "inner", {"weight": np.ones((6, 40), np.float32)})
    assert "ov contains" in fail("quantize", inner, "-o", outer, "-r", "int8", "--overwrite")
    assert "out is inside" in fail("quantize", inner, "-o", inner / "out", "-r", "int8")
    assert "is the model itself" in fail("quantize", inner, "-o", inner, "-r", "int8", "--overwrite")
    (inner / "notes.txt").write_text("mine")
    assert "contains files that fewbit did not write (notes.txt)" in fail(
        "quantize", flat, "-o", inner, "-r", "int8", "--overwrite"
    )
    assert sorted(path.name for path in inner.iterdir()) == [
        "config.json", "fewbit.safetensors", "manifest.json", "notes.txt"
    ]  # fmt: skip


@pytest.mark.parametrize(
    "command", [["verify", ""], ["quantize", "m", "-o", "", "-r", "int8"], ["eval", "m", "--against", ""]]
)
def test_an_empty_path_is_refused(command):
    """It is not the working directory."""
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 2
    assert "the path is empty" in result.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "exactly one of --recipe, --plan, --keep and --bits"),
        (["-r", "int8", "--keep"], "exactly one of --recipe, --plan, --keep and --bits"),
        (["-r", "int8", "--seed", "1"], "--seed 1 is the seed of the rotation; it needs --rotate"),
        (["-r", "int8", "--rotate"], "cannot be run by fewbit's decoder"),
        (["-r", "int8", "--text", "pydoc"], "cannot be run by fewbit's decoder"),
        (["-r", "int8", "--text", "pydoc", "--no-check"], "drop one of the two"),
        (["--keep", "--method", "gptq"], "--method gptq chooses codes and keep changes none; drop one of the two"),
        (["-r", "keep", "--method", "hqq"], "--method hqq chooses codes and keep changes none; drop one of the two"),
        (["--plan", "no.json"], "plan file no.json does not exist"),
    ],
)
def test_options_that_do_not_go_together(flat, tmp_path, options, message):
    assert message in fail("quantize", flat, "-o", tmp_path / "out", *options)
    assert not (tmp_path / "out").exists()


def test_a_log_replaces_no_file_that_is_read(flat, tmp_path):
    recipe = rules(tmp_path, {"path": ".*", "policy": None})
    message = fail("quantize", flat, "-o", tmp_path / "out", "-r", recipe, "--log", recipe)
    assert "which is read; name another file" in message
    assert json.loads(recipe.read_text())


@pytest.mark.parametrize("command", [["eval"], ["generate", "Hello"], ["compare"], ["demo"]])
def test_an_unknown_network_cannot_be_run(flat, command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    message = fail(command[0], flat, *command[1:])
    assert "cannot be run" in message and "planned, quantized, inspected" in message


@needs_tokenizers
def test_a_chart_of_another_kind_is_refused_before_the_work(tmp_path):
    model = llama_directory(tmp_path / "hf")
    assert "must end in .svg or .png" in fail("compare", model, "--chart", tmp_path / "chart.gif")
    assert "no does not exist" in fail("compare", model, "--chart", tmp_path / "no" / "chart.svg")


def test_an_empty_recipe_and_endless_bits(flat):
    assert "unknown recipe ''" in fail("plan", flat, "-r", "")
    assert "bits per weight are inf" in fail("plan", flat, "--bits", "inf", "--candidates", "int8")


def test_a_plan_for_a_layout_that_cannot_store_it(flat):
    assert "cannot become a GGUF file" in fail("plan", flat, "-r", "q8_0", "--to", "gguf")
    assert "--to 'ggfu' is not a file layout" in fail("plan", flat, "-r", "int8", "--to", "ggfu")


def test_the_demo_replaces_no_files_of_others(tmp_path):
    (tmp_path / "report.json").write_text("{}")
    assert "report.json is not of an earlier demo" in fail("demo", tmp_path, "-o", tmp_path)


def test_recipes_given_twice(flat):
    assert "each once" in fail("compare", flat, "-r", "int8,int8")


def test_an_unwritable_log(flat, tmp_path):
    out = tmp_path / "out"
    assert "no does not exist" in fail("quantize", flat, "-o", out, "-r", "int8", "--log", tmp_path / "no" / "l")
    assert not out.exists()


def test_a_log_replaces_neither_the_model_nor_a_binary_file(flat, tmp_path):
    before, other = flat.read_bytes(), tmp_path / "other.bin"
    other.write_bytes(b"a\0b")
    arguments = ["quantize", flat, "-o", tmp_path / "out", "-r", "int8", "--log"]
    assert "is the model itself" in fail(*arguments, flat)
    assert "is not a text file" in fail(*arguments, other)
    for log in ("out", "out/log.txt", "out.report.html"):
        assert "which is an output; name another file" in fail(*arguments, tmp_path / log)
    assert "which is an output" in fail("convert", flat, tmp_path / "out", "--log", tmp_path / "out")
    assert flat.read_bytes() == before
    assert not (tmp_path / "out").exists()


def test_a_plan_replaces_nothing_but_a_plan(flat, tmp_path):
    other, saved = tmp_path / "config.json", tmp_path / "plan.json"
    other.write_text('{"model_type": "llama"}')
    assert "is not a plan" in fail("plan", flat, "-r", "int8", "--save", flat)
    assert "it lacks recipe and rows" in fail("plan", flat, "-r", "int8", "--save", other)
    for recipe in ("int8", "int4_g32"):
        assert CliRunner().invoke(app, ["plan", str(flat), "-r", recipe, "--save", str(saved)]).exit_code == 0
    assert json.loads(saved.read_text())["recipe"] == "int4_g32"


@needs_tokenizers
def test_the_text_of_the_check_is_read_before_the_work(tmp_path):
    model, short, out = llama_directory(tmp_path / "hf"), tmp_path / "short.txt", tmp_path / "out"
    short.write_text("few words")
    for text, message in (("nope.txt", "no text 'nope.txt'"), (short, "tokens")):
        assert message in fail("quantize", model, "-o", out, "-r", "int8", "--text", text)
        assert not out.exists()


@needs_tokenizers
def test_a_model_is_rotated_once(tmp_path):
    model, out = llama_directory(tmp_path / "hf"), tmp_path / "out"
    done = CliRunner().invoke(app, ["quantize", str(model), "--rotate", "-r", "nf4", "-o", str(out), "--no-check"])
    assert done.exit_code == 0, done.output
    message = fail("quantize", out, "--rotate", "-r", "int8", "-o", tmp_path / "again", "--no-check")
    assert "the residual stream of out is rotated already (seed 0); start from its source" in message
    assert "is already quantized to 4-bit" in CliRunner().invoke(app, ["plan", str(out), "-r", "int8"]).output


@pytest.mark.parametrize(
    "command", [["quantize", "--recipe", "int8", "--rotate"], ["generate", "Hello", "--temperature", "1"]]
)
def test_a_seed_that_no_key_takes(command, flat):
    name, *rest = command
    result = CliRunner().invoke(app, [name, str(flat), *rest, "--seed", str(2**64)])
    assert result.exit_code == 2
    assert "--seed" in result.stderr


def test_facts_of_another_program_are_shown(tmp_path):
    io.write(tmp_path / "f", {"w": np.ones((2, 4), np.float32)}, facts={"recipe": "nf4", "source": "mine"})
    done = CliRunner().invoke(app, ["inspect", str(tmp_path / "f")])
    assert done.exit_code == 0, done.output
    assert "from mine" in done.output


def test_a_model_without_elements(tmp_path):
    np.savez(tmp_path / "empty.npz", a=np.zeros((0, 4), np.float32))
    done = CliRunner().invoke(app, ["convert", str(tmp_path / "empty.npz"), str(tmp_path / "out")])
    assert done.exit_code == 0, done.output


def test_a_usage_error_names_the_option(flat):
    result = CliRunner().invoke(app, ["quantize", str(flat), "--recipe", "int8", "--seed", "one"])
    assert result.exit_code == 2
    assert "--seed" in result.stderr


@pytest.mark.parametrize("command", [["eval"], ["generate", "Hello"]])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--kv", "int44"], "unknown cache format 'int44'; did you mean 'int4'"),
        (["--kv", "int8,fp9"], "unknown cache format 'fp9'; did you mean 'fp8'"),
        (["--kv", "int8,"], "unknown cache format ''"),
        (["--kv", "int8,int8,int4"], "--kv has 3 formats, int8,int8,int4; it takes one, or those of keys and values"),
        (["--kv", "uint8"], "format uint8, which lacks negative or positive numbers; use int8, int4 or e4m3fn"),
        (["--kv", "int8", "--kv-scale", "heads"], "unknown per 'heads'; did you mean 'head'?"),
        (["--kv-scale", "token"], "--kv-scale token is about a quantized KV cache; it needs --kv"),
        (["--activations", "int4"], "activations 'int4' are unknown; did you mean 'int8'?"),
    ],
    ids=["format", "values", "no-values", "three", "unsigned", "scale", "scale-alone", "activations"],
)
def test_what_cannot_be_quantized_is_refused_before_the_model_is_read(command, options, message, tmp_path):
    assert message in fail(command[0], tmp_path / "nothing", *command[1:], *options)
