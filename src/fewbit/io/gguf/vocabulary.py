"""GGUF metadata fields of a Hugging Face tokenizer.

Byte-level BPE becomes llama.cpp's type "gpt2" with the name of its rule for splitting text; BPE of SentencePiece becomes "llama",
with the scores of `tokenizer.model`, or without it scores in the order of the merges. That of Gemma 4 becomes "gemma4", with its merges.

Reference: llama.cpp, src/llama-vocab.cpp and conversion/base.py.
"""

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from ..._json import Count, converted, parsed
from ..._merges import checked_merge, merges_by_score
from ..._pretokenizers import SPLITS
from ...errors import QuantError, UnsupportedError
from .fields import Field
from .sentencepiece import pieces

_NORMAL, _UNKNOWN, _CONTROL, _USER, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
_BAR = "\N{FULLWIDTH VERTICAL LINE}"
_VISIBLE = {
    *("<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>"),
    *("<|tool_response>", "<tool_response|>", '<|"|>'),
}
"""Tokens of Gemma 4 that llama.cpp keeps in the text, where it looks for calls of tools."""

_WITHOUT_MERGES = {"dbrx": "llama-bpe"}
"""The name of the same rule for a tokenizer that looks up whole words before it merges."""

_SPECIAL = ("bos", "eos", "unk", "sep", "pad", "mask")
_SPECIAL_KEYS = {"unk": "unknown", "sep": "seperator", "pad": "padding"}


def tokenizer_fields(files: Mapping[str, bytes], config: Mapping[str, Any], vocab: int) -> dict[str, Field]:
    """The `tokenizer.*` fields of a checkpoint.

    Args:
        files: `tokenizer.json`, and as far as they exist `tokenizer.model`, `tokenizer_config.json`, `generation_config.json` and
            `chat_template.jinja`.
        config: the content of config.json.
        vocab: the rows of the embedding; the list of tokens is padded or cut to it.

    Returns:
        The fields.

    Raises:
        QuantError: for a damaged file.
        UnsupportedError: for a kind of tokenizer, a rule of splitting text, or merges that llama.cpp lacks.
    """
    if "tokenizer.json" not in files:
        raise QuantError(f"no tokenizer.json among {', '.join(sorted(files)) or 'no files'}; copy it to the checkpoint")
    tokenizer = _object(files, "tokenizer.json")
    settings = _object(files, "tokenizer_config.json")
    converted(settings, _Settings, "tokenizer_config.json")
    model = tokenizer.get("model")
    if not isinstance(model, dict) or model.get("type", "BPE") != "BPE":
        raise UnsupportedError(
            "tokenizer.json is not a BPE; a GGUF tokenizer of fewbit is byte-level BPE or BPE of SentencePiece"
        )
    converted(tokenizer, _Tokenizer, "tokenizer.json")
    tokens, kinds = _tokens(tokenizer, vocab)
    rules = list(_rules(tokenizer.get("pre_tokenizer")))
    if "bytes" in rules:
        _check_byte_level(tokenizer)
        fields = _byte_level(model, rules, settings, tokens, kinds)
    elif model.get("byte_fallback") and config.get("model_type") == "gemma4_text":
        fields = _gemma4(tokenizer, tokens, kinds)
    elif model.get("byte_fallback"):
        fields = _sentencepiece(tokenizer, files, tokens, kinds)
    else:
        raise UnsupportedError(
            "tokenizer.json is neither a byte-level BPE nor one with byte fallback; llama.cpp has no such kind"
        )
    ids = {token: i for i, token in reversed(list(enumerate(tokens)))}
    before, after = _template(tokenizer.get("post_processor"))
    said = {"bos_token": before, "eos_token": after, **settings}
    fields |= _special_ids(ids, said, {**_object(files, "generation_config.json"), **config})
    fields |= _added({"bos": before is not None, "eos": after is not None}, settings)
    if template := _chat_template(files, settings):
        fields["tokenizer.chat_template"] = template
    return fields


