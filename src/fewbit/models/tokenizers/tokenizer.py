"""A tokenizer with its start and stop tokens and chat template."""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from ..._json import dumped
from ...errors import QuantError, UnsupportedError
from .chat_template import chat_text


@dataclasses.dataclass(frozen=True, eq=False)
class Tokenizer:
    """A tokenizer with its start and stop tokens and chat template.

    Attributes:
        backend: the `tokenizers.Tokenizer`.
        stop_ids: the tokens that end a generation.
        chat_template: the checkpoint's Jinja template, or None.
        start_ids: the tokens that begin every text: the beginning-of-text token, or none.
        bos: the text of the beginning-of-text token for the chat template, even if other texts do not begin with it.
    """

    backend: Any
    stop_ids: tuple[int, ...] = ()
    chat_template: str | None = None
    start_ids: tuple[int, ...] = ()
    bos: str = ""

    @property
    def vocab(self) -> int:
        """The vocabulary size, special tokens included."""
        return self.backend.get_vocab_size()

    def encode(self, text: str, *, add_start: bool = False) -> np.ndarray:
        """The int32 token ids of a text, in which special tokens are recognised.

        Args:
            text: the text.
            add_start: whether `start_ids` are put before it, unless it begins with them.

        Returns:
            The ids.

        Raises:
            QuantError: for a text with bytes that are no UTF-8, such as an argument of the command line may have.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise QuantError(f"the text is no UTF-8: {text[: error.end]!r} ends in a byte that is no character") from error
        with without_panics():
            ids = self.backend.encode(text, add_special_tokens=False).ids
        if add_start and tuple(ids[: len(self.start_ids)]) != self.start_ids:
            ids = [*self.start_ids, *ids]
        return np.asarray(ids, np.int32)

    def decode(self, ids: Sequence[int] | np.ndarray, *, keep_special: bool = False) -> str:
        """The text of token ids, without special tokens unless `keep_special`."""
        with without_panics():
            return self.backend.decode([int(i) for i in ids], skip_special_tokens=not keep_special)

    def chat(self, message: str) -> np.ndarray:
        """The token ids of a user message in the chat template, up to the answer.

        The template is rendered as by transformers, with its default system message if it has one. It writes the
        beginning-of-text token itself.

        Raises:
            UnsupportedError: when the checkpoint has no template, the template fails, or jinja2 is not installed.
        """
        eos = self.backend.id_to_token(self.stop_ids[0]) if self.stop_ids else ""
        return self.encode(chat_text(message, self.chat_template, bos=self.bos, eos=eos))

    def files(self) -> dict[str, bytes]:
        """The files by name that `tokenizer_from_files` reads.

        They are `tokenizer.json`, `tokenizer_config.json` and, where more than one token stops, `generation_config.json`.
        """
        config: dict[str, Any] = {"chat_template": self.chat_template}
        if self.stop_ids:
            config["eos_token"] = self.backend.id_to_token(self.stop_ids[0])
        if self.bos:
            config["bos_token"] = self.bos
        if self.start_ids:
            config |= {"bos_token": self.backend.id_to_token(self.start_ids[0]), "add_bos_token": True}
        written = {"tokenizer_config.json": config}
        if len(self.stop_ids) > 1:
            written["generation_config.json"] = {"eos_token_id": list(self.stop_ids)}
        return {
            "tokenizer.json": self.backend.to_str().encode(),
            **{name: dumped(value, name) for name, value in written.items()},
        }

    def save(self, directory: Path) -> None:
        """Writes `files` into an existing directory."""
        for name, content in self.files().items():
            (directory / name).write_bytes(content)


@contextlib.contextmanager
def without_panics() -> Iterator[None]:
    """Turns a panic of the Rust code of `tokenizers` into QuantError."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # the class cannot be imported
            raise
        raise QuantError(f"tokenizer.json has rules that cannot be applied: {error}") from error


def tokenizers_package() -> ModuleType:
    """The package `tokenizers`."""
    try:
        import tokenizers
    except ImportError as error:
        raise UnsupportedError("tokenizers is not installed; pip install fewbit[io] brings it") from error
    return tokenizers
