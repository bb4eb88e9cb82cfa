"""torchao: what we flatten it unflattens and decodes to our numbers, and what it flattens decodes here to its numbers."""

import contextlib
import dataclasses
import io
import json
import logging
import warnings

import numpy as np
import pytest

import fewbit as fb
from fewbit import QuantError, UnsupportedError
from fewbit.formats import FORMATS
from fewbit.io.containers.torchao.container import TorchAO
from tests.io.containers.stored_weights import ROUNDS, example, fuzz, numbers, read_back, same, stored, tensors_of, weight
from tests.io.containers.torch_arrays import to_numpy, to_torch

AO = TorchAO()
NAME = "model.layers.0.mlp.up_proj.weight"
MX = {
    "mxfp8": "float8_e4m3fn",
    "mxfp8_e5m2": "float8_e5m2",
    "mxfp6": "fp6_e2m3",
    "mxfp6_e3m2": "fp6_e3m2",
    "mxfp4": "float4_e2m1fn_x2",
}
CASES = {
    **{name: (name, (7, 96), "float32") for name in MX},
    "mxfp4 bfloat16": ("mxfp4", (7, 96), "bfloat16"),
    "mxfp8 of a stack": ("mxfp8", (2, 3, 64), "float32"),
    "nvfp4": ("nvfp4", (7, 96), "float32"),
    "nvfp4 bfloat16": ("nvfp4", (7, 96), "bfloat16"),
    "int8": ("int8", (7, 45), "float32"),
    "int8 bfloat16": ("int8", (7, 45), "bfloat16"),
    "int8 of a tensor": (dataclasses.replace(fb.scheme("int8"), tile={}), (7, 45), "float32"),
    "int8 with zero points": (dataclasses.replace(fb.scheme("int8"), zero_point=FORMATS["int8"]), (7, 45), "float32"),
    "int4_g32": ("int4_g32", (7, 96), "float32"),
    "int3_g32 bfloat16": (dataclasses.replace(fb.scheme("int3_g32"), scale="bfloat16"), (7, 96), "bfloat16"),
    "int5": ("int5", (7, 45), "float32"),
    "fp8": ("fp8", (7, 45), "float32"),
    "fp8 bfloat16": ("fp8", (7, 45), "bfloat16"),
    "fp8_e5m2": ("fp8_e5m2", (7, 45), "float32"),
    "fp8_tensor": ("fp8_tensor", (7, 45), "float32"),
    "fp8_block128": ("fp8_block128", (256, 256), "float32"),
}


@pytest.fixture(scope="module")
def support():
    """Their functions to flatten and unflatten."""
    pytest.importorskip("torch")
    logging.disable(logging.WARNING)
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")  # it says at import which of its own kernels it could not load
        found = pytest.importorskip("torchao.prototype.safetensors.safetensors_support")
    logging.disable(logging.NOTSET)
    return found


@pytest.mark.parametrize("case", CASES)
def test_what_we_write_is_read_back(case):
    scheme, shape, dtype = CASES[case]
    q = example(scheme, shape, dtype)
    found = stored(AO, {NAME: q}, {"model.norm.weight": np.ones(3, np.float32)})
    again = read_back(AO, found)
    assert sorted(again) == sorted([NAME, "model.norm.weight"])
    same(q, again[NAME])
    assert (again.info[NAME].shape, again.info[NAME].dtype, again.info[NAME].scheme) == (shape, dtype, again[NAME].scheme)


@pytest.mark.oracle
@pytest.mark.parametrize("case", CASES)
def test_it_decodes_what_we_write(case, support):
    scheme, shape, dtype = CASES[case]
    q = example(scheme, shape, dtype)
    found = stored(AO, {NAME: q}, {"model.norm.weight": np.ones(3, np.float32)})
    tensors = {name: to_torch(array) for name, array in found.arrays.items()}
    result, left = support.unflatten_tensor_state_dict(tensors, found.metadata)
    assert not left
    assert sorted(result) == sorted([NAME, "model.norm.weight"])
    values = to_numpy(result[NAME].dequantize())
    assert values.dtype.name == dtype
    np.testing.assert_array_equal(values, numbers(q))
    # What it flattens again is what we wrote.
    again, metadata = support.flatten_tensor_state_dict(result)
    assert {name: json.loads(text) for name, text in metadata.items()} == {
        name: json.loads(text) for name, text in found.metadata.items() if name != "format"
    }
    for name, array in again.items():
        assert to_numpy(array).tobytes() == found.arrays[name].tobytes()