def _object(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    """A JSON file, or {}."""
    value = parsed(files.get(name, b"{}"), name)
    if not isinstance(value, dict):
        raise QuantError(f"{name} is a {type(value).__name__}, expected an object")
    return value


def _tokens(tokenizer: Mapping[str, Any], vocab: int) -> tuple[list[str], list[int]]:
    """The tokens by id, and their kinds."""
    tokens: list[str | None] = [None] * vocab
    kinds = [_UNUSED] * vocab
    for token, index in tokenizer["model"]["vocab"].items():
        if index < vocab:
            tokens[index], kinds[index] = token, _NORMAL
    for added in tokenizer.get("added_tokens") or []:
        index, token = added["id"], added["content"]
        if index < vocab:
            is_control = bool(added.get("special")) or _looks_special(token)
            kinds[index] = _CONTROL if is_control else _USER
            tokens[index] = token if is_control else token.replace(_SPACE, " ")
    named = [token if token else f"[PAD{i}]" for i, token in enumerate(tokens)]
    if len(set(named)) < len(named):
        twice = next(token for token in named if named.count(token) > 1)
        raise QuantError(f"tokenizer.json has the token {twice!r:.60} twice; llama.cpp needs each once")
    return named, kinds


def _looks_special(token: str) -> bool:
    """Whether llama.cpp's converter takes an added token for a control token.

    It does so for some that are not marked as control tokens.
    """
    ends = {"<|": "|>", f"<{_BAR}": f"{_BAR}>", "<unused": ">"}
    is_marked = any(token.startswith(start) and token.endswith(end) for start, end in ends.items())
    return is_marked or token in ("<pad>", "<mask>", "<2mass>", "[@BOS@]")


def _objects(value: Any) -> list[dict[str, Any]]:
    """The objects of a JSON array."""
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _rules(rule: Any) -> Iterator[str]:
    """The splitting rules of a pre-tokenizer, in order: regular expressions, "digits", "bytes"."""
    if not isinstance(rule, dict):
        return
    kind = rule.get("type")
    if kind == "Sequence":
        for part in _objects(rule.get("pretokenizers")):
            yield from _rules(part)
    elif kind == "Split":
        pattern = rule.get("pattern")
        text = str(pattern.get("Regex", pattern.get("String")) if isinstance(pattern, dict) else pattern)
        yield text.replace("\r", r"\r").replace("\n", r"\n")
    elif kind == "Digits" and rule.get("individual_digits"):
        yield "digits"
    elif kind == "ByteLevel":
        yield "bytes"
        if rule.get("use_regex") is False:
            yield "no regex"
    elif kind != "Metaspace":
        yield str(kind)


def _check_byte_level(tokenizer: Mapping[str, Any]) -> None:
    """Refuses steps before the merges that no field of GGUF describes.

    NFC is one as well. llama.cpp leaves it out for Qwen, whose text is nearly always composed already.
    """
    for step in _steps(tokenizer.get("normalizer"), "normalizers"):
        if step.get("type") != "NFC":
            raise UnsupportedError(f"tokenizer.json normalizes text by {step.get('type')}, which llama.cpp's BPE does not")
    for step in _steps(tokenizer.get("pre_tokenizer"), "pretokenizers"):
        if step.get("type") == "ByteLevel" and step.get("add_prefix_space"):
            raise UnsupportedError(
                "tokenizer.json puts a space before every text, which llama.cpp's byte-level BPE does not"
            )


def _steps(step: Any, parts: str) -> Iterator[dict[str, Any]]:
    """The steps of a normalizer or a pre-tokenizer, those of sequences one by one."""
    if not isinstance(step, dict):
        return
    if step.get("type") != "Sequence":
        yield step
    for part in _objects(step.get(parts)):
        yield from _steps(part, parts)


def _byte_level(
    model: Mapping[str, Any], rules: list[str], settings: Mapping[str, Any], tokens: list[str], kinds: list[int]
) -> dict[str, Field]:
    """The fields of a byte-level BPE."""
    key = tuple(rules)
    if rules[-2:] == ["bytes", "no regex"]:
        key = tuple(rules[:-2])
    name = SPLITS.get(key)
    if name is None:
        raise UnsupportedError(
            f"tokenizer.json splits text by {' then '.join(rules)!r:.200}, which llama.cpp has no name for"
        )
    if model.get("ignore_merges"):
        name = _WITHOUT_MERGES.get(name, name)
    if name == "smollm" and settings.get("clean_up_tokenization_spaces"):
        name = "refact"  # the same rule, but spaces before punctuation are removed when text is decoded
    merges = [" ".join(merge) if isinstance(merge, list) else str(merge) for merge in model.get("merges") or []]
    if not merges:
        raise UnsupportedError("tokenizer.json has no merges, and llama.cpp reads no BPE without them")
    fields: dict[str, Field] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": name,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": merges,
    }
    return fields


