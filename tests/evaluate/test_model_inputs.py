"""Inputs of models that are no language models: read from files, cut from texts, or random with a fixed seed."""

import types

import numpy as np
import pytest

from fewbit.errors import QuantError
from fewbit.evaluate.model_inputs import Signature, array_inputs, default_inputs, text_inputs


def signature(*names, context=None, **settings):
    """A model that takes these arguments, with a configuration of these entries."""
    found = types.SimpleNamespace(**settings)
    found.get_text_config = lambda decoder: found
    return Signature("Net", names, found, context)


BERT = signature("input_ids", "attention_mask", vocab_size=10, context=8)
T5 = signature("input_ids", "decoder_input_ids", vocab_size=10, is_encoder_decoder=True, decoder_start_token_id=7)
WHISPER = signature(
    "input_features",
    "decoder_input_ids",
    vocab_size=10,
    is_encoder_decoder=True,
    num_mel_bins=4,
    max_source_positions=6,
    max_target_positions=5,
    bos_token_id=3,
)
VIT = signature("pixel_values", image_size=(6, 4), num_channels=1)
CLIP = signature("input_ids", "pixel_values", vocab_size=10, vision_config=types.SimpleNamespace(image_size=6))


def shapes(given):
    return [{name: array.shape for name, array in example.items()} for example in given.examples]


def test_arrays_of_one_length_are_examples(tmp_path):
    np.savez(tmp_path / "a.npz", input_ids=np.ones((3, 5), np.int32), attention_mask=np.ones((3, 5), bool))
    given = array_inputs(tmp_path / "a.npz", BERT)
    assert shapes(given) == [{"input_ids": (1, 5), "attention_mask": (1, 5)}] * 3
    assert [array.dtype.name for array in given.examples[0].values()] == ["int64", "bool"]
    assert given.title == "a.npz (input_ids 3x5, attention_mask 3x5)"


def test_arrays_of_other_lengths_are_one_example(tmp_path):
    np.savez(tmp_path / "a.npz", input_ids=np.ones((3, 5), np.int64), attention_mask=np.ones(5))
    assert shapes(array_inputs(tmp_path / "a.npz", BERT)) == [{"input_ids": (3, 5), "attention_mask": (5,)}]


def test_one_array_is_the_main_input_in_float32(tmp_path):
    np.save(tmp_path / "a.npy", np.ones((2, 1, 6, 4)))
    given = array_inputs(tmp_path / "a.npy", VIT)
    assert shapes(given) == [{"pixel_values": (1, 1, 6, 4)}] * 2
    assert given.examples[0]["pixel_values"].dtype == np.float32


def test_a_decoder_reads_the_tokens_shifted_by_one(tmp_path):
    np.save(tmp_path / "a.npy", np.array([[1, 2, 3]]))
    given = array_inputs(tmp_path / "a.npy", T5)
    assert given.examples[0]["decoder_input_ids"].tolist() == [[7, 1, 2]]
    assert "shifted by one" in given.title
    np.savez(tmp_path / "b.npz", input_ids=np.array([[1, 2]]), decoder_input_ids=np.array([[4]]))
    assert array_inputs(tmp_path / "b.npz", T5).examples[0]["decoder_input_ids"].tolist() == [[4]]


TWO_VOCABULARIES = {
    "encoder": {"encoder": types.SimpleNamespace(vocab_size=10), "vocab_size": 3},
    "text encoder": {"text_encoder": types.SimpleNamespace(vocab_size=10), "vocab_size": 3},
    "source and target": {"src_vocab_size": 10, "vocab_size": 3},
}


@pytest.mark.parametrize("settings", TWO_VOCABULARIES.values(), ids=TWO_VOCABULARIES)
def test_encoder_and_decoder_have_each_its_vocabulary(tmp_path, settings):
    takes = signature("input_ids", "decoder_input_ids", is_encoder_decoder=True, decoder_start_token_id=2, **settings)
    np.savez(tmp_path / "a.npz", input_ids=[[9, 8]], decoder_input_ids=[[2]])
    assert array_inputs(tmp_path / "a.npz", takes).examples[0]["input_ids"].tolist() == [[9, 8]]
    for name, ids in (("input_ids", [[10]]), ("decoder_input_ids", [[3]])):
        np.savez(tmp_path / "b.npz", **{name: ids})
        with pytest.raises(QuantError, match=rf"b\.npz: {name} has ids from"):
            array_inputs(tmp_path / "b.npz", takes)
    given = default_inputs(takes)
    largest = {name: max(example[name].max() for example in given.examples) for name in given.examples[0]}
    assert largest == {"input_ids": 9, "decoder_input_ids": 2}
    assert shapes(given) == [{"input_ids": (1, 32), "decoder_input_ids": (1, 16)}] * 4
    assert given.title.endswith("; the decoder reads its start token and 15 random ones)")


def test_the_vocabulary_of_the_decoder_configuration():
    settings = types.SimpleNamespace(vocab_size=10, is_encoder_decoder=True)
    settings.get_text_config = lambda decoder: types.SimpleNamespace(vocab_size=3)  # Marian with decoder_vocab_size
    takes = Signature("Net", ("input_ids", "decoder_input_ids"), settings, None)
    assert (takes.vocab, takes.decoder_vocab) == (10, 3)


