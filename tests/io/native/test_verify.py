"""What is wrong with a stored model is found and named; what is well gives no finding."""

import dataclasses

import gguf
import jax.numpy as jnp
import numpy as np
import pytest

import fewbit as fb
from fewbit import QuantError, io
from fewbit.io import Finding
from tests.io.examples import X, quantized


def findings(tmp_path, value) -> list[str]:
    return [str(finding) for finding in io.verify(io.write(tmp_path / "m", {"w": value}))]


@pytest.mark.slow
def test_all_is_well_with_what_was_just_quantized(tmp_path):
    names = ("int3", "uint4", "nf4", "nf4_dq", "fp8", "mxfp4", "nvfp4", "ternary", "binary", "q4_1", "q8_0")
    assert io.verify(io.write(tmp_path / "m", {name: quantized(name) for name in names})) == []


def test_all_is_well_with_other_containers(tmp_path):
    np.savez(tmp_path / "m.npz", a=X, whole=np.arange(3))
    assert io.verify(tmp_path / "m.npz") == []


def test_a_changed_byte_is_found_in_the_file_and_in_the_tensor(tmp_path):
    path = io.write(tmp_path / "m", {"w": X, "v": X})
    data = bytearray((path / "fewbit.safetensors").read_bytes())
    data[-1] ^= 1
    (path / "fewbit.safetensors").write_bytes(data)
    file, tensor = io.verify(path)
    assert str(file).endswith("fewbit.safetensors: was changed since it was written (its SHA-256 differs)")
    assert (tensor.severity, tensor.where) == ("error", "v")


def test_a_file_that_the_manifest_does_not_know_is_a_warning(tmp_path):
    path = io.write(tmp_path / "m", {"w": X})
    (path / "notes.txt").write_text("mine")
    assert io.verify(path) == [Finding("warning", str(path / "notes.txt"), "is not in the manifest")]


def test_a_directory_that_does_not_open_is_one_finding(tmp_path):
    path = io.write(tmp_path / "m", {"w": X})
    (path / "config.json").unlink()
    (finding,) = io.verify(path)
    assert finding.severity == "error"
    assert "config.json is missing" in finding.message


def test_a_missing_path_raises(tmp_path):
    with pytest.raises(QuantError, match="nowhere does not exist"):
        io.verify(tmp_path / "nowhere")


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_plain_tensors_must_be_finite(tmp_path, bad):
    x = X.copy()
    x[0, :3] = bad
    assert findings(tmp_path, x) == ["error: w: 3 of 512 elements are NaN or infinite"]


def spoiled(name: str, part: str, value: float) -> fb.QArray:
    """A QArray of which one scale (or offset) is changed."""
    q = quantized(name)
    leaf = getattr(q, part)
    return dataclasses.replace(q, **{part: leaf.at[0, 0].set(jnp.asarray(value, leaf.dtype))})


SPOILED = {
    "float32 scale": (("int8_g32", "scale", np.nan), "error: w: 1 of 16 scales are NaN or infinite"),
    "float16 scale": (("q4_1", "scale", np.inf), "error: w: 1 of 16 scales are NaN or infinite"),
    "float16 offset": (("q4_1", "zero_point", np.nan), "error: w: 1 of 16 zero points are NaN or infinite"),
    "E8M0 NaN": (("mxfp4", "scale", 255), "error: w: 1 of 16 scales are NaN or infinite"),
    "E4M3 NaN": (("nvfp4", "scale", 127), "error: w: 1 of 32 scales are NaN or infinite"),
    "E4M3 zero": (("nvfp4", "scale", 0), "warning: w: 1 of 32 scales are zero, so their tiles are"),
    "zero": (("int8_g32", "scale", 0), "warning: w: 1 of 16 scales are zero, so their tiles are"),
    "tensor scale": (("nvfp4", "tensor_scale", np.nan), "error: w: 1 of 1 tensor scales are NaN or infinite"),
}


@pytest.mark.parametrize("name", SPOILED)
def test_scales_must_be_finite_and_not_zero(tmp_path, name):
    change, message = SPOILED[name]
    assert findings(tmp_path, spoiled(*change)) == [message]


def test_nested_scales_are_looked_into(tmp_path):
    q = quantized("nf4_dq")
    scale = dataclasses.replace(q.scale, scale=jnp.full_like(q.scale.scale, jnp.nan))
    found = findings(tmp_path, dataclasses.replace(q, scale=scale))
    assert "error: w.scale: 1 of 1 scales are NaN or infinite" in found
    assert "error: w: 8 of 8 scales are NaN or infinite" in found


def test_codes_that_mean_no_number(tmp_path):
    q = quantized("ternary")
    codes = q.codes.at[0, 0].set(0b11_01_11_00)
    assert findings(tmp_path, dataclasses.replace(q, codes=codes)) == [
        "error: w: 2 of 512 codes are invalid, NaN or infinite"
    ]
    q = quantized("fp8")
    nan = dataclasses.replace(q, codes=q.codes.at[0, 0].set(0x7F))
    (tmp_path / "two").mkdir()
    assert findings(tmp_path / "two", nan) == ["error: w: 1 of 512 codes are invalid, NaN or infinite"]


def test_a_scale_of_zero_in_a_gguf_file_is_a_warning(tmp_path):
    x = X.copy()
    x[0, :32] = 0
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    kind = gguf.GGMLQuantizationType.Q4_0
    writer.add_tensor("w", gguf.quantize(x, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert [str(f) for f in io.verify(tmp_path / "m.gguf")] == ["warning: w: 1 of 16 scales are zero, so their tiles are"]
