"""Methods on whole decoders, layer by layer: against `fb.observe`, with experts, and on the disk."""

import dataclasses
import functools
import json
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fewbit as fb
from fewbit import io, workflows
from fewbit.io.checkpoint import TensorInfo
from fewbit.methods import GPTQ, QEP
from fewbit.methods.awq import AWQScaling
from fewbit.models import forward, params_from_paths, paths_of_params
from fewbit.workflows.methods import calibrated
from fewbit.workflows.methods.calibrated import calibrated_weights
from fewbit.workflows.methods.calibration_data import CalibrationData, calibration_data
from fewbit.workflows.model import Model
from tests.nets.random_decoder import (
    BY_HEAD,
    CHUNKS,
    FEATURES,
    LATENT,
    LINEAR,
    MAMBA,
    OTHERS,
    SINGLE_BLOCKS,
    SMALL,
    UNTIED,
    compiled_logits,
    random_params,
    random_tokens,
)
from tests.workflows.checkpoints import llama_directory, needs_tokenizers, text_file

ONE_LINEAR = dataclasses.replace(LINEAR, layers=2, norm_offset=0.0, linear=dataclasses.replace(LINEAR.linear, layers=(0,)))
CONFIGS = {
    "small": SMALL,
    "untied": UNTIED,
    "features": FEATURES,
    "others": OTHERS,
    "latent": LATENT,
    "linear": ONE_LINEAR,
    "mamba": dataclasses.replace(MAMBA, layers=2, nope_layers=(), mamba=dataclasses.replace(MAMBA.mamba, layers=(0,))),
    "by head": BY_HEAD,
    "single blocks": SINGLE_BLOCKS,
    "chunks": CHUNKS,
}


def model_of(config, tmp_path) -> Model:
    """A model in memory."""
    arrays = {path: np.asarray(x) for path, x in paths_of_params(random_params(config), config).items()}
    info = {path: TensorInfo(a.shape, "float32", "F32", a.nbytes) for path, a in arrays.items()}
    return Model(tmp_path, "npz", config, "", info, arrays.__getitem__)


def data_of(config, count=16) -> CalibrationData:
    return CalibrationData("random", np.asarray(random_tokens(config, count, config.context)))


def errors(model, plan, values, tokens) -> float:
    """The relative error of the logits with some parameters replaced."""
    config = model.config
    exact = compiled_logits(model.params(), tokens, config)
    params = params_from_paths({path: values.get(path, model.load(path)) for path in model.info}, config)
    logits = compiled_logits(params, tokens, config)
    return float(jnp.linalg.norm(logits - exact) / jnp.linalg.norm(exact))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "small",
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("features", "latent", "linear", "mamba", "by head")),
        *(pytest.param(n, marks=pytest.mark.long) for n in ("untied", "others")),
    ],
)
def test_logits_are_nearer_than_with_rounded_weights(name, tmp_path):
    config = CONFIGS[name]
    model = model_of(config, tmp_path)
    plan, data = workflows.plan_model(model, recipe="int4"), data_of(config)
    values = calibrated_weights(model, plan, GPTQ(), data, fused={})
    planned = {row.path for row in plan if row.policy is not None}
    assert set(values) <= planned
    assert all("/experts/" in path or path == "embed" for path in planned - set(values)), "what no token multiplies"
    nearest = {path: fb.quantize(model.load(path), plan[path].policy.weight, axis=plan[path].axis) for path in planned}
    assert jax.tree.structure(values) == jax.tree.structure({path: nearest[path] for path in values})
    tokens = jnp.asarray(data.windows)
    assert errors(model, plan, nearest | values, tokens) < 0.85 * errors(model, plan, nearest, tokens)


@pytest.mark.slow
def test_later_layers_are_corrected_for_the_errors_before_them(tmp_path):
    """QEP: the first layer has exact inputs, so there it is GPTQ; after it logits come nearer."""
    model, data = model_of(SMALL, tmp_path), data_of(SMALL)
    plan, tokens = workflows.plan_model(model, recipe="int3"), jnp.asarray(data.windows)
    gptq, qep = (calibrated_weights(model, plan, method, data) for method in (GPTQ(), QEP()))
    assert jax.tree.structure(qep) == jax.tree.structure(gptq)
    for path in gptq:
        is_first = re.match(r"layers/0/attn/[qkv]", path) is not None
        assert np.array_equal(qep[path].codes, gptq[path].codes) == is_first or "layers/0" in path
    assert errors(model, plan, qep, tokens) < errors(model, plan, gptq, tokens)


