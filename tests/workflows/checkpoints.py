"""Small checkpoints on the disk: a random Llama as Hugging Face keeps one, a tokenizer of characters, and a text."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fewbit.models import FAMILIES, HUGGING_FACE, config_from_hf, is_installed, named_from_params
from tests.nets.random_decoder import SMALL, random_params

LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 .,?!"
TEXT = "The quick brown fox, 42 years old, jumps over the lazy dog. What then? Nothing! " * 12

needs_tokenizers = pytest.mark.skipif(
    not all(map(is_installed, ("tokenizers", "safetensors"))), reason="needs pip install fewbit[io]"
)


def llama_directory(directory: Path, *, changed: dict[str, Any] | None = None) -> Path:
    """A Hugging Face directory of `SMALL` with random float32 weights; `changed` replaces tensors by their names."""
    from safetensors.numpy import save_file

    directory.mkdir(parents=True, exist_ok=True)
    named = named_from_params(random_params(SMALL), HUGGING_FACE, SMALL)
    arrays = {name: np.array(array) for name, array in named.items()} | (changed or {})
    save_file(arrays, str(directory / "model.safetensors"))
    config = {
        "model_type": "llama",
        "vocab_size": SMALL.vocab,
        "num_hidden_layers": SMALL.layers,
        "hidden_size": SMALL.width,
        "num_attention_heads": SMALL.heads,
        "num_key_value_heads": SMALL.kv_heads,
        "head_dim": SMALL.head_dim,
        "intermediate_size": SMALL.hidden,
        "rms_norm_eps": SMALL.norm_eps,
        "rope_theta": SMALL.rope_theta,
        "tie_word_embeddings": SMALL.tied,
        "max_position_embeddings": SMALL.context,
    }
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "tokenizer.json").write_text(_tokenizer_json())
    return directory


def family_directory(directory: Path, model_type: str, settings: dict[str, Any], tokenizer: str | None = None) -> Path:
    """A Hugging Face directory of another family with random float32 weights; the tokenizer is one of characters by default."""
    from safetensors.numpy import save_file

    settings = {**settings, "model_type": model_type}
    if tokenizer is None:
        settings["vocab_size"] = len(LETTERS)
    config, family = config_from_hf(settings), FAMILIES[model_type]
    directory.mkdir(parents=True, exist_ok=True)
    named = named_from_params(random_params(config), family.table_of(config), config)
    save_file({name: np.array(array) for name, array in named.items()}, str(directory / "model.safetensors"))
    (directory / "config.json").write_text(json.dumps(settings))
    (directory / "tokenizer.json").write_text(tokenizer or _tokenizer_json())
    return directory


def last_axis(scheme: str) -> dict[str, Any]:
    """The recipe that quantizes tensors of unknown role along their last axis, as a user says who knows their layout."""
    return {"rules": [{"path": ".*", "policy": scheme, "axis": -1}]}


def text_file(directory: Path) -> Path:
    """A text whose every character is a token."""
    path = directory / "text.txt"
    path.write_text(TEXT)
    return path


def _tokenizer_json() -> str:
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    assert len(LETTERS) == SMALL.vocab
    tokenizer = Tokenizer(models.WordLevel({letter: i for i, letter in enumerate(LETTERS)}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    return tokenizer.to_str()
