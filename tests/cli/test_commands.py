"""Every command: what it prints, its JSON, and that the way from a plan to a generated text holds."""

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from fewbit import FORMATS, RECIPES, SCHEMES, Recipe, io, recipe
from fewbit.cli.commands import app
from fewbit.evaluate.report.template import MARKER
from fewbit.models import is_installed
from fewbit.workflows.load import INSTALLED
from tests.nets.checkpoints import needs_glassllm
from tests.workflows.checkpoints import llama_directory, needs_tokenizers, text_file

needs_matplotlib = pytest.mark.skipif(not is_installed("matplotlib"), reason="needs pip install fewbit[plot]")


def run(*arguments, status=0):
    """A command that ends with the given exit status, and its result."""
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    assert result.exit_code == status, result.output
    return result


def run_json(*arguments):
    """What a command prints with --json: one object on stdout."""
    return json.loads(run(*arguments, "--json").stdout)


@pytest.fixture
def model(tmp_path):
    return llama_directory(tmp_path / "hf")


@pytest.mark.parametrize(
    ("command", "names"),
    [("formats", FORMATS.names()), ("schemes", SCHEMES.names()), ("recipes", (*RECIPES.names(), "keep"))],
)
def test_catalogues_list_every_name(command, names):
    assert tuple(record["name"] for record in run_json(command)[command]) == names
    text = run(command).stdout
    assert all(name in text for name in names)


def test_formats_count_the_numbers_that_elements_are_rounded_to():
    counts = {record["name"]: record["values"] for record in run_json("formats")["formats"]}
    expected = {"int4": 16, "int4_narrow": 15, "e2m1": 15, "e4m3fn": 253, "e5m2": 247, "e8m0": 255}
    assert expected.items() <= counts.items()


def test_one_recipe_shows_its_rules(tmp_path):
    text = " ".join(run("recipes", "te_nvfp4").stdout.split())
    assert all(
        said in text for said in ("nvfp4_16x16", "nvfp4_absmax x forward (stochastic)", "Hadamard 16", "left as it is")
    )
    assert "scales from 1024 steps before" in run("recipes", "maxtext/fp8").stdout
    assert recipe(run_json("recipes", "maxtext/int8")) == recipe("maxtext/int8")
    pruned = {"rules": [{"path": ".*", "policy": "int8", "sparsity": {"n": 2, "m": 4}}]}
    (tmp_path / "pruned.json").write_text(json.dumps(pruned))
    assert "int8, 2:4 sparse" in run("recipes", tmp_path / "pruned.json").stdout
    assert "every tensor as stored in the file" in run("recipes", "keep").stdout.lower()
    assert "did you mean 'maxtext/int8'" in run("recipes", "maxtxt/int8", status=2).stderr


@needs_tokenizers
def test_a_plan_counts_the_products_without_a_parameter(model):
    short, full = (run("plan", model, "--recipe", "w8", *more).stdout for more in ((), ("--full",)))
    assert "products without a parameter: " in short
    assert " in float" in short
    assert "#1  " not in short
    assert len(full.splitlines()) > len(short.splitlines()) + 6


def test_the_schema_of_recipes():
    assert json.loads(run("recipes", "--schema").stdout) == Recipe.json_schema()
    assert "leave out the name" in run("recipes", "int8", "--schema", status=2).stderr


