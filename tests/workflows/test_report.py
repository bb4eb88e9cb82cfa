"""The facts of a report: of a fewbit directory, a GGUF file, other programs' files, and what does not fit."""

import dataclasses
import json
import math
import sys

import jax.numpy as jnp
import numpy as np
import pytest

import fewbit as fb
from fewbit.array.quantize import dequantize
from fewbit.array.quantize import quantize as quantize_array
from fewbit.errors import QuantError
from fewbit.evaluate.report.facts import WORST, Report
from fewbit.models import find_text
from fewbit.workflows import compare, evaluation_windows, load, plan_model, quantize, weight_sqnr
from fewbit.workflows.convert.targets import fitted
from fewbit.workflows.evaluate import baseline, evaluate
from fewbit.workflows.inspect import file_bytes
from fewbit.workflows.report import _histogram, _in_units, candidate_facts, report
from tests.each_scheme import each_scheme
from tests.workflows.checkpoints import last_axis, llama_directory, needs_tokenizers, text_file

pytestmark = needs_tokenizers


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return load(llama_directory(tmp_path_factory.mktemp("source") / "hf"))


@pytest.fixture(scope="module")
def model(source, tmp_path_factory):
    out = tmp_path_factory.mktemp("nf4") / "nf4"
    quantize(source, plan_model(source, recipe="nf4"), out)
    return load(out)


@pytest.fixture(scope="module")
def facts(model, source) -> Report:
    return report([model], source, quality=False)


@pytest.mark.slow
def test_the_manifest_and_the_sizes(facts, model, source):
    one = facts.models[0]
    assert (one.recipe, one.method, one.source) == ("nf4", "rtn", "hf")
    assert one.quality is None and one.why_no_quality == "not asked for (--no-quality)"
    assert (one.stored.file_bytes, one.stored.array_bytes) == (file_bytes(model.path), model.nbytes)
    assert one.stored.bits_per_weight == pytest.approx(8 * model.nbytes / model.size)
    assert facts.source.path == str(source.path) and facts.source.container == "safetensors"


def test_every_tensor_has_its_role_its_reason_and_its_error(facts, model, source):
    sqnr, _ = weight_sqnr(model, source)
    by_path = {tensor.path: tensor for tensor in facts.models[0].tensors}
    assert list(by_path) == list(model.info)
    assert {path: t.sqnr_db for path, t in by_path.items() if t.sqnr_db is not None} == sqnr
    down, norm = by_path["layers/1/mlp/down"], by_path["layers/1/mlp/norm"]
    assert (down.kind, down.layer, down.stored, down.role) == ("layers/*/mlp/down", 1, "nf4", "matmul")
    assert down.is_quantized and down.bytes_before == source.info[down.path].nbytes > down.bytes_after
    assert (norm.is_quantized, norm.role, norm.sqnr_db) == (False, "norm", None)
    assert "no product contracts it" in norm.reason
    assert by_path["embed"].layer is None
    left = facts.models[0].left_in_float
    assert sum(group.count for group in left) == sum(not tensor.is_quantized for tensor in by_path.values())


def test_every_quantized_weight_has_a_histogram(facts, model, source):
    tensors, histograms = facts.models[0].tensors, facts.models[0].histograms
    quantized = [tensor for tensor in tensors if tensor.is_quantized]
    assert [(h.path, h.sqnr_db) for h in histograms] == [(t.path, t.sqnr_db) for t in quantized] and len(quantized) > WORST
    lowest = sorted(quantized, key=lambda tensor: tensor.sqnr_db)[:WORST]
    assert [h.path for h in facts.models[0].worst] == [t.path for t in lowest]
    for found in histograms:
        assert sum(found.counts) == math.prod(model.info[found.path].shape)
        assert found.amax == np.abs(source.load(found.path)).max()
        assert found.numbers == tuple(sorted(model.info[found.path].scheme.format.values())) and found.clipped == 0
        assert found.low < found.numbers[0] and found.high > found.numbers[-1]


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("scheme", ["int4", "q4_1", "uint4", "nf4"])
def test_units_are_those_of_the_codes(scheme):
    x = np.random.default_rng(0).normal(size=(8, 64)).astype(np.float32)
    q = quantize_array(x, scheme)
    numbers = q.scheme.format.nearest(jnp.asarray(_in_units(x, q)))
    np.testing.assert_allclose(_in_units(np.asarray(dequantize(q)), q), np.asarray(numbers), atol=1e-3)


def test_blocks_of_scale_zero_have_no_units():
    x = np.ones((2, 64), np.float32)
    q = quantize_array(x, "int4")
    empty = dataclasses.replace(q, scale=q.scale.at[0].set(0.0))
    assert _in_units(x, empty).size == 64


def histogram_of(x, q, facts, model, source):
    """The histogram of a float weight and its quantized form."""
    models = dataclasses.replace(model, load=lambda path: q), dataclasses.replace(source, load=lambda path: x)
    return _histogram(*models, facts.models[0].tensors[0], 20.0)


