"""Inputs of models that are not causal language models."""

import dataclasses
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .._registry import near_names
from ..errors import QuantError
from ..io.npz import ZIP_ERRORS

Example = Mapping[str, np.ndarray]
"""The arguments of a model's forward function, with a batch axis of length 1 if the arrays allow it."""

_SEED = 0
_DECODER_TOKENS = 16
_TEXT_EXAMPLES = (4, 32)
_IMAGES = 4
_AUDIO_SAMPLES = 16_000


@dataclasses.dataclass(frozen=True)
class ModelInputs:
    """The inputs that two models are compared on.

    Attributes:
        title: what they are, for reports.
        examples: the arguments of each call.
    """

    title: str
    examples: tuple[Example, ...]


@dataclasses.dataclass(frozen=True)
class Signature:
    """What a model's forward function takes.

    Attributes:
        title: the name of the model's class.
        names: the names of the arguments, the main input first.
        settings: the configuration object of transformers.
        context: the most tokens of an input; None if there is no limit.
    """

    title: str
    names: tuple[str, ...]
    settings: Any
    context: int | None

    @property
    def has_text(self) -> bool:
        """Whether the main input is token ids."""
        return self.names[0] == "input_ids"

    @property
    def needs_decoder_ids(self) -> bool:
        """Whether a decoder takes tokens of its own."""
        return bool(getattr(self.settings, "is_encoder_decoder", False)) and "decoder_input_ids" in self.names

    @property
    def vocab(self) -> int | None:
        """The vocabulary size of `input_ids`; None for a model without tokens."""
        if not self.needs_decoder_ids:
            return vocabulary(self.settings)
        encoders = (getattr(self.settings, name, None) for name in ("encoder", "encoder_config", "text_encoder"))
        sizes = [getattr(encoder, "vocab_size", None) for encoder in encoders]
        sizes += [getattr(self.settings, name, None) for name in ("src_vocab_size", "vocab_size")]  # FSMT's, Marian's
        return next((size for size in sizes if isinstance(size, int)), self.decoder_vocab)

    @property
    def decoder_vocab(self) -> int | None:
        """The vocabulary size of `decoder_input_ids`; None for a model without tokens."""
        return vocabulary(self.settings)

    @property
    def start_token(self) -> int:
        """The token that a decoder's input starts with."""
        for name in ("decoder_start_token_id", "bos_token_id", "pad_token_id"):
            if isinstance(token := getattr(self.settings, name, None), int):
                return token
        return 0


def vocabulary(settings: Any) -> int | None:
    """The vocabulary size of a configuration object of transformers, the decoder's if it has two. None without tokens."""
    for part in (settings.get_text_config(decoder=True), settings):
        if isinstance(size := getattr(part, "vocab_size", None), int):
            return size
    return None


def array_inputs(path: Path, takes: Signature) -> ModelInputs:
    """Reads a `.npz` of arguments by name, or a `.npy` of the main input.

    Arrays whose first axes have the same length are examples along that axis, and are run one by one.

    Args:
        path: the file.
        takes: what the model takes.

    Returns:
        The examples.

    Raises:
        QuantError: when the file cannot be read, or an array is not an argument, not numeric or not a token of the vocabulary.
    """
    try:
        with path.open("rb") as file:
            loaded = np.load(file, allow_pickle=False)
            if isinstance(loaded, np.ndarray):
                arrays = {takes.names[0]: loaded}
            else:
                arrays = {name: loaded[name] for name in loaded.files}
    except ZIP_ERRORS as error:
        raise QuantError(f"{path} cannot be read as NumPy arrays: {error}") from error
    if not arrays:
        raise QuantError(f"{path} has no arrays; expected arguments of {takes.title}, such as {takes.names[0]}")
    checked = {name: _argument(name, array, takes, str(path)) for name, array in arrays.items()}
    examples = tuple(_with_decoder_ids(example, takes) for example in _split(checked))
    named = ", ".join(f"{name} {'x'.join(map(str, array.shape))}" for name, array in checked.items())
    return ModelInputs(f"{path.name} ({named}{_decoder_note(checked, takes)})", examples)


def text_inputs(
    title: str, lines: Iterable[str], encode: Callable[[str], Sequence[int]], takes: Signature, *, tokens: int, window: int
) -> ModelInputs:
    """The lines of a text as token ids, special tokens included, each an example.

    Args:
        title: the name of the text.
        lines: its lines; empty ones are left out.
        encode: turns a line into token ids.
        takes: what the model takes.
        tokens: the most tokens of all examples together.
        window: the most tokens of an example; the rest of a longer line is left out.

    Returns:
        The examples; a decoder's input is the start token, followed by the line without its last token.

    Raises:
        QuantError: when there is no line, a token is not in the vocabulary, or `tokens` or `window` is not positive.
    """
    if tokens < 1 or window < 1:
        raise QuantError(f"tokens is {tokens} and window is {window}; both must be at least 1")
    if takes.context is not None:
        window = min(window, takes.context)
    examples: list[Example] = []
    total = 0
    for line in lines:
        ids = list(encode(line))[: min(window, tokens)] if line.strip() else []
        if not ids:
            continue
        if examples and total + len(ids) > tokens:
            break
        total += len(ids)
        array = _argument("input_ids", np.asarray([ids], np.int64), takes, title)
        examples.append(_with_decoder_ids({"input_ids": array}, takes))
    if not examples:
        raise QuantError(f"{title} has no line with text; give one input per line")
    return ModelInputs(f"{total:,} tokens of {title} (a line each{_decoder_note({'input_ids'}, takes)})", tuple(examples))


