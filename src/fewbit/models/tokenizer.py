"""Text to token ids and back, with the `tokenizers` package, from GGUF, `tokenizer.json` or glassllm."""

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

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
        return np.asarray(self.backend.encode(text, add_special_tokens=False).ids, np.int32)

    def decode(self, ids: Sequence[int] | np.ndarray, *, keep_special: bool = False) -> str:
        """The text of token ids; special tokens are left out unless they are asked for."""
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
        QuantError: for a key that is missing.
    """
    hf = _tokenizers()
    kind, pre = _field(fields, "tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre", "default")
    if kind != "gpt2":
        raise UnsupportedError(f"the GGUF file's tokenizer is of kind {kind!r}; byte-level BPE ('gpt2') can be read")
    byte_level = hf.pre_tokenizers.ByteLevel(add_prefix_space=False)
    if pre == "smollm":
        splits = hf.pre_tokenizers.Sequence([hf.pre_tokenizers.Digits(individual_digits=True), byte_level])
    elif pre in ("gpt-2", "default"):
        splits = byte_level
    else:
        raise UnsupportedError(f"the GGUF file splits text by the rule {pre!r}; smollm, gpt-2 and default can be read")
    tokens, kinds = _field(fields, "tokenizer.ggml.tokens"), _field(fields, "tokenizer.ggml.token_type")
    merges = [tuple(m.split(" ")) for m in _field(fields, "tokenizer.ggml.merges")]
    backend = hf.Tokenizer(hf.models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
    backend.pre_tokenizer, backend.decoder = splits, hf.decoders.ByteLevel()
    special = [t for t, token_kind in zip(tokens, kinds, strict=True) if token_kind == _CONTROL]
    backend.add_special_tokens([hf.AddedToken(t, special=True) for t in special])
    stop = fields.get("tokenizer.ggml.eos_token_id")
    return Tokenizer(backend, () if stop is None else (stop,), fields.get("tokenizer.chat_template"))


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
    try:
        backend = hf.Tokenizer.from_buffer(files["tokenizer.json"])
        config = json.loads(files.get("tokenizer_config.json", b"{}"))
    except ValueError as error:
        raise QuantError(f"the tokenizer's files cannot be read: {error}") from error
    backend.no_padding()
    backend.no_truncation()
    stops = [_text_of(t) for t in _listed(config.get("eos_token"))]
    ids = tuple(i for i in (backend.token_to_id(t) for t in stops) if i is not None)
    template = config.get("chat_template") or files.get("chat_template.jinja", b"").decode() or None
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
    alphabet, merges = _field(obj, "alphabet"), [tuple(pair) for pair in _field(obj, "merges")]
    special = ["<pad>", "<unk>", "<bos>", "<eos>"]
    tokens = [*special, *alphabet, *(a + b for a, b in merges)]
    vocab = {t: i for i, t in enumerate(tokens)}
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


def _field(fields: Mapping[str, Any], key: str) -> Any:
    """The value of a key that a tokenizer cannot do without."""
    if key not in fields:
        raise QuantError(f"the tokenizer has no {key!r}; is the file complete?")
    return fields[key]


def _listed(value: Any) -> list[Any]:
    """A value that may stand alone, be absent, or be a list, as a list."""
    return value if isinstance(value, list) else [] if value is None else [value]


def _text_of(token: Any) -> str:
    """The text of a token, which Hugging Face writes plain or as an object with its content."""
    return token["content"] if isinstance(token, Mapping) else str(token)


def _tokenizers() -> ModuleType:
    """The package `tokenizers`."""
    try:
        import tokenizers
    except ImportError as error:
        raise UnsupportedError("tokenizers is not installed; pip install fewbit[io] brings it") from error
    return tokenizers
