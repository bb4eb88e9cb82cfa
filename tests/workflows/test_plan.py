"""Plans of checkpoints: traced axes, real bytes, reasons; edited plans are checked before anything is quantized."""

import dataclasses
import json

import numpy as np
import pytest

import fewbit as fb
from fewbit import io, workflows
from fewbit.errors import QuantError, UnsupportedError
from fewbit.io.containers.container import Weight
from fewbit.io.containers.registry import container
from fewbit.io.containers.writer import ContainerWriter
from fewbit.io.gguf.stored import stored
from fewbit.io.gguf.writer import GGUFWriter
from fewbit.recipe import PlanRow
from tests.workflows.checkpoints import last_axis, llama_directory, needs_tokenizers, text_file


@pytest.fixture
def odd(tmp_path):
    """Flat tensors of every kind."""
    arrays = {
        "w64": np.linspace(-1, 1, 64).reshape(2, 32),
        "w16": np.ones((2, 32), np.float16),
        "ids": np.arange(6, dtype=np.int32).reshape(2, 3),
        "wave": np.ones((2, 2), np.complex64),
        "step": np.float32(3),
        "bias": np.ones(5, np.float32),
        "none": np.ones((0, 32), np.float32),
    }
    np.savez(tmp_path / "odd.npz", **arrays)
    return workflows.load(tmp_path / "odd.npz")


def test_flat_tensors_say_why_they_stay(odd):
    plan = workflows.plan_model(odd, recipe=last_axis("int8"))
    reasons = {row.path: row.reason for row in plan}
    assert reasons == {
        "w64": "float64, rounded to float32 first",
        "w16": "",
        "ids": "int32 is not floating",
        "wave": "complex64 is not floating",
        "step": "a scalar",
        "bias": "a vector: no product contracts it",
        "none": "no elements",
    }
    assert (plan["w64"].dtype, plan["w64"].bytes_before, plan["w64"].axis) == ("float64", 512, (-1,))
    assert [row.path for row in plan if row.policy is not None] == ["w64", "w16"]


def test_a_dtype_that_files_cannot_hold_is_refused_before_anything_is_written(tmp_path):
    np.savez(tmp_path / "wide.npz", w=np.ones((2, 32), np.float32), wave=np.ones((2, 2), np.complex128))
    with pytest.raises(QuantError, match=r"tensor 'wave' of .*wide.npz has dtype complex128; safetensors files store"):
        workflows.plan_model(workflows.load(tmp_path / "wide.npz"), recipe=last_axis("int8"))


@needs_tokenizers
def test_a_llama_is_traced(tmp_path):
    plan = workflows.plan_model(workflows.load(llama_directory(tmp_path / "hf")), recipe="nf4")
    assert str(plan["embed"].policy) == "q8_0"
    assert plan["layers/2/mlp/down"].axis == (-1,)
    assert plan["norm"].reason == "no product contracts it; used by mul"
    names = [name for name, _, _ in workflows.folded(plan)]
    assert names[:3] == ["embed", "layers/0-2/attn/norm", "layers/0-2/attn/q"]
    assert sum(count for _, count, _ in workflows.folded(plan)) == len(plan.rows)


@needs_tokenizers
def test_attentions_own_products_stand_in_the_plan(tmp_path):
    model = workflows.load(llama_directory(tmp_path / "hf"))
    plan = workflows.plan_model(model, recipe="nf4")
    assert [row.policy for row in plan.products] == [None] * len(plan.products)
    assert len({row.name for row in plan.products}) == len(plan.products) >= 2 * 3
    assert all("dot_general at " in site for site in plan["layers/1/attn/q"].sites)
    first = dataclasses.replace(plan.products[0], policy=fb.Policy("fp8", "fp8"))
    quantized = dataclasses.replace(plan, products=(first, *plan.products[1:]))
    with pytest.raises(fb.UnsupportedError, match="quantizes products without a parameter"):
        workflows.quantize(model, quantized, tmp_path / "out")
    with pytest.raises(fb.UnsupportedError, match="there are none outside training"):
        workflows.quantize(model, workflows.plan_model(model, recipe="te_fp8_delayedscaling"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@needs_tokenizers
def test_plans_for_training_are_refused_before_a_method_reads_its_text(tmp_path):
    model = workflows.load(llama_directory(tmp_path / "hf"))
    plan = workflows.plan_model(model, recipe="te_fp8_delayedscaling")
    data = workflows.calibration_data(model, str(text_file(tmp_path)), windows=1, window=16)
    layers = []
    with pytest.raises(fb.UnsupportedError, match="there are none outside training"):
        workflows.quantize(
            model,
            plan,
            tmp_path / "out",
            method=fb.methods.GPTQ(),
            calibration=data,
            on_layer=lambda done, _: layers.append(done),
        )
    assert not layers


@needs_tokenizers
def test_rows_that_differ_are_not_folded(tmp_path):
    plan = workflows.plan_model(workflows.load(llama_directory(tmp_path / "hf")), recipe="nf4")
    rows = [dataclasses.replace(r, reason="other") if r.path == "layers/1/attn/q" else r for r in plan]
    names = [name for name, _, _ in workflows.folded(rows)]
    assert "layers/0,2/attn/q" in names
    assert "layers/1/attn/q" in names


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (
            [f"decoder.block.{i}.layer.{j}.norm.weight" for i in range(3) for j in range(2)],
            {"decoder.block.0-2.layer.0-1.norm.weight": 6},
        ),
        (
            ["b.0.layer.0.w", "b.1.layer.0.w", "b.0.layer.1.w", "b.2.layer.1.w"],
            {"b.0-1.layer.0.w": 2, "b.0,2.layer.1.w": 2},
        ),
        ([f"layers/{i}/experts/{j}/up" for i in (0, 1) for j in (0, 1, 3)], {"layers/0-1/experts/0-1,3/up": 6}),
        (["norm", "layers/7/w"], {"norm": 1, "layers/7/w": 1}),
    ],
)
def test_every_number_of_folded_paths_is_named(paths, names):
    rows = [PlanRow(path, (4, 8), "float32", None, (), (), (), 128, 128) for path in paths]
    assert {name: count for name, count, _ in workflows.folded(rows)} == names


