"""A directory of another program: written exactly or refused, read back, verified."""

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

import fewbit as fb
from fewbit import io
from fewbit.errors import QuantError, UnsupportedError
from fewbit.io.containers import reader
from fewbit.io.containers.container import Weight
from fewbit.io.containers.writer import ContainerWriter
from tests.io.containers.simple import INT8, Simple

UP = Weight("layers.0.up.weight", (6, 16), "float32", INT8)
DOWN = Weight("layers.0.down.weight", (16, 6), "float32", INT8)
BIAS = np.arange(6, dtype=np.float32)


def q(weight):
    return fb.quantize(jnp.asarray(np.random.default_rng(0).normal(size=weight.shape), jnp.float32), "int8")


def write(path, container=None, weights=(UP, DOWN), **options):
    with ContainerWriter(path, container or Simple(), weights=weights, config={"model_type": "demo"}, **options) as writer:
        for weight in weights:
            writer.add(weight.name, q(weight))
        writer.add("layers.0.up.bias", BIAS)
    return path


@pytest.fixture(autouse=True)
def _known(monkeypatch):
    monkeypatch.setattr(reader, "CONTAINERS", (Simple(),))


def test_a_weight_is_decoded_again_with_its_own_metadata_only(tmp_path, monkeypatch):
    """Else the time would be quadratic in the number of weights, where metadata has an entry for each (torchao)."""
    files, decoded, found = Simple.files, Simple.decoded, []

    def described(self, weights, kept, config):
        added = files(self, weights, kept, config)
        return dataclasses.replace(added, metadata={weight.name: "int8" for weight in weights})

    def recorded(self, config, tensors, where):
        found.append(list(tensors.metadata))
        return decoded(self, config, tensors, where)

    monkeypatch.setattr(Simple, "files", described)
    monkeypatch.setattr(Simple, "decoded", recorded)
    write(tmp_path / "m")
    names = [UP.name, DOWN.name]
    assert found[:2] == [[name] for name in names] and sorted(found[-1]) == sorted(names)


def test_weights_come_back_and_others_find_the_files_they_expect(tmp_path):
    path = write(tmp_path / "m", files={"tokenizer.json": b"{}"}, facts={"recipe": "int8"})
    assert sorted(file.name for file in path.iterdir()) == [
        "config.json",
        "manifest.json",
        "model.safetensors",
        "simple.json",
        "tokenizer.json",
    ]
    arrays = safetensors.numpy.load_file(path / "model.safetensors")
    assert set(arrays) == {f"layers.0.{n}" for n in ("up.codes", "up.scales", "down.codes", "down.scales", "up.bias")}
    config = json.loads((path / "config.json").read_text())
    assert config["model_type"] == "demo" and config["quantization_config"]["quant_method"] == "simple"
    found = io.read(path)
    assert found.metadata == {"model_type": "demo", "torch_dtype": "float32"} and found.facts == {"recipe": "int8"}
    assert found.notes == ("simple: 2 weights in int8",)
    for weight in (UP, DOWN):
        back = found.tensors[weight.name]
        assert found.tensors.info[weight.name].shape == weight.shape
        np.testing.assert_array_equal(back.codes, q(weight).codes)
    np.testing.assert_array_equal(found.tensors["layers.0.up.bias"], BIAS)
    assert io.verify(path) == []


@pytest.mark.parametrize(
    "named", [{"dtype": "bfloat16"}, {"torch_dtype": "float16"}, {"text_config": {"dtype": "bfloat16"}}]
)
def test_the_dtype_of_a_config_stays(tmp_path, named):
    with ContainerWriter(tmp_path / "m", Simple(), weights=(UP,), config={"model_type": "demo", **named}) as writer:
        writer.add(UP.name, q(UP))
    assert io.read(tmp_path / "m").metadata == {"model_type": "demo", **named}


def test_files_of_bounded_size_have_an_index(tmp_path):
    path = write(tmp_path / "m", max_shard_bytes=150)
    names = sorted(file.name for file in path.glob("*.safetensors"))
    assert names == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    index = json.loads((path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 2 * 96 + 4 * (6 + 16) + BIAS.nbytes
    assert set(index["weight_map"].values()) == set(names)
    assert set(io.read(path).tensors) == {UP.name, DOWN.name, "layers.0.up.bias"}


def test_a_weight_that_would_change_is_refused_and_nothing_is_written(tmp_path):
    with pytest.raises(QuantError, match=r"'layers.0.up.weight' in scheme int8 would not dequantize to the same numbers"):
        write(tmp_path / "m", Simple(error=1e-6))
    assert not list(tmp_path.iterdir())


def test_a_scheme_that_does_not_fit_is_refused_with_those_that_do(tmp_path):
    weight = Weight(UP.name, UP.shape, "float32", fb.scheme("nf4"))
    with pytest.raises(
        UnsupportedError,
        match=r"simple cannot store this exactly: nf4 is not int8 \(layers.0.up.weight\)"
        r"\. Schemes that fit: int8",
    ):
        ContainerWriter(tmp_path / "m", Simple(), weights=[weight])


def test_announced_and_added_must_agree(tmp_path):
    def opened():
        return ContainerWriter(tmp_path / "m", Simple(), weights=[UP])

    with pytest.raises(QuantError, match="was announced, but not added"), opened() as writer:
        writer.add("bias", BIAS)
    with pytest.raises(QuantError, match="is an array, but a weight in int8 was announced"), opened() as writer:
        writer.add(UP.name, np.zeros(UP.shape, np.float32))
    with pytest.raises(QuantError, match="which was not announced"), opened() as writer:
        writer.add(DOWN.name, q(DOWN))
    with opened() as writer:
        writer.add(UP.name, q(UP))
        with pytest.raises(QuantError, match="taken already"):
            writer.add(UP.name, q(UP))
    with pytest.raises(QuantError, match="within the block"):
        ContainerWriter(tmp_path / "n", Simple(), weights=[UP]).add("bias", BIAS)
    with pytest.raises(QuantError, match="cannot be called"):
        ContainerWriter(tmp_path / "n", Simple(), weights=[UP], files={"model.safetensors": b""})
    assert [file.name for file in tmp_path.iterdir()] == ["m"]


def test_only_a_directory_that_fewbit_wrote_is_replaced(tmp_path):
    path = write(tmp_path / "m")
    with pytest.raises(QuantError, match="exists"):
        write(path)
    write(path, overwrite=True, facts={"round": 2})
    assert io.read(path).facts == {"round": 2}
    (path / "notes.txt").write_text("mine")
    with pytest.raises(QuantError, match="contains files that fewbit did not write"):
        write(path, overwrite=True)


def test_a_changed_byte_is_found(tmp_path):
    path = write(tmp_path / "m")
    file = path / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(bytes(data))
    assert any("were changed since they were written" in str(finding) for finding in io.verify(path))
    (path / "manifest.json").write_bytes((path / "manifest.json").read_bytes().replace(b"simple", b"simpla"))
    assert "does not match its own hash" in str(io.verify(path)[0])
