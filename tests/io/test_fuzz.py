"""Mutated files of every kind that fewbit reads end in its own errors, soon, and without growth of memory."""

import dataclasses
import gc
import json
import pathlib
import random
import struct
import time
import zlib
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import fewbit as fb
from fewbit import QuantError, UnsupportedError, io, models, workflows
from fewbit._json import canonical, dumped, parsed_object
from fewbit.cli.progress import peak_memory
from fewbit.io.gguf.blocks import LAYOUTS
from fewbit.io.gguf.fields import encoded
from fewbit.io.gguf.metadata import architecture_fields, architecture_of, extra_tensors
from fewbit.io.gguf.stored import Stored
from fewbit.io.gguf.vocabulary import tokenizer_fields
from fewbit.io.gguf.writer import GGUFWriter
from fewbit.io.native.manifest import sha256
from fewbit.io.peft import read_adapters, write_adapters
from fewbit.io.safetensors.file import file_header
from fewbit.models import GGUF, shapes
from fewbit.training.lora import Adapter
from tests.io.gguf.families import COMMON, FAMILIES, save_tokenizer
from tests.io.gguf.test_sentencepiece import model as sentencepiece_model
from tests.io.gguf.test_vocabulary import sentencepiece_json
from tests.models.tokenizers.fields import gguf_fields, sentencepiece_fields
from tests.nets.random_decoder import SMALL, SMALL_GGUF
from tests.workflows.checkpoints import llama_directory, needs_tokenizers

from .damage import content
from .mutations import gguf_bytes, mutated_bytes, mutated_json

SECONDS = 2.0
"""How much processor time reading one file may take."""
GROWTH = 1.5
"""How much the memory of a run may grow after its first tenth."""
ROUNDS = pytest.mark.parametrize(
    "rounds", [pytest.param(30, id="few"), pytest.param(100_000, id="many", marks=pytest.mark.long)]
)


@dataclasses.dataclass(frozen=True)
class Subject:
    """One kind of file.

    Attributes:
        path: the file that is mutated.
        mutated: a damaged copy of its bytes.
        read: reads it, and all that belongs to it.
    """

    path: pathlib.Path
    mutated: Callable[[bytes, random.Random], bytes]
    read: Callable[[], Any]


def recipe(directory):
    path = directory / "recipe.json"
    form = fb.recipe("te_nvfp4").to_json() | {"products": [{"path": "attn.*", "policy": "int8"}]}
    form["rules"][0] |= {"ops": ["take"], "axis": [-1], "sparsity": {"n": 2, "m": 4}}
    path.write_text(json.dumps(form))

    def read():
        found = fb.recipe(path)
        for rule in found.rules:
            rule.matches("l" + "a" * 40 + "b", ("dot_general",))
        found.to_json()

    return Subject(path, mutated_json, read)


def plan(directory):
    params = {"w": jnp.zeros((4, 64)), "b": jnp.zeros(4)}
    fb.plan(lambda p, x: x @ p["w"].T, params, jnp.zeros((1, 64)), recipe="w8a8").save(directory / "plan.json")

    def read():
        found = fb.Plan.load(directory / "plan.json")
        found.text(width=80)
        found.to_json()

    return Subject(directory / "plan.json", mutated_json, read)


def mixed_precision(directory):
    path = directory / "mixed.json"
    path.write_text(json.dumps({"__default__": {"w_bits": 8, "a_bits": None}, ".*/query": {"w_bits": 4, "tile_size": 128}}))
    return Subject(path, mutated_json, lambda: fb.maxtext_mixed_precision(path))


