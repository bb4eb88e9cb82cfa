"""Tokenizers of Hugging Face files stop and begin texts as the files say."""

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tokenizers")

from fewbit.errors import QuantError
from fewbit.models import tokenizer_from_directory, tokenizer_from_files, tokenizer_from_gguf
from tests.models.tokenizers.fields import gguf_fields, sentencepiece_source


def test_files_of_hugging_face():
    files = tokenizer_from_gguf(gguf_fields()).files()
    as_object = {**files, "tokenizer_config.json": b'{"eos_token": {"content": "<|im_end|>"}}', "chat_template.jinja": b"t"}
    tokenizer = tokenizer_from_files(as_object)
    assert (tokenizer.stop_ids, tokenizer.chat_template) == ((1,), "t")
    assert tokenizer_from_files({"tokenizer.json": files["tokenizer.json"]}).stop_ids == ()
    generation = {**as_object, "generation_config.json": b'{"eos_token_id": [0, 1, 999999]}'}
    assert tokenizer_from_files(generation).stop_ids == (1, 0)


NAMED = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "default"}]


@pytest.mark.parametrize(
    ("of_config", "jinja", "template"),
    [("config", b"jinja", "jinja"), ("config", None, "config"), (NAMED, None, "default"), (NAMED[:1], None, None)],
)
def test_the_chat_template_is_that_of_transformers(
    tmp_path: Path, of_config: Any, jinja: bytes | None, template: str | None
):
    files = tokenizer_from_gguf(gguf_fields()).files()
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": of_config}
    files["tokenizer_config.json"] = json.dumps(config).encode()
    if jinja is not None:
        files["chat_template.jinja"] = jinja
    assert tokenizer_from_files(files).chat_template == template
    transformers = pytest.importorskip("transformers")
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    if template is not None:
        assert theirs.get_chat_template() == template


@pytest.mark.parametrize(("files", "found"), [({}, ""), ({"b.json": b"", "a.json": b""}, " among a.json, b.json")])
def test_without_a_tokenizer_the_files_that_are_there_are_named(files: dict[str, bytes], found: str):
    with pytest.raises(QuantError, match=rf"^there is no tokenizer\.json{found}; copy it to the checkpoint$"):
        tokenizer_from_files(files)


@pytest.mark.finding(18)
@pytest.mark.parametrize("index", [10**9, 2**31])
def test_an_id_without_end_is_refused(index: int):
    """tokenizers writes its vocabulary by counting up to the largest id: 10**9 took 13 s, and 2**31 is no int32."""
    files = tokenizer_from_gguf(gguf_fields()).files()
    form = json.loads(files["tokenizer.json"])
    form["model"]["vocab"]["h"] = index
    with pytest.raises(QuantError, match=rf"gives token 'h' the id {index}, more than 16,777,216"):
        tokenizer_from_files({"tokenizer.json": json.dumps(form).encode()})


def with_template(*steps: str, **config: Any) -> dict[str, bytes]:
    """The files of a tokenizer whose post-processor has these steps."""
    from tokenizers.processors import TemplateProcessing

    source = sentencepiece_source()
    special = [(step, source.token_to_id(step)) for step in steps if step != "$A"]
    source.post_processor = TemplateProcessing(single=list(steps), special_tokens=special)
    return {"tokenizer.json": source.to_str().encode(), "tokenizer_config.json": json.dumps(config).encode()}


@pytest.mark.parametrize(
    ("steps", "config", "start_ids"),
    [
        (["<s>", "$A"], {}, (1,)),
        (["<s>", "<|end|>", "$A", "</s>"], {}, (1, 6)),
        (["$A", "</s>"], {}, ()),
        (["</s>"], {}, ()),
        (["<s>", "$A"], {"add_bos_token": False, "bos_token": "<s>"}, ()),
        (["<s>", "$A"], {"add_bos_token": True, "bos_token": "</s>"}, (1,)),
        (["$A"], {"add_bos_token": True, "bos_token": {"content": "<s>"}}, (1,)),
        (["$A"], {"add_bos_token": True}, ()),
        (["$A"], {"bos_token": "<s>"}, ()),
    ],
)
def test_start_tokens_are_those_of_the_post_processor(steps: list[str], config: dict[str, Any], start_ids: tuple[int, ...]):
    assert tokenizer_from_files(with_template(*steps, **config)).start_ids == start_ids


@pytest.mark.oracle
@pytest.mark.parametrize("steps", [["<s>", "$A"], ["$A"]])
def test_a_text_begins_as_in_transformers(tmp_path: Path, steps: list[str]):
    transformers = pytest.importorskip("transformers")
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    for name, data in with_template(*steps, **config).items():
        (tmp_path / name).write_bytes(data)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    text = "the mother <s> bathes"
    ours = tokenizer_from_directory(tmp_path).encode(text, add_start=True).tolist()
    assert ours == theirs(text)["input_ids"]
    assert (ours[0] == 1) == (steps[0] == "<s>")


def test_refuses():
    with pytest.raises(QuantError, match=r"no tokenizer\.json among config\.json"):
        tokenizer_from_files({"config.json": b"{}"})
    with pytest.raises(QuantError, match="the tokenizer's files cannot be read"):
        tokenizer_from_files({"tokenizer.json": b"{"})
    files = with_template("<s>", "$A")
    unknown = {**files, "tokenizer.json": files["tokenizer.json"].replace(b'"ids":[1]', b'"ids":[999]')}
    with pytest.raises(QuantError, match=r"tokenizer\.json begins a text with token 999, which its vocabulary lacks"):
        tokenizer_from_files(unknown)