@needs_tokenizers
@pytest.mark.slow
def test_from_a_plan_through_an_edit_to_a_text(model, tmp_path):
    plan, out, text = tmp_path / "plan.json", tmp_path / "out", text_file(tmp_path)
    assert "22 of 29 parameters quantized" in run("plan", model, "--recipe", "nf4", "--save", plan).stdout
    form = json.loads(plan.read_text())
    row = next(row for row in form["rows"] if row["path"] == "layers/1/mlp/down")
    row["policy"] = "int8"
    plan.write_text(json.dumps(form))
    done = run("quantize", model, "-o", out, "--plan", plan, "--text", text)
    assert "layers/0-2/mlp/gate" in done.stdout  # the plan
    assert "layers/1/mlp/down  24x40  int8" in done.stderr  # the log
    for said in (
        "files:",
        "bits/weight",
        "signal-to-noise",
        "perplexity",
        "KL divergence",
        "top-1 agreement",
        "fewbit eval",
    ):
        assert said in done.stdout
    assert "0 errors, 0 warnings" in run("verify", out).stdout
    assert run_json("verify", out) == {"path": str(out), "errors": 0, "findings": []}
    stored = {t["path"]: t["stored"] for t in run_json("inspect", out)["tensors"]}
    assert (stored["layers/1/mlp/down"], stored["layers/0/mlp/down"], stored["norm"]) == ("int8", "nf4", "F32")
    quality = run_json("eval", out, "--against", model, "--text", text, "--window", 16)["quality"]
    assert quality["against"]["kl"]["mean"]["value"] > 0
    assert "perplexity" in run("eval", out, "--text", text).stdout
    sample = run_json("generate", out, "The quick ", "--max-tokens", 5)
    assert sample["tokens"] == 5
    kept = run_json("generate", out, "The quick ", "--max-tokens", 5, "--kv", "fp8", "--kv-scale", "token")
    assert (kept["kv"], sample["kv"]) == ("e4m3fn per token", None)
    assert kept["cache_bytes"] < sample["cache_bytes"] / 3
    mixed = run("eval", out, "--text", text, "--kv", "int8,int4").stdout
    assert "keys and values quantized: keys int8_narrow per head, values int4_narrow per head" in mixed
    integers = run("eval", out, "--text", text, "--activations", "int8", "--kv", "int8").stdout
    assert "int8 with 22 weights; the table of nf4 rounded to int8, by 0.0037 at most" in integers
    assert "keys and values quantized: int8_narrow per head, int8 queries" in integers
    written = run("generate", out, "The quick ", "--max-tokens", 5)
    assert written.stdout.rstrip("\n") == "The quick " + sample["text"]
    assert f"prefill {sample['prompt_tokens']} tokens at " in written.stderr and ", decode 4 tokens at " in written.stderr


@pytest.mark.slow
@needs_tokenizers
def test_quantize_as_json(model, tmp_path):
    form = run_json("quantize", model, "-o", tmp_path / "out", "-r", "int8", "--text", text_file(tmp_path))
    assert form["outcome"]["file_bytes"] == sum(f.stat().st_size for f in (tmp_path / "out").iterdir())
    assert len(form["outcome"]["tensors"]) == len(form["plan"]["rows"]) == 29
    assert form["quality"]["against"]["top1"]["value"] > 0.8
    assert any("fewbit generate" in line for line in form["commands"])


@pytest.mark.slow
@needs_tokenizers
def test_quantize_by_a_method(model, tmp_path):
    calibration = ["--calibration-text", text_file(tmp_path), "--calibration-windows", 4, "--calibration-window", 16]
    result = run("quantize", model, "-o", tmp_path / "q", "-r", "int4", "--method", "gptq", *calibration, "--no-check")
    assert "int4" in result.stdout and " by gptq  " in result.stderr
    facts = io.read(tmp_path / "q").facts["method"]
    assert facts["name"] == "gptq" and facts["calibration"]["windows"] == [4, 16]
    free = run("quantize", model, "-o", tmp_path / "h", "-r", "int4", "--method", "hqq", "--no-check")
    assert " by hqq  " in free.stderr and io.read(tmp_path / "h").facts["method"]["power"] == 0.7
    refused = run("quantize", model, "-o", tmp_path / "x", "-r", "int4", *calibration, status=2)
    assert "--calibration-text is for a method that learns from a text, and rtn does not" in refused.stderr
    assert (
        "did you mean 'gptq'"
        in run("quantize", model, "-o", tmp_path / "x", "-r", "int4", "--method", "gptw", status=2).stderr
    )


