"""gpt-oss: expert stacks that transformers decodes to our numbers, transposed as it has them."""

import numpy as np
import pytest

import fewbit as fb
from fewbit import QuantError, UnsupportedError
from fewbit.io.containers.gpt_oss import GptOss

from .stored_weights import ROUNDS, example, fuzz, numbers, read_back, same, stored, tensors_of, weight
from .torch_arrays import to_numpy, to_torch

OSS = GptOss()
EXPERTS = "model.layers.0.mlp.experts"
UP, DOWN = f"{EXPERTS}.gate_up_proj", f"{EXPERTS}.down_proj"


def experts(dtype: str = "bfloat16") -> dict[str, fb.QArray]:
    """The stacks of a layer: three experts of 64 by 32."""
    return {
        UP: example("mxfp4", (3, 64, 10), dtype, axis=-2),
        DOWN: example("mxfp4", (3, 32, 7), dtype, axis=-2, seed=1),
    }


def test_what_we_write_is_read_back():
    qs = experts()
    kept = {f"{UP}_bias": np.ones((3, 10), np.float32), "model.norm.weight": np.ones(2, np.float32)}
    found = stored(OSS, qs, kept, {"torch_dtype": "bfloat16"})
    again = read_back(OSS, found)
    assert sorted(again) == sorted([*qs, *kept])
    for name, q in qs.items():
        same(q, again[name])
        info = again.info[name]
        assert (info.shape, info.dtype, info.scheme) == (q.shape, "bfloat16", again[name].scheme)


def test_the_order_of_bytes():
    q = experts()[UP]
    found = stored(OSS, {UP: q})
    blocks, scales = found.arrays[f"{UP}_blocks"], found.arrays[f"{UP}_scales"]
    assert blocks.shape == (3, 10, 2, 16)
    assert scales.shape == (3, 10, 2)
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    codes = np.stack([blocks & 15, blocks >> 4], axis=-1)  # element 0 in the low nibble
    signed = np.where(codes >= 8, -1, 1) * values[codes & 7]
    decoded = (signed.reshape(3, 10, 2, 32) * 2.0 ** (scales[..., None] - 127.0)).reshape(3, 10, 64).swapaxes(1, 2)
    np.testing.assert_array_equal(decoded.astype(np.float32), numbers(q).astype(np.float32))


@pytest.mark.oracle
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_transformers_decodes_what_we_write(dtype):
    torch = pytest.importorskip("torch")
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    for name, q in experts(dtype).items():
        arrays = stored(OSS, {name: q}).arrays
        blocks, scales = to_torch(arrays[f"{name}_blocks"]), to_torch(arrays[f"{name}_scales"])
        result = to_numpy(mxfp4.convert_moe_packed_tensors(blocks, scales, dtype=getattr(torch, dtype)))
        np.testing.assert_array_equal(result, numbers(q))
        np.testing.assert_array_equal(np.signbit(result), np.signbit(numbers(q)))


def test_layers_that_are_not_quantized_are_named():
    other = "model.layers.1.mlp.experts"
    found = stored(OSS, experts(), {f"{other}.gate_up_proj": np.ones(2), f"{other}.down_proj": np.ones(2)})
    assert found.config["quantization_config"]["quant_method"] == "mxfp4"
    assert other in found.config["quantization_config"]["modules_to_not_convert"]
    assert EXPERTS not in found.config["quantization_config"]["modules_to_not_convert"]


def test_half_a_layer_is_refused():
    with pytest.raises(UnsupportedError, match=r"both weights of 'model\.layers\.0\.mlp\.experts'"):
        stored(OSS, {UP: experts()[UP]}, {DOWN: np.ones(2)})


@pytest.mark.parametrize(
    ("name", "q", "activations", "reason"),
    [
        ("model.layers.0.mlp.up_proj.weight", example("mxfp4", (4, 64)), None, "it stores the expert stacks"),
        (UP, example("mxfp4", (64, 8), axis=-2), None, "has 2 axes"),
        (UP, example("mxfp4", (2, 8, 64)), None, "along axis -2"),
        (UP, example("mxfp8", (2, 64, 8), axis=-2), None, "stores mxfp4, not mxfp8"),
        (UP, example("mxfp4", (2, 40, 8), axis=-2), None, "40 inputs are no multiple"),
        (UP, example("mxfp4", (2, 64, 8), axis=-2), "mxfp8", "activations are not quantized there"),
    ],
)
def test_what_does_not_fit_is_refused(name, q, activations, reason):
    with pytest.raises(UnsupportedError, match=reason):
        OSS.check([weight(q, name, activations)])


def test_a_block_of_nan_is_refused_both_ways():
    q = experts()[UP]
    scale = np.asarray(q.scale).copy()
    scale[2, 1, 3] = 255
    q = fb.QArray.tree_unflatten((q.scheme, q.dtype, q.slack, None), (q.codes, scale, None, None))
    with pytest.raises(UnsupportedError, match="block of NaN"):
        stored(OSS, {UP: q})
    found = stored(OSS, experts())
    found.arrays[f"{UP}_scales"][0, 0, 0] = 255
    with pytest.raises(QuantError, match=r"2\*\*128"):
        read_back(OSS, found)[UP]


@pytest.mark.parametrize(
    ("part", "array", "reason"),
    [
        ("_scales", None, "is missing"),
        ("_scales", np.ones((3, 10, 3), np.uint8), "scales of shape"),
        ("_blocks", np.ones((3, 10, 2, 15), np.uint8), "blocks of shape"),
        ("_blocks", np.ones((3, 10, 32), np.uint8), "expected 4 axes"),
    ],
)
def test_arrays_that_do_not_fit_are_named(part, array, reason):
    found = stored(OSS, experts())
    arrays = {name: value for name, value in found.arrays.items() if name != f"{UP}{part}"}
    if array is not None:
        arrays[f"{UP}{part}"] = array
    with pytest.raises(QuantError, match=reason):
        OSS.decoded(found.config, tensors_of(arrays), "here")


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("rounds", [ROUNDS[0], pytest.param(ROUNDS[1], marks=pytest.mark.long)])
def test_mutated_directories_end_in_our_own_error(rounds, tmp_path):
    fuzz(OSS, stored(OSS, experts(), {f"{UP}_bias": np.ones((3, 10), np.float32)}), tmp_path, rounds)