@pytest.mark.oracle
@pytest.mark.parametrize("scheme", ["mxfp4", "nvfp4", "int8", "int4_g32", "fp8"])
def test_its_configuration_is_built(scheme, support):
    section = stored(AO, {NAME: example(scheme, (4, 64))}, {"lm_head.weight": np.ones((2, 2))}).config["quantization_config"]
    assert section["modules_to_not_convert"] == ["lm_head"]
    form = section["quant_type"]["default"]
    assert type(pytest.importorskip("torchao.core.config").config_from_dict(form)).__name__ == form["_type"]


def their_tensors():
    """Weights in every class that they make on the CPU, by name."""
    import torch
    from torchao.prototype.mx_formats.mx_tensor import MXTensor
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale
    from torchao.quantization import Float8Tensor, Int8Tensor, IntxUnpackedToInt8Tensor, MappingType, PerRow, PerTensor

    x = np.random.default_rng(0).standard_normal((21, 96)).astype(np.float32)
    x[3, :32], x[5], x[7, 4] = 0, x[5] * 1e-4, -0.0
    w = torch.from_numpy(x)
    factor = per_tensor_amax_to_scale(w.abs().max())
    made = {f"{name}.weight": MXTensor.to_mx(w, getattr(torch, d, d), 32) for name, d in MX.items()}
    made["mx swizzled.weight"] = MXTensor.to_mx(w, torch.float8_e4m3fn, 32, is_swizzled_scales=True)
    made["nvfp4.weight"] = NVFP4Tensor.to_nvfp4(w, per_tensor_scale=factor)
    made["nvfp4 one level.weight"] = NVFP4Tensor.to_nvfp4(w.bfloat16())
    wide = torch.from_numpy(np.tile(x, (7, 1)))
    made["nvfp4 swizzled.weight"] = NVFP4Tensor.to_nvfp4(wide, per_tensor_scale=factor, is_swizzled_scales=True)
    made["int8.weight"] = Int8Tensor.from_hp(w, PerRow())
    made["int8 tensor.weight"] = Int8Tensor.from_hp(w.bfloat16(), PerTensor())
    made["int8 asymmetric.weight"] = Int8Tensor.from_hp(w, PerRow(), MappingType.ASYMMETRIC)
    for bits in (1, 3, 4, 8):
        made[f"intx{bits}.weight"] = IntxUnpackedToInt8Tensor.from_hp(w, (1, 32), getattr(torch, f"int{bits}"))
    made["intx4 asymmetric.weight"] = IntxUnpackedToInt8Tensor.from_hp(
        w.bfloat16(), (1, 32), torch.int4, mapping_type=MappingType.ASYMMETRIC
    )
    made["fp8.weight"] = Float8Tensor.from_hp(w)
    made["fp8 tensor.weight"] = Float8Tensor.from_hp(w.bfloat16(), granularity=PerTensor())
    return made


@pytest.mark.oracle
def test_we_decode_what_it_writes(support):
    made = their_tensors()
    tensors, metadata = support.flatten_tensor_state_dict(made)
    found = AO.decoded({}, tensors_of({name: to_numpy(array) for name, array in tensors.items()}, metadata), "here")
    assert sorted(found) == sorted(made)
    for name, theirs in made.items():
        q = found[name]
        np.testing.assert_array_equal(numbers(q), to_numpy(theirs.dequantize()), name)
    named = {name: found[name].scheme.name for name in ("mxfp6.weight", "nvfp4.weight", "int8.weight", "intx4.weight")}
    assert named == {"mxfp6.weight": "mxfp6", "nvfp4.weight": "nvfp4", "int8.weight": "int8", "intx4.weight": "int4_g32"}


