"""Tokenizers that only transformers reads: SentencePiece models, vocabularies without a tokenizer.json."""

import contextlib
import dataclasses
import json
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..models.roles.modules import guarded
from ..models.tokenizers.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class _Encoding:
    """The token ids of a text, as the package `tokenizers` gives them."""

    ids: list[int]


@dataclasses.dataclass(frozen=True)
class _Backend:
    """A tokenizer of transformers with the interface of the package `tokenizers`."""

    tokenizer: Any

    def encode(self, text: str, *, add_special_tokens: bool) -> _Encoding:
        """The token ids of a text."""
        with guarded("tokenize the text"):
            return _Encoding(self.tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"])

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        """The text of token ids."""
        return self.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def get_vocab_size(self) -> int:
        """The number of tokens."""
        return len(self.tokenizer)


def transformers_tokenizer(files: Mapping[str, bytes], config: Mapping[str, Any]) -> Tokenizer:
    """Reads a tokenizer that has no `tokenizer.json` through transformers.

    Args:
        files: the checkpoint's small files by name.
        config: its `config.json`; only the `model_type` is used.

    Returns:
        The tokenizer.

    Raises:
        UnsupportedError: when transformers cannot read it.
    """
    with (
        _directory(files, json.dumps({"model_type": config.get("model_type")}).encode()) as directory,
        guarded("read the tokenizer"),
    ):
        import transformers

        tokenizer = transformers.AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
        found = tokenizer("a", return_special_tokens_mask=True)
    ids, is_special = found["input_ids"], found["special_tokens_mask"]
    count = is_special.index(0) if 0 in is_special else 0
    return Tokenizer(_Backend(tokenizer), start_ids=tuple(ids[:count]))


@contextlib.contextmanager
def _directory(files: Mapping[str, bytes], config: bytes) -> Iterator[str]:
    """A temporary directory with a checkpoint's small files."""
    with tempfile.TemporaryDirectory() as directory:
        for name, content in {**files, "config.json": config}.items():
            (Path(directory) / name).write_bytes(content)
        yield directory