def _sentencepiece(
    tokenizer: Mapping[str, Any], files: Mapping[str, bytes], tokens: list[str], kinds: list[int]
) -> dict[str, Field]:
    """The fields of a BPE of SentencePiece."""
    scores = [-10000.0 if kind == _UNUSED else -1000.0 for kind in kinds]
    if "tokenizer.model" in files:
        for i, piece in enumerate(pieces(files["tokenizer.model"])[: len(tokens)]):
            if kinds[i] in (_NORMAL, _UNUSED):
                tokens[i], scores[i], kinds[i] = piece.text, piece.score, piece.kind
            elif kinds[i] == _CONTROL and piece.kind != _NORMAL:
                kinds[i] = piece.kind
    else:
        merges = _merges(tokenizer["model"])
        normal = {token for token, kind in zip(tokens, kinds, strict=True) if kind == _NORMAL and not _is_byte(token)}
        _check_merges(merges, normal)
        ranks = {token: rank for rank, token in enumerate(dict.fromkeys(left + right for left, right in merges))}
        unknown = tokenizer["model"].get("unk_token")
        for i, token in enumerate(tokens):
            if kinds[i] == _NORMAL and _is_byte(token):
                kinds[i], scores[i] = _BYTE, 0.0
            elif kinds[i] == _NORMAL:
                scores[i] = -float(ranks.get(token, len(ranks)))
            if token == unknown:
                kinds[i] = _UNKNOWN
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.add_space_prefix": _adds_space(tokenizer),
    }


def _gemma4(tokenizer: Mapping[str, Any], tokens: list[str], kinds: list[int]) -> dict[str, Field]:
    """The fields of the tokenizer of Gemma 4, which begins every text with a token."""
    unknown = tokenizer["model"].get("unk_token")
    for added in tokenizer.get("added_tokens") or []:
        if added["id"] < len(tokens):
            tokens[added["id"]] = added["content"]  # as in the merges, which join runs of spaces
    for i, token in enumerate(tokens):
        if kinds[i] == _NORMAL and _is_byte(token):
            kinds[i] = _BYTE
        elif token == unknown:
            kinds[i] = _UNKNOWN
        elif kinds[i] == _CONTROL and token in _VISIBLE:
            kinds[i] = _USER
    if _adds_space(tokenizer):
        raise UnsupportedError("tokenizer.json puts a space before every text, which llama.cpp does not for Gemma 4")
    return {
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [-1000.0] * len(tokens),
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": [f"{left} {right}" for left, right in _merges(tokenizer["model"])],
        "tokenizer.ggml.add_space_prefix": False,
    }


def _is_byte(token: str) -> bool:
    return len(token) == 6 and token.startswith("<0x") and token.endswith(">")


