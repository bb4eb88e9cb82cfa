"""Tokenizers of GGUF, Hugging Face and glassllm checkpoints."""

import contextlib
import dataclasses
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import msgspec
import numpy as np

from .._json import Count, converted, parsed
from .._pretokenizers import SPLITS
from ..errors import QuantError, UnsupportedError

_CONTROL, _USER_DEFINED = 3, 4  # tokenizer.ggml.token_type of special and of added tokens


@dataclasses.dataclass(frozen=True, eq=False)
class Tokenizer:
    """A tokenizer with its stop tokens and chat template.

    Attributes:
        backend: the `tokenizers.Tokenizer`.
        stop_ids: the tokens that end a generation.
        chat_template: the checkpoint's Jinja template, or None.
    """

    backend: Any
    stop_ids: tuple[int, ...] = ()
    chat_template: str | None = None

    @property
    def vocab(self) -> int:
        """The vocabulary size, special tokens included."""
        return self.backend.get_vocab_size()

    def encode(self, text: str) -> np.ndarray:
        """The int32 token ids of a text: special tokens in the text are recognised, none are added."""
        with _panics():
            return np.asarray(self.backend.encode(text, add_special_tokens=False).ids, np.int32)

    def decode(self, ids: Sequence[int] | np.ndarray, *, keep_special: bool = False) -> str:
        """The text of token ids, without special tokens unless `keep_special`."""
        with _panics():
            return self.backend.decode([int(i) for i in ids], skip_special_tokens=not keep_special)

    def chat(self, message: str) -> np.ndarray:
        """The token ids of a user message in the chat template, up to the answer.

        ChatML templates (`<|im_start|>role`, newline, content, `<|im_end|>`, newline) are rendered without running Jinja,
        with the template's default system message if it has one.

        Raises:
            UnsupportedError: when the checkpoint has no template, or one of another kind.
        """
        return self.encode(chat_text(message, self.chat_template))

    def files(self) -> dict[str, bytes]:
        """`tokenizer.json` and `tokenizer_config.json` by name, for `tokenizer_from_files`."""
        stops = [self.backend.id_to_token(i) for i in self.stop_ids]
        config = {"eos_token": stops[0] if len(stops) == 1 else stops, "chat_template": self.chat_template}
        return {
            "tokenizer.json": self.backend.to_str().encode(),
            "tokenizer_config.json": json.dumps(config, ensure_ascii=False, indent=2).encode(),
        }

    def save(self, directory: Path) -> None:
        """Writes `files` into an existing directory."""
        for name, content in self.files().items():
            (directory / name).write_bytes(content)


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
    hf = _tokenizers()
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
    merges = [_merge(m.split(" "), vocab, f"tokenizer.ggml.merges[{i}]") for i, m in enumerate(found.merges)]
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
    patterns = [steps.Split(_tokenizers().Regex(pattern), "isolated") for pattern in rule]
    return steps.Sequence([*patterns, steps.ByteLevel(add_prefix_space=False, use_regex=False)])


def tokenizer_from_files(files: Mapping[str, bytes]) -> Tokenizer:
    """Reads `tokenizer.json`, `tokenizer_config.json` and `generation_config.json`.

    The stop tokens are the `eos_token` of the second and the `eos_token_id` of the third.

    Args:
        files: the contents of a directory's small files, by name.

    Returns:
        The tokenizer.

    Raises:
        QuantError: when `tokenizer.json` is missing or cannot be read.
    """
    hf = _tokenizers()
    if "tokenizer.json" not in files:
        raise QuantError(f"no tokenizer.json among {', '.join(sorted(files)) or 'no files'}; copy it to the checkpoint")
    config_text = files.get("tokenizer_config.json", b"{}")
    config = converted(parsed(config_text, "tokenizer_config.json"), _Config, "tokenizer_config.json")
    try:
        with _panics():
            backend = hf.Tokenizer.from_buffer(files["tokenizer.json"])
        jinja = files.get("chat_template.jinja", b"").decode("utf-8")
    except ValueError as error:
        raise QuantError(f"the tokenizer's files cannot be read: {error}") from error
    backend.no_padding()
    backend.no_truncation()
    eos = config.eos_token or []
    if not isinstance(eos, list):
        eos = [eos]
    stops = [token if isinstance(token, str) else token.content for token in eos]
    where = "generation_config.json"
    generation = converted(parsed(files.get(where, b"{}"), where), _Generation, where).eos_token_id or []
    if not isinstance(generation, list):
        generation = [generation]
    known = [i for i in generation if backend.id_to_token(i) is not None]
    ids = tuple(dict.fromkeys([*(i for i in map(backend.token_to_id, stops) if i is not None), *known]))
    template = config.chat_template or jinja
    if not isinstance(template, str):  # a list of named templates
        template = None
    return Tokenizer(backend, ids, template or None)