@pytest.mark.slow
@needs_tokenizers
def test_an_importance_matrix(model, tmp_path):
    """Written, and used; what goes with it is refused."""
    calibration = ["--calibration-text", text_file(tmp_path), "--calibration-windows", 4, "--calibration-window", 16]
    file = tmp_path / "imatrix.gguf"
    assert (
        f"wrote {file}: 22 tensors, 4 chunks of 16 tokens of {text_file(tmp_path)}"
        in run("imatrix", model, "-o", file, *calibration).stdout
    )
    assert "exists; choose another output" in run("imatrix", model, "-o", file, *calibration, status=2).stderr
    quantize = ["quantize", model, "-o", tmp_path / "q", "-r", "int4_g32", "--no-check", "--imatrix", file, "--method"]
    assert " by imatrix  " in run(*quantize, "imatrix").stderr
    facts = io.read(tmp_path / "q").facts["method"]
    assert facts["name"] == "imatrix" and facts["calibration"]["imatrix"] == "imatrix.gguf"
    for name in ("gptq", "awq+imatrix"):
        assert f"--imatrix is for --method imatrix, not {name}" in run(*quantize, name, "--overwrite", status=2).stderr
    both = run(*quantize, "imatrix", "--overwrite", *calibration, status=2).stderr
    assert "--imatrix takes the place of the calibration text" in both
    unseen = run(*quantize, "imatrix", "--overwrite", "--unseen-experts", "share", status=2).stderr
    assert "--imatrix rounds experts without tokens to nearest; drop it or --unseen-experts" in unseen
    assert "measured without a rotation, which changes the inputs" in run(*quantize, "imatrix", "--rotate", status=2).stderr


@pytest.mark.slow
@needs_tokenizers
def test_quantize_with_scaled_inputs(model, tmp_path):
    calibration = ["--calibration-text", text_file(tmp_path), "--calibration-windows", 2, "--calibration-window", 8]
    result = run(
        "quantize", model, "-o", tmp_path / "q", "-r", "w8a8", "--method", "smoothquant", *calibration, "--no-check"
    )
    assert "note: smoothquant scales the inputs of 21 of 21 quantized weights" in result.stdout
    assert "divided by the smoothquant scales of q, k, v" in result.stderr
    facts = io.read(tmp_path / "q").facts
    assert facts["scaling"]["name"] == "smoothquant" and "method" not in facts
    refused = run("plan", model, "--bits", 5, "--candidates", "int4,int8", "--method", "awq", status=2).stderr
    assert "awq changes the weights; plan with --method rtn or gptq" in refused


@pytest.mark.slow
@needs_tokenizers
def test_a_plan_for_a_number_of_bits(model, tmp_path, monkeypatch):
    monkeypatch.setattr("fewbit.cli.quantize_report.SENSITIVITY_WINDOWS", 8)
    saved, budget = tmp_path / "plan.json", ["--bits", 7, "--candidates", "int8,int4"]
    text = ["--calibration-text", text_file(tmp_path)]
    assert run_json("plan", model, *budget, *text)["plan"] != run_json("plan", model, *budget)["plan"], "another text"
    found = run_json("plan", model, *budget, "--save", saved)
    assert 6 < found["bits_per_weight"] <= 7
    seeded = [run_json("plan", model, *budget, "--seed", seed) for seed in (0, 1, 1)]
    assert seeded[0]["sha256"] == found["sha256"], "the default"
    assert seeded[1]["sha256"] == seeded[2]["sha256"] != found["sha256"], "labels of another seed, so other estimates"
    measured = run("plan", model, *budget, "--measure").stdout
    assert "measured KL" in measured and "the rank correlation of the measured and the estimated ones is" in measured
    assert "--measure is for --bits" in run("plan", model, "-r", "int8", "--measure", status=2).stderr
    assert "--seed 3 is for --bits" in run("plan", model, "-r", "int8", "--seed", 3, status=2).stderr
    run("quantize", model, "-o", tmp_path / "q", "--plan", saved, "--no-check")
    assert {info.stored for info in io.read(tmp_path / "q").tensors.info.values()} >= {"int8", "int4"}
    assert "--candidates int8 are the schemes of --bits" in run("plan", model, "--candidates", "int8", status=2).stderr
    assert "--method of a plan is for --bits" in run("plan", model, "-r", "int8", "--method", "gptq", status=2).stderr
    assert "cannot be reached: the smallest candidates take" in run("plan", model, "--bits", 3, *budget[2:], status=2).stderr


@pytest.mark.slow
@needs_tokenizers
def test_a_log_file_takes_the_lines(model, tmp_path):
    done = run("quantize", model, "-o", tmp_path / "out", "-r", "int8", "--no-check", "--log", tmp_path / "log")
    assert len((tmp_path / "log").read_text().splitlines()) == 29
    assert "layers/0/attn/q  48x24  int8" in (tmp_path / "log").read_text()
    assert "layers/0/attn/q" not in done.stderr
    assert "quality check skipped: --no-check" in done.stdout


