"""The manifest guards itself: any change of what it says is found."""

import dataclasses

import pytest

from fewbit import QuantError, UnsupportedError
from fewbit._json import canonical, dumped, parsed
from fewbit.io.native import manifest as manifests
from fewbit.io.native.manifest import FileRecord, Manifest, TensorRecord, is_plain_name, read_manifest, sha256
from tests.io.damage import EVERY_BIT, flipped, truncated

MANIFEST = Manifest(
    {"model.safetensors": FileRecord(12, "ab" * 32)},
    {"w": TensorRecord("model.safetensors", "F32", (1, 3), "cd" * 32)},
    {"recipe": "nf4"},
)


def signed(change: dict) -> bytes:
    """A manifest whose fields were changed by somebody who also renewed its hash."""
    form = parsed(MANIFEST.text(), "x") | change
    del form["sha256"]
    return dumped(form | {"sha256": sha256(canonical(form))}, "x")


def read_or_message(path) -> Manifest | str:
    try:
        return read_manifest(path)
    except QuantError as error:
        return str(error)


def test_it_comes_back(tmp_path):
    (tmp_path / "manifest.json").write_bytes(MANIFEST.text())
    assert read_manifest(tmp_path) == MANIFEST


def test_facts_with_numbers_as_keys_have_their_texts(tmp_path):
    facts = {"layers": {1: "a", 2: "b", 10: "c", "d": 0}}
    (tmp_path / "manifest.json").write_bytes(dataclasses.replace(MANIFEST, facts=facts).text())
    assert read_manifest(tmp_path).facts == {"layers": {"1": "a", "2": "b", "10": "c", "d": 0}}


@EVERY_BIT
def test_a_flipped_bit_is_found(tmp_path, bits):
    text = MANIFEST.text()
    for position, damaged in flipped(text, bits):
        (tmp_path / "manifest.json").write_bytes(damaged)
        assert "manifest.json" in read_or_message(tmp_path), f"byte {position}"


def test_every_truncation_is_found(tmp_path):
    for cut in truncated(MANIFEST.text()[:-1]):
        (tmp_path / "manifest.json").write_bytes(cut)
        with pytest.raises(QuantError, match=r"manifest\.json is not valid JSON"):
            read_manifest(tmp_path)


def test_it_is_missing(tmp_path):
    with pytest.raises(QuantError, match=r"manifest\.json is missing, though fewbit wrote the directory"):
        read_manifest(tmp_path)


def test_a_newer_layout_is_unsupported(tmp_path):
    (tmp_path / "manifest.json").write_bytes(signed({"version": manifests.VERSION + 1}))
    with pytest.raises(UnsupportedError, match="has layout version 3, this fewbit reads version 2; upgrade fewbit"):
        read_manifest(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "other"}, "is no manifest of fewbit: format 'other', version 2"),
        ({"version": 0}, "is no manifest of fewbit: format 'fewbit', version 0"),
        ({"files": {"../x": {"size": 1, "sha256": ""}}}, r"names the file '\.\./x'; only files of the directory itself"),
        ({"files": {}}, r"tensor 'w' is in 'model\.safetensors', which is not a file of the manifest"),
        ({"files": []}, r"files is \[\]; expected object"),
        ({"facts": 3}, "facts is 3; expected object"),
    ],
)
def test_what_was_written_by_hand_is_checked_too(tmp_path, change, message):
    (tmp_path / "manifest.json").write_bytes(signed(change))
    with pytest.raises(QuantError, match=message):
        read_manifest(tmp_path)


@pytest.mark.parametrize("text", [MANIFEST.text()[:-1], MANIFEST.text() + b" ", MANIFEST.text().replace(b"\n ", b"\n  ", 1)])
def test_changed_white_space_is_found(tmp_path, text):
    (tmp_path / "manifest.json").write_bytes(text)
    with pytest.raises(QuantError, match=r"manifest\.json is damaged: its white space or number format was changed"):
        read_manifest(tmp_path)


def test_an_older_layout_is_unsupported(tmp_path):
    (tmp_path / "manifest.json").write_bytes(signed({"version": 1}))
    with pytest.raises(UnsupportedError, match="has layout version 1, this fewbit reads version 2; quantize the checkpoint"):
        read_manifest(tmp_path)


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "a\\b", "/a", "c:a", "a\0"])
def test_names_that_lead_elsewhere(name):
    assert not is_plain_name(name)
    assert is_plain_name("tokenizer.json")