@pytest.mark.slow
def test_the_first_layer_is_corrected_for_the_errors_of_the_embeddings(tmp_path):
    model, data = model_of(dataclasses.replace(SMALL, tied=False), tmp_path), data_of(SMALL, 8)
    recipe = {"rules": [{"path": "embed", "policy": "int2"}, {"path": "layers/0/attn/[qkv]", "policy": "int4"}]}
    plan = workflows.plan_model(model, recipe=recipe)
    gptq, qep = (dict(calibrated_weights(model, plan, method, data)) for method in (GPTQ(), QEP()))
    assert gptq.keys() == qep.keys() == {f"layers/0/attn/{name}" for name in "qkv"}
    embed, gain = model.load("embed"), model.load("layers/0/attn/norm")
    exact, seen = (
        np.asarray(table)[data.windows.ravel()] for table in (embed, fb.dequantize(fb.quantize(jnp.asarray(embed), "int2")))
    )
    exact, seen = (x / np.sqrt(np.mean(x**2, axis=1, keepdims=True) + SMALL.norm_eps) * gain for x in (exact, seen))
    for path in gptq:
        wanted = exact @ np.asarray(model.load(path)).T
        errors_of = [np.linalg.norm(seen @ np.asarray(fb.dequantize(found[path])).T - wanted) for found in (qep, gptq)]
        assert errors_of[0] < 0.98 * errors_of[1]


def test_the_first_layer_is_that_of_observe(tmp_path):
    """Its inputs are those of the float model; later layers see quantized ones."""
    model, data = model_of(SMALL, tmp_path), data_of(SMALL, 4)
    plan = workflows.plan_model(model, recipe="int4")
    values = calibrated_weights(model, plan, GPTQ(), data, fused={})
    recipe = fb.Recipe((fb.Rule(r"layers/0/.*/(q|up)", "int4"),))
    tokens = jnp.asarray(data.windows)
    stats = fb.observe(
        lambda params, tokens: forward(params, tokens, SMALL), model.params(), [tokens], recipe, collect=("hessian",)
    )
    for path in ("layers/0/attn/q",):
        alone = GPTQ().quantized(jnp.asarray(model.load(path)), fb.scheme("int4"), (-1,), stats[path])
        assert np.mean(np.asarray(alone.codes == values[path].codes)) > 0.98


@pytest.mark.slow
def test_experts_without_tokens_are_left_out(tmp_path):
    config = dataclasses.replace(FEATURES, experts=dataclasses.replace(FEATURES.experts, count=8))
    model = model_of(config, tmp_path)
    plan = workflows.plan_model(model, recipe="int4")
    values = calibrated_weights(model, plan, GPTQ(), CalibrationData("one token", np.zeros((1, 1), np.int32)), fused={})
    experts = {path.split("/")[4] for path in values if "/experts/" in path}
    assert len(experts) == config.experts.active


@pytest.mark.slow
@needs_tokenizers
def test_a_directory_says_how_it_was_made(tmp_path):
    model = workflows.load(llama_directory(tmp_path / "hf"))
    plan = workflows.plan_model(model, recipe="int4")
    data, layers, results = calibration_data(model, str(text_file(tmp_path)), windows=8), [], []
    assert data.windows.shape == (8, SMALL.context)
    for name in ("a", "b"):
        workflows.quantize(
            model,
            plan,
            tmp_path / name,
            method=GPTQ(damping=0.05),
            calibration=data,
            on_layer=lambda *done: layers.append(done),
            on_tensor=results.append,
        )
    assert layers[:4] == [(0, 3), (1, 3), (2, 3), (3, 3)]
    assert {r.method for r in results if "attn/q" in r.path} == {"gptq"} and any(" by gptq  " in str(r) for r in results)
    facts = json.loads((tmp_path / "a" / "manifest.json").read_text())["facts"]["method"]
    assert facts == {"name": "gptq", "damping": 0.05, "act_order": True, "calibration": data.facts}
    assert (tmp_path / "a" / "fewbit.safetensors").read_bytes() == (tmp_path / "b" / "fewbit.safetensors").read_bytes()
    stored = io.read(tmp_path / "a").tensors
    nearest = workflows.quantize(model, plan, tmp_path / "rtn").tensors
    lower = [t.sqnr_db > r.sqnr_db for t, r in zip(nearest, results, strict=False) if t.is_quantized]
    assert np.mean(lower) > 0.8, "the weights themselves are further away"
    assert len(stored) == len(plan.rows)