@needs_tokenizers
def test_a_dry_run_writes_nothing(model, tmp_path):
    assert "dry run: nothing was written" in run("quantize", model, "-o", tmp_path / "out", "-r", "int8", "--dry-run").stdout
    assert run_json("quantize", model, "-o", tmp_path / "out", "-r", "int8", "--dry-run")["dry_run"] is True
    turned = run("quantize", model, "-o", tmp_path / "out", "-r", "int8", "--dry-run", "--rotate-inputs", "o, down").stdout
    assert "inputs of o and down" in turned
    assert not (tmp_path / "out").exists()


@needs_tokenizers
def test_the_command_for_a_saved_plan_can_be_pasted(model, tmp_path):
    plan = tmp_path / "my plan.json"
    said = run("plan", model, "-r", "int8", "--to", "compressed-tensors", "--save", plan).stdout
    assert said.endswith(f"then: fewbit quantize {model} -o OUT --plan '{plan}' --to compressed-tensors\n")


@needs_tokenizers
def test_overwrite_replaces_what_fewbit_wrote(model, tmp_path):
    out = tmp_path / "out"
    run("quantize", model, "-o", out, "-r", "int8", "--no-check")
    run("quantize", model, "-o", out, "--keep", "--no-check", "--overwrite")
    assert run_json("inspect", out)["facts"]["recipe"] == "keep"


@pytest.mark.slow
@needs_tokenizers
def test_a_rotated_model(model, tmp_path):
    text = text_file(tmp_path)
    done = run("quantize", model, "-o", tmp_path / "out", "-r", "int8", "--rotate", "--seed", 7, "--text", text)
    assert "rotated at random (seed 7)" in done.stdout
    assert run_json("inspect", tmp_path / "out")["facts"]["rotation_seed"] == 7
    inputs = ("quantize", model, "-o", tmp_path / "inputs", "-r", "int8", "--rotate-inputs", "o,down")
    assert (
        "inputs of o and down are multiplied by a Hadamard matrix when the model runs" in run(*inputs, "--text", text).stdout
    )
    assert "KL" in run("eval", tmp_path / "inputs", "--against", model, "--text", text).stdout
    refused = run(*inputs, "--no-check", "--overwrite", "--to", "hf", status=2).stderr
    assert "write it --to fewbit or orbax, or quantize its source without --rotate-inputs" in refused


@pytest.mark.slow
@needs_tokenizers
def test_kept_scales(model, tmp_path):
    text, out = text_file(tmp_path), tmp_path / "out"
    awq = ("--method", "awq", "--calibration-text", text, "--calibration-windows", 2, "--calibration-window", 16)
    done = run("quantize", model, "-o", out, "-r", "int8", "--keep-scales", "o,down", *awq, "--text", text)
    assert "scales of the inputs of o and down are kept, and multiplied when the model runs" in done.stdout
    assert "KL" in run("eval", out, "--against", model, "--text", text).stdout
    refused = run("quantize", model, "-o", out, "-r", "int8", "--keep-scales", "o", "--overwrite", status=2).stderr
    assert "--keep-scales o is for --method awq or smoothquant; rtn finds no scales of inputs" in refused


@pytest.mark.slow
@needs_tokenizers
def test_the_source_that_is_quantized_already_is_told(model, tmp_path):
    run("quantize", model, "-o", tmp_path / "out", "-r", "nf4", "--no-check")
    said = run("plan", tmp_path / "out", "-r", "int8").stdout
    assert "is already quantized to 4-bit (1 tensor q8_0, 21 tensors nf4)" in said
    assert "not to the original one" in said
    assert "q8_0 in the file, kept exactly" in said


