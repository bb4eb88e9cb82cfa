"""Tokenizers in the metadata of GGUF files."""

from collections.abc import Mapping
from typing import Any

import msgspec

from ..._json import Count, converted
from ..._pretokenizers import SPLITS
from ...errors import QuantError, UnsupportedError
from .merges import checked_merge
from .tokenizer import Tokenizer, tokenizers_package

_CONTROL, _USER_DEFINED = 3, 4  # tokenizer.ggml.token_type of special and of added tokens


def tokenizer_from_gguf(fields: Mapping[str, Any]) -> Tokenizer:
    """Reads the byte-level BPE tokenizer of a GGUF file.

    Args:
        fields: the metadata by key, as plain Python values.

    Returns:
        The tokenizer, with the digit rule of its `pre`.

    Raises:
        UnsupportedError: for another kind of tokenizer or another `pre`.
        QuantError: for a key that is missing or of another type, and for merges outside the vocabulary.
    """
    hf = tokenizers_package()
    found = converted(fields, _GgufKind, "the GGUF metadata")
    kind, pre = found.kind, found.pre
    if kind != "gpt2":
        raise UnsupportedError(f"the GGUF file's tokenizer is of kind {kind!r}; supported is byte-level BPE ('gpt2')")
    rules = {name: rule for rule, name in SPLITS.items()}
    name = _SAME_RULE.get(pre, pre)
    if name not in rules:
        known = ", ".join(sorted({*rules, *_SAME_RULE}))
        raise UnsupportedError(f"the GGUF file's pre-tokenizer is {pre!r}; supported are {known}")
    found = converted(fields, _Gguf, "the GGUF metadata")
    if len(found.kinds) != len(found.tokens):
        raise QuantError(f"the GGUF metadata has {len(found.tokens)} tokens and {len(found.kinds)} token types")
    if found.stop is not None and found.stop >= len(found.tokens):
        raise QuantError(f"tokenizer.ggml.eos_token_id is {found.stop}, but there are {len(found.tokens)} tokens")
    vocab = {t: i for i, t in enumerate(found.tokens)}
    merges = [checked_merge(m.split(" "), vocab, f"tokenizer.ggml.merges[{i}]") for i, m in enumerate(found.merges)]
    backend = hf.Tokenizer(hf.models.BPE(vocab=vocab, merges=merges, ignore_merges=pre == "llama-bpe"))
    backend.pre_tokenizer, backend.decoder = _pre_tokenizer(hf.pre_tokenizers, rules[name]), hf.decoders.ByteLevel()
    added = [t for t, token_kind in zip(found.tokens, found.kinds, strict=True) if token_kind == _USER_DEFINED]
    backend.add_tokens([hf.AddedToken(t, normalized=False) for t in added])
    special = [t for t, token_kind in zip(found.tokens, found.kinds, strict=True) if token_kind == _CONTROL]
    backend.add_special_tokens([hf.AddedToken(t, special=True) for t in special])
    stop_ids = ()
    if found.stop is not None:
        stop_ids = (found.stop,)
    return Tokenizer(backend, stop_ids, found.template)


_SAME_RULE = {"default": "gpt-2", "refact": "smollm", "llama-bpe": "dbrx"}
"""Names of rules that split text as another one does."""


def _pre_tokenizer(steps: Any, rule: tuple[str, ...]) -> Any:
    """The pre-tokenizer of a rule of `SPLITS`."""
    if rule[-1] == "bytes":
        digits = [steps.Digits(individual_digits=True)] if "digits" in rule else []
        return steps.Sequence([*digits, steps.ByteLevel(add_prefix_space=False)])
    patterns = [steps.Split(tokenizers_package().Regex(pattern), "isolated") for pattern in rule]
    return steps.Sequence([*patterns, steps.ByteLevel(add_prefix_space=False, use_regex=False)])


class _GgufKind(msgspec.Struct):
    """The JSON schema of a GGUF file's kind of tokenizer."""

    kind: str = msgspec.field(name="tokenizer.ggml.model")
    pre: str = msgspec.field(name="tokenizer.ggml.pre", default="default")


class _Gguf(msgspec.Struct):
    """The JSON schema of a byte-level BPE in a GGUF file."""

    tokens: list[str] = msgspec.field(name="tokenizer.ggml.tokens")
    kinds: list[int] = msgspec.field(name="tokenizer.ggml.token_type")
    merges: list[str] = msgspec.field(name="tokenizer.ggml.merges")
    stop: Count | None = msgspec.field(name="tokenizer.ggml.eos_token_id", default=None)
    template: str | None = msgspec.field(name="tokenizer.chat_template", default=None)
