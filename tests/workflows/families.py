"""Small checkpoints of several families as transformers writes them, quantized by the command line, and decoded again."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
from typer.testing import CliRunner

import fewbit as fb
from fewbit import io
from fewbit.cli.commands import app

FAMILIES = json.loads((Path(__file__).parent.parent / "models" / "family_roles.json").read_text())
LETTERS = "abcdefghijklmnopqrstuvwxyz .,?!:;-'\"()[]"  # as many as the vocabularies of FAMILIES
TEXT = "the quick brown fox jumps over the lazy dog. (what then? nothing!)\nit sleeps; and so do we.\n"


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A float checkpoint and a quantized one.

    Attributes:
        family: a key of FAMILIES.
        path: the directory that transformers wrote.
        quantized: the directory that `fewbit quantize` wrote.
        decoded: the quantized weights in float32, as a directory that transformers reads.
    """

    family: str
    path: Path
    quantized: Path
    decoded: Path

    def theirs(self, *, decoded: bool) -> Any:
        """The model as transformers itself loads it, from the float or the decoded weights."""
        import transformers

        cls = getattr(transformers, FAMILIES[self.family]["class"])
        return cls.from_pretrained(self.decoded if decoded else self.path)


def run_json(*arguments: Any) -> Any:
    """What a command prints with --json."""
    result = CliRunner().invoke(app, [str(a) for a in (*arguments, "--json")])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def checkpoint(directory: Path, family: str, recipe: str, **changed: Any) -> Checkpoint:
    """A random checkpoint of a family, with a tokenizer of letters for those that read text, quantized by a recipe."""
    import torch
    import transformers
    from safetensors.numpy import save_file

    listed = FAMILIES[family]
    cls = getattr(transformers, listed["class"])
    torch.manual_seed(0)
    model = cls(cls.config_class(**{**listed["config"], **changed}))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter *= 6  # logits of different sizes, where the initial ones are all near zero
    path = directory / family
    model.save_pretrained(path)
    if "vocab_size" in listed["config"]:
        write_tokenizer(path)
    found = Checkpoint(family, path, directory / f"{family}-{recipe}", directory / f"{family}-decoded")
    run_json("quantize", path, "-o", found.quantized, "--recipe", recipe, "--no-check")
    tensors = io.read(found.quantized).tensors
    decoded = {name: np.array(fb.dequantize(v) if fb.is_qarray(v) else v) for name, v in tensors.items()}
    found.decoded.mkdir()
    save_file(decoded, str(found.decoded / "model.safetensors"), metadata={"format": "pt"})
    (found.decoded / "config.json").write_text((path / "config.json").read_text())
    return found


def write_tokenizer(directory: Path) -> None:
    """A tokenizer with a token for each letter; `[` and `]` surround a text as special tokens."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors

    tokenizer = Tokenizer(models.WordLevel({letter: i for i, letter in enumerate(LETTERS)}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    special = [(letter, LETTERS.index(letter)) for letter in "[]"]
    tokenizer.post_processor = processors.TemplateProcessing(single="[ $A ]", special_tokens=special)
    (directory / "tokenizer.json").write_text(tokenizer.to_str())