@needs_tokenizers
def test_what_is_refused(tmp_path):
    model = workflows.load(llama_directory(tmp_path / "hf"))
    plan, text = workflows.plan_model(model, recipe="int4"), text_file(tmp_path)
    with pytest.raises(fb.QuantError, match="method gptq needs calibration data"):
        workflows.quantize(model, plan, tmp_path / "q", method=GPTQ())
    with pytest.raises(fb.QuantError, match="method rtn uses no calibration data"):
        workflows.quantize(model, plan, tmp_path / "q", calibration=calibration_data(model, str(text)))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").write_text("not ours")
    with pytest.raises(fb.QuantError, match="other"):
        workflows.quantize(
            model,
            plan,
            tmp_path / "other",
            method=GPTQ(),
            calibration=calibration_data(model, str(text)),
            overwrite=True,
            on_layer=lambda *_: pytest.fail("an output that is refused comes before any work"),
        )
    for token in (67, -1):
        with pytest.raises(fb.QuantError, match=f"the calibration data has token {token}"):
            calibrated_weights(model, plan, GPTQ(), CalibrationData("x", np.full((1, 4), token)), fused={})


quantized = calibrated._quantized


def _files(directory):
    return {file.name: file.read_bytes() for file in directory.iterdir()}


@needs_tokenizers
@pytest.mark.parametrize("method", [pytest.param(GPTQ(), id="gptq"), pytest.param(QEP(), id="qep", marks=pytest.mark.slow)])
def test_an_interrupted_run_goes_on_and_gives_the_same_bytes(method, tmp_path, monkeypatch):
    """QEP has two residual streams, and both are on the disk."""
    model = workflows.load(llama_directory(tmp_path / "hf"))
    plan, data = workflows.plan_model(model, recipe="int4"), calibration_data(model, str(text_file(tmp_path)), windows=4)
    quantize = functools.partial(workflows.quantize, model, plan, method=method, calibration=data)
    quantize(tmp_path / "whole")
    done = []

    def stop(layer, layers):
        if layer == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize(tmp_path / "resumed", on_layer=stop)
    work = tmp_path / ".resumed.fewbit-work"
    assert sorted(part.name for part in work.iterdir()) == ["journal", "layer-0", "layer-1", "stream-2"]
    streams = io.read(work / "stream-2").tensors["0"]
    assert streams.shape == (1 + isinstance(method, QEP), *data.windows.shape, model.config.width)
    assert isinstance(method, GPTQ) or not np.array_equal(*streams), "quantized and float"
    monkeypatch.setattr(
        calibrated, "_quantized", lambda layer, prefix, *rest: done.append(prefix) or quantized(layer, prefix, *rest)
    )
    quantize(tmp_path / "resumed")
    assert list(dict.fromkeys(done)) == ["layers/2/", ""], "layers 0 and 1 are not quantized again"
    assert _files(tmp_path / "resumed") == _files(tmp_path / "whole")
    assert not work.exists()


def _interrupted(quantize, out, layers):
    """Runs a job until so many layers are done. Returns the folder of what is finished."""

    def stop(layer, _):
        if layer == layers:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize(out, on_layer=stop)
    return out.with_name(f".{out.name}.fewbit-work")


@pytest.mark.slow_after(1)
@needs_tokenizers
@pytest.mark.parametrize("is_missing", [False, True], ids=["damaged", "missing"])
def test_scales_that_an_earlier_run_lost_are_searched_again(is_missing, tmp_path):
    model = workflows.load(llama_directory(tmp_path / "hf"))
    plan, data = workflows.plan_model(model, recipe="int4"), calibration_data(model, str(text_file(tmp_path)), windows=4)
    quantize = functools.partial(workflows.quantize, model, plan, scaling=AWQScaling(), calibration=data)
    quantize(tmp_path / "whole")
    part = _interrupted(quantize, tmp_path / "resumed", 2) / "scales-0"
    (file,) = part.glob("*.safetensors")
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)
    if is_missing:
        shutil.rmtree(part)
    quantize(tmp_path / "resumed")
    assert _files(tmp_path / "resumed") == _files(tmp_path / "whole")


