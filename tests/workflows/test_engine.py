"""Language models through transformers: the numbers of transformers itself on the decoded weights."""

import json
import sys
from typing import Any

import numpy as np
import pytest

from fewbit import io, workflows
from fewbit.errors import QuantError, UnsupportedError
from fewbit.evaluate.transformers_engine import transformers_engine
from fewbit.kvcache import kv_policy
from fewbit.models import is_installed
from fewbit.workflows.engine import as_stored, choose_engine, transformers_of
from tests.workflows.checkpoints import llama_directory, needs_tokenizers, text_file
from tests.workflows.families import LETTERS, TEXT, checkpoint, run_json, write_tokenizer

pytestmark = needs_tokenizers
needs_transformers = pytest.mark.skipif(not is_installed("transformers"), reason="needs pip install fewbit[transformers]")

RECIPES = {
    "llama": "int8",
    "gpt2": "int8",
    "gpt_neox": "nf4",
    "mamba": "int8",
    "gemma3_text": "int8",
    "mixtral": "int8",
    "gpt_oss": "int8",
}


@pytest.fixture(scope="module")
def found(tmp_path_factory, one_thread):
    """The checkpoints, made when they are asked for."""
    directory, made = tmp_path_factory.mktemp("families"), {}

    def find(family):
        if family not in made:
            two = {"n_layer": 2} if family == "gpt2" else {"num_hidden_layers": 2}
            made[family] = checkpoint(directory, family, RECIPES[family], **two)
        return made[family]

    (directory / "text.txt").write_text(TEXT)
    find.text = directory / "text.txt"
    return find


@pytest.fixture(scope="module")
def one_thread():
    """More threads spin on a shared machine."""
    torch = pytest.importorskip("torch")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def log_softmax(logits):
    """In float64."""
    wide = logits.astype(np.float64)
    wide = wide - wide.max(-1, keepdims=True)
    return wide - np.log(np.exp(wide).sum(-1, keepdims=True))


def logits_of(theirs, tokens):
    import torch

    with torch.no_grad():
        return theirs(torch.from_numpy(tokens.astype(np.int64))).logits.numpy()


@pytest.mark.oracle
@needs_transformers
@pytest.mark.parametrize("family", RECIPES)
def test_each_family_has_the_numbers_of_transformers_on_the_decoded_weights(found, family):
    of = found(family)
    arguments = ("--text", found.text, "--window", 8, "--tokens", 48, "--engine", "transformers")
    quality = run_json("eval", of.quantized, "--against", of.path, *arguments)["quality"]
    tokens = np.asarray(as_stored(workflows.load(of.path)).readable_tokenizer().encode(TEXT))[:49]
    windows = np.stack([tokens[i : i + 9] for i in range(0, 48, 8)])
    windows[:, 0] = LETTERS.index("[")  # the token that begins a text
    logits = [logits_of(of.theirs(decoded=decoded), windows[:, :-1]) for decoded in (False, True)]
    p, q = map(log_softmax, logits)
    losses = [-np.take_along_axis(log, windows[:, 1:, None], -1) for log in (p, q)]
    against = quality["against"]
    # Losses in float32 of the same logits, and in float64.
    assert [against[key]["value"] for key in ("reference", "candidate")] == pytest.approx(
        [np.exp(loss.mean()) for loss in losses], rel=1e-5
    )
    kl = (np.exp(p) * (p - q)).sum(-1)
    assert against["kl"]["mean"]["value"] == pytest.approx(kl.mean(), rel=1e-3, abs=1e-7)
    assert kl.mean() > 1e-5
    assert against["top1"]["value"] == (logits[0].argmax(-1) == logits[1].argmax(-1)).mean()
    assert quality["engine"].startswith(type(of.theirs(decoded=False)).__name__ + " of transformers ")
    assert len(quality["blocks"]) == 2
    assert all(0 < error < 1 for error in quality["blocks"].values())
    assert quality["sqnr_db"]


@pytest.mark.oracle
@needs_transformers
def test_the_error_of_a_block_is_that_of_its_hidden_state(found):
    import torch

    of = found("llama")
    arguments = ("--text", found.text, "--window", 8, "--tokens", 8, "--engine", "transformers")
    blocks = run_json("eval", of.quantized, "--against", of.path, *arguments)["quality"]["blocks"]
    assert list(blocks) == ["model.layers.0", "model.layers.1"]
    tokens = as_stored(workflows.load(of.path)).readable_tokenizer().encode(TEXT)[:8]
    tokens[0] = LETTERS.index("[")
    ids = torch.from_numpy(tokens.astype(np.int64))[None]
    with torch.no_grad():
        p, q = (of.theirs(decoded=decoded)(ids, output_hidden_states=True).hidden_states[1] for decoded in (False, True))
    assert blocks["model.layers.0"] == pytest.approx(float((p - q).norm() / p.norm()), rel=1e-5)


