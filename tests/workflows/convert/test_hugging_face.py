"""A Llama of a GGUF file as a Hugging Face checkpoint: the same function under other names."""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fewbit as fb
from fewbit.errors import UnsupportedError
from fewbit.io.checkpoint import TensorInfo
from fewbit.models.decoder import forward
from fewbit.models.families.table import config_from_hf
from fewbit.models.names import shapes
from fewbit.models.tokenizers.gguf import tokenizer_from_gguf
from fewbit.workflows.convert.hugging_face import as_hugging_face
from fewbit.workflows.model import Model
from tests.models.tokenizers.fields import gguf_fields
from tests.nets.random_decoder import SMALL
from tests.workflows.checkpoints import needs_tokenizers

CONFIG = dataclasses.replace(SMALL, rope="interleaved")


def model(config=CONFIG, scheme=None):
    def load(path):
        x = np.random.default_rng(sum(map(ord, path))).normal(size=shapes(config)[path]).astype(np.float32)
        if scheme is None or x.ndim < 2 or path == "embed":
            return x
        return fb.quantize(jnp.asarray(x), scheme)

    info = {path: TensorInfo(shape, "float32", "F32", 4) for path, shape in shapes(config).items()}
    metadata = {
        "tokenizer.ggml.tokens": ["<s>", "</s>"],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.chat_template": "{{ messages }}",
    }
    return Model(Path("a.gguf"), "gguf", config, "", info, load, files={"tokenizer.json": b"{}"}, metadata=metadata)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("scheme", [None, "q4_1", "int8", "nvfp4"])
def test_it_computes_the_same(scheme):
    source = model(scheme=scheme)
    found = as_hugging_face(source)
    assert (found.config.rope, found.names["layers/1/attn/q"]) == ("half", "model.layers.1.self_attn.q_proj.weight")
    q = found.load("layers/1/attn/q")
    assert type(q) is type(source.load("layers/1/attn/q"))
    tokens = jnp.arange(6, dtype=jnp.int32)[None]
    expected, logits = (jax.jit(forward, static_argnums=2)(m.float_params(), tokens, m.config) for m in (source, found))
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-5 * float(jnp.abs(expected).max()))


def test_weights_whose_rows_share_scales_are_announced_as_floats():
    """Their q and k cannot be reordered as they are."""
    source = model(scheme="fp8_block128")
    info = {path: dataclasses.replace(one, scheme=fb.scheme("fp8_block128")) for path, one in source.info.items()}
    found = as_hugging_face(dataclasses.replace(source, info=info))
    for name, is_kept in (("q", False), ("k", False), ("v", True)):
        path = f"layers/1/attn/{name}"
        assert isinstance(found.load(path), fb.QArray) == (found.info[path].scheme is not None) == is_kept


def test_its_config_and_tokenizer_are_those_of_transformers():
    found = as_hugging_face(model())
    assert config_from_hf(found.metadata) == found.config
    assert (found.metadata["bos_token_id"], found.metadata["eos_token_id"]) == (0, 1)
    assert json.loads(found.files["tokenizer_config.json"]) == {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "chat_template": "{{ messages }}",
    }
    assert as_hugging_face(found) is found


@needs_tokenizers
def test_the_ids_of_special_tokens_come_from_the_tokenizer_where_there_is_no_metadata():
    """As in a fewbit directory of a GGUF model; without eos_token_id transformers would never stop."""
    tokenizer = tokenizer_from_gguf(gguf_fields() | {"tokenizer.ggml.bos_token_id": 0})
    found = as_hugging_face(dataclasses.replace(model(), kind="fewbit", metadata={}, tokenizer=tokenizer)).metadata
    assert (found["bos_token_id"], found["eos_token_id"]) == (0, 1)


def test_what_is_not_a_llama_is_refused():
    with pytest.raises(UnsupportedError, match=r"the model is not a Llama.*: qkv_bias=True; start from"):
        as_hugging_face(model(dataclasses.replace(CONFIG, qkv_bias=True)))
    with pytest.raises(UnsupportedError, match=r"has no config\.json with a model_type"):
        as_hugging_face(dataclasses.replace(model(), config=None, why_not_run="unknown"))