def test_clipped_weights_are_counted(facts, model, source):
    x, q = source.load("layers/0/mlp/up"), model.load("layers/0/mlp/up")
    found = histogram_of(x, dataclasses.replace(q, scale=q.scale / 4), facts, model, source)
    assert 0.1 < found.clipped < 0.9 and sum(found.counts) == q.size
    assert (found.low, found.high) == (-3.0, 3.0)  # what lies further out is in the outermost bins


def test_clipped_weights_are_counted_where_an_edge_is_no_float32(facts, model, source):
    x = np.random.default_rng(0).normal(size=(8, 64)).astype(np.float32)
    q = quantize_array(x, fb.Scheme(fb.formats.Codebook("odd", (-1.0, 0.0, 0.2)), {...: 1, -1: 32}))
    found = histogram_of(x, dataclasses.replace(q, scale=q.scale / 8), facts, model, source)
    assert found.low == float(np.float32(-2.2)) < -2.20000003 and sum(found.counts) == x.size
    assert found.counts[0] > 0 and found.counts[-1] > 0


@each_scheme(("int8", "nf4", "q4_1", "nvfp4"))
def test_histograms_of_every_scheme(name, facts, model, source):
    x = np.random.default_rng(0).normal(size=(256, 256)).astype(np.float32)
    q = quantize_array(x, name)
    found = histogram_of(x, q, facts, model, source)
    numbers = q.scheme.format.values()
    assert sum(found.counts) == x.size and found.amax == np.abs(x).max()
    assert set(found.numbers) == set(numbers[np.isfinite(numbers)].tolist()) and found.low < found.numbers[0]
    assert list(found.numbers) == sorted(found.numbers) and found.numbers[-1] < found.high and 0 <= found.clipped < 0.5


@pytest.mark.slow
def test_quality_and_its_progress(model, source, tmp_path, monkeypatch):
    seen, evaluated = [], []
    monkeypatch.setattr(
        sys.modules["fewbit.workflows.report"],
        "baseline",
        lambda one, *rest, **named: evaluated.append(one) or baseline(one, *rest, **named),
    )
    text = str(text_file(tmp_path))
    facts = report([model, model], source, text=text, progress=lambda part, detail: seen.append((part, detail)))
    one, two = facts.models
    assert evaluated == [source], "the source is evaluated once for both"
    alone = evaluate(model, against=source, text=text)
    assert one.quality is not None and one.quality.comparison == alone.against
    assert facts.why_no_inputs == "" and facts.inputs is not None and facts.inputs.expert_tokens == {}
    assert {product.path for product in facts.inputs.products} >= {"layers/0/attn/q,k,v", "layers/2/mlp/down"}
    assert one == two and one.quality is not None and one.why_no_quality == ""
    assert one.quality.comparison.kl.mean.value > 0 and one.quality.engine == "fewbit"
    parts = [part for part, _ in seen]
    assert parts == sorted(parts) and parts[0] > 0 and parts[-1] < 1 and "nf4: weights" in {text for _, text in seen}


def test_a_model_that_cannot_be_run_says_why(model, source):
    without = dataclasses.replace(source, tokenizer=None, why_no_tokenizer="none was given")
    one = report([dataclasses.replace(model, tokenizer=None, why_no_tokenizer="none was given")], without).models[0]
    assert one.quality is None and one.why_no_quality.endswith("has no tokenizer: none was given")
    assert len(one.worst) == WORST


@pytest.mark.slow
def test_a_candidate_in_memory_has_the_facts_of_the_written_model(model, source, tmp_path):
    text = find_text(str(text_file(tmp_path)))
    base = baseline(source, evaluation_windows(source, text.content))
    found = candidate_facts(compare(base, plan_model(source, recipe="nf4")), base, text.name, None)
    expected = report([model], source, text=text.name).models[0]
    assert found.stored.file_bytes is None and found.stored.array_bytes == expected.stored.array_bytes
    assert found.histograms == expected.histograms and found.left_in_float == expected.left_in_float
    assert (found.recipe, found.source, found.method) == ("nf4", "hf", "rtn")
    assert found.quality is not None and found.quality.comparison.kl.mean.value == pytest.approx(
        expected.quality.comparison.kl.mean.value, rel=1e-4
    )
    for one, other in zip(found.tensors, expected.tensors, strict=True):
        assert dataclasses.replace(one, stored=other.stored) == other


def test_a_text_that_is_missing_or_too_short(model, source, tmp_path):
    with pytest.raises(QuantError, match=r"no text 'nowhere\.txt'"):
        report([model], source, text="nowhere.txt")
    (tmp_path / "short.txt").write_text("abc")
    with pytest.raises(QuantError, match="the text has 3 tokens"):
        report([model], source, text=str(tmp_path / "short.txt"))


