"""Rows of a saved file that another run keeps."""

import json
import pathlib

import pytest

from bench import facts


def test_kept_rows_have_the_date_of_their_run(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "__file__", str(tmp_path / "facts.py"))
    (tmp_path / "results").mkdir()
    facts.save("losses", (), rows=[{"scheme": "nf4", "kl": 1}, {"scheme": "int8", "kl": 2, "date": "1999-12-31"}])
    kept = facts.kept_rows("losses", "scheme")
    assert list(kept) == [("nf4",), ("int8",)]
    saved = json.loads((tmp_path / "results" / "losses.json").read_text())
    assert kept["nf4",] == {"scheme": "nf4", "kl": 1, "date": saved["date"], "device": saved["device"]}
    assert kept["int8",]["date"] == "1999-12-31"
