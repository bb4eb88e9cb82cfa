"""Tokenizers of glassllm checkpoints."""

from collections.abc import Mapping
from typing import Any

import msgspec

from ..._json import converted
from ..._merges import checked_merge
from .tokenizer import Tokenizer, tokenizers_package


def tokenizer_from_glassllm(obj: Mapping[str, Any]) -> Tokenizer:
    """Reads a glassllm `*.tokenizer.json`.

    It is a BPE of characters, with the space as U+2581.

    Args:
        obj: the JSON object, with an alphabet and merges.

    Returns:
        The tokenizer.

    Raises:
        QuantError: for a missing key.
    """
    hf = tokenizers_package()
    found = converted(obj, _Glassllm, "the glassllm tokenizer")
    alphabet, merges = found.alphabet, found.merges
    special = ["<pad>", "<unk>", "<bos>", "<eos>"]
    tokens = [*special, *alphabet, *(a + b for a, b in merges)]
    vocab = {t: i for i, t in enumerate(tokens)}
    merges = [checked_merge(pair, vocab, f"the glassllm tokenizer: merges[{i}]") for i, pair in enumerate(merges)]
    backend = hf.Tokenizer(hf.models.BPE(vocab=vocab, merges=merges, unk_token="<unk>"))
    space = "\N{LOWER ONE EIGHTH BLOCK}"
    backend.normalizer = hf.normalizers.Sequence([hf.normalizers.NFC(), hf.normalizers.Replace(" ", space)])
    chunk = hf.Regex(rf"\n|{space}*[^{space}\n]+|{space}+")  # a line end, or a word with the spaces before it
    backend.pre_tokenizer = hf.pre_tokenizers.Split(chunk, behavior="isolated")
    backend.decoder = hf.decoders.Sequence([hf.decoders.Fuse(), hf.decoders.Replace(space, " ")])
    backend.add_special_tokens([hf.AddedToken(t, special=True) for t in special])
    return Tokenizer(backend)


class _Glassllm(msgspec.Struct):
    """The JSON schema of a glassllm tokenizer."""

    alphabet: list[str]
    merges: list[tuple[str, str]]