def test_the_decoder_has_as_many_rows_as_the_main_input(tmp_path):
    takes = signature("input_ids", "attention_mask", "decoder_input_ids", vocab_size=10, is_encoder_decoder=True)
    np.savez(tmp_path / "a.npz", attention_mask=np.ones(4, int), input_ids=np.ones((2, 3), int))
    assert array_inputs(tmp_path / "a.npz", takes).examples[0]["decoder_input_ids"].shape == (2, 3)
    np.savez(tmp_path / "b.npz", attention_mask=np.ones((2, 3), int), input_ids=np.ones(3, int))
    with pytest.raises(QuantError, match=r"input_ids has shape \(3,\); Net takes a batch axis and at least one more"):
        array_inputs(tmp_path / "b.npz", takes)


@pytest.mark.parametrize(
    ("name", "arrays", "message"),
    [
        ("a.npz", {"input_idz": np.ones((1, 2), int)}, "takes no 'input_idz'; did you mean 'input_ids'"),
        ("a.npz", {"input_ids": np.array([[1, 10]])}, "ids from 1 to 10, the vocabulary 10 tokens"),
        ("a.npz", {"input_ids": np.array([[-1, 1]])}, "ids from -1 to 1"),
        ("a.npz", {"input_ids": np.array([["a"]])}, "has dtype <U1"),
        ("a.npz", {"input_ids": np.array([None])}, r"a\.npz cannot be read as NumPy arrays"),  # a pickle
        ("a.npz", {}, "has no arrays"),
    ],
)
def test_arrays_that_do_not_fit(tmp_path, name, arrays, message):
    np.savez(tmp_path / name, **arrays)
    with pytest.raises(QuantError, match=message):
        array_inputs(tmp_path / name, BERT)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"\x93NUMPY\x01\x00", b"no array"])
def test_damaged_files_are_refused(tmp_path, content):
    (tmp_path / "a.npy").write_bytes(content)
    with pytest.raises(QuantError, match="cannot be read as NumPy arrays"):
        array_inputs(tmp_path / "a.npy", BERT)
    with pytest.raises(QuantError, match="cannot be read"):
        array_inputs(tmp_path / "none.npy", BERT)


def test_an_unknown_compression_is_refused(tmp_path):
    np.savez(tmp_path / "a.npz", input_ids=np.ones((1, 2), int))
    content = bytearray((tmp_path / "a.npz").read_bytes())
    content[8] = content[content.index(b"PK\x01\x02") + 10] = 99  # the method, of the member and in the directory
    (tmp_path / "a.npz").write_bytes(content)
    with pytest.raises(QuantError, match=r"a\.npz cannot be read as NumPy arrays: That compression method"):
        array_inputs(tmp_path / "a.npz", BERT)


def encode(line):
    """One token for each letter, between two special ones."""
    return [8, *(ord(c) - ord("a") for c in line), 9]


def test_lines_are_cut_at_the_window_and_end_at_the_limit():
    given = text_inputs("t", ["abcdefgh", "", "  ", "ab", "abcdef"], encode, BERT, tokens=13, window=7)
    assert [example["input_ids"].tolist() for example in given.examples] == [[[8, 0, 1, 2, 3, 4, 5]], [[8, 0, 1, 9]]]
    assert given.title == "11 tokens of t (a line each)"


def test_the_context_and_the_limit_bound_the_first_line_too():
    bert = signature("input_ids", vocab_size=10, context=5)
    assert shapes(text_inputs("t", ["abcdefgh"], encode, bert, tokens=99, window=9)) == [{"input_ids": (1, 5)}]
    given = text_inputs("t", ["abcdefgh"], encode, bert, tokens=3, window=9)
    assert (shapes(given), given.title) == ([{"input_ids": (1, 3)}], "3 tokens of t (a line each)")


@pytest.mark.parametrize(
    ("lines", "tokens", "window", "message"),
    [(["", " "], 9, 9, "no line with text"), (["ab"], 0, 9, "tokens is 0"), (["az"], 9, 9, "ids from 0 to 25")],
)
def test_texts_that_do_not_fit(lines, tokens, window, message):
    with pytest.raises(QuantError, match=message):
        text_inputs("t", lines, encode, BERT, tokens=tokens, window=window)


@pytest.mark.parametrize(
    ("takes", "expected"),
    [
        (VIT, [{"pixel_values": (1, 1, 6, 4)}] * 4),
        (WHISPER, [{"input_features": (1, 4, 12), "decoder_input_ids": (1, 5)}]),
        (CLIP, [{"pixel_values": (1, 3, 6, 6), "input_ids": (1, 32)}] * 4),
        (T5, [{"input_ids": (1, 32), "decoder_input_ids": (1, 32)}] * 4),
        (signature("input_values"), [{"input_values": (1, 16000)}]),
        (signature("input_values", max_length=9, num_mel_bins=4), [{"input_values": (1, 9, 4)}]),
    ],
)
def test_random_inputs_follow_from_the_configuration(takes, expected):
    given, again = default_inputs(takes), default_inputs(takes)
    assert shapes(given) == expected
    assert given.title.startswith("random inputs of seed 0 (")
    for one, other in zip(given.examples, again.examples, strict=True):
        assert all(np.array_equal(one[name], other[name]) for name in one)


def test_the_decoder_of_speech_starts_with_its_start_token():
    given = default_inputs(WHISPER)
    assert given.examples[0]["decoder_input_ids"][0, 0] == 3
    assert "its start token and 4 random ones" in given.title


def test_inputs_that_do_not_follow_must_be_given():
    with pytest.raises(QuantError, match=r"no inputs of Net follow.* pass --inputs FILE.npz with arrays named waveform"):
        default_inputs(signature("waveform"))