def default_inputs(takes: Signature) -> ModelInputs:
    """Seeded random inputs: normal images, spectra and sounds, uniform token ids.

    Args:
        takes: what the model takes.

    Returns:
        The examples.

    Raises:
        QuantError: when the shape of the inputs does not follow from the configuration.
    """
    random, arrays = np.random.default_rng(_SEED), {}
    settings = takes.settings
    vision = getattr(settings, "vision_config", settings)
    if "pixel_values" in takes.names and (size := getattr(vision, "image_size", None)):
        height, width = (size, size) if isinstance(size, int) else tuple(size)[-2:]
        arrays["pixel_values"] = _normal(random, (_IMAGES, getattr(vision, "num_channels", 3), height, width))
    elif "input_features" in takes.names and hasattr(settings, "max_source_positions"):
        arrays["input_features"] = _normal(random, (1, settings.num_mel_bins, 2 * settings.max_source_positions))
    elif "input_values" in takes.names:
        shape: tuple[int, ...] = (1, _AUDIO_SAMPLES)
        if isinstance(getattr(settings, "num_mel_bins", None), int):  # a spectrum, not samples
            shape = (1, settings.max_length, settings.num_mel_bins)
        arrays["input_values"] = _normal(random, shape)
    if "input_ids" in takes.names and (takes.has_text or not arrays) and takes.vocab:
        rows, length = _TEXT_EXAMPLES
        arrays["input_ids"] = random.integers(takes.vocab, size=(rows, min(length, takes.context or length)))
    if not arrays:
        raise QuantError(
            f"no inputs of {takes.title} follow from its configuration; pass --inputs FILE.npz with arrays named "
            f"{', '.join(takes.names[:4])}"
        )
    named = ", ".join(f"{name} {'x'.join(map(str, array.shape))}" for name, array in arrays.items())
    examples = tuple(_with_decoder_ids(example, takes) for example in _split(arrays))
    return ModelInputs(f"random inputs of seed {_SEED} ({named}{_decoder_note(arrays, takes)})", examples)


def _normal(random: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return random.standard_normal(shape, dtype=np.float32)


def _argument(name: str, array: np.ndarray, takes: Signature, where: str) -> np.ndarray:
    """The array as the model takes it: float32, int64 or bool."""
    if name not in takes.names:
        raise QuantError(f"{where}: {takes.title} takes no {name!r}; {near_names(name, takes.names)}")
    if array.dtype.kind == "f":
        return np.asarray(array, np.float32)
    if array.dtype.kind == "b":
        return array
    if array.dtype.kind not in "iu":
        raise QuantError(f"{where}: {name} has dtype {array.dtype}; floats, integers or booleans are expected")
    vocab = {"input_ids": takes.vocab, "decoder_input_ids": takes.decoder_vocab}.get(name)
    if vocab is not None and array.size and (array.min() < 0 or array.max() >= vocab):
        raise QuantError(f"{where}: {name} has ids from {array.min()} to {array.max()}, the vocabulary {vocab} tokens")
    return array.astype(np.int64)


def _split(arrays: Mapping[str, np.ndarray]) -> list[Example]:
    """One example for each index of the first axis.

    All arrays are one example if they differ in length, or one is empty or a scalar.
    """
    lengths = {array.shape[0] if array.ndim else 0 for array in arrays.values()}
    if len(lengths) > 1 or 0 in lengths:
        return [arrays]
    return [{name: array[i : i + 1] for name, array in arrays.items()} for i in range(lengths.pop())]


def _with_decoder_ids(example: Example, takes: Signature) -> Example:
    """Adds the decoder's input tokens, if the model needs them.

    They are the encoder's tokens shifted by one, or the start token and random ones.
    """
    if not takes.needs_decoder_ids or "decoder_input_ids" in example:
        return example
    name = next(name for name in takes.names if name in example)  # the main input, or what is given instead
    if example[name].ndim < 2:
        raise QuantError(f"{name} has shape {example[name].shape}; {takes.title} takes a batch axis and at least one more")
    rows = len(example[name])
    start = np.full((rows, 1), takes.start_token, np.int64)
    if _is_shifted(example, takes):
        rest = example["input_ids"][:, :-1]
    else:
        rest = np.random.default_rng(_SEED).integers(takes.decoder_vocab or 1, size=(rows, _decoder_tokens(takes) - 1))
    return {**example, "decoder_input_ids": np.concatenate([start, rest], axis=1)}


def _is_shifted(given: Container[str], takes: Signature) -> bool:
    """Whether the decoder reads the encoder's tokens: those of a text, in one vocabulary."""
    return takes.has_text and "input_ids" in given and takes.vocab == takes.decoder_vocab


def _decoder_tokens(takes: Signature) -> int:
    return min(_DECODER_TOKENS, getattr(takes.settings, "max_target_positions", _DECODER_TOKENS))


def _decoder_note(given: Container[str], takes: Signature) -> str:
    """How the decoder's input was made, for a title. Empty if it was not."""
    if not takes.needs_decoder_ids or "decoder_input_ids" in given:
        return ""
    if _is_shifted(given, takes):
        return "; the decoder reads the same tokens shifted by one"
    return f"; the decoder reads its start token and {_decoder_tokens(takes) - 1} random ones"
