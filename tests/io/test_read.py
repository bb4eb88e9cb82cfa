"""What a path holds is recognised by its content; everything else is one clear sentence."""

import ml_dtypes
import numpy as np
import pytest

from fewbit import QuantError, UnsupportedError, io

from .examples import quantized


def test_the_name_does_not_matter(tmp_path):
    np.savez(tmp_path / "m.npz", a=np.ones(3))
    (tmp_path / "m.npz").rename(tmp_path / "weights")
    assert io.read(tmp_path / "weights").kind == "npz"
    io.write(tmp_path / "m", {"w": np.ones(3, np.float32)})
    assert io.read(str(tmp_path / "m")).kind == "fewbit"


@pytest.mark.parametrize("suffix", [".gguf", ".safetensors", ".npz", ".bin", ""])
@pytest.mark.parametrize("data", [b"", b"x", b"\x80\x02}q\x00.", b"hello world, this is no model at all" * 10, bytes(100)])
def test_what_is_no_model(tmp_path, suffix, data):
    path = tmp_path / f"m{suffix}"
    path.write_bytes(data)
    with pytest.raises(QuantError) as error:
        io.read(path)
    assert str(path) in str(error.value)
    assert len(str(error.value).splitlines()) == 1


def test_an_unknown_file_is_told_what_is_expected(tmp_path):
    (tmp_path / "m.bin").write_bytes(b"\x80\x02}q\x00.")
    with pytest.raises(
        QuantError, match=r"begins with b'\\x80\\x02}q'. Expected a GGUF, safetensors or \.npz file; pickles"
    ):
        io.read(tmp_path / "m.bin")


def test_a_missing_path(tmp_path):
    with pytest.raises(QuantError, match="nothing-here does not exist"):
        io.read(tmp_path / "nothing-here")


def test_a_directory_without_a_model(tmp_path):
    with pytest.raises(
        QuantError, match=r"is not a model directory: it has neither a fewbit manifest, safetensors files nor an Orbax tree$"
    ):
        io.read(tmp_path)


def test_a_directory_with_a_model_file_names_it(tmp_path):
    (tmp_path / "tiny.gguf").write_bytes(b"GGUF")
    with pytest.raises(QuantError, match=r"pass one of its files or checkpoints: tiny\.gguf"):
        io.read(tmp_path)


def test_a_directory_of_orbax_steps_names_them(tmp_path):
    for step in ("100", "200"):
        (tmp_path / step).mkdir()
        (tmp_path / step / "_CHECKPOINT_METADATA").write_text("{}")
    with pytest.raises(QuantError, match=r"pass one of its files or checkpoints: 100, 200$"):
        io.read(tmp_path)


def test_reading_loads_nothing(tmp_path):
    io.write(tmp_path / "m", {"w": quantized("nf4")})
    checkpoint = io.read(tmp_path / "m")
    shard = tmp_path / "m" / "fewbit.safetensors"
    data = shard.read_bytes()
    shard.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    checkpoint = io.read(tmp_path / "m")  # the size is right, and the tensor is not touched
    with pytest.raises(QuantError, match=r"fewbit\.safetensors: the bytes of tensor 'w.codes' were changed"):
        checkpoint.tensors["w"]


def test_tensors_are_read_after_a_change_of_directory(tmp_path, monkeypatch):
    io.write(tmp_path / "m", {"w": np.arange(4, dtype=np.float32)})
    monkeypatch.chdir(tmp_path)
    checkpoint = io.read("m")
    monkeypatch.chdir("/")
    assert checkpoint.tensors["w"].tolist() == [0, 1, 2, 3]
    assert str(checkpoint.path) == "m"


@pytest.mark.parametrize("constant", ["Infinity", "-Infinity", "NaN"])
def test_infinity_in_the_config_of_transformers(tmp_path, constant):
    """transformers 4 writes the constant, transformers 5 an object that it reads back."""
    header = b'{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    (tmp_path / "config.json").write_text(f'{{"time_step_limit": [0.0, {constant}]}}')
    assert io.read(tmp_path).metadata == {"time_step_limit": [0.0, {"__float__": constant}]}


@pytest.mark.parametrize("section", ["null", "{}"])
def test_an_empty_section_is_none(section, tmp_path):
    """Float checkpoints may have one; the writer of a fewbit directory adds its own."""
    save_file = pytest.importorskip("safetensors.numpy").save_file
    save_file({"w": np.ones((4, 32), np.float32)}, str(tmp_path / "model.safetensors"))
    (tmp_path / "config.json").write_text(f'{{"a": 1, "quantization_config": {section}}}')
    found = io.read(tmp_path)
    assert found.metadata == {"a": 1}
    io.write(tmp_path / "out", found.tensors, config=found.metadata)


@pytest.mark.parametrize(
    ("codes", "scale"),
    [
        ({"w.qweight": np.zeros((8, 2), np.int32)}, "w.scales"),
        ({"w.weight": np.zeros((8, 8), ml_dtypes.float8_e4m3fn)}, "w.weight_scale_inv"),
        ({"w.weight": np.zeros((8, 8), np.int8)}, "w.weight_scale"),
    ],
)
def test_codes_that_no_section_describes_are_refused(codes, scale, tmp_path):
    """Nobody knows their layout: an AWQ directory whose settings lie in quant_config.json alone, say."""
    save_file = pytest.importorskip("safetensors.numpy").save_file
    save_file({**codes, scale: np.ones(8, np.float32)}, str(tmp_path / "model.safetensors"))
    for config in ('{"model_type": "llama"}', '{"quantization_config": null}', '{"quantization_config": {}}'):
        (tmp_path / "config.json").write_text(config)
        with pytest.raises(UnsupportedError, match=f"{scale}'.*quantization_config"):
            io.read(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama", "quantization_config": {"quant_method": "theirs"}}')
    assert set(io.read(tmp_path).tensors) == {*codes, scale}