@pytest.mark.oracle
@needs_transformers
def test_auto_is_the_decoder_on_a_llama_and_agrees_with_transformers(found):
    of = found("llama")
    arguments = ("eval", of.quantized, "--against", of.path, "--text", found.text, "--window", 8, "--tokens", 80)
    ours, theirs = (run_json(*arguments, *engine)["quality"] for engine in ((), ("--engine", "transformers")))
    assert (ours["engine"], theirs["engine"].split()[0]) == ("fewbit", "LlamaForCausalLM")
    for key in ("reference", "candidate"):
        assert theirs["against"][key]["value"] == pytest.approx(ours["against"][key]["value"], rel=1e-5)
    assert theirs["against"]["kl"]["mean"]["value"] == pytest.approx(ours["against"]["kl"]["mean"]["value"], rel=1e-3)


@pytest.mark.oracle
@needs_transformers
def test_without_architectures_a_decoder_has_its_perplexity_beside_a_reference(tmp_path):
    """Its paths in fewbit are not the names of its files, by which transformers' class is chosen."""
    model, text = llama_directory(tmp_path / "hf"), text_file(tmp_path)
    arguments = ("--text", text, "--window", 8, "--tokens", 16, "--engine", "transformers")
    quality = run_json("eval", model, "--against", model, *arguments)["quality"]
    assert quality["engine"].split()[0] == "LlamaForCausalLM"
    assert quality["against"]["kl"]["mean"]["value"] == pytest.approx(0, abs=1e-9)


@pytest.mark.oracle
@needs_transformers
def test_without_architectures_the_names_say_whether_there_is_a_head():
    config = {"model_type": "llama", "num_hidden_layers": 1}
    inside, alone = "model.embed_tokens.weight", "embed_tokens.weight"
    found = [transformers_engine(config, [name], source="m").cls.__name__ for name in (inside, alone)]
    assert found == ["LlamaForCausalLM", "LlamaModel"]


@pytest.mark.oracle
@needs_transformers
def test_compare_is_eval_of_what_quantize_writes(found):
    of = found("gpt2")
    arguments = ("--text", found.text, "--window", 8, "--tokens", 48)
    compared = run_json("compare", of.path, "-r", "int8", *arguments)
    quality = run_json("eval", of.quantized, "--against", of.path, *arguments)["quality"]
    (recipe,) = compared["recipes"]
    assert compared["engine"] == quality["engine"]
    assert compared["float"] == quality["against"]["reference"]
    assert (recipe["kl"], recipe["blocks"]) == (quality["against"]["kl"]["mean"]["value"], quality["blocks"])


@pytest.mark.oracle
@needs_transformers
def test_weights_are_read_once_each_and_one_at_a_time(found):
    model = as_stored(workflows.load(found("mixtral").quantized))
    read, running = [], []

    def load(path):
        assert not running  # transformers reads in several threads
        running.append(path)
        read.append(path)
        value = model.load(path)
        running.clear()
        return value

    transformers_of(model).network(model.info, load)
    assert sorted(read) == sorted(model.info)


@pytest.mark.oracle
@needs_transformers
def test_weights_that_do_not_fit_are_named(found, tmp_path):
    model = as_stored(workflows.load(found("gpt2").path))
    engine = transformers_of(model)
    missing = "transformer.h.1.ln_2.bias"
    with pytest.raises(QuantError, match=rf"gpt2 lacks {missing} of transformers' GPT2LMHeadModel"):
        engine.network([path for path in model.info if path != missing], model.load)
    with pytest.raises(QuantError, match=r"GPT2LMHeadModel has no place for transformer.h.9.extra of gpt2"):
        engine.network(
            [*model.info, "transformer.h.9.extra"], lambda path: model.load(path.replace("9.extra", "1.ln_2.bias"))
        )
    with pytest.raises(QuantError, match=rf"has another shape for {missing} of gpt2"):
        engine.network(model.info, lambda path: model.load(path)[: 5 if path == missing else None])


@pytest.mark.oracle
@needs_transformers
def test_a_damaged_weight_is_reported_as_reading_it_does(found):
    model = as_stored(workflows.load(found("gpt2").path))

    def load(path):
        if path == "transformer.h.1.ln_2.bias":
            raise QuantError("the file is damaged")
        return model.load(path)

    with pytest.raises(QuantError, match=r"^the file is damaged$"):
        transformers_of(model).network(model.info, load)