@pytest.mark.slow
@needs_tokenizers
def test_a_changed_configuration_is_another_job(tmp_path):
    """The same tensors are another network then, and what was learned from its activations does not hold."""
    hf = llama_directory(tmp_path / "hf")
    text = str(text_file(tmp_path))

    def quantize(out, on_layer=None):
        model = workflows.load(hf)
        plan, data = workflows.plan_model(model, recipe="int4"), calibration_data(model, text, windows=4)
        workflows.quantize(model, plan, out, method=GPTQ(), calibration=data, on_layer=on_layer)

    assert _interrupted(quantize, tmp_path / "resumed", 2).exists()
    config = json.loads((hf / "config.json").read_text())
    (hf / "config.json").write_text(json.dumps(config | {"rope_theta": 50.0}))
    quantize(tmp_path / "resumed")
    quantize(tmp_path / "whole")
    assert _files(tmp_path / "resumed") == _files(tmp_path / "whole")


@pytest.mark.slow
@needs_tokenizers
def test_a_killed_process_loses_one_layer_at_most(tmp_path):
    """SIGKILL as soon as a layer is finished, twice; then a run to the end."""
    command = command_by("gptq", tmp_path)
    subprocess.run([*command, tmp_path / "whole"], check=True, capture_output=True)
    work = tmp_path / ".killed.fewbit-work"
    for layer in range(2):
        process = subprocess.Popen([*command, tmp_path / "killed"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while process.poll() is None and not (work / f"layer-{layer}").exists():
            time.sleep(0.01)
        process.kill()
        process.wait()
        assert {f"layer-{i}" for i in range(layer + 1)} <= {part.name for part in work.iterdir()}
        assert not (tmp_path / "killed").exists()
    subprocess.run([*command, tmp_path / "killed"], check=True, capture_output=True)
    assert _files(tmp_path / "killed") == _files(tmp_path / "whole")
    records = {".whole.fewbit-source", ".killed.fewbit-source"}
    assert {path.name for path in tmp_path.iterdir()} == {"hf", "text.txt", "whole", "killed"} | records


def command_by(method: str, directory: Path) -> list[str | Path]:
    """The command that quantizes a small model by a method, but for its output."""
    source, text = llama_directory(directory / "hf"), text_file(directory)
    command = [
        sys.executable,
        "-c",
        "from fewbit.cli import main; main()",
        "quantize",
        source,
        "--recipe",
        "int4",
        "--no-check",
    ]
    return [*command, "--method", method, "--calibration-text", text, "--calibration-windows", "4", "-o"]


@pytest.mark.long
@needs_tokenizers
def test_random_kills_of_a_search_of_scales_and_gptq(tmp_path):
    """SIGKILL at 50 random moments of runs that resume one another; whenever one comes to its end, it has the same bytes."""
    command, draw = command_by("awq+gptq", tmp_path), random.Random(0)
    for name in ("first", "whole"):  # the first fills the caches
        start = time.perf_counter()
        subprocess.run([*command, tmp_path / name], check=True, capture_output=True)
    seconds = time.perf_counter() - start
    out, whole, kills, resumed = tmp_path / "killed", _files(tmp_path / "whole"), 0, 0
    while kills < 50 or not resumed:
        is_kept = (tmp_path / ".killed.fewbit-work").exists()
        process = subprocess.Popen([*command, out], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            process.wait(draw.uniform(0.3, 1.2) * seconds)
        except subprocess.TimeoutExpired:
            process.kill()
        kills += process.wait() == -signal.SIGKILL
        assert process.returncode in (0, -signal.SIGKILL)
        if out.exists():
            resumed += is_kept
            assert _files(out) == whole
            shutil.rmtree(out)
            shutil.rmtree(tmp_path / ".killed.fewbit-work", ignore_errors=True)
    subprocess.run([*command, out], check=True, capture_output=True)
    assert _files(out) == whole