def test_a_source_with_other_parameters(model, source):
    def changed(info):
        return dataclasses.replace(source, info=info)

    path = "layers/0/mlp/up"
    other = dataclasses.replace(source.info[path], shape=(2, 2))
    with pytest.raises(QuantError, match=r"layers/0/mlp/up has shape .* and \(2, 2\) in .*; pass the model that it was"):
        report([model], changed({**source.info, path: other}))
    with pytest.raises(QuantError, match=r"nf4 has layers/0/mlp/up, which .* lacks"):
        report([model], changed({p: i for p, i in source.info.items() if p != path}))
    with pytest.raises(QuantError, match=r"lacks extra of .* \(1 parameters\)"):
        report([model], changed({**source.info, "extra": other}))
    with pytest.raises(QuantError, match="at least one model"):
        report([], source)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize(
    ("recorded", "expected"),
    [
        ({}, ("", "", "")),
        ({"recipe": 3, "source": "x", "method": []}, ("", "", "")),
        ({"recipe": "nf4", "method": {"name": "gptq"}, "source": {"name": "hf"}}, ("nf4", "gptq", "hf")),
        ({"recipe": "int8", "scaling": {"name": "smoothquant"}}, ("int8", "smoothquant+rtn", "")),
        (
            {"recipe": "keep", "source": {"name": "b", "facts": {"recipe": "int8", "source": {"name": "hf"}}}},
            ("int8", "rtn", "hf"),
        ),
        ({"recipe": "../mine.json"}, ("../mine.json", "rtn", "")),
        ({"recipe": "no_such_recipe"}, ("no_such_recipe", "rtn", "")),
    ],
    ids=["none", "wrong types", "method", "scaling", "copied", "file", "unknown"],
)
def test_what_a_manifest_says(recorded, expected, model, source):
    one = report([dataclasses.replace(model, facts=recorded)], source, quality=False).models[0]
    assert (one.recipe, one.method, one.source) == expected
    norm = next(tensor for tensor in one.tensors if tensor.path == "layers/0/mlp/norm")
    known = expected[0] in ("nf4", "int8")
    assert norm.role == "norm" and ("no product contracts it" if known else "rules leave a norm in float") in norm.reason


def test_a_manifest_of_another_source_and_a_tensor_that_a_plan_left(model, source):
    left = dataclasses.replace(source, facts={"recipe": "nf4", "source": {"name": "elsewhere"}})
    one = report([left], source, quality=False).models[0]
    assert "its manifest says that it was made from elsewhere, not from hf" in one.notes
    up = next(tensor for tensor in one.tensors if tensor.path == "layers/0/mlp/up")
    assert up.reason == "recipe nf4 quantizes it, but the file has it in float" and up.sqnr_db == math.inf
    assert one.histograms == ()


def test_a_rotated_model_has_no_error_of_its_weights(model, source):
    more = {**model.info, "untied": model.info["layers/0/mlp/up"]}  # rotating unties the embedding from the head
    rotated = dataclasses.replace(model, info=more, facts={**model.facts, "rotation_seed": 0})
    one = report([rotated], source, quality=False).models[0]
    assert one.histograms == () and all(tensor.sqnr_db is None for tensor in one.tensors)
    assert "no SQNR of the weights: one model's residual stream is rotated and the other's is not" in one.notes
    untied = one.tensors[-1]
    assert (untied.path, untied.bytes_before, untied.role, untied.is_quantized) == ("untied", None, "unknown", True)


def test_files_of_another_program(source, tmp_path):
    plan = fitted("compressed-tensors", source, plan_model(source, recipe="int8"))
    quantize(source, plan, tmp_path / "out", to="compressed-tensors")
    (tmp_path / "out" / "manifest.json").unlink()
    one = report([load(tmp_path / "out")], source, quality=False).models[0]
    up = next(tensor for tensor in one.tensors if tensor.path == "layers/0/mlp/up")
    assert (one.recipe, up.is_quantized, up.role, up.reason) == ("", True, "matmul", "")
    assert up.sqnr_db is not None and 30 < up.sqnr_db < 60
    assert json.dumps(up.to_json()) and one.histograms[0].format.startswith("int8")


def test_flat_tensors_of_unknown_role(tmp_path):
    x = np.random.default_rng(0).normal(size=(8, 64)).astype(np.float32)
    np.savez(tmp_path / "a.npz", **{"some.0.thing": x, "b": x[0]})
    source = load(tmp_path / "a.npz")
    quantize(source, plan_model(source, recipe=last_axis("int8")), tmp_path / "q")
    one = report([load(tmp_path / "q")], source).models[0]
    assert one.quality is None and "cannot be run" in one.why_no_quality
    thing = one.tensors[0]
    assert (thing.kind, thing.layer, thing.is_quantized) == ("some.*.thing", 0, True)
    assert one.histograms[0].numbers == tuple(float(n) for n in range(-128, 128))
