"""Where an output may be written: never over, into or around what is read, and never over files that are not ours."""

import functools
import json
import os
import shutil

import numpy as np
import pytest

from fewbit import QuantError, io
from fewbit._json import canonical, dumped
from fewbit.evaluate.report import check_page_path
from fewbit.io.gguf.imatrix import check_imatrix_output
from fewbit.io.gguf.writer import check_gguf_output
from fewbit.io.native.manifest import sha256
from fewbit.io.output import check_output, foreign_files

X = np.ones(3, np.float32)


@pytest.fixture
def ours(tmp_path):
    """A directory that fewbit wrote."""
    return io.write(tmp_path / "m", {"x": X}, files={"tokenizer.json": b"{}"})


def refused(path, match, **kwargs):
    with pytest.raises(QuantError, match=match):
        check_output(path, overwrite=True, **kwargs)


@pytest.mark.finding(3)
def test_only_files_of_the_manifest_are_replaced(ours):
    assert check_output(ours, overwrite=True) == ours
    (ours / "notes.txt").write_text("mine")
    refused(ours, r"m contains files that fewbit did not write \(notes\.txt\), so it is not replaced; move them elsewhere")
    (ours / "notes.txt").unlink()
    for i in range(5):
        (ours / f"d{i}").mkdir()
    refused(ours, r"m contains files that fewbit did not write \(d0, d1, d2 and 2 more\)")


@pytest.mark.finding(3)
def test_a_listed_name_that_is_a_link_or_a_directory_is_not_ours(ours, tmp_path):
    (ours / "tokenizer.json").rename(tmp_path / "tokenizer.json")
    assert foreign_files(ours) == []
    (ours / "tokenizer.json").symlink_to(tmp_path / "tokenizer.json")
    assert foreign_files(ours) == ["tokenizer.json"]
    (ours / "tokenizer.json").unlink()
    (ours / "tokenizer.json").mkdir()
    assert foreign_files(ours) == ["tokenizer.json"]


@pytest.mark.finding(3)
@pytest.mark.parametrize("manifest", [None, '{"format": "fewbit", "files": {"config.json": {}}}', "fewbit"])
def test_a_directory_without_a_sound_manifest_is_not_replaced(tmp_path, manifest):
    """Such as a Hugging Face directory whose config mentions fewbit."""
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "fewbit"}}))
    if manifest is not None:
        (tmp_path / "m" / "manifest.json").write_text(manifest)
    refused(tmp_path / "m", r"m was not written by fewbit as safetensors files, so it is not replaced; .*manifest\.json")
    if manifest is None:
        refused(tmp_path / "m", r"\(it has no manifest\.json\)$")


def test_what_another_version_wrote_is_not_replaced_and_called_so(ours):
    form = json.loads((ours / "manifest.json").read_text()) | {"version": 1}
    del form["sha256"]
    (ours / "manifest.json").write_bytes(dumped(form | {"sha256": sha256(canonical(form))}, "x"))
    refused(ours, "m is not replaced: .* has layout version 1, .*or choose another output, or remove it yourself")


@pytest.mark.finding(3)
def test_a_source_inside_around_or_at_the_target_is_refused(ours, tmp_path):
    refused(ours, "m is the model itself", sources=[ours])
    refused(ours / "out", "out is inside .*m, the model that is read", sources=[ours])
    refused(ours / "a" / "b", "b is inside .*m, the model that is read", sources=[ours])
    refused(ours / "config.json", r"config\.json is a file of .*m, the model that is read", sources=[ours])
    refused(tmp_path, "contains .*m, which is read", sources=[ours])
    refused(ours, r"m contains .*fewbit\.safetensors, which is read", sources=[ours / "fewbit.safetensors"])
    assert check_output(tmp_path / "out", overwrite=True, sources=[ours, tmp_path / "no-such-thing"]) == tmp_path / "out"
    assert check_output(tmp_path / "n", overwrite=False, sources=[tmp_path / "m.gguf"]) == tmp_path / "n"


@pytest.mark.finding(3)
def test_links_between_source_and_target_are_followed(ours, tmp_path):
    (tmp_path / "link").symlink_to(ours)
    refused(ours, "m is the model itself", sources=[tmp_path / "link"])
    refused(tmp_path / "link" / "out", "out is inside .*link, the model that is read", sources=[tmp_path / "link"])
    refused(tmp_path / "link", "link is a symbolic link, so it is not replaced")
    cache = tmp_path / "cache"  # as the hub keeps models: a directory of links into a store
    cache.mkdir()
    (cache / "model.safetensors").symlink_to(ours / "fewbit.safetensors")
    refused(ours, r"m contains .*cache.model\.safetensors, which is read", sources=[cache])


def test_paths_that_cannot_be_written(tmp_path):
    refused("", "the output path is empty; name a directory")
    refused("a\0b", "contains a zero byte")
    (tmp_path / "file").touch()
    refused(tmp_path / "file" / "m", "m cannot be written: .*file is not a directory")
    for overwrite in (False, True):
        with pytest.raises(QuantError, match="file is a file, so it is not replaced; choose another output or remove it"):
            check_output(tmp_path / "file", overwrite=overwrite)
    (tmp_path / "m").mkdir()
    with pytest.raises(QuantError, match="m exists; choose another output, or allow it to be replaced"):
        check_output(tmp_path / "m", overwrite=False)
    assert check_output(tmp_path / "a" / "b", overwrite=False) == tmp_path / "a" / "b"


FILES = {
    "GGUF": (check_gguf_output, "model.gguf"),
    "importance matrix": (check_imatrix_output, "imatrix.gguf"),
    "report": (check_page_path, "report.html"),
}


@pytest.mark.parametrize("check", FILES)
def test_files_are_refused_in_the_words_of_directories(check, ours, tmp_path):
    check, name = FILES[check]
    check = functools.partial(check, overwrite=True)
    (tmp_path / "file").touch()
    (tmp_path / "link.gguf").symlink_to(tmp_path / "file")
    reasons = {
        "": f"the output path is empty; name a file, such as {name}",
        "a\0b": "contains a zero byte",
        tmp_path / "file" / "a.gguf": "a.gguf cannot be written: .*file is not a directory",
        tmp_path / "m": f"m is a directory, so it is not replaced; name a file, such as .*m/{name}",
        tmp_path
        / "link.gguf": "link.gguf is a symbolic link, so it is not replaced; choose another output or remove it yourself",
        "/dev/null": "/dev/null is no regular file, so it is not replaced",
    }
    for path, reason in reasons.items():
        with pytest.raises(QuantError, match=reason):
            check(path)
    for source, relation in (
        (tmp_path / "file", "the model itself"),
        (tmp_path, f"a file of {tmp_path}, the model that is"),
    ):
        with pytest.raises(QuantError, match=f"file is {relation}"):
            check(tmp_path / "file", sources=[source])


@pytest.mark.finding(3)
def test_a_file_that_comes_while_the_model_is_written_stays(ours):
    """The target is looked at again right before it is replaced."""

    def run() -> None:
        with io.DirectoryWriter(ours, overwrite=True) as writer:
            writer.add("y", X)
            (ours / "notes.txt").write_text("mine")

    with pytest.raises(QuantError, match=r"m contains files that fewbit did not write \(notes\.txt\)"):
        run()
    assert (ours / "notes.txt").read_text() == "mine" and os.listdir(ours.parent) == ["m"]
    (ours / "notes.txt").unlink()
    assert list(io.read(ours).tensors) == ["x"]
    shutil.rmtree(ours)
