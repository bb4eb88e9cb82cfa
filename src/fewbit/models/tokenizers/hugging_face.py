"""Tokenizers in the files of Hugging Face directories."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec

from ..._json import converted, parsed
from ...errors import QuantError
from .tokenizer import Tokenizer, tokenizers_package, without_panics

# More than any embedding has rows. `tokenizers` counts up to the largest id when it writes its vocabulary.
_LARGEST_ID = 1 << 24


def tokenizer_from_files(files: Mapping[str, bytes]) -> Tokenizer:
    """Reads `tokenizer.json`, `tokenizer_config.json` and `generation_config.json`.

    The stop tokens are the `eos_token` of the second and the `eos_token_id` of the third. The start tokens are those that the
    post-processor puts before a text; `add_bos_token` of the second has the last word, as in files that llama.cpp converts. As in
    transformers, `chat_template.jinja` comes before the template of the second, of which several have the one named "default".

    Args:
        files: the contents of a directory's small files, by name.

    Returns:
        The tokenizer.

    Raises:
        QuantError: when `tokenizer.json` is missing or cannot be read.
    """
    hf = tokenizers_package()
    if "tokenizer.json" not in files:
        others = f" among {', '.join(sorted(files))}" if files else ""
        raise QuantError(f"there is no tokenizer.json{others}; copy it to the checkpoint")
    config_text = files.get("tokenizer_config.json", b"{}")
    config = converted(parsed(config_text, "tokenizer_config.json"), _Config, "tokenizer_config.json")
    try:
        with without_panics():
            backend = hf.Tokenizer.from_buffer(files["tokenizer.json"])
        jinja = files.get("chat_template.jinja", b"").decode("utf-8")
    except ValueError as error:
        raise QuantError(f"the tokenizer's files cannot be read: {error}") from error
    largest = max(backend.get_vocab().items(), key=lambda item: item[1], default=("", 0))
    if largest[1] > _LARGEST_ID:
        raise QuantError(
            f"tokenizer.json gives token {largest[0]!r:.60} the id {largest[1]}, more than {_LARGEST_ID:,}; it is damaged"
        )
    backend.no_padding()
    backend.no_truncation()
    stops = _texts(config.eos_token)
    where = "generation_config.json"
    generation = converted(parsed(files.get(where, b"{}"), where), _Generation, where).eos_token_id or []
    if not isinstance(generation, list):
        generation = [generation]
    known = [i for i in generation if backend.id_to_token(i) is not None]
    ids = tuple(dict.fromkeys([*(i for i in map(backend.token_to_id, stops) if i is not None), *known]))
    template = jinja or config.chat_template
    if isinstance(template, list):
        template = next((each.template for each in template if each.name == "default"), None)
    return Tokenizer(backend, ids, template or None, _start_ids(backend, config), "".join(_texts(config.bos_token)))


def _start_ids(backend: Any, config: "_Config") -> tuple[int, ...]:
    """The tokens that begin a text."""
    if config.add_bos_token is False:
        return ()
    hf = tokenizers_package()
    text = hf.Tokenizer(hf.models.WordLevel({"a": 0}, unk_token="a")).encode("a")
    with without_panics():
        processed = backend.post_process(text)
    ids: list[int] = []
    if 0 in processed.special_tokens_mask:
        ids = processed.ids[: processed.special_tokens_mask.index(0)]
    if config.add_bos_token and not ids:
        found = [backend.token_to_id(token) for token in _texts(config.bos_token)]
        ids = [index for index in found if index is not None]
    if missing := [index for index in ids if backend.id_to_token(index) is None]:
        raise QuantError(f"tokenizer.json begins a text with token {missing[0]}, which its vocabulary lacks")
    return tuple(ids)


def _texts(tokens: "str | _Token | list[str | _Token] | None") -> list[str]:
    """The texts of tokens."""
    if not isinstance(tokens, list):
        tokens = [tokens] if tokens else []
    return [token if isinstance(token, str) else token.content for token in tokens]


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


class _Token(msgspec.Struct):
    """The JSON schema of a token as an object."""

    content: str


class _Template(msgspec.Struct):
    """The JSON schema of one of several chat templates."""

    name: str
    template: str


_Id = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]


class _Config(msgspec.Struct):
    """The JSON schema of `tokenizer_config.json`."""

    add_bos_token: bool | None = None
    bos_token: str | _Token | None = None
    eos_token: str | _Token | list[str | _Token] | None = None
    chat_template: str | list[_Template] | None = None


class _Generation(msgspec.Struct):
    """The JSON schema of `generation_config.json`."""

    eos_token_id: _Id | list[_Id] | None = None
