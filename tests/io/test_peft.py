"""Adapters in PEFT's files, whose names and shapes are written down here by hand, after PEFT's guide."""

import dataclasses
import functools
import json
import re
import struct

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from fewbit import QuantError
from fewbit.io import read_adapters, write_adapters
from fewbit.models import HUGGING_FACE
from fewbit.training.lora import Adapter


def normal(*shape, seed=0):
    return jax.device_put(np.float32(np.random.default_rng(seed).normal(size=shape)))


def plain(rank=2, alpha=16.0, dtype=jnp.float32):
    """The adapter of a weight `[8, 6]` that is contracted along its last axis, as PyTorch's Linear has it."""
    return Adapter(normal(6, rank).astype(dtype), normal(rank, 8, seed=1).astype(dtype), alpha, (-1,))


def heads():
    """Of a stack of three weights `[4 in, 2 heads, 5]`."""
    return Adapter(normal(3, 4, 2), normal(3, 2, 2, 5, seed=1), 8.0, (-3,), (-4,))


def raw(path):
    """The tensors of a safetensors file, read by its specification."""
    data = (path / "adapter_model.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    assert header.pop("__metadata__") == {"format": "pt"}
    dtypes = {"F32": np.float32, "BF16": ml_dtypes.bfloat16}
    return {
        name: np.frombuffer(data[8 + length :][slice(*form["data_offsets"])], dtypes[form["dtype"]]).reshape(form["shape"])
        for name, form in header.items()
    }


def assert_same(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)


def test_names_shapes_and_numbers_are_those_of_peft(tmp_path):
    """PEFT adds `(lora_alpha / r) * B @ A` to a weight `[out, in]`."""
    adapter = plain()
    write_adapters(tmp_path / "out", {"layers/3/attn/q": adapter}, names=HUGGING_FACE.name, base_model="some/model")
    tensors, config = raw(tmp_path / "out"), json.loads((tmp_path / "out/adapter_config.json").read_text())
    prefix = "base_model.model.model.layers.3.self_attn.q_proj"
    assert {name: x.shape for name, x in tensors.items()} == {
        f"{prefix}.lora_A.weight": (2, 6),
        f"{prefix}.lora_B.weight": (8, 2),
    }
    a, b = tensors[f"{prefix}.lora_A.weight"], tensors[f"{prefix}.lora_B.weight"]
    np.testing.assert_allclose(16 / 2 * b @ a, adapter.scale * (adapter.a @ adapter.b).T, rtol=1e-6)
    wanted = {"peft_type": "LORA", "r": 2, "lora_alpha": 16, "bias": "none", "base_model_name_or_path": "some/model"}
    assert {key: config[key] for key in wanted} == wanted
    assert config["target_modules"] == ["model.layers.3.self_attn.q_proj"]


def test_stacked_layers_are_modules_of_their_own(tmp_path):
    adapter = heads()
    write_adapters(tmp_path / "out", {"layers/q": adapter}, names=lambda path, i: f"layers.{i}.{path.split('/')[1]}")
    tensors = raw(tmp_path / "out")
    assert len(tensors) == 6
    np.testing.assert_array_equal(tensors["base_model.model.layers.1.q.lora_A.weight"], adapter.a[1].T)
    np.testing.assert_array_equal(tensors["base_model.model.layers.1.q.lora_B.weight"], adapter.b[1].reshape(2, 10).T)


def test_what_was_written_is_read(tmp_path):
    adapters = {"stack": heads(), "w": plain(dtype=jnp.bfloat16), "other": plain(rank=4, alpha=0.5)}
    write_adapters(tmp_path / "out", adapters)
    config = json.loads((tmp_path / "out/adapter_config.json").read_text())
    assert config["rank_pattern"] == {"other": 4}
    assert config["alpha_pattern"] == {"w": 16, "other": 0.5}
    assert_same(read_adapters(tmp_path / "out", adapters), adapters)
    fresh = {path: dataclasses.replace(a, a=jnp.zeros((*a.a.shape[:-1], 1)), alpha=1.0) for path, a in adapters.items()}
    fresh = {path: dataclasses.replace(a, b=a.b[:, :1] if a.stacked else a.b[:1]) for path, a in fresh.items()}
    assert_same(read_adapters(tmp_path / "out", fresh), adapters)


def test_the_factor_over_the_root_of_the_rank(tmp_path):
    path = write_adapters(tmp_path / "out", {"w": plain(rank=4)})
    config = json.loads((path / "adapter_config.json").read_text()) | {"use_rslora": True}
    (path / "adapter_config.json").write_text(json.dumps(config))
    assert read_adapters(path, {"w": plain()})["w"].scale == 16 / 2


def test_an_interrupted_write_leaves_what_stood(tmp_path, monkeypatch):
    path = write_adapters(tmp_path / "out", {"w": plain()})
    with pytest.raises(QuantError, match="exists; choose another output"):
        write_adapters(path, {"w": plain()})
    monkeypatch.setattr("pathlib.Path.read_bytes", lambda path: b"")
    with pytest.raises(QuantError, match="reads back differently from what was written"):
        write_adapters(path, {"w": plain(alpha=1.0)}, overwrite=True)
    monkeypatch.undo()
    assert read_adapters(path, {"w": plain()})["w"].alpha == 16
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]
    write_adapters(path, {"w": plain(alpha=1.0)}, overwrite=True)
    assert read_adapters(path, {"w": plain()})["w"].alpha == 1
    (path / "notes").write_text("mine")
    with pytest.raises(QuantError, match=r"contains files that fewbit did not write \(notes\), so it is not replaced"):
        write_adapters(path, {"w": plain()}, overwrite=True)