def tokenizer_from_directory(directory: Path) -> Tokenizer:
    """Reads the tokenizer files of a directory.

    Args:
        directory: the directory.

    Returns:
        The tokenizer.

    Raises:
        QuantError: when the directory has no `tokenizer.json`.
    """
    names = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja")
    return tokenizer_from_files({n: (directory / n).read_bytes() for n in names if (directory / n).is_file()})


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
    hf = _tokenizers()
    found = converted(obj, _Glassllm, "the glassllm tokenizer")
    alphabet, merges = found.alphabet, found.merges
    special = ["<pad>", "<unk>", "<bos>", "<eos>"]
    tokens = [*special, *alphabet, *(a + b for a, b in merges)]
    vocab = {t: i for i, t in enumerate(tokens)}
    merges = [_merge(pair, vocab, f"the glassllm tokenizer: merges[{i}]") for i, pair in enumerate(merges)]
    backend = hf.Tokenizer(hf.models.BPE(vocab=vocab, merges=merges, unk_token="<unk>"))
    space = "\N{LOWER ONE EIGHTH BLOCK}"
    backend.normalizer = hf.normalizers.Sequence([hf.normalizers.NFC(), hf.normalizers.Replace(" ", space)])
    chunk = hf.Regex(rf"\n|{space}*[^{space}\n]+|{space}+")  # a line end, or a word with the spaces before it
    backend.pre_tokenizer = hf.pre_tokenizers.Split(chunk, behavior="isolated")
    backend.decoder = hf.decoders.Sequence([hf.decoders.Fuse(), hf.decoders.Replace(space, " ")])
    backend.add_special_tokens([hf.AddedToken(t, special=True) for t in special])
    return Tokenizer(backend)


def chat_text(message: str, template: str | None) -> str:
    """A user message in a ChatML template, up to the answer.

    >>> print(chat_text("Hello", "{{'<|im_start|>' + role}}"))
    <|im_start|>user
    Hello<|im_end|>
    <|im_start|>assistant
    <BLANKLINE>
    """
    if template is None:
        raise UnsupportedError("the checkpoint has no chat template; give the prompt as plain text")
    if "<|im_start|>" not in template:
        raise UnsupportedError("the checkpoint has a chat template that is not ChatML; give the prompt as plain text")
    text = f"<|im_start|>user\n{message}<|im_end|>\n<|im_start|>assistant\n"
    if system := re.search(r"<\|im_start\|>system(?:\\n|\n)(.*?)<\|im_end\|>", template, re.DOTALL):
        text = f"<|im_start|>system\n{system.group(1)}<|im_end|>\n{text}"
    return text


def _merge(pair: Sequence[str], vocab: Mapping[str, int], where: str) -> tuple[str, str]:
    """The two tokens of a merge; they and their concatenation must be in the vocabulary."""
    if len(pair) != 2:
        raise QuantError(f"{where} is {' '.join(pair)!r:.80}; two tokens with a space between them are expected")
    left, right = pair
    if missing := [token for token in (left, right, left + right) if token not in vocab]:
        raise QuantError(f"{where} is {left + ' ' + right!r:.80}, but {missing[0]!r:.80} is not in the vocabulary")
    return left, right


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


class _Token(msgspec.Struct):
    """The JSON schema of a token as an object."""

    content: str


_Id = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]


class _Config(msgspec.Struct):
    """The JSON schema of `tokenizer_config.json`."""

    eos_token: str | _Token | list[str | _Token] | None = None
    chat_template: str | list[Any] | None = None


class _Generation(msgspec.Struct):
    """The JSON schema of `generation_config.json`."""

    eos_token_id: _Id | list[_Id] | None = None


class _Glassllm(msgspec.Struct):
    """The JSON schema of a glassllm tokenizer."""

    alphabet: list[str]
    merges: list[tuple[str, str]]


@contextlib.contextmanager
def _panics() -> Iterator[None]:
    """Turns a panic of the Rust code of `tokenizers` into QuantError."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # the class cannot be imported
            raise
        raise QuantError(f"tokenizer.json has rules that cannot be applied: {error}") from error


def _tokenizers() -> ModuleType:
    """The package `tokenizers`."""
    try:
        import tokenizers
    except ImportError as error:
        raise UnsupportedError("tokenizers is not installed; pip install fewbit[io] brings it") from error
    return tokenizers
