"""Tokenizers in the metadata of GGUF files.

Byte-level BPE, llama.cpp's kind "gpt2", has a list of merges and the name of its rule for splitting text. BPE of SentencePiece, its
kind "llama", has a score for each token: two neighbours are merged if their concatenation is a token, the highest score first. Its kind
"gemma4" has a list of merges for the same pieces, and joins none across the end of a line.

Reference: llama.cpp, src/llama-vocab.cpp.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from ..._json import Count, converted
from ..._merges import checked_merge, merges_by_score
from ..._pretokenizers import SPLITS
from ...errors import QuantError, UnsupportedError
from .tokenizer import Tokenizer, tokenizers_package

_WHERE = "the GGUF metadata"
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4  # tokenizer.ggml.token_type
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"

_SAME_RULE = {
    "refact": "smollm",
    "starcoder": "smollm",
    "command-r": "smollm",
    "llama-bpe": "dbrx",
    "llama-v3": "dbrx",
    "llama3": "dbrx",
    "lfm2": "dbrx",
    "smaug-bpe": "dbrx",
    "glm4": "dbrx",
    "chatglm-bpe": "dbrx",
    "deepseek-r1-qwen": "qwen2",
    "hunyuan": "qwen2",
    "solar-open": "qwen2",
    "hunyuan-dense": "deepseek-v3",
    "stablelm2": "qwen2",
    "minimax-m2": "gpt-4o",
    "llama4": "gpt-4o",
    "exaone4": "gpt-2",
    "olmo": "gpt-2",
    "phi-2": "gpt-2",
}
"""Names of rules that split text as another one does."""

_WHOLE_WORDS = ("llama-bpe", "llama-v3", "llama3", "lfm2", "tekken")
"""The rules of tokenizers that look up whole words before they merge."""

_STRIPPING_MODELS = ("phi-3", "phi3")
"""Parts of the names of models whose added tokens take the white space after them, which no field says."""
_NOT_STRIPPING = ("<unk>", "<s>", "<|endoftext|>")

_ENDS = {
    *("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|calls|>", "<|flush|>"),
    *("<end_of_turn>", "<end_of_utterance>", "<turn|>", "<|endoftext|>", "<|end_of_text|>", "<eos>", "</s>"),
    *("<EOT>", "_<EOT>", "[EOT]", "[EOS]"),
}
"""The texts of end-of-generation tokens in llama.cpp, which it adds to the ids in the metadata."""


def tokenizer_from_gguf(fields: Mapping[str, Any]) -> Tokenizer:
    """Reads the tokenizer of a GGUF file: byte-level BPE, BPE of SentencePiece or that of Gemma 4.

    Text is split as llama.cpp does, at control and user-defined tokens first. Tokens of SentencePiece with equal scores are
    merged in the order of their ids; llama.cpp merges the leftmost. Without `add_bos_token` those begin a text with the
    beginning-of-text token that do in llama.cpp: SentencePiece, Llama 3 and Tekken; Gemma 4 always does. A generation ends at the end-of-text,
    end-of-turn and end-of-message tokens, and at control tokens that llama.cpp knows by their text, as `<|im_end|>`.

    Args:
        fields: the metadata by key, as plain Python values.

    Returns:
        The tokenizer.

    Raises:
        UnsupportedError: for another kind of tokenizer or another `pre`.
        QuantError: for a key that is missing or of another type, lists of different lengths, ids and merges outside the
            vocabulary.
    """
    kind = converted(fields, _Kind, _WHERE)
    if kind.model == "gpt2":
        rule = _rule(kind.pre)
        found = converted(fields, _Merged, _WHERE)
        backend = _byte_level(found, rule, ignore_merges=kind.pre in _WHOLE_WORDS)
    elif kind.model == "llama":
        found = converted(fields, _SentencePiece, _WHERE)
        merges = merges_by_score(_finite_scores(found))
        backend = _sentencepiece(found, merges, adds_space=found.adds_space)
    elif kind.model == "gemma4":
        found = converted(fields, _Merged, _WHERE)
        backend = _sentencepiece(found, _merges(found), adds_space=False)
        backend.pre_tokenizer = tokenizers_package().pre_tokenizers.Split(tokenizers_package().Regex("\n+"), "isolated")
    else:
        raise UnsupportedError(
            f"the GGUF file's tokenizer is of kind {kind.model!r}; supported are byte-level BPE ('gpt2'), BPE of "
            "SentencePiece ('llama') and 'gemma4'"
        )
    _add_tokens(backend, found)
    stop_ids = _stop_ids(found)
    adds_start = found.adds_start
    if kind.model == "gemma4":
        adds_start = True
    elif adds_start is None:
        adds_start = kind.model == "llama" or kind.pre in _WHOLE_WORDS
    if found.start is None:
        return Tokenizer(backend, stop_ids, found.template)
    bos, start_ids = found.tokens[found.start], ()
    if adds_start:
        backend.post_processor, start_ids = _start_processor(bos, found.start), (found.start,)
    return Tokenizer(backend, stop_ids, found.template, start_ids, bos)


def _rule(pre: str) -> tuple[str, ...]:
    """The regular expressions that split text for a pre-tokenizer, by its name in GGUF files."""
    rules = {name: rule for rule, name in SPLITS.items()}
    name = _SAME_RULE.get(pre, pre)
    if name not in rules:
        known = ", ".join(sorted({*rules, *_SAME_RULE}))
        raise UnsupportedError(f"the GGUF file's pre-tokenizer is {pre!r}; supported are {known}")
    return rules[name]


def _byte_level(found: "_Merged", rule: tuple[str, ...], *, ignore_merges: bool) -> Any:
    """The backend of a byte-level BPE."""
    hf, vocab = tokenizers_package(), _vocab(found)
    backend = hf.Tokenizer(hf.models.BPE(vocab=vocab, merges=_merges(found), ignore_merges=ignore_merges))
    steps = hf.pre_tokenizers
    if rule[-1] == "bytes":
        before = [steps.Digits(individual_digits=True)] if "digits" in rule else []
        splits = steps.ByteLevel(add_prefix_space=False)
    else:
        before = [steps.Split(hf.Regex(pattern), "isolated") for pattern in rule]
        splits = steps.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = steps.Sequence([*before, splits])
    backend.decoder = hf.decoders.ByteLevel()
    return backend


def _merges(found: "_Merged") -> list[tuple[str, str]]:
    """The merges of a list, in order."""
    vocab = _vocab(found)
    return [checked_merge(m.split(" "), vocab, f"tokenizer.ggml.merges[{i}]") for i, m in enumerate(found.merges)]


def _finite_scores(found: "_SentencePiece") -> dict[str, float]:
    """The scores by token."""
    if len(found.scores) != len(found.tokens):
        raise QuantError(f"{_WHERE} has {len(found.tokens)} tokens and {len(found.scores)} scores")
    if not all(map(math.isfinite, found.scores)):
        raise QuantError(f"{_WHERE} has scores that are not finite; the file is damaged")
    return dict(zip(found.tokens, found.scores, strict=True))


def _sentencepiece(found: "_Vocabulary", merges: list[tuple[str, str]], *, adds_space: bool) -> Any:
    """The backend of a BPE of SentencePiece."""
    hf, vocab = tokenizers_package(), _vocab(found)
    unknown = next((token for token, kind in found.pairs() if kind == _UNKNOWN), None)
    model = hf.models.BPE(vocab=vocab, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    backend = hf.Tokenizer(model)
    normalizers = [hf.normalizers.Replace(" ", _SPACE)]
    decoders = [hf.decoders.Replace(_SPACE, " "), hf.decoders.ByteFallback(), hf.decoders.Fuse()]
    if adds_space:
        normalizers.insert(0, hf.normalizers.Prepend(_SPACE))
        decoders.append(hf.decoders.Strip(" ", 1, 0))
    backend.normalizer = hf.normalizers.Sequence(normalizers)
    backend.decoder = hf.decoders.Sequence(decoders)
    return backend


def _vocab(found: "_Vocabulary") -> dict[str, int]:
    """The ids by token."""
    if len(found.kinds) != len(found.tokens):
        raise QuantError(f"{_WHERE} has {len(found.tokens)} tokens and {len(found.kinds)} token types")
    ids = {"bos": found.start, "eos": found.stop, "eot": found.end_of_turn, "eom": found.end_of_message}
    for name, index in ids.items():
        if index is not None and index >= len(found.tokens):
            raise QuantError(f"tokenizer.ggml.{name}_token_id is {index}, but there are {len(found.tokens)} tokens")
    vocab: dict[str, int] = {}
    for i, token in enumerate(found.tokens):
        if vocab.setdefault(token, i) != i:
            raise QuantError(f"tokenizer.ggml.tokens has {token!r:.60} twice, with the ids {vocab[token]} and {i}")
    return vocab


def _stop_ids(found: "_Vocabulary") -> tuple[int, ...]:
    """The tokens that end a generation. They are the ids in the metadata, then the control tokens of `_ENDS`.

    llama.cpp takes tokens of `_ENDS` of any kind; in Gemma's vocabulary `</s>` is a normal token, a tag of HTML.
    """
    named = [index for index in (found.stop, found.end_of_turn, found.end_of_message) if index is not None]
    known = [i for i, (token, kind) in enumerate(found.pairs()) if kind == _CONTROL and token in _ENDS]
    texts = {i: found.tokens[i] for i in (*named, *known)}
    if {"<|return|>", "<|call|>"} <= set(texts.values()):  # gpt-oss, where another message follows this token
        return tuple(i for i, text in texts.items() if text != "<|end|>")
    return tuple(texts)


def _add_tokens(backend: Any, found: "_Vocabulary") -> None:
    """Makes text split at control and user-defined tokens. Control tokens are special."""
    hf = tokenizers_package()
    strips = any(part in found.name.lower() for part in _STRIPPING_MODELS)

    def added(kinds: tuple[int, ...], *, special: bool) -> list[Any]:
        tokens = [token for token, kind in found.pairs() if kind in kinds]
        rstrip = [strips and token not in _NOT_STRIPPING for token in tokens]
        pairs = zip(tokens, rstrip, strict=True)
        return [hf.AddedToken(token, rstrip=rstrip, normalized=False, special=special) for token, rstrip in pairs]

    backend.add_tokens(added((_USER_DEFINED,), special=False))
    backend.add_special_tokens(added((_UNKNOWN, _CONTROL), special=True))


def _start_processor(token: str, index: int) -> Any:
    """The post-processor that puts a token before a text."""
    if ":" in token or token.startswith("$"):  # they have a meaning in templates
        raise UnsupportedError(f"the beginning-of-text token is {token!r:.60}, which the package tokenizers cannot add")
    return tokenizers_package().processors.TemplateProcessing(single=[token, "$A"], special_tokens=[(token, index)])


class _Kind(msgspec.Struct):
    """The JSON schema of a GGUF file's kind of tokenizer."""

    model: str = msgspec.field(name="tokenizer.ggml.model")
    pre: str = msgspec.field(name="tokenizer.ggml.pre", default="default")


