"""Text to token ids and back, with the `tokenizers` package, from GGUF, `tokenizer.json` or glassllm."""

import contextlib
import dataclasses
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import numpy as np

from .._json import Count, converted, parsed
from ..errors import QuantError, UnsupportedError

_CONTROL = 3  # tokenizer.ggml.token_type of special tokens


@dataclasses.dataclass(frozen=True, eq=False)
class Tokenizer:
    """A tokenizer, the tokens that end a text, and how a chat is written.

    Attributes:
        backend: the `tokenizers.Tokenizer` that does the work.
        stop_ids: the tokens that end a generation.
        chat_template: the checkpoint's own Jinja template; None when it has none.
    """

    backend: Any
    stop_ids: tuple[int, ...] = ()
    chat_template: str | None = None

    @property
    def vocab(self) -> int:
        """How many tokens there are, special ones included."""
        return self.backend.get_vocab_size()

    def encode(self, text: str) -> np.ndarray:
        """The token ids of a text, int32. Nothing is added around it; special tokens in the text are recognised."""
        with _panics():
            return np.asarray(self.backend.encode(text, add_special_tokens=False).ids, np.int32)

    def decode(self, ids: Sequence[int] | np.ndarray, *, keep_special: bool = False) -> str:
        """The text of token ids; special tokens are left out unless they are asked for."""
        with _panics():
            return self.backend.decode([int(i) for i in ids], skip_special_tokens=not keep_special)

    def chat(self, message: str) -> np.ndarray:
        """The token ids of a question to an instruction-tuned model, up to where its answer begins.

        Templates of the ChatML kind (`<|im_start|>role`, newline, content, `<|im_end|>`, newline) are written out as
        they are meant, with the template's default system message if it has one. Jinja itself is not run.

        Raises:
            UnsupportedError: when the checkpoint has no template, or one of another kind.
        """
        return self.encode(chat_text(message, self.chat_template))

    def files(self) -> dict[str, bytes]:
        """What `tokenizer_from_files` reads back: `tokenizer.json`, and `tokenizer_config.json` beside it, by name."""
        stops = [self.backend.id_to_token(i) for i in self.stop_ids]
        config = {"eos_token": stops[0] if len(stops) == 1 else stops, "chat_template": self.chat_template}
        return {
            "tokenizer.json": self.backend.to_str().encode(),
            "tokenizer_config.json": json.dumps(config, ensure_ascii=False, indent=2).encode(),
        }

    def save(self, directory: Path) -> None:
        """Writes `files` into a directory that exists."""
        for name, content in self.files().items():
            (directory / name).write_bytes(content)