@pytest.mark.oracle
@needs_transformers
def test_a_model_that_reads_later_tokens_has_no_perplexity(tmp_path, one_thread):
    import transformers

    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "vocab_size": 40,
    }
    transformers.BertLMHeadModel(transformers.BertConfig(**sizes)).save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    (tmp_path / "text.txt").write_text(TEXT)
    with pytest.raises(UnsupportedError, match="the logits of its BertLMHeadModel depend on later tokens"):
        workflows.evaluate(workflows.load(tmp_path), text=str(tmp_path / "text.txt"), window=8)


@pytest.mark.oracle
@needs_transformers
def test_a_vocabulary_without_tokenizer_json_is_read_by_transformers(found, tmp_path):
    of = found("gpt2")
    for file in of.path.iterdir():
        if file.name != "tokenizer.json":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "vocab.json").write_text(json.dumps({"a": 0, "b": 1, "ab": 2}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\n")
    tokenizer = as_stored(workflows.load(tmp_path)).readable_tokenizer()
    assert tokenizer.encode("aba").tolist() == [2, 0]


@pytest.mark.oracle
@needs_transformers
def test_the_context_ends_with_the_positions_or_where_the_tokenizer_says():
    config = {"model_type": "roberta", "architectures": ["RobertaForCausalLM"], "max_position_embeddings": 514}
    files = {"tokenizer_config.json": b'{"model_max_length": 256}'}
    assert transformers_engine(config, ["w"] * 12, source="m", files=files).context == 256
    assert transformers_engine(config, ["w"] * 12, source="m").context == 512  # positions begin after the padding token's


@pytest.mark.oracle
@needs_transformers
@pytest.mark.parametrize(("kind", "name"), [("lilt", "LiltModel"), ("markuplm", "MarkupLMModel")])
def test_the_longest_input_runs_where_positions_begin_after_the_padding_token(kind, name):
    import torch

    sizes = {"vocab_size": 8, "hidden_size": 24, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 8}
    config = {"model_type": kind, "architectures": [name], "pad_token_id": 1, "max_position_embeddings": 20, **sizes}
    engine = transformers_engine(config, ["w"], source="m")
    module = engine.cls(engine.settings).eval()
    module(torch.full((1, engine.context), 3))
    with pytest.raises(IndexError, match="out of range"):
        module(torch.full((1, engine.context + 1), 3))


@pytest.mark.oracle
@needs_transformers
def test_an_infinite_number_of_a_configuration_is_read():
    config = {"model_type": "mamba2", "time_step_limit": [0.0, {"__float__": "Infinity"}], "num_hidden_layers": 1}
    sizes = {"hidden_size": 16, "num_heads": 4, "head_dim": 8}
    engine = transformers_engine({**config, **sizes}, ["w"], source="m")
    assert tuple(engine.settings.time_step_limit) == (0.0, float("inf"))


def test_auto_takes_the_decoder_where_it_runs_all_models(tmp_path):
    llama = workflows.load(llama_directory(tmp_path / "hf"))
    assert choose_engine("auto", llama, None) == "fewbit"
    with pytest.raises(QuantError, match="unknown engine 'torch'; known"):
        choose_engine("torch", llama)


@pytest.mark.oracle
@needs_transformers
def test_only_the_decoder_quantizes_keys_and_values(tmp_path):
    llama = workflows.load(llama_directory(tmp_path / "hf"))
    with pytest.raises(UnsupportedError, match="only fewbit's own decoder quantizes keys and values"):
        workflows.evaluate(llama, kv=kv_policy("int8"), engine="transformers")


def test_what_neither_engine_runs_says_why_and_what_to_install(tmp_path, monkeypatch):
    io.write(tmp_path / "m", {"w": np.ones((4, 4), np.float32)}, config={"model_type": "gpt2"})
    model = workflows.load(tmp_path / "m")
    monkeypatch.setitem(sys.modules, "transformers", None)  # as where it is not installed
    with pytest.raises(
        UnsupportedError, match=r"By transformers: it needs transformers: pip install fewbit\[transformers\]"
    ):
        choose_engine("auto", model)
    with pytest.raises(UnsupportedError, match=r"m cannot be run by transformers: it needs transformers: pip install"):
        choose_engine("transformers", model)
    np.savez(tmp_path / "a.npz", w=np.ones((4, 4)))
    with pytest.raises(UnsupportedError, match=r"a.npz cannot be run, .* By transformers: a.npz has no config.json"):
        choose_engine("auto", workflows.load(tmp_path / "a.npz"))


def test_a_model_that_is_rotated_in_memory_stays_in_the_decoder(tmp_path):
    turned = workflows.rotated(workflows.load(llama_directory(tmp_path / "hf")), seed=1)
    with pytest.raises(QuantError, match="is rotated in memory, which only fewbit's decoder runs"):
        as_stored(turned)