def hugging_face(name):
    def subject(directory):
        llama_directory(directory)
        (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": 1, "temperature": 0.5}))

        def read():
            model = workflows.load(directory)
            if model.config is None:
                raise QuantError(model.why_not_run)

        return Subject(directory / name, mutated_json, read)

    return subject


def tokenizer(name, files=None):
    def subject(directory):
        fields = {**gguf_fields(), "tokenizer.ggml.bos_token_id": 0, "tokenizer.ggml.add_bos_token": True}
        found = files or models.tokenizer_from_gguf(fields).files()
        config = {
            "eos_token": {"content": "a"},
            "bos_token": "a",
            "add_bos_token": True,
            "chat_template": "{{'<|im_start|>'}}",
            "model_max_length": 10**30,
        }
        for each, data in {**found, "tokenizer_config.json": json.dumps(config).encode()}.items():
            (directory / each).write_bytes(data)

        def read():
            found = models.tokenizer_from_directory(directory)
            found.decode(found.encode("hello 12", add_start=True))
            found.files()

        return Subject(directory / name, mutated_json, read)

    return subject


def index(directory):
    files = {"model-1.safetensors": {"a.weight": np.ones((2, 3), np.float32)}, "model-2.safetensors": {"b": np.ones(2)}}
    for name, tensors in files.items():
        (directory / name).write_bytes(file_header(tensors, {}) + b"".join(t.tobytes() for t in tensors.values()))
    places = {tensor: name for name, tensors in files.items() for tensor in tensors}
    path = directory / "model.safetensors.index.json"
    path.write_text(json.dumps({"metadata": {"total_size": 40}, "weight_map": places}))
    return Subject(path, mutated_json, lambda: content(io.read(directory)))


def safetensors(directory):
    """Half of the mutations are of the header's JSON, whose length is then right."""
    tensors = {"w": np.ones((2, 32), np.float32), "h": np.ones(3, np.float16)}
    header = file_header(tensors, {"format": "pt"})
    path = directory / "model.safetensors"
    path.write_bytes(header + b"".join(t.tobytes() for t in tensors.values()))

    def mutated(data, draw):
        if draw.random() < 0.5:
            return mutated_bytes(data, draw)
        text = mutated_json(header[8:], draw)
        return struct.pack("<Q", len(text)) + text + data[len(header) :]

    return Subject(path, mutated, lambda: content(io.read(path)))


def fewbit_directory(name):
    def subject(directory):
        weights = {
            "w": fb.quantize(jnp.ones((4, 64)), "nvfp4"),
            "d": fb.quantize(jnp.ones((4, 256)), "nf4_dq"),
            "b": np.ones(3),
        }
        target = directory / "q"
        io.write(target, weights)
        original = {path.name: path.read_bytes() for path in target.iterdir()}

        def mutated(data, draw):
            """Most mutations get hashes that fit, so that what the hashes protect is read, too."""
            changed = mutated_json(data, draw)
            try:
                manifest = json.loads(changed if name == "manifest.json" else original["manifest.json"])
                if name != "manifest.json":
                    manifest["files"][name] = {"size": len(changed), "sha256": sha256(changed)}
                manifest.pop("sha256")
                manifest["sha256"] = sha256(canonical(manifest))
                text = dumped(manifest, "manifest.json")
            except (QuantError, ValueError, KeyError, AttributeError, TypeError, RecursionError):
                return changed
            if name != "manifest.json":
                (target / "manifest.json").write_bytes(text)
                return changed
            return text if draw.random() < 0.8 else changed

        return Subject(target / name, mutated, lambda: (content(io.read(target)), io.verify(target)))

    return subject


def gguf(tokenizer):
    def subject(directory):
        fields = SMALL_GGUF | tokenizer
        tensors = {GGUF.name(path): shape for path, shape in shapes(SMALL).items()}
        tensors["token_embd.weight"] = (len(fields["tokenizer.ggml.tokens"]), SMALL.width)
        path = directory / "model.gguf"
        path.write_bytes(gguf_bytes(fields, tensors))

        def mutated(data, draw):
            if draw.random() < 0.5:
                return mutated_bytes(data, draw)
            try:
                changed = json.loads(mutated_json(json.dumps(fields).encode(), draw))
            except (ValueError, RecursionError):
                return mutated_bytes(data, draw)
            return gguf_bytes(changed if isinstance(changed, dict) else {"a": changed}, tensors)

        def read():
            model = workflows.load(path)
            if model.tokenizer is not None:
                model.tokenizer.decode(model.tokenizer.encode("hello <s>\n", add_start=True))
            return content(io.read(path))

        return Subject(path, mutated, read)

    return subject


def gguf_blocks(directory):
    """A tensor of every type that loads as a QArray."""
    path = directory / "model.gguf"
    draw = np.random.default_rng(0)
    with GGUFWriter(path, {"general.architecture": "llama"}) as writer:
        for name, layout in LAYOUTS.items():
            scale = np.ones(1, np.float32) if name == "NVFP4" else None
            writer.add(
                f"{name}.weight", Stored(name, draw.integers(0, 120, (2, layout.nbytes), np.uint8), layout.length, scale)
            )
    return Subject(path, mutated_bytes, lambda: content(io.read(path)))


def to_gguf(name, mutated=mutated_json, family="llama-3.1"):
    """The metadata of a GGUF file, from the small files of a checkpoint."""

    def subject(directory):
        save_tokenizer(directory)
        (directory / "tokenizer.model").write_bytes(sentencepiece_model())
        kind, changed = FAMILIES[family]
        config = {**COMMON, "model_type": kind, "vocab_size": 300, "rms_norm_eps": 1e-6, **changed}
        (directory / "config.json").write_text(json.dumps(config))
        if name == "tokenizer.model":
            tokenizer = sentencepiece_json()
            (directory / "tokenizer.json").write_text(json.dumps(tokenizer))

        def read():
            files = {file.name: file.read_bytes() for file in directory.iterdir()}
            config = parsed_object(files["config.json"], "config.json")
            architecture = architecture_of(config)
            extra_tensors(architecture, config)
            fields = architecture_fields(architecture, config) | tokenizer_fields(files, config, 300)
            for key, value in fields.items():
                encoded(value, key)

        return Subject(directory / name, mutated, read)

    return subject


def imatrix(name):
    def subject(directory):
        entries = {
            "blk.0.attn_q.weight": io.Importance(np.ones((1, 8), np.float32), np.full(1, 5, np.float32)),
            "blk.0.ffn_up_exps.weight": io.Importance(np.ones((2, 8), np.float32), np.array([3, 0], np.float32)),
        }
        path = io.write_imatrix(directory / name, io.ImportanceMatrix(entries, ("text",), 2, 4))
        return Subject(path, mutated_bytes, lambda: io.read_imatrix(path))

    return subject


def npz(directory):
    """Half of the mutations are of the configuration's JSON, within a sound archive."""
    config = {
        "vocab_size": 8,
        "n_layers": 1,
        "d_model": 8,
        "n_heads": 2,
        "n_kv_heads": 1,
        "max_len": 8,
        "eps": 1e-5,
        "rope_base": 1e4,
    }
    path = directory / "model.npz"
    scratch = directory / "scratch.npz"
    np.savez_compressed(path, w=np.ones((4, 8), np.float16), __config__=json.dumps(config))
    (directory / "model.tokenizer.json").write_text(json.dumps({"alphabet": ["a", "b"], "merges": [["a", "b"]]}))

    def mutated(data, draw):
        if draw.random() < 0.5:
            return mutated_bytes(data, draw)
        text = mutated_json(json.dumps(config).encode(), draw)
        np.savez(scratch, w=np.ones((4, 8), np.float16), __config__=np.array(text))
        return scratch.read_bytes()

    return Subject(path, mutated, lambda: (content(io.read(path)), workflows.load(path)))


def glassllm_tokenizer(directory):
    path = directory / "en.tokenizer.json"
    path.write_text(json.dumps({"alphabet": ["a", "b", "c"], "merges": [["a", "b"], ["ab", "c"]]}))

    def read():
        from fewbit._json import file_text, parsed

        found = models.tokenizer_from_glassllm(parsed(file_text(path, "tokenizer"), str(path)))
        found.decode(found.encode("abc abc"))

    return Subject(path, mutated_json, read)


def peft(name):
    def subject(directory):
        adapter = Adapter(jnp.ones((6, 2)), jnp.ones((2, 8)), 4.0, (-1,))
        target = directory / "adapter"
        write_adapters(target, {"up": adapter, "x/down": dataclasses.replace(adapter, alpha=8.0)})
        like = {"up": adapter, "x/down": adapter}
        mutated = mutated_json if name.endswith("json") else mutated_bytes
        return Subject(target / name, mutated, lambda: read_adapters(target, like))

    return subject


SUBJECTS = {
    "recipe": recipe,
    "plan": plan,
    "mixed precision": mixed_precision,
    "config": hugging_face("config.json"),
    "generation_config": hugging_face("generation_config.json"),
    "tokenizer": tokenizer("tokenizer.json"),
    "tokenizer_config": tokenizer("tokenizer_config.json"),
    "index": index,
    "safetensors": safetensors,
    "manifest": fewbit_directory("manifest.json"),
    "fewbit config": fewbit_directory("config.json"),
    "gguf": gguf(gguf_fields()),
    "gguf: sentencepiece": gguf(sentencepiece_fields()),
    "gguf blocks": gguf_blocks,
    "to gguf: config": to_gguf("config.json"),
    "to gguf: config of Phi-3": to_gguf("config.json", family="phi3-long"),
    "to gguf: config of DeepSeek": to_gguf("config.json", family="deepseek-v3-yarn"),
    "to gguf: tokenizer": to_gguf("tokenizer.json"),
    "to gguf: tokenizer_config": to_gguf("tokenizer_config.json"),
    "to gguf: tokenizer.model": to_gguf("tokenizer.model", mutated_bytes),
    "imatrix": imatrix("imatrix.gguf"),
    "imatrix: older layout": imatrix("imatrix.dat"),
    "npz": npz,
    "glassllm tokenizer": glassllm_tokenizer,
    "peft config": peft("adapter_config.json"),
    "peft tensors": peft("adapter_model.safetensors"),
}


@pytest.mark.slow_after(2)
@needs_tokenizers
@pytest.mark.finding(17, 18)
@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("kind", SUBJECTS)
@ROUNDS
def test_a_mutated_file_ends_in_our_own_error_soon(kind, rounds, tmp_path):
    pytest.importorskip("gguf")
    subject = SUBJECTS[kind](tmp_path)
    subject.read()
    original = subject.path.read_bytes()
    refused, early = 0, 0
    for turn in range(rounds):
        draw = random.Random(zlib.crc32(f"{kind} {turn}".encode()))
        data = subject.mutated(original, draw)
        subject.path.write_bytes(data)
        start = time.process_time()
        try:
            subject.read()
        except (QuantError, UnsupportedError) as error:
            refused += len(str(error).encode()) > 0  # it can be printed
        except BaseException as error:
            raise AssertionError(
                f"{kind}, mutation {turn}: {type(error).__name__}: {error!r:.300}; file {data!r:.500}"
            ) from error
        taken = time.process_time() - start
        assert taken < SECONDS, f"{kind}, mutation {turn} took {taken:.1f} s: {data!r:.500}"
        if turn == rounds // 10:
            gc.collect()
            early = peak_memory() or 0
    assert refused > rounds // 10 or kind == "generation_config"
    assert (peak_memory() or 0) <= GROWTH * early