def _merges(model: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The merges of a BPE, in order."""
    pairs = (merge if isinstance(merge, list) else str(merge).split(" ", 1) for merge in model.get("merges") or [])
    return [checked_merge(pair, model["vocab"], f"tokenizer.json: merges[{i}]") for i, pair in enumerate(pairs)]


def _check_merges(merges: Sequence[tuple[str, str]], normal: Collection[str]) -> None:
    """Refuses merges that llama.cpp would apply otherwise.

    It merges every pair whose concatenation is a token, in the order of the tokens' scores, so that all pairs of a token have
    one rank.
    """
    groups, known = [token for token, _ in itertools.groupby(left + right for left, right in merges)], set(merges)
    missing = next((pair for pair in merges_by_score(dict.fromkeys(normal, 0.0)) if pair not in known), None)
    if missing is None and len(set(groups)) == len(groups):
        return
    reason = "has other merges between those of one token"
    if missing is not None:
        reason = f"does not merge {missing[0]!r:.40} and {missing[1]!r:.40}, though {''.join(missing)!r:.40} is a token"
    raise UnsupportedError(
        f"tokenizer.json {reason}, so llama.cpp would split text into other tokens: it merges every such pair, by the "
        "tokens' scores. Copy the tokenizer.model that the scores come from to the checkpoint, if there is one"
    )


def _adds_space(tokenizer: Mapping[str, Any]) -> bool:
    """Whether a space is put before the text."""
    normalizer, splitter = tokenizer.get("normalizer") or {}, tokenizer.get("pre_tokenizer") or {}
    parts = [normalizer, *_objects(normalizer.get("normalizers"))]
    if any(part.get("type") == "Prepend" for part in parts):
        return True
    if splitter.get("type") != "Metaspace":
        return False
    return splitter.get("prepend_scheme", "always") != "never" and bool(splitter.get("add_prefix_space", True))


def _special_ids(ids: Mapping[str, int], settings: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Field]:
    """The ids of special tokens, from tokenizer_config.json, else from config.json."""
    fields: dict[str, Field] = {}
    for name in _SPECIAL:
        token = settings.get(f"{name}_token")
        if isinstance(token, dict):
            token = token.get("content")
        if isinstance(token, list):
            token = next(iter(token), None)
        index = ids.get(token) if isinstance(token, str) else None
        if index is None:
            given = config.get(f"{name}_token_id")
            index = given[0] if isinstance(given, list) and given else given
        if isinstance(index, int) and not isinstance(index, bool) and 0 <= index < len(ids):
            fields[f"tokenizer.ggml.{_SPECIAL_KEYS.get(name, name)}_token_id"] = index
    return fields


def _added(by_template: Mapping[str, bool], settings: Mapping[str, Any]) -> dict[str, Field]:
    """Whether the beginning and end tokens are added to a text. What tokenizer_config.json says takes precedence."""
    found = {}
    for name, is_added in by_template.items():
        said = settings.get(f"add_{name}_token")
        found[f"tokenizer.ggml.add_{name}_token"] = said if isinstance(said, bool) else is_added
    return found


def _template(processor: Any) -> tuple[str | None, str | None]:
    """The tokens that a post-processor adds before and after a text; None: none."""
    if not isinstance(processor, dict):
        return None, None
    if processor.get("type") == "Sequence":
        found = [_template(part) for part in _objects(processor.get("processors"))]
        before, after = ([each[side] for each in found if each[side] is not None] for side in (0, 1))
        return next(iter(before), None), next(iter(after), None)
    steps = _objects(processor.get("single"))
    if processor.get("type") != "TemplateProcessing" or not any("Sequence" in step for step in steps):
        return None, None
    return _special(steps[0]), _special(steps[-1])


def _special(step: Mapping[str, Any]) -> str | None:
    """The text of a template's special token; None for another step."""
    if "SpecialToken" not in step:
        return None
    token = step["SpecialToken"]
    return str(token.get("id", "")) if isinstance(token, dict) else ""


def _chat_template(files: Mapping[str, bytes], settings: Mapping[str, Any]) -> str | None:
    """The chat template, the one named "default" of several."""
    if "chat_template.jinja" in files:
        return files["chat_template.jinja"].decode("utf-8", "replace")
    found = settings.get("chat_template")
    if found is None and "chat_template.json" in files:
        found = _object(files, "chat_template.json").get("chat_template")
    if isinstance(found, list):
        found = next((each.get("template") for each in _objects(found) if each.get("name") == "default"), None)
    return found if isinstance(found, str) else None


class _Added(msgspec.Struct):
    """The JSON schema of an added token."""

    id: Count
    content: str


class _Bpe(msgspec.Struct):
    """The JSON schema of a BPE."""

    vocab: dict[str, Count]
    merges: list[str | tuple[str, str]] = []
    byte_fallback: bool | None = None
    ignore_merges: bool | None = None
    unk_token: str | None = None


class _Tokenizer(msgspec.Struct):
    """The JSON schema of what is read of `tokenizer.json`."""

    model: _Bpe
    added_tokens: list[_Added] | None = None
    normalizer: dict[str, Any] | None = None
    pre_tokenizer: dict[str, Any] | None = None
    post_processor: dict[str, Any] | None = None


class _Settings(msgspec.Struct):
    """The JSON schema of what is read of `tokenizer_config.json`."""

    clean_up_tokenization_spaces: bool | None = None