class _Vocabulary(msgspec.Struct, kw_only=True):
    """The JSON schema of what all tokenizers in GGUF files have."""

    tokens: list[str] = msgspec.field(name="tokenizer.ggml.tokens")
    kinds: list[int] = msgspec.field(name="tokenizer.ggml.token_type")
    start: Count | None = msgspec.field(name="tokenizer.ggml.bos_token_id", default=None)
    adds_start: bool | None = msgspec.field(name="tokenizer.ggml.add_bos_token", default=None)
    stop: Count | None = msgspec.field(name="tokenizer.ggml.eos_token_id", default=None)
    end_of_turn: Count | None = msgspec.field(name="tokenizer.ggml.eot_token_id", default=None)
    end_of_message: Count | None = msgspec.field(name="tokenizer.ggml.eom_token_id", default=None)
    template: str | None = msgspec.field(name="tokenizer.chat_template", default=None)
    name: str = msgspec.field(name="general.name", default="")

    def pairs(self) -> Iterator[tuple[str, int]]:
        """The tokens with their kinds."""
        return zip(self.tokens, self.kinds, strict=True)


class _Merged(_Vocabulary, kw_only=True):
    """The JSON schema of a BPE with a list of merges."""

    merges: list[str] = msgspec.field(name="tokenizer.ggml.merges")


class _SentencePiece(_Vocabulary, kw_only=True):
    """The JSON schema of a BPE of SentencePiece."""

    start: Count | None = msgspec.field(name="tokenizer.ggml.bos_token_id", default=1)
    scores: list[float] = msgspec.field(name="tokenizer.ggml.scores")
    adds_space: bool = msgspec.field(name="tokenizer.ggml.add_space_prefix", default=True)
