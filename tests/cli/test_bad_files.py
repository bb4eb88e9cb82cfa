"""Files with values that cannot be, at the command line: one line that names the file or field, exit status 2, no traceback."""

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from fewbit.cli.commands import app
from fewbit.models import GGUF, shapes
from tests.io.mutations import RAW, gguf_bytes
from tests.models.tokenizers.fields import gguf_fields
from tests.nets.random_decoder import SMALL, SMALL_GGUF
from tests.workflows.checkpoints import llama_directory, needs_tokenizers

pytestmark = [pytest.mark.finding(17, 18), pytest.mark.usefixtures("unchecked")]


def fail(*arguments):
    """The message that a command ends with."""
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output and result.stderr.count("error:") == 1
    return result.stderr


@pytest.fixture
def flat(tmp_path):
    np.savez(tmp_path / "a.npz", weight=np.ones((6, 40), np.float32))
    return tmp_path / "a.npz"


RULE = '{"rules": [{"path": ".*", "policy": %s}]}'
RECIPES = {
    "5,000 digits": (
        RULE % '{"weight": {"format": "int4", "tile": {"-1": %s}}}' % RAW["@digits"],
        "an integer of 5000 digits",
    ),
    "deep nesting": (RULE % RAW["@deep list"], "nested too deeply"),
    "deepest nesting": (RULE % RAW["@deepest"], "nested too deeply"),
    "a rule": ('{"rules": [3]}', "rules[0] is 3; expected object with the fields path, policy"),
    "a path": ('{"rules": [{"path": 3, "policy": null}]}', "rules[0].path is 3; expected str"),
    "a policy": (RULE % "[]", "rules[0].policy is []; expected str | object | null"),
    "a format": (RULE % '{"weight": {"format": 3}}', "rules[0].policy.weight.format is 3; expected str | object"),
    "a width": (
        RULE % '{"weight": {"format": {"kind": "integer", "name": "i", "width": "4"}}}',
        "format.width is '4'; expected int",
    ),
    "a scale": (RULE % '{"weight": {"format": "int4", "scale": 3}}', "rules[0]: a format is 3; expected object"),
    "a list of scales": (
        RULE % '{"weight": {"format": "int4", "scale": ["e8m0"]}}',
        "rules[0]: a format is ['e8m0']; expected object",
    ),
    "a calibration": (RULE % '{"weight": {"format": "int4", "calibration": 3}}', "weight.calibration is 3; expected str"),
    "a tile": (RULE % '{"weight": {"format": "int4", "tile": [32]}}', "weight.tile is [32]; expected object"),
    "a flag": ('{"rules": [{"path": ".*", "policy": null, "optional": 1}]}', "rules[0].optional is 1; expected bool"),
    "a surrogate": ('{"name": "\\ud800", "rules": []}', "half of a surrogate pair"),
    "a constant": (RULE % "NaN", "NaN is not a JSON number"),
    "a key twice": ('{"rules": [], "rules": []}', "the key 'rules' appears twice"),
    "an expression": (RULE.replace(".*", "(") % "null", "rules[0]: rule path '(' is not a regular expression"),
    "an unknown scheme": (RULE % '"nf44"', "unknown scheme 'nf44'; did you mean 'nf4'"),
}


@pytest.mark.parametrize(("text", "message"), RECIPES.values(), ids=RECIPES)
def test_a_recipe(text, message, flat, tmp_path):
    (tmp_path / "r.json").write_text(text)
    said = fail("plan", flat, "-r", tmp_path / "r.json")
    assert message in said and f"recipe file {tmp_path / 'r.json'}" in said


ROW = {"path": "weight", "shape": [6, 40], "dtype": "float32", "policy": "int8", "axis": [-1], "stacked": [], "ops": []}
ROW |= {"bytes_before": 960, "bytes_after": 300}
PLANS = {
    "5,000 digits": ('{"recipe": "r", "rows": [' + RAW["@digits"] + "]}", "an integer of 5000 digits"),
    "deep nesting": ('{"recipe": "r", "rows": ' + RAW["@deep object"] + "}", "nested too deeply"),
    "a shape": (ROW | {"shape": [6, "40"]}, "rows[0].shape[1] is '40'; expected int"),
    "bytes": (ROW | {"bytes_after": -1}, "rows[0].bytes_after is -1; expected int >= 0"),
    "an axis": (ROW | {"axis": 1}, "rows[0].axis is 1; expected array"),
    "a policy": (ROW | {"policy": 3}, "rows[0].policy is 3; expected str | object | null"),
    "a dtype": (ROW | {"dtype": None}, "rows[0].dtype is None; expected str"),
    "a typo": (ROW | {"resaon": ""}, "rows[0] has no field 'resaon'; did you mean 'reason'"),
    "no list": ('{"recipe": "r", "rows": {}}', "rows is {}; expected array"),
}


