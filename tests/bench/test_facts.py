"""The files of measurements: their names, and rows that another run keeps."""

import argparse
import json
import os
import pathlib

import pytest

from bench import facts, limit


def test_kept_rows_have_the_date_of_their_run(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "__file__", str(tmp_path / "facts.py"))
    (tmp_path / "results").mkdir()
    one, other = {"scheme": "nf4", "method": "rtn", "kl": 1}, {"scheme": "nf4", "method": "gptq", "date": "1999-12-31"}
    facts.save("losses", (), rows=[one, other])
    kept = facts.kept_rows("losses", argparse.Namespace(keep=True, save=True), "scheme", "method")
    saved = json.loads((tmp_path / "results" / "losses.json").read_text())
    assert kept["nf4", "rtn"] == {**one, "date": saved["date"], "device": saved["device"]}
    assert kept["nf4", "gptq"]["date"] == "1999-12-31" and len(kept) == 2
    assert facts.kept_rows("losses", argparse.Namespace(keep=False, save=True), "scheme", "method") == {}
    with pytest.raises(SystemExit, match="pass both"):
        facts.kept_rows("losses", argparse.Namespace(keep=True, save=False), "scheme", "method")


def test_files_end_with_the_instruction_set_and_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))
    assert limit(["--save", "--rounds", "3"]) == ""
    assert limit(["--machine", "small", "--isa", "avx2"]) == "-avx2-small"
    assert os.environ["FEWBIT_ISA"] == "avx2"
    assert limit(["--isa", "avxvnni"]) == "-avxvnni"
    assert os.environ["FEWBIT_ISA"] == "avxvnni" and os.environ["ONEDNN_MAX_CPU_ISA"] == "AVX2_VNNI"