def test_what_the_file_holds_in_the_planned_scheme_is_kept(tmp_path):
    q = fb.quantize(np.ones((4, 64), np.float32), "q8_0")
    io.write(tmp_path / "q", {"same": q, "other": fb.quantize(np.ones((4, 64), np.float32), "nf4")})
    plan = workflows.plan_model(workflows.load(tmp_path / "q"), recipe=last_axis("q8_0"))
    assert "q8_0 in the file, kept exactly" in plan["same"].reason
    assert "dequantized from nf4 first" in plan["other"].reason
    left = workflows.plan_model(workflows.load(tmp_path / "q"), recipe={"rules": [{"path": ".*", "policy": None}]})
    assert "stays nf4, as stored in the file" in left["other"].reason


def test_keep_leaves_everything(odd):
    plan = workflows.plan_model(odd, recipe="keep")
    assert all(row.policy is None and row.reason == "kept as it is" for row in plan)
    assert plan.bytes_before == plan.bytes_after


@pytest.mark.parametrize(("layout", "scheme"), [("awq", "uint4_f16_g32"), ("torchao", "int4_g32"), ("gptq", "q4_0")])
@pytest.mark.parametrize("recipe", ["keep", {"rules": [{"path": ".*", "policy": None}]}], ids=["keep", "rule"])
def test_weights_of_another_quantizer_count_the_bytes_that_they_take_here(tmp_path, layout, scheme, recipe):
    weight = Weight("a.weight", (32, 64), "float16", fb.scheme(scheme))
    q = fb.quantize(np.ones((32, 64), np.float16), weight.scheme)
    with ContainerWriter(tmp_path / "q", container(layout), weights=[weight], config={"torch_dtype": "float16"}) as writer:
        writer.add(weight.name, q)
    model = workflows.load(tmp_path / "q")
    row = workflows.plan_model(model, recipe=recipe)["a.weight"]
    assert row.bytes_before == model.info["a.weight"].nbytes != row.bytes_after == model.load("a.weight").nbytes


@pytest.mark.parametrize("scales", [None, [0.5], [0.5, 1.0, 2.0]], ids=["none", "one", "each"])
def test_tensor_scales_of_experts_are_counted(tmp_path, scales):
    q = fb.quantize(np.ones((3, 4, 64), np.float32), "nvfp4")
    tensor_scale = None if scales is None else np.asarray(scales, np.float32)
    with GGUFWriter(tmp_path / "m.gguf", {"general.architecture": "other"}) as writer:
        writer.add("ffn_up_exps.weight", dataclasses.replace(stored(q, "w"), tensor_scale=tensor_scale))
    model = workflows.load(tmp_path / "m.gguf")
    row = workflows.plan_model(model, recipe="keep")["ffn_up_exps.weight"]
    assert row.bytes_after == model.load("ffn_up_exps.weight").nbytes


def edited(odd, path, edit):
    form = workflows.plan_model(odd, recipe=last_axis("int8")).to_json()
    edit(form["rows"])
    path.write_text(json.dumps(form))
    return path


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda rows: rows.pop(5), r"the plan lacks bias of odd\.npz"),
        (lambda rows: rows[0].update(path="w65"), r"has a row for 'w65', which odd\.npz does not have; did you mean 'w64'"),
        (lambda rows: rows[0].update(shape=[2, 31]), r"w64 has shape \(2, 32\), but the plan was made for \(2, 31\)"),
        (lambda rows: rows[2].update(policy="int8", axis=[-1]), r"quantizes or prunes ids, which is int32"),
        (lambda rows: rows[5].update(policy="int8"), r"row of bias has a policy but no axis"),
        (lambda rows: rows[0].update(policy="int9"), r"unknown scheme 'int9'"),
        (
            lambda rows: rows[0].update(axis=[-3]),
            r"row of 'w64' has -3 in axis; the axes of its shape \(2, 32\) are -2 to 1",
        ),
    ],
)
def test_an_edited_plan_is_checked(odd, tmp_path, edit, message):
    with pytest.raises(QuantError, match=message):
        workflows.plan_model(odd, plan=edited(odd, tmp_path / "plan.json", edit))


def test_an_edited_plan_counts_its_bytes_anew(odd, tmp_path):
    path = edited(odd, tmp_path / "plan.json", lambda rows: rows[1].update(policy="nf4"))
    row = workflows.plan_model(odd, plan=path)["w16"]
    assert row.bytes_after == fb.quantize(np.ones((2, 32), np.float16), "nf4").nbytes


def test_exactly_one_of_recipe_and_plan(odd):
    with pytest.raises(QuantError, match="exactly one"):
        workflows.plan_model(odd)


@needs_tokenizers
def test_a_checkpoint_of_another_quantizer_is_refused(tmp_path):
    directory = llama_directory(tmp_path / "hf")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "aqlm"}}))
    with pytest.raises(UnsupportedError, match=r"quantized already .*method 'aqlm'"):
        workflows.plan_model(workflows.load(directory), recipe="int8")