@pytest.mark.parametrize(("form", "message"), PLANS.values(), ids=PLANS)
def test_a_plan(form, message, flat, tmp_path):
    text = form if isinstance(form, str) else json.dumps({"recipe": "r", "rows": [form]})
    (tmp_path / "p.json").write_text(text)
    said = fail("quantize", flat, "-o", tmp_path / "out", "--plan", tmp_path / "p.json")
    assert message in said and f"plan file {tmp_path / 'p.json'}" in said


CHECKPOINTS = {
    "layers": (
        "config.json",
        {"num_hidden_layers": 10**9},
        "the configuration has 1,000,000,000 layers, but the checkpoint has 29",
    ),
    "layers of a float": ("config.json", {"num_hidden_layers": 1e9}, "num_hidden_layers is 1000000000.0; expected int"),
    "a width of text": ("config.json", {"hidden_size": "24"}, "hidden_size is '24'; expected int"),
    "no heads": ("config.json", {"num_attention_heads": 0}, "num_attention_heads is 0; expected int >= 1"),
    "negative": ("config.json", {"intermediate_size": -40}, "intermediate_size is -40; expected int >= 1"),
    "rope": ("config.json", {"rope_parameters": [1]}, "rope_parameters is [1]; expected object"),
    "no object": ("tokenizer_config.json", [], "tokenizer_config.json is []; expected object"),
    "a token": ("tokenizer_config.json", {"eos_token": {"content": 3}}, "eos_token.content is 3; expected str"),
    "deep": (
        "tokenizer_config.json",
        RAW["@deep object"],
        "tokenizer_config.json is not valid JSON: it is nested too deeply",
    ),
}


@needs_tokenizers
@pytest.mark.parametrize(("name", "change", "message"), CHECKPOINTS.values(), ids=CHECKPOINTS)
def test_a_hugging_face_directory(name, change, message, tmp_path):
    path = llama_directory(tmp_path / "m") / name
    if isinstance(change, dict):
        change = json.dumps((json.loads(path.read_text()) if path.exists() else {}) | change)
    path.write_text(change if isinstance(change, str) else json.dumps(change))
    assert message in fail("generate", tmp_path / "m", "Hello")


@needs_tokenizers
def test_a_list_in_a_weight_map(tmp_path):
    directory = llama_directory(tmp_path / "m")
    (directory / "model.safetensors.index.json").write_text('{"weight_map": {"a": ["model.safetensors"]}}')
    assert "index.json: weight_map.a is ['model.safetensors']; expected str" in fail("inspect", directory)


@needs_tokenizers
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"llama.attention.head_count": 0}, "llama.attention.head_count is 0; expected int >= 1"),
        ({"llama.block_count": 2**39}, "has 549,755,813,888 layers, but the checkpoint has 29"),
        ({"tokenizer.ggml.merges": ["h zz"]}, "tokenizer.ggml.merges[0] is 'h zz', but 'zz' is not in the vocabulary"),
        ({"tokenizer.ggml.merges": ["hh"]}, "tokenizer.ggml.merges[0] is 'hh'; two tokens with a space between them"),
        ({"tokenizer.ggml.merges": [1]}, "tokenizer.ggml.merges[0] is 1; expected str"),
        ({"tokenizer.ggml.token_type": [1]}, "tokens and 1 token types"),
        ({"tokenizer.ggml.eos_token_id": 10**6}, "tokenizer.ggml.eos_token_id is 1000000, but there are"),
        ({"tokenizer.ggml.model": 3}, "tokenizer.ggml.model is 3; expected str"),
    ],
    ids=["heads", "layers", "merge", "one token", "number", "types", "stop", "kind"],
)
def test_a_gguf_file(change, message, tmp_path):
    pytest.importorskip("gguf")
    fields = SMALL_GGUF | gguf_fields() | change
    tensors = {GGUF.name(path): shape for path, shape in shapes(SMALL).items()}
    tensors["token_embd.weight"] = (len(fields["tokenizer.ggml.tokens"]), SMALL.width)
    (tmp_path / "m.gguf").write_bytes(gguf_bytes(fields, tensors))
    assert message in fail("generate", tmp_path / "m.gguf", "hello")


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            "smollm3",
            "smollm3 does not exist, and no installed package provides a model of that name; did you mean 'smollm2'?",
        ),
        (
            "whisper",
            "whisper does not exist, and no installed package provides a model of that name; known: smollm2, glassllm, minilm",
        ),
    ],
)
def test_a_model_that_is_not_there(model, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert message in fail("inspect", model)


def test_an_empty_path_is_not_the_current_directory():
    result = CliRunner().invoke(app, ["inspect", ""])
    assert (result.exit_code, "Invalid value for 'MODEL': the path is empty" in result.stderr) == (2, True)


def test_names_that_are_near(flat):
    assert "did you mean 'maxtext/fp8_full'?" in fail("plan", flat, "-r", "fp8_full")
    assert "unknown recipe 'mixd'; did you mean 'mixed'" in fail("plan", flat, "-r", "mixd")
    far = fail("plan", flat, "-r", "zzzz")
    assert "the nearest names are" in far and "`fewbit recipes`" in far and len(far) < 250
    assert "did you mean 'quantize'" in CliRunner().invoke(app, ["quantise"]).stderr.lower()
