"""ModelOpt: what we write decodes there to our numbers, and what it writes decodes here to its numbers."""

import dataclasses
import json
import warnings

import numpy as np
import pytest

import fewbit as fb
from fewbit import QuantError, UnsupportedError
from fewbit.array.scales import Fixed
from fewbit.io.containers.container import Weight
from fewbit.io.containers.modelopt import ModelOpt

from .stored_weights import ROUNDS, example, fuzz, numbers, read_back, same, stored, tensors_of, weight
from .torch_arrays import to_numpy, to_torch

MO = ModelOpt()
NAME = "model.layers.0.mlp.up_proj.weight"
MODULE = NAME.removesuffix(".weight")
CASES = {
    "nvfp4": (7, 96),
    "fp8_tensor": (7, 45),
    "fp8": (7, 45),
    "mxfp8": (7, 96),
}


@pytest.fixture(scope="module")
def qtensor():
    """Their quantized tensors."""
    pytest.importorskip("torch")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the packages that it imports
        return pytest.importorskip("modelopt.torch.quantization.qtensor")


@pytest.mark.parametrize("scheme", CASES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_we_write_is_read_back(scheme, dtype):
    q = example(scheme, CASES[scheme], dtype)
    found = stored(MO, {NAME: q}, {"model.norm.weight": np.ones(3, np.float32)}, {"torch_dtype": dtype})
    again = read_back(MO, found)
    assert list(again) == ["model.norm.weight", NAME]
    same(q, again[NAME])
    assert (again.info[NAME].shape, again.info[NAME].dtype, again.info[NAME].scheme) == (q.shape, dtype, again[NAME].scheme)


def test_the_second_scale_of_nvfp4_is_a_factor():
    q = example("nvfp4", (2, 32))
    arrays = stored(MO, {NAME: q}).arrays
    assert sorted(arrays) == [f"{MODULE}.weight", f"{MODULE}.weight_scale", f"{MODULE}.weight_scale_2"]
    assert arrays[f"{MODULE}.weight_scale_2"].shape == ()
    assert arrays[f"{MODULE}.weight_scale_2"] == np.float32(0.00123456)
    np.testing.assert_array_equal(arrays[f"{MODULE}.weight"], np.asarray(q.codes))  # element 0 in the low nibble


@pytest.mark.oracle
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_decodes_what_we_write(dtype, qtensor):
    import torch

    q = example("nvfp4", (7, 96), dtype)
    arrays = {name.removeprefix(f"{MODULE}."): to_torch(a) for name, a in stored(MO, {NAME: q}).arrays.items()}
    theirs = qtensor.NVFP4QTensor(torch.Size(q.shape), getattr(torch, dtype), arrays["weight"])
    result = theirs.dequantize(scale=arrays["weight_scale"], double_scale=arrays["weight_scale_2"], block_sizes={-1: 16})
    np.testing.assert_array_equal(to_numpy(result), numbers(q))


def their_arrays(qtensor, scheme: str, x: np.ndarray):
    """Their arrays of a weight, and what they decode to."""
    import torch

    w = torch.from_numpy(x)
    if scheme == "nvfp4":
        q, scale, factor = qtensor.NVFP4QTensor.quantize(w, 16)
        parts = {"weight": q._quantized_data, "weight_scale": scale, "weight_scale_2": factor}
        values = q.dequantize(dtype=torch.float32, scale=scale, double_scale=factor, block_sizes={-1: 16})
    elif scheme == "mxfp4":
        q, scale = qtensor.MXFP4QTensor.quantize(w, 32)
        scale = scale.reshape(len(w), -1)  # as its exporter stores it
        parts = {"weight": q._quantized_data, "weight_scale": scale}
        values = q.dequantize(dtype=torch.float32, scale=scale, block_sizes={-1: 32})
    elif scheme == "mxfp8":
        q, scale = qtensor.MXFP8QTensor.quantize(w)
        parts = {"weight": q._quantized_data, "weight_scale": scale}
        values = q.dequantize(dtype=torch.float32, scale=scale)
    else:
        amax = w.abs().amax() if scheme == "fp8_tensor" else w.abs().amax(-1)
        scale = amax / 448
        codes = (w / (scale if scheme == "fp8_tensor" else scale[:, None])).to(torch.float8_e4m3fn)
        parts = {"weight": codes, "weight_scale": scale}
        values = codes.float() * (scale if scheme == "fp8_tensor" else scale[:, None])
    return {f"{MODULE}.{part}": to_numpy(array) for part, array in parts.items()}, to_numpy(values)


@pytest.mark.oracle
@pytest.mark.parametrize("scheme", [*CASES, "mxfp4"])
def test_we_decode_what_it_writes(scheme, qtensor):
    x = np.random.default_rng(0).standard_normal((21, 96)).astype(np.float32)
    x[3, :32], x[5], x[7, 4] = 0, x[5] * 1e-4, -0.0
    arrays, expected = their_arrays(qtensor, scheme, x)
    config = {"quantization_config": {"quant_method": "modelopt"}, "dtype": "float32"}
    q = MO.decoded(config, tensors_of(arrays), "here")[NAME]
    assert q.scheme.name == scheme
    np.testing.assert_array_equal(numbers(q), expected)


def test_mxfp4_is_read_and_not_written():
    """ModelOpt writes it with uint8 scales, and other programs do not read it from its directories."""
    q = example("mxfp4", (7, 96))
    with pytest.raises(UnsupportedError, match="no algorithm for mxfp4"):
        stored(MO, {NAME: q})
    arrays = {NAME: np.asarray(q.codes), f"{NAME}_scale": np.asarray(q.scale)}
    same(q, MO.decoded({"dtype": "float32"}, tensors_of(arrays), "here")[NAME])


@pytest.mark.oracle
def test_the_section_of_the_configuration_is_theirs(qtensor):
    convert = pytest.importorskip("modelopt.torch.export.convert_hf_config").convert_hf_quant_config_format
    other = "model.layers.1.mlp.up_proj.weight"
    for qs in (
        {NAME: example("nvfp4", (4, 64))},
        {NAME: example("fp8_tensor", (4, 64))},
        {NAME: example("nvfp4", (4, 64)), other: example("mxfp8", (4, 64))},
    ):
        found = stored(MO, qs, {"model.layers.0.mlp.gate.weight": np.ones((2, 2), np.float32)})
        form = json.loads(found.small["hf_quant_config.json"])
        assert found.config["quantization_config"] == convert(form)


def test_a_directory_without_a_section_is_recognised():
    for scheme in CASES:  # older directories have their section in hf_quant_config.json alone
        q = example(scheme, CASES[scheme], "bfloat16")
        tensors = stored(MO, {NAME: q}).tensors
        assert MO.recognises({}, tensors)
        same(q, MO.decoded({}, tensors, "here")[NAME])
    assert not MO.recognises({"quantization_config": {"quant_method": "gptq"}}, tensors)
    assert not MO.recognises({}, tensors_of({"a": np.ones(2)}))
    assert not MO.recognises({}, tensors_of({"a.weight": np.ones((2, 2), np.int8), "a.weight_scale": np.ones(2)}))


def test_layers_that_are_not_quantized_are_excluded():
    found = stored(
        MO, {NAME: example("fp8_tensor", (4, 64))}, {"model.layers.0.mlp.gate.weight": np.ones((2, 2), np.float32)}
    )
    quantization = json.loads(found.small["hf_quant_config.json"])["quantization"]
    assert quantization == {
        "quant_algo": "FP8",
        "kv_cache_quant_algo": None,
        "exclude_modules": ["model.layers.0.mlp.gate", "lm_head"],
    }


def test_a_fixed_range_of_activations_is_stored():
    q = example("fp8_tensor", (4, 64))
    activations = dataclasses.replace(fb.scheme("fp8_tensor"), calibration=Fixed(-44.8, 44.8))
    one = Weight(NAME, q.shape, "float32", q.scheme, activations)
    MO.check([one])
    scale = MO.encoded(one, q)[f"{MODULE}.input_scale"]
    assert scale.shape == ()
    np.testing.assert_allclose(scale, 0.1, rtol=1e-7)


@pytest.mark.parametrize(
    ("scheme", "shape", "activations", "reason"),
    [
        ("int4_g32", (4, 64), None, "no algorithm for int4_g32"),
        ("nvfp4", (4, 70), None, "no multiple of a block of 16"),
        ("nvfp4", (2, 4, 64), None, "has 3 axes"),
        ("nvfp4", (4, 64), "nvfp4", "static input_scale"),
        ("fp8_tensor", (4, 64), "fp8_tensor", "a static range there"),
        ("fp8", (4, 64), "int8", "are fp8 there, not int8"),
    ],
)
def test_what_does_not_fit_is_refused(scheme, shape, activations, reason):
    with pytest.raises(UnsupportedError, match=reason):
        MO.check([weight(example(scheme, shape), NAME, activations)])


def test_scales_of_activations_are_refused():
    found = stored(MO, {NAME: example("nvfp4", (4, 64))})
    tensors = tensors_of(found.arrays | {f"{MODULE}.pre_quant_scale": np.ones(64, np.float32)})
    with pytest.raises(UnsupportedError, match="multiplied by a stored scale"):
        MO.decoded(found.config, tensors, "here")


def test_static_ranges_are_not_tensors_of_the_model():
    found = stored(MO, {NAME: example("nvfp4", (4, 64))})
    tensors = tensors_of(found.arrays | {f"{MODULE}.input_scale": np.ones((), np.float32)})
    assert list(MO.decoded(found.config, tensors, "here")) == [NAME]


@pytest.mark.parametrize(
    ("part", "array", "reason"),
    [
        ("weight_scale_2", None, "is missing"),
        ("weight_scale_2", np.ones(2, np.float32), "not those of NVFP4"),
        ("weight", np.ones((4, 31), np.uint8), "in no layout"),
        ("weight", np.ones((4, 32), np.int8), "is int8, expected"),
    ],
)
def test_arrays_that_do_not_fit_are_named(part, array, reason):
    found = stored(MO, {NAME: example("nvfp4", (4, 64))})
    arrays = dict(found.arrays)
    arrays.pop(f"{MODULE}.{part}")
    if array is not None:
        arrays[f"{MODULE}.{part}"] = array
    with pytest.raises((QuantError, UnsupportedError), match=reason):
        MO.decoded(found.config, tensors_of(arrays), "here")


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("rounds", [ROUNDS[0], pytest.param(ROUNDS[1], marks=pytest.mark.long)])
def test_mutated_directories_end_in_our_own_error(rounds, tmp_path):
    qs = {f"m{i}.weight": example(scheme, shape, "bfloat16") for i, (scheme, shape) in enumerate(CASES.items())}
    fuzz(MO, stored(MO, qs, {"norm.weight": np.ones(2, np.float32)}, {"dtype": "bfloat16"}), tmp_path, rounds)
