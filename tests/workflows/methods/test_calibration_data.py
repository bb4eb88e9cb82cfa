"""Windows of a text: spread over it, with what begins a text, and what is refused."""

import dataclasses
import hashlib

import numpy as np
import pytest

import fewbit as fb
from fewbit import workflows
from fewbit.workflows.methods.calibration_data import CalibrationData, calibration_data
from tests.workflows.checkpoints import TEXT, llama_directory, needs_tokenizers, text_file


@needs_tokenizers
def test_windows_are_spread_over_the_text(tmp_path):
    model, text = workflows.load(llama_directory(tmp_path / "hf")), str(text_file(tmp_path))
    tokenizer = model.readable_tokenizer()
    ids, start = tokenizer.encode(text_file(tmp_path).read_text()), len(tokenizer.start_ids)
    data, count = calibration_data(model, text, windows=3, window=8), len(ids) // 8
    assert data.windows.shape == (3, 8) and data.unseen_experts == "nearest"
    for window, place in zip(data.windows, (0, (count - 1) // 2, count - 1), strict=True):
        assert list(window[:start]) == list(tokenizer.start_ids)
        np.testing.assert_array_equal(window[start:], ids[8 * place : 8 * place + 8][start:])
    assert len(calibration_data(model, text, windows=10**6, window=8).windows) == count
    assert calibration_data(model, text, windows=2).windows.shape == (2, 32), "the context"
    digest = hashlib.sha256(data.windows.astype(np.int32).tobytes()).hexdigest()
    assert data.facts == {"text": data.text, "windows": [3, 8], "sha256": digest, "unseen_experts": "nearest"}


@needs_tokenizers
def test_what_is_refused(tmp_path):
    model, text = workflows.load(llama_directory(tmp_path / "hf")), str(text_file(tmp_path))
    with pytest.raises(fb.QuantError, match=r"each of 1 to 32 tokens, the context of hf"):
        calibration_data(model, text, window=33)
    two = dataclasses.replace(model, tokenizer=dataclasses.replace(model.readable_tokenizer(), start_ids=(1, 2)))
    assert calibration_data(two, text, windows=2, window=3).windows[:, :2].tolist() == [[1, 2], [1, 2]]
    for window in (1, 2):
        with pytest.raises(
            fb.QuantError, match=rf"has {window} tokens, and the tokenizer of hf begins each with 2; take 3 tokens or more"
        ):
            calibration_data(two, text, window=window)
    (tmp_path / "short").write_text(TEXT[:20])
    with pytest.raises(fb.QuantError, match=r"short has 20 tokens, and a window takes 32"):
        calibration_data(model, str(tmp_path / "short"))
    with pytest.raises(fb.QuantError, match="hf has no experts; leave out --unseen-experts share"):
        calibration_data(model, text, unseen_experts="share")
    with pytest.raises(fb.QuantError, match=r"calibration windows are float64\(2, 3\), expected token ids"):
        CalibrationData("x", np.zeros((2, 3)))