def tokenizer_from_gguf(fields: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer inside a GGUF file: byte-level BPE, with the digit rule that its `pre` asks for.

    Args:
        fields: the metadata by key, as plain Python values.

    Returns:
        The tokenizer.

    Raises:
        UnsupportedError: for another kind of tokenizer or another `pre`.
        QuantError: for a key that is missing or of another type, and for merges outside the vocabulary.
    """
    hf = _tokenizers()
    said = converted(fields, _GgufKind, "the GGUF metadata")
    kind, pre = said.kind, said.pre
    if kind != "gpt2":
        raise UnsupportedError(f"the GGUF file's tokenizer is of kind {kind!r}; byte-level BPE ('gpt2') can be read")
    byte_level = hf.pre_tokenizers.ByteLevel(add_prefix_space=False)
    if pre == "smollm":
        splits = hf.pre_tokenizers.Sequence([hf.pre_tokenizers.Digits(individual_digits=True), byte_level])
    elif pre in ("gpt-2", "default"):
        splits = byte_level
    else:
        raise UnsupportedError(f"the GGUF file splits text by the rule {pre!r}; smollm, gpt-2 and default can be read")
    found = converted(fields, _Gguf, "the GGUF metadata")
    if len(found.kinds) != len(found.tokens):
        raise QuantError(f"the GGUF metadata has {len(found.tokens)} tokens and {len(found.kinds)} token types")
    if found.stop is not None and found.stop >= len(found.tokens):
        raise QuantError(f"tokenizer.ggml.eos_token_id is {found.stop}, but there are {len(found.tokens)} tokens")
    vocab = {t: i for i, t in enumerate(found.tokens)}
    merges = [_merge(m.split(" "), vocab, f"tokenizer.ggml.merges[{i}]") for i, m in enumerate(found.merges)]
    backend = hf.Tokenizer(hf.models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer, backend.decoder = splits, hf.decoders.ByteLevel()
    special = [t for t, token_kind in zip(found.tokens, found.kinds, strict=True) if token_kind == _CONTROL]
    backend.add_special_tokens([hf.AddedToken(t, special=True) for t in special])
    return Tokenizer(backend, () if found.stop is None else (found.stop,), found.template)


def tokenizer_from_files(files: Mapping[str, bytes]) -> Tokenizer:
    """The tokenizer of a checkpoint directory's `tokenizer.json`, with what `tokenizer_config.json` adds to it.

    Args:
        files: the directory's small files, by name.

    Returns:
        The tokenizer.

    Raises:
        QuantError: when `tokenizer.json` is missing or cannot be read.
    """
    hf = _tokenizers()
    if "tokenizer.json" not in files:
        raise QuantError(f"no tokenizer.json among {', '.join(sorted(files)) or 'no files'}; copy it beside the checkpoint")
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
    stops = [t if isinstance(t, str) else t.content for t in _listed(config.eos_token)]
    ids = tuple(i for i in (backend.token_to_id(t) for t in stops) if i is not None)
    template = config.chat_template or jinja or None
    return Tokenizer(backend, ids, template if isinstance(template, str) else None)


def tokenizer_from_directory(directory: Path) -> Tokenizer:
    """`tokenizer_from_files` of the files in a directory.

    Args:
        directory: the directory.

    Returns:
        The tokenizer.

    Raises:
        QuantError: when the directory has no `tokenizer.json`.
    """
    names = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
    return tokenizer_from_files({n: (directory / n).read_bytes() for n in names if (directory / n).is_file()})


def tokenizer_from_glassllm(obj: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer of a glassllm `*.tokenizer.json`: characters merged into pieces, with the space as U+2581.

    Args:
        obj: the JSON object, with an alphabet and merges.

    Returns:
        The tokenizer.

    Raises:
        QuantError: for a key that is missing.
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
    """The text of a question to a model whose chats are ChatML, up to where its answer begins.

    >>> print(chat_text("Hello", "{{'<|im_start|>' + role}}"))
    <|im_start|>user
    Hello<|im_end|>
    <|im_start|>assistant
    <BLANKLINE>
    """
    if template is None or "<|im_start|>" not in template:
        what = "no chat template" if template is None else "a chat template that is not ChatML"
        raise UnsupportedError(f"the checkpoint has {what}; give the prompt as plain text")
    found = re.search(r"<\|im_start\|>system(?:\\n|\n)(.*?)<\|im_end\|>", template, re.DOTALL)
    turns = [] if found is None else [("system", found.group(1))]
    written = "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in [*turns, ("user", message)])
    return written + "<|im_start|>assistant\n"


def _merge(pair: Sequence[str], vocab: Mapping[str, int], where: str) -> tuple[str, str]:
    """The two tokens of a merge, which must be in the vocabulary, and what they make."""
    if len(pair) != 2:
        raise QuantError(f"{where} is {' '.join(pair)!r:.80}; two tokens with a space between them are expected")
    left, right = pair
    if missing := [token for token in (left, right, left + right) if token not in vocab]:
        raise QuantError(f"{where} is {left + ' ' + right!r:.80}, but {missing[0]!r:.80} is not in the vocabulary")
    return left, right


class _GgufKind(msgspec.Struct):
    """The JSON schema of which tokenizer a GGUF file has."""

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
    """The JSON schema of a token that is written as an object."""

    content: str


class _Config(msgspec.Struct):
    """The JSON schema of what fewbit reads of `tokenizer_config.json`."""

    eos_token: str | _Token | list[str | _Token] | None = None
    chat_template: str | list[Any] | None = None


class _Glassllm(msgspec.Struct):
    """The JSON schema of a glassllm tokenizer."""

    alphabet: list[str]
    merges: list[tuple[str, str]]


@contextlib.contextmanager
def _panics() -> Iterator[None]:
    """Turns a panic of the Rust code of `tokenizers` into our error: its rules do not fit what they are applied to."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # the class cannot be imported
            raise
        raise QuantError(f"tokenizer.json has rules that cannot be applied: {error}") from error


def _listed(value: Any) -> list[Any]:
    """A value that may stand alone, be absent, or be a list, as a list."""
    return value if isinstance(value, list) else [] if value is None else [value]


def _tokenizers() -> ModuleType:
    """The package `tokenizers`."""
    try:
        import tokenizers
    except ImportError as error:
        raise UnsupportedError("tokenizers is not installed; pip install fewbit[io] brings it") from error
    return tokenizers