@pytest.mark.slow
@needs_tokenizers
@needs_matplotlib
def test_compare_prints_a_table_and_draws_a_chart(model, tmp_path):
    chart, text = tmp_path / "chart.svg", text_file(tmp_path)
    said = run("compare", model, "-r", "int8,nf4", "--text", text, "--chart", chart).stdout
    assert "int8" in said
    assert "float" in said
    assert "<svg" in chart.read_text()
    form = run_json("compare", model, "-r", "int8,nf4", "--text", text)
    assert [r["recipe"] for r in form["recipes"]] == ["int8", "nf4"]
    assert form["recipes"][0]["kl"] < form["recipes"][1]["kl"]


@needs_glassllm
@needs_matplotlib
@pytest.mark.slow
def test_the_demo_on_a_small_model(tmp_path):
    out = tmp_path / "demo"
    form = run_json("demo", "glassllm", "-o", out, "--tokens", 256)
    report = json.loads((out / "report.json").read_text())
    assert report == {key: value for key, value in form.items() if key != "seconds"}
    assert [r["recipe"] for r in report["recipes"]] == ["int8", "nf4", "mxfp4", "nvfp4", "mixed"]
    assert all(r["sample"] and r["kl"] >= 0 for r in report["recipes"])
    assert [r["recipe"] for r in report["recipes"] if r["written"]] == ["nf4"]
    assert (out / "quality.svg").stat().st_size > 1000
    page = (out / "report.html").read_text()
    assert page.startswith(MARKER) and "nats at" in page
    assert (
        page.count("<svg ") == 1 + 5 + 5 * 5 + 1 + 1
    )  # quality; of each recipe a map and histograms; the chosen one; inputs
    assert "0 errors, 0 warnings" in run("verify", out / "model-nf4").stdout


def test_an_unknown_network_is_quantized_without_a_check(tmp_path):
    np.savez(tmp_path / "a.npz", **{"lm_head.weight": np.random.default_rng(0).normal(size=(8, 64)), "bias": np.ones(8)})
    done = run("quantize", tmp_path / "a.npz", "-o", tmp_path / "out", "-r", "nf4")
    assert (
        "no code was traced; the roles of 2 tensors: 1 from the table of names: decoder, 1 from their own names"
        in " ".join(done.stdout.split())
    )
    assert "quality check skipped" in done.stdout
    assert "fewbit generate" not in done.stdout


@pytest.mark.slow  # it imports transformers
@pytest.mark.finding(1)
def test_strict_refuses_where_a_role_is_unknown(tmp_path):
    arrays = {"lm_head.weight": np.ones((8, 64), np.float32), "adapter.mixing": np.ones((4, 64), np.float32)}
    config = {"model_type": "qwen3"}
    io.write(tmp_path / "m", arrays, config=config)
    assert "role unknown, so it stays float" in " ".join(run("plan", tmp_path / "m", "-r", "nf4").stdout.split())
    done = run("plan", tmp_path / "m", "-r", "nf4", "--strict", "--save", tmp_path / "plan.json", status=1)
    assert done.stdout == "" and not (tmp_path / "plan.json").exists()
    assert done.stderr.startswith("error: the role of adapter.mixing is unknown; ")
    assert "Add a rule for each: its path and the policy null to keep it" in done.stderr
    rules = [{"path": r"adapter\.mixing", "policy": None}, *recipe("nf4").to_json()["rules"]]
    (tmp_path / "rules.json").write_text(json.dumps({"rules": rules}))
    run("plan", tmp_path / "m", "-r", tmp_path / "rules.json", "--strict")


def test_verify_finds_a_changed_byte(tmp_path):
    np.savez(tmp_path / "a.npz", **{"lm_head.weight": np.ones((8, 64), np.float32)})
    run("quantize", tmp_path / "a.npz", "-o", tmp_path / "out", "-r", "int8")
    shard = tmp_path / "out" / "fewbit.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    assert "was changed since it was written" in run("verify", tmp_path / "out", status=1).stdout


def test_verify_takes_the_names_of_installed_models(tmp_path, monkeypatch):
    np.savez(tmp_path / "a.npz", x=np.ones((8, 64), np.float32))
    monkeypatch.setitem(INSTALLED, "smollm2", lambda: tmp_path / "a.npz")
    assert run("verify", "smollm2").stdout == "smollm2: 0 errors, 0 warnings\n"


def test_help_says_that_weights_are_dequantized():
    assert "they are dequantized once" in " ".join(run("generate", "--help").stdout.replace("│", " ").split())