@pytest.mark.parametrize(
    ("name", "scheme", "shape", "activations", "reason"),
    [
        ("weight", "int8", (4, 64), None, "names have a dot"),
        (NAME, "nf4", (4, 64), None, "no class for nf4"),
        (NAME, "uint4", (4, 64), None, "no class for uint4"),
        (NAME, "mxint8", (4, 64), None, "no class for mxint8"),
        (NAME, "mxfp4", (4, 70), None, "no multiple of 32"),
        (NAME, "int4_g32", (4, 70), None, "no multiple of 32"),
        (NAME, "fp8_block128", (130, 128), None, "no multiple of 128"),
        (NAME, "int8", (4, 64), "int8", "float activations"),
    ],
)
def test_what_does_not_fit_is_refused(name, scheme, shape, activations, reason):
    with pytest.raises(UnsupportedError, match=reason):
        AO.check([weight(example(scheme, shape), name, activations)])


def test_tiles_along_another_axis_are_refused():
    with pytest.raises(UnsupportedError, match="tiles along the last axis"):
        AO.check([weight(example("mxfp4", (2, 64, 8), axis=-2), NAME)])


def damaged(found, change, **parts):
    """The tensors with a changed entry and some arrays replaced."""
    entry = json.loads(found.metadata[NAME])
    change(entry)
    arrays = dict(found.arrays)
    for part, array in parts.items():
        name = NAME.replace(".weight", f"._weight_{part}")
        arrays.pop(name, None)
        if array is not None:
            arrays[name] = array
    return tensors_of(arrays, found.metadata | {NAME: json.dumps(entry)})


@pytest.mark.parametrize(
    ("scheme", "change", "parts", "reason"),
    [
        ("mxfp4", lambda e: e.update(_type="Int4Tensor"), {}, "class 'Int4Tensor'"),
        ("mxfp4", lambda e: e["_data"].update(block_size=16), {}, "blocks of 16"),
        ("mxfp4", lambda e: e["_data"].update(orig_dtype=3), {}, "its dtype is None"),
        ("mxfp4", lambda e: e["_data"].update(is_swizzled_scales=True), {}, "scales have shape"),
        ("mxfp4", lambda e: e.pop("_type"), {}, "_type"),
        ("mxfp4", lambda e: None, {"scale": None}, "is missing"),
        ("mxfp4", lambda e: None, {"qdata": np.ones((4, 31), np.uint8)}, "no rows of blocks"),
        ("int4_g32", lambda e: e["_data"].update(block_size=[1, 48]), {}, "does not fit"),
        ("int4_g32", lambda e: e["_data"].update(block_size=[1]), {}, "block_size is"),
        ("int4_g32", lambda e: e["_data"].update(target_dtype="int9"), {}, "expected int1 to int8"),
        ("int4_g32", lambda e: None, {"zero_point": np.ones((4, 1), np.int8)}, "zero points do not have"),
        ("int4_g32", lambda e: None, {"qdata": np.full((4, 64), 8, np.int8)}, "beyond 4 bits"),
        ("int8", lambda e: None, {"act_pre_scale": np.ones(64, np.float32)}, "act_pre_scale"),
        ("mxfp6", lambda e: None, {"qdata": np.full((4, 64), 64, np.uint8)}, "beyond 6 bits"),
        ("nvfp4", lambda e: None, {"per_tensor_scale": np.ones((2, 1, 1), np.float32)}, "each expert"),
    ],
)
def test_damaged_entries_are_named(scheme, change, parts, reason):
    found = stored(AO, {NAME: example(scheme, (4, 64))})
    with pytest.raises((QuantError, UnsupportedError), match=reason):
        AO.decoded(found.config, damaged(found, change, **parts), "here")[NAME]


def test_other_containers_are_not_recognised():
    found = stored(AO, {NAME: example("int8", (4, 64))})
    assert AO.recognises({}, found.tensors)
    assert not AO.recognises({"quantization_config": {"quant_method": "gptq"}}, found.tensors)
    assert not AO.recognises(found.config, tensors_of(found.arrays))


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("rounds", [ROUNDS[0], pytest.param(ROUNDS[1], marks=pytest.mark.long)])
def test_mutated_directories_end_in_our_own_error(rounds, tmp_path):
    qs = {
        "a.weight": example("mxfp6", (3, 32)),
        "b.weight": example("nvfp4", (3, 32)),
        "c.weight": example("int4_g32", (3, 64)),
        "d.weight": example("fp8_block128", (128, 128)),
    }
    fuzz(AO, stored(AO, qs, {"norm.weight": np.ones(2, np.float32)}), tmp_path, rounds)