def test_what_does_not_fit_is_refused(tmp_path):
    path = write_adapters(tmp_path / "out", {"w": plain(), "v": plain()})
    with pytest.raises(
        QuantError, match=r"has 2 tensors without an adapter in like, such as 'base_model.model.v.lora_A.weight'"
    ):
        read_adapters(path, {"w": plain()})
    with pytest.raises(QuantError, match=r"lacks 'base_model.model.u.lora_A.weight'; did you mean 'base_model"):
        read_adapters(path, {"u": plain()})
    with pytest.raises(QuantError, match=r"tensors of v have shapes \(2, 6\) and \(8, 2\) and alpha 16; expected \(2, 5\)"):
        read_adapters(path, {"w": plain(), "v": Adapter(normal(5, 2), normal(2, 8), 1.0, (-1,))})
    with pytest.raises(QuantError, match="gives both"):
        write_adapters(tmp_path / "other", {"w": plain(), "v": plain()}, names=lambda path: "same")
    with pytest.raises(QuantError, match="adapters is empty"):
        write_adapters(tmp_path / "other", {})
    config = json.loads((path / "adapter_config.json").read_text())
    for change, message in (
        ({"peft_type": "IA3"}, "'IA3'; fewbit reads LORA"),
        ({"lora_alpha": "2"}, "lora_alpha is '2'; expected float"),
    ):
        (path / "adapter_config.json").write_text(json.dumps(config | {"alpha_pattern": {}} | change))
        with pytest.raises(QuantError, match=message):
            read_adapters(path, {"w": plain(), "v": plain()})
    (path / "adapter_config.json").unlink()
    with pytest.raises(QuantError, match="does not exist"):
        read_adapters(path, {"w": plain()})


AMBIGUOUS = {
    "up": plain(alpha=8.0),
    "x/up": plain(alpha=4.0),
    "y": plain(alpha=4.0),
    "y/down": plain(rank=4, alpha=4.0),
    "down": plain(alpha=4.0),
}


REGEXES = {
    "layers/0/attn/q+k+v": plain(rank=4, alpha=32.0),
    "w(0)+": plain(alpha=3.0),
    "w[": plain(alpha=5.0),
    "o": plain(alpha=4.0),
    "down": plain(alpha=4.0),
}


def test_a_name_with_characters_of_regexes_keeps_its_alpha_and_rank(tmp_path):
    path = write_adapters(tmp_path / "out", REGEXES)
    assert_same(read_adapters(path, REGEXES), REGEXES)
    config = json.loads((path / "adapter_config.json").read_text())
    (rank,) = config["rank_pattern"]
    assert re.fullmatch(rank, "layers.0.attn.q+k+v")


@pytest.mark.parametrize("alpha", [float("inf"), float("nan")])
def test_an_alpha_that_json_lacks_is_refused(alpha, tmp_path):
    with pytest.raises(QuantError, match=r"the alpha of an adapter is (inf|nan); it must be finite"):
        write_adapters(tmp_path / "out", {"w": plain(alpha=alpha)})


@pytest.mark.finding(37)
def test_a_module_whose_name_ends_in_another_keeps_its_own_alpha_and_rank(tmp_path):
    path = write_adapters(tmp_path / "out", AMBIGUOUS)
    config = json.loads((path / "adapter_config.json").read_text())
    assert config["alpha_pattern"] == {"^up": 8}
    assert config["rank_pattern"] == {"y.down": 4}
    assert_same(read_adapters(path, AMBIGUOUS), AMBIGUOUS)


@pytest.mark.finding(37)
@pytest.mark.oracle
def test_peft_itself_scales_each_module_as_we_do(tmp_path):
    peft, torch = pytest.importorskip("peft"), pytest.importorskip("torch")
    path = write_adapters(tmp_path / "out", AMBIGUOUS)
    linear = functools.partial(torch.nn.Linear, 6, 8, bias=False)
    base = torch.nn.Module()
    base.up, base.x, base.y, base.down = linear(), torch.nn.Module(), torch.nn.Module(), linear()
    base.x.up, base.y.down = linear(), linear()
    adapters = {name: adapter for name, adapter in AMBIGUOUS.items() if name != "y"}  # a module with children is no Linear
    write_adapters(path, adapters, overwrite=True)
    model = peft.PeftModel.from_pretrained(base, path)
    for name, adapter in adapters.items():
        layer = model.base_model.model.get_submodule(name.replace("/", "."))
        assert layer.scaling["default"] == adapter.scale, name
        np.testing.assert_array_equal(layer.lora_A["default"].weight.numpy(), adapter.a.T)


@pytest.mark.finding(40)
def test_variants_of_lora_are_refused_by_name(tmp_path):
    path = write_adapters(tmp_path / "out", {"w": plain()})
    config = json.loads((path / "adapter_config.json").read_text())
    (path / "adapter_config.json").write_text(json.dumps(config | {"use_dora": True}))
    with pytest.raises(QuantError, match="use_dora is true; fewbit reads plain LoRA and rsLoRA"):
        read_adapters(path, {"w": plain()})
