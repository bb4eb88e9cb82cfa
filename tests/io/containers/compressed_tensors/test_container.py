"""compressed-tensors: what we write decodes there to our numbers, and what it writes decodes here to its numbers."""

import dataclasses
import json
import shutil
import warnings

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

import fewbit as fb
from fewbit import QuantError, UnsupportedError, workflows
from fewbit.formats import FORMATS
from fewbit.io.containers.compressed_tensors.container import CompressedTensors
from fewbit.io.containers.compressed_tensors.global_scale import divisor_of, factor_of
from fewbit.io.containers.writer import ContainerWriter
from fewbit.ops.policy import Policy
from tests.conformance import array_laws as laws
from tests.io.containers.stored_weights import ROUNDS, example, fuzz, numbers, read_back, same, stored, tensors_of, weight
from tests.io.containers.torch_arrays import to_numpy, to_torch
from tests.nets.families import CASES as FAMILIES

CT = CompressedTensors()
NAME = "model.layers.0.mlp.up_proj.weight"
MODULE = NAME.removesuffix(".weight")


def scaled(name: str, dtype: str) -> fb.Scheme:
    return dataclasses.replace(fb.scheme(name), scale=dtype)


# Odd rows and columns where the format lets them be, several groups, every bit width; scales in each float dtype.
CASES = {
    **{f"int{bits}": (f"int{bits}", (7, 45), "float32") for bits in range(2, 9)},
    **{f"uint{bits}": (f"uint{bits}", (37, 45), "float32") for bits in range(2, 9)},
    "int4_g32 bfloat16": (scaled("int4_g32", "bfloat16"), (5, 96), "bfloat16"),
    "uint4_g32 bfloat16": (scaled("uint4_g32", "bfloat16"), (13, 96), "bfloat16"),
    "uint3_g32 float16": (scaled("uint3_g32", "float16"), (13, 96), "float16"),
    "int4_g128 of a short row": ("int4_g128", (5, 64), "float32"),
    "int1": (fb.Scheme(FORMATS["int1"], {...: 1, -1: 32}), (5, 64), "float32"),
    "fp8": ("fp8", (7, 45), "float32"),
    "fp8 bfloat16": (scaled("fp8", "bfloat16"), (7, 45), "bfloat16"),
    "fp8_tensor": ("fp8_tensor", (7, 45), "float32"),
    "fp8_g32": ("fp8_g32", (7, 64), "float32"),
    "fp8_block128": ("fp8_block128", (200, 300), "float32"),
    "mxfp4": ("mxfp4", (7, 96), "bfloat16"),
    "mxfp6": ("mxfp6", (7, 96), "bfloat16"),
    "mxfp8": ("mxfp8", (7, 96), "bfloat16"),
    "nvfp4": ("nvfp4", (7, 96), "bfloat16"),
}
WITH_ACTIVATIONS = {
    "int8 x int8": ("int8", (7, 45), "int8"),
    "uint8 x int8": ("uint8", (7, 45), "int8"),
    "uint4_g32 x int8": ("uint4_g32", (7, 64), "int8"),
    "int8 of a tensor x int8": (dataclasses.replace(fb.scheme("int8"), tile={}), (7, 45), "int8"),
    "fp8 x fp8": ("fp8", (7, 45), "fp8"),
    "fp8_block128 x fp8_g128": ("fp8_block128", (130, 256), "fp8_g128"),
    "mxfp8 x mxfp8": ("mxfp8", (7, 96), "mxfp8"),
    "mxfp4 x mxfp4": ("mxfp4", (7, 96), "mxfp4"),
}


@pytest.fixture(scope="module")
def theirs():
    """Their registry of formats and their configuration."""
    pytest.importorskip("torch")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the packages that it imports
        compressors = pytest.importorskip("compressed_tensors.compressors")
        quantization = pytest.importorskip("compressed_tensors.quantization")
    return compressors.BaseCompressor, quantization


def decompressed(theirs, config, arrays) -> np.ndarray:
    """What their code makes of the first config group."""
    base, quantization = theirs
    form = quantization.QuantizationConfig.model_validate(config["quantization_config"])
    scheme = form.config_groups["group_0"]
    state = {name.removeprefix(f"{MODULE}."): to_torch(array) for name, array in arrays.items()}
    return to_numpy(base.get_value_from_registry(scheme.format).decompress(state, scheme)["weight"])


@pytest.mark.oracle
@pytest.mark.parametrize("case", CASES)
def test_it_decodes_what_we_write(case, theirs):
    scheme, shape, dtype = CASES[case]
    q = example(scheme, shape, dtype)
    found = stored(CT, {NAME: q}, config={"dtype": dtype})
    result = decompressed(theirs, found.config, found.arrays)
    assert result.dtype.name == dtype
    np.testing.assert_array_equal(result, numbers(q))
    np.testing.assert_array_equal(np.signbit(result), np.signbit(numbers(q)))


@pytest.mark.oracle
@pytest.mark.parametrize("case", WITH_ACTIVATIONS)
def test_it_decodes_weights_of_products_with_quantized_activations(case, theirs):
    scheme, shape, activations = WITH_ACTIVATIONS[case]
    q = example(scheme, shape, "bfloat16" if case.startswith("mx") else "float32")
    found = stored(CT, {NAME: q}, activations=activations, config={"dtype": q.dtype.name})
    np.testing.assert_array_equal(decompressed(theirs, found.config, found.arrays), numbers(q))
    again = read_back(CT, found)[NAME]
    np.testing.assert_array_equal(numbers(again), numbers(q))
    assert again.policy == Policy(again.scheme, activations)


@pytest.mark.parametrize("case", CASES)
def test_what_we_write_is_read_back(case):
    scheme, shape, dtype = CASES[case]
    q = example(scheme, shape, dtype)
    found = stored(CT, {NAME: q}, {"model.norm.weight": np.ones(3, np.float32)}, {"dtype": dtype})
    again = read_back(CT, found)
    assert sorted(again) == sorted([NAME, "model.norm.weight"])
    np.testing.assert_array_equal(numbers(again[NAME]), numbers(q))
    info = again.info[NAME]
    assert (info.shape, info.dtype, info.scheme) == (q.shape, dtype, again[NAME].scheme)
    if case not in (
        "nvfp4",
        "int4_g128 of a short row",
    ):  # the tensor scale may differ in the last place; one group is a row
        same(q, again[NAME])


THEIR_SETTINGS = {
    **{f"W{bits} group": {"num_bits": bits, "strategy": "group", "group_size": 32} for bits in range(1, 9)},
    **{
        f"W{bits} group asymmetric": {"num_bits": bits, "strategy": "group", "group_size": 32, "symmetric": False}
        for bits in (2, 3, 4, 5, 8)
    },
    "W4 channel": {"num_bits": 4, "strategy": "channel"},
    "W4 channel asymmetric": {"num_bits": 4, "strategy": "channel", "symmetric": False},
    "int8 channel": {"num_bits": 8, "strategy": "channel", "format": "int-quantized"},
    "int8 tensor": {"num_bits": 8, "strategy": "tensor", "format": "int-quantized"},
    "int6 group asymmetric": {
        "num_bits": 6,
        "strategy": "group",
        "group_size": 32,
        "symmetric": False,
        "format": "int-quantized",
    },
    "fp8 channel": {"num_bits": 8, "type": "float", "strategy": "channel", "format": "float-quantized"},
    "fp8 tensor": {"num_bits": 8, "type": "float", "strategy": "tensor", "format": "naive-quantized"},
    "fp8 block": {
        "num_bits": 8,
        "type": "float",
        "strategy": "block",
        "block_structure": [16, 32],
        "format": "float-quantized",
    },
    "nvfp4": {
        "num_bits": 4,
        "type": "float",
        "strategy": "tensor_group",
        "group_size": 16,
        "scale_dtype": "torch.float8_e4m3fn",
        "format": "nvfp4-pack-quantized",
    },
    **{
        f"mxfp{bits}": {
            "num_bits": bits,
            "type": "float",
            "strategy": "group",
            "group_size": 32,
            "scale_dtype": "torch.uint8",
            "format": f"mxfp{bits}-{kind}",
        }
        for bits, kind in ((4, "pack-quantized"), (6, "pack-quantized"), (8, "quantized"))
    },
}


def their_module(theirs, settings, x):
    """Their configuration and compressed arrays of a weight, with scales from their own observer's rule."""
    import torch
    from compressed_tensors.quantization.utils import helpers

    base, quantization = theirs
    settings = {"format": "pack-quantized", **settings}
    fmt = settings.pop("format")
    args = quantization.QuantizationArgs(**settings)
    w = torch.from_numpy(x).to(torch.bfloat16)
    shape, strategy = x.shape, settings["strategy"]
    if strategy in ("group", "tensor_group"):
        tiles = w.unflatten(-1, (-1, settings["group_size"]))
    elif strategy == "block":
        rows, columns = settings["block_structure"]
        padded = torch.nn.functional.pad(w, (0, -shape[1] % columns, 0, -shape[0] % rows))
        tiles = padded.reshape(-(-shape[0] // rows), rows, -(-shape[1] // columns), columns).transpose(1, 2).flatten(-2)
    else:
        tiles = w.reshape(1, -1) if strategy == "tensor" else w[:, None, :]
    unit = None
    state = {"weight": w}
    if strategy == "tensor_group":
        unit = helpers.generate_gparam(w.amin(), w.amax()).reshape(1)
        state["weight_global_scale"] = unit
    scale, zero = helpers.calculate_qparams(tiles.amin(-1), tiles.amax(-1), args, unit)
    if scale.dtype not in (torch.bfloat16, torch.float32):
        scale = scale.float()
    state["weight_scale"] = scale
    if not args.symmetric:
        state["weight_zero_point"] = zero.to(torch.int8)
    group = quantization.QuantizationScheme(targets=["Linear"], weights=args, format=fmt)
    form = quantization.QuantizationConfig(config_groups={"group_0": group}, format=fmt, quantization_status="compressed")
    compressor = base.get_value_from_registry(fmt)
    state = compressor.compress(state, group)
    arrays = {f"{MODULE}.{name}": to_numpy(value) for name, value in state.items()}
    section = form.model_dump(mode="json") | {"version": pytest.importorskip("compressed_tensors").__version__}
    config = {"dtype": "bfloat16", "quantization_config": section}
    return config, arrays, to_numpy(compressor.decompress(state, group)["weight"])


@pytest.mark.oracle
@pytest.mark.parametrize("case", THEIR_SETTINGS)
def test_we_decode_what_it_writes(case, theirs):
    x = np.random.default_rng(0).standard_normal((21, 96)).astype(np.float32)
    x[3, :32] = 0
    x[5] *= 1e-4
    config, arrays, expected = their_module(theirs, THEIR_SETTINGS[case], x)
    config["quantization_config"].setdefault("quant_method", "compressed-tensors")
    assert CT.recognises(config, tensors_of(arrays))
    q = CT.decoded(config, tensors_of(arrays), "here")[NAME]
    np.testing.assert_array_equal(numbers(q).astype(np.float32), expected.astype(np.float32))


def bits_of(codes, bits: int) -> str:
    """A bit stream, code 0 first, the lowest bit of each first."""
    return "".join(format(code, f"0{bits}b")[::-1] for code in codes)


def test_a_code_of_three_bits_straddles_words():
    q = example("int3", (2, 64))
    words = stored(CT, {NAME: q}).arrays[f"{MODULE}.weight_packed"].view(np.uint32)
    assert words.shape == (2, 6)
    for row, codes in zip(words, laws.unpacked(q), strict=True):
        stream = bits_of(codes ^ 4, 3)  # half of the range is added: the sign bit flips
        assert [format(int(word), "032b")[::-1] for word in row] == [stream[i : i + 32] for i in range(0, 192, 32)]


@pytest.mark.parametrize("bits", [3, 5, 6, 7])
@pytest.mark.parametrize("zero", [False, True])
def test_the_words_of_2025_have_no_code_across_them(bits, zero):
    rng = np.random.default_rng(bits)
    shape, per_word = (170, 192), 32 // bits
    stored_codes, stored_zeros = rng.integers(0, 2**bits, shape), rng.integers(0, 2**bits, (170, 2))

    def words(codes):
        padded = np.pad(codes, ((0, 0), (0, -codes.shape[1] % per_word)))
        parts = padded.reshape(len(codes), -1, per_word).astype(np.uint64)
        return (parts << (np.arange(per_word, dtype=np.uint64) * np.uint64(bits))).sum(-1).astype(np.uint32).view(np.int32)

    scale = rng.standard_normal((170, 2)).astype(np.float32)
    arrays = {
        f"{MODULE}.weight_packed": words(stored_codes),
        f"{MODULE}.weight_scale": scale,
        f"{MODULE}.weight_shape": np.array(shape, np.int64),
    }
    zeros = np.full((170, 2), 2 ** (bits - 1))
    if zero:
        zeros = stored_zeros
        arrays[f"{MODULE}.weight_zero_point"] = np.ascontiguousarray(words(stored_zeros.T).T)
    settings = {"num_bits": bits, "type": "int", "strategy": "group", "group_size": 96, "symmetric": not zero}
    config = {
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": settings}},
        }
    }
    q = CT.decoded(config, tensors_of(arrays), "here")[NAME]
    expected = (stored_codes - np.repeat(zeros, 96, axis=1)).astype(np.float32) * np.repeat(scale, 96, axis=1)
    np.testing.assert_array_equal(numbers(q), expected)


def test_a_width_of_both_layouts_needs_the_version():
    q = example("int3", (4, 40))
    found = stored(CT, {NAME: q})
    same(q, read_back(CT, found)[NAME])
    for version, accepted in (("0.20.1", True), ("0.12.2", True), ("0.15.0", False), ("", False)):
        found.config["quantization_config"]["version"] = version
        if accepted:
            CT.decoded(found.config, found.tensors, "here")
            continue
        with pytest.raises(UnsupportedError, match="does not tell which"):
            CT.decoded(found.config, found.tensors, "here")


def test_the_global_scale_is_a_divisor():
    q = example("nvfp4", (2, 32), "bfloat16")
    found = stored(CT, {NAME: q})
    divisor = found.arrays[f"{MODULE}.weight_global_scale"]
    assert divisor.shape == (1,)
    assert divisor.dtype == np.float32
    np.testing.assert_allclose(divisor[0], 1 / 0.00123456, rtol=1e-6)
    packed = found.arrays[f"{MODULE}.weight_packed"]
    np.testing.assert_array_equal(packed, np.asarray(q.codes))  # element 0 in the low nibble


def test_every_factor_has_a_divisor_that_decodes_the_same_bfloat16():
    rng = np.random.default_rng(0)
    scales = FORMATS["e4m3fn"].values()[1:127].astype(np.float32)
    codes = np.float32([0.5, 1, 1.5, 2, 3, 4, 6])[:, None]
    exact = 0
    for factor in np.exp2(rng.uniform(-40, 10, 500)).astype(np.float32):
        for given, found, ours, theirs in (
            (factor, divisor_of(factor), scales * factor, lambda g: scales / g),
            (factor, factor_of(factor), scales / factor, lambda t: scales * t),
        ):
            assert found is not None, given
            result = theirs(found)
            exact += (result == ours).all()
            np.testing.assert_array_equal(
                (codes * result).astype(ml_dtypes.bfloat16), (codes * ours).astype(ml_dtypes.bfloat16)
            )
    assert 100 < exact < 300, "in float32 too, one factor of five"
    assert divisor_of(np.float32(0.25)) == 4
    assert factor_of(np.float32(np.inf)) == 0
    assert factor_of(np.float32(1e-42)) is None  # its scales overflow
    assert [divisor_of(np.float32(x)) for x in (0, -1, np.nan, np.inf)] == [None] * 4


def test_a_factor_without_a_divisor_moves_before_it_is_used_and_is_refused_afterwards():
    factor = np.float32(7 / 2048)  # 9.1875 / 2688; bfloat16 weights have such maxima
    q = jax.tree.map(jnp.asarray, example("nvfp4", (2, 32), "bfloat16"))
    q = dataclasses.replace(q, tensor_scale=jnp.full_like(q.tensor_scale, factor))
    with pytest.raises(UnsupportedError, match="has no divisor for the tensor scale"):
        stored(CT, {NAME: q})
    moved = CT.representable(q)
    assert np.asarray(moved.tensor_scale).item() == np.nextafter(factor, np.float32(1))
    found = stored(CT, {NAME: moved})
    np.testing.assert_array_equal(fb.dequantize(CT.decoded(found.config, found.tensors, "here")[NAME]), fb.dequantize(moved))
    other = example("fp8", (2, 32))
    assert CT.representable(other) is other


def test_layers_that_are_not_quantized_are_ignored():
    kept = ("model.embed_tokens.weight", "model.norm.weight", "model.layers.0.mlp.gate.weight", f"{MODULE}.bias")
    found = stored(CT, {NAME: example("int4", (4, 64))}, {name: np.ones((2, 2), np.float32) for name in kept})
    section = found.config["quantization_config"]
    assert section["ignore"] == ["model.layers.0.mlp.gate", "lm_head"]
    assert section["config_groups"]["group_0"]["targets"] == ["Linear"]
    assert section["format"] == "pack-quantized"
    assert sorted(read_back(CT, found)) == sorted([*kept, NAME])


def test_the_output_layer_of_gpt_neox_has_another_name_in_transformers():
    weights = {NAME: example("int4_g32", (4, 64)), "embed_out.weight": example("int4_g32", (4, 64), seed=1)}
    section = stored(CT, weights).config["quantization_config"]
    assert [group["targets"] for group in section["config_groups"].values()] == [["Linear"]] and section["ignore"] == []
    assert sorted(read_back(CT, stored(CT, weights))) == sorted(weights)
    found = stored(CT, {**weights, "embed_out.weight": example("fp8", (4, 64))})
    groups = found.config["quantization_config"]["config_groups"]
    assert [group["targets"] for group in groups.values()] == [[MODULE], ["embed_out", "lm_head"]]


def test_several_schemes_are_groups_by_name():
    other = "model.layers.1.mlp.up_proj.weight"
    qs = {
        NAME: example("int4_g32", (4, 64)),
        other: example("fp8", (4, 64)),
        "lm_head.weight": example("int4_g32", (4, 64), seed=1),
    }
    found = stored(CT, qs)
    section = found.config["quantization_config"]
    groups = section["config_groups"]
    assert [group["targets"] for group in groups.values()] == [[MODULE, "lm_head"], ["model.layers.1.mlp.up_proj"]]
    assert [group["format"] for group in groups.values()] == ["pack-quantized", "float-quantized"]
    assert section["format"] == "mixed-precision"
    assert section["ignore"] == []
    again = read_back(CT, found)
    for name, q in qs.items():
        same(q, again[name])


def test_groups_are_found_by_name_then_pattern_then_class():
    config = {
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "config_groups": {
                "a": {"targets": ["Linear"], "weights": {"num_bits": 8}},
                "b": {"targets": ["re:.*layers\\.0\\..*"], "weights": {"num_bits": 3}},
                "c": {"targets": ["model.layers.0.mlp.down_proj"], "weights": {"num_bits": 2}},
                "d": {"targets": ["Embedding"], "weights": {"num_bits": 5}},
                "e": {"targets": ["re:.*attn.*"], "weights": {"num_bits": 6}},  # before b in the alphabet
            },
        }
    }
    bits = {"model.layers.0.mlp.down_proj": 2, "model.layers.0.mlp.up_proj": 3, "lm_head": 8, "model.embed_tokens": 5}
    bits["model.layers.0.self_attn.q_proj"] = 6
    arrays = {}
    for module, width in bits.items():
        found = stored(CT, {f"{module}.weight": example(f"int{width}", (4, 320))})
        arrays |= found.arrays
    tensors = CT.decoded(config, tensors_of(arrays), "here")
    assert {name: info.scheme.format.bits for name, info in tensors.info.items()} == {
        f"{m}.weight": b for m, b in bits.items()
    }


REFUSED = {
    "nf4": ("nf4", (4, 64), None, "no format for nf4"),
    "fp8_e5m2": ("fp8_e5m2", (4, 64), None, "no format"),
    "short last group": ("int4_g32", (4, 70), None, "groups must divide rows of 70"),
    "short last block": ("mxfp4", (4, 70), None, "no multiple of a block of 32"),
    "an expert stack": ("int4_g32", (2, 4, 64), None, "has 3 axes"),
    "float32 NVFP4": ("nvfp4", (4, 64), None, "fewbit convert MODEL DIRECTORY --to hf"),
    "float16 offsets": ("q4_1", (4, 64), None, "zero points are integers"),
    "E4M3 scales": ("nvint4", (4, 64), None, "scales are floats"),
    "an MX integer": ("mxint8", (4, 64), None, "steps of 1"),
    "a scale of the tensor": (fb.Scheme(FORMATS["int4"]), (4, 64), None, "per row or per group"),
    "other activations": ("int4_g32", (4, 64), "fp8", "int8 per token there, not fp8"),
    "narrow activations": ("int8", (4, 64), "int8_narrow", "int8 per token there"),
    "float activations of a block": ("mxfp8", (4, 64), "fp8", "are mxfp8 there, not fp8"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused(case):
    scheme, shape, activations, reason = REFUSED[case]
    scheme = fb.scheme(scheme)
    given = dataclasses.replace(weight(example("int8", shape), NAME, activations), scheme=scheme)
    with pytest.raises(UnsupportedError, match=reason):
        CT.check([given])


def test_nvfp4_activations_need_a_static_range():
    with pytest.raises(UnsupportedError, match="static input_global_scale"):
        CT.check([weight(example("nvfp4", (4, 64), "bfloat16"), NAME, "nvfp4")])


def test_a_block_of_nan_is_refused():
    q = example("mxfp4", (2, 64))
    scale = np.asarray(q.scale).copy()
    scale[1, 1] = 255
    q = fb.QArray.tree_unflatten((q.scheme, q.dtype, q.slack, None), (q.codes, scale, None, None))
    with pytest.raises(UnsupportedError, match="block of NaN"):
        stored(CT, {NAME: q})


def changed(found, **parts):
    """The arrays with some replaced; None removes one."""
    arrays = dict(found.arrays)
    for part, array in parts.items():
        arrays.pop(f"{MODULE}.{part}", None)
        if array is not None:
            arrays[f"{MODULE}.{part}"] = array
    return tensors_of(arrays)


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ({"weight_shape": None}, "weight_shape' is missing"),
        ({"weight_shape": np.array([4, 65])}, "has 8 words for 65 codes of 4 bits, expected 9"),
        ({"weight_shape": np.array([3, 64])}, "weight_shape"),
        ({"weight_shape": np.array([4, -1])}, "weight_shape"),
        ({"weight_scale": np.ones((4, 3), np.float32)}, "scales of shape"),
        ({"weight_scale": np.ones((4, 2), np.float64)}, "is float64, expected"),
        ({"weight_packed": np.ones((4, 8), np.int64)}, "is int64, expected"),
        ({"weight_packed": None}, "is missing"),
        ({"weight_zero_point": np.ones((1, 3), np.int32)}, "zero points of shape"),
    ],
)
def test_arrays_that_do_not_fit_are_named(parts, reason):
    found = stored(CT, {NAME: example("int4_g32", (4, 64))})
    with pytest.raises(QuantError, match=reason):
        CT.decoded(found.config, changed(found, **parts), "here")


def test_unpacked_integers_are_within_their_bits():
    """int8 arrays may hold integers of fewer bits; one beyond these, on either side, is refused."""
    found = stored(CT, {NAME: example("int4", (4, 64))}, activations="int8")

    def read(number: int) -> fb.QArray:
        codes = np.zeros((4, 64), np.int8)
        codes[1, 2] = number
        return CT.decoded(found.config, changed(found, weight=codes), "here")[NAME]

    for number in (-8, 7):
        q = read(number)
        assert q.scheme.format.bits == 4
        assert fb.dequantize(q)[1, 2] == number * q.scale[1, 0]
    for number in (-9, 8):
        with pytest.raises(QuantError, match="has numbers beyond 4 bits"):
            read(number)


def test_the_order_of_activations_is_refused():
    found = stored(CT, {NAME: example("int4_g32", (4, 64))})
    group = np.repeat(np.arange(2, dtype=np.int32), 32)
    CT.decoded(found.config, changed(found, weight_g_idx=group), "here")
    with pytest.raises(UnsupportedError, match="order of activations"):
        CT.decoded(found.config, changed(found, weight_g_idx=group[::-1].copy()), "here")


@pytest.mark.parametrize(
    ("section", "reason"),
    [
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse weights"),
        ({"transform_config": {"config_groups": {"R1": {}}}}, "weights are rotated"),
        ({"config_groups": {"W4A16": ["Linear"]}}, "names the preset 'W4A16'"),
    ],
)
def test_variants_without_a_scheme_are_refused(section, reason):
    found = stored(CT, {NAME: example("int4_g32", (4, 64))})
    config = {"quantization_config": found.config["quantization_config"] | section}
    with pytest.raises(UnsupportedError, match=reason):
        CT.decoded(config, found.tensors, "here")


def test_static_ranges_of_activations_are_not_tensors_of_the_model():
    found = stored(CT, {NAME: example("fp8_tensor", (4, 64))})
    again = CT.decoded(found.config, changed(found, input_scale=np.ones(1, np.float32)), "here")
    assert list(again) == [NAME]
    assert again[NAME].policy is None


SERVED = {
    "int4_g32": ("int4_g32", None, "float32"),
    "uint3_g32": ("uint3_g32", None, "float32"),
    "int8 x int8": ("int8", "int8", "float32"),
    "fp8": ("fp8", None, "float32"),
    "fp8_block128": ("fp8_block128", None, "float32"),
    "nvfp4": ("nvfp4_absmax", None, "bfloat16"),
    "mxfp4": ("mxfp4", None, "bfloat16"),
}


@pytest.mark.slow
@pytest.mark.oracle
@pytest.mark.parametrize("case", SERVED)
def test_transformers_runs_what_is_written(case, theirs, tmp_path):
    """Its logits are those of the float model with our decoded weights, bit for bit; one layer and a tied head stay float."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    scheme, activations, dtype = SERVED[case]
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 40}
    config = transformers.LlamaConfig(**sizes, num_key_value_heads=2, initializer_range=0.2, tie_word_embeddings=True)
    model = transformers.LlamaForCausalLM(config).eval()
    for parameter in model.parameters():  # the frequencies of rotary embeddings stay float32
        parameter.data = parameter.data.to(getattr(torch, dtype))
    arrays = {name: to_numpy(tensor) for name, tensor in model.named_parameters()}
    names = [name for name in arrays if "proj" in name and "layers.1.mlp" not in name]
    qs = {name: fb.quantize(jnp.asarray(arrays[name]), scheme) for name in names}
    weights = [weight(q, name, activations) for name, q in qs.items()]
    form = json.loads(config.to_json_string(use_diff=False)) | {"architectures": ["LlamaForCausalLM"], "dtype": dtype}
    kept = [name for name in arrays if name not in qs]
    with ContainerWriter(tmp_path / "m", CT, weights=weights, kept=kept, config=form) as writer:
        for name, array in arrays.items():
            writer.add(name, qs.get(name, array))
    loaded = transformers.AutoConfig.from_pretrained(tmp_path / "m")
    has_zero_points = scheme.startswith("uint")  # transformers 5.23 expects them unpacked unless it decompresses at once
    loaded.quantization_config["dequantize"] = has_zero_points
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the package, about its own arguments
        served = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / "m", config=loaded, dtype=getattr(torch, dtype)
        ).eval()
    found = fb.io.read(tmp_path / "m")
    tokens = torch.arange(12)[None]
    with torch.no_grad():
        wanted = served(tokens).logits.float().numpy()
        for name, parameter in model.named_parameters():
            if name in qs:
                parameter.copy_(to_torch(np.asarray(fb.dequantize(found.tensors[name]))))
                np.testing.assert_array_equal(
                    np.asarray(fb.dequantize(qs[name])), np.asarray(fb.dequantize(found.tensors[name]))
                )
                np.testing.assert_array_equal(to_numpy(served.get_parameter(name)), to_numpy(parameter))
        mine = model(tokens).logits.float().numpy()
    modules = dict(served.named_modules())
    assert hasattr(modules["model.layers.0.mlp.up_proj"], "quantization_scheme") != has_zero_points
    assert not hasattr(modules["model.layers.1.mlp.up_proj"], "quantization_scheme")
    assert not hasattr(modules["lm_head"], "quantization_scheme")
    if activations is None:
        np.testing.assert_array_equal(wanted, mine)
    else:  # it rounds the activations too, as the policy of the weights that are read says
        assert found.tensors[names[0]].policy == Policy(found.tensors[names[0]].scheme, activations)
        assert (mine * wanted).sum() > 0.999 * np.linalg.norm(mine) * np.linalg.norm(wanted)


@pytest.mark.slow
@pytest.mark.oracle
@pytest.mark.usefixtures("theirs")
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "qwen2_moe", "deepseek_v3"])
def test_transformers_runs_the_experts_that_are_written(family, tmp_path):
    """It stacks the experts of a layer, which the file has one by one; its logits are those of our decoded weights, bit for bit."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    name, settings = FAMILIES[family]
    cls = getattr(transformers, name)
    torch.manual_seed(0)
    cls(cls.config_class(**settings, initializer_range=0.2)).save_pretrained(tmp_path / "float")
    model = workflows.load(tmp_path / "float")
    recipe = fb.Recipe((fb.Rule(".*", "int8", roles=("matmul", "experts")),))
    plan = workflows.plan_model(model, recipe=recipe)
    workflows.quantize(model, plan, tmp_path / "q", to="compressed-tensors")
    tensors = fb.io.read(tmp_path / "q").tensors
    assert any(fb.is_qarray(x) and ".experts." in path for path, x in tensors.items())
    (tmp_path / "decoded").mkdir()
    decoded = {path: np.array(fb.dequantize(x) if fb.is_qarray(x) else x) for path, x in tensors.items()}
    save_file(decoded, tmp_path / "decoded" / "model.safetensors", metadata={"format": "pt"})
    shutil.copy(tmp_path / "float" / "config.json", tmp_path / "decoded")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the package, about its own arguments
        found = [cls.from_pretrained(tmp_path / at, dtype=torch.float32).eval() for at in ("q", "decoded")]
    with torch.no_grad():
        served, ours = (each(torch.arange(4, 20)[None]).logits.numpy() for each in found)
    np.testing.assert_array_equal(served, ours)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("rounds", [ROUNDS[0], pytest.param(ROUNDS[1], marks=pytest.mark.long)])
def test_mutated_directories_end_in_our_own_error(rounds, tmp_path):
    qs = {
        NAME: example("uint3_g32", (5, 64)),
        "a.weight": example("nvfp4", (2, 32), "bfloat16"),
        "b.weight": example("mxfp6", (2, 32), "bfloat16"),
        "c.weight": example("fp8_block128", (3, 130)),
        "embed.weight": example("int4", (3, 8)),
    }
    fuzz(CT, stored(CT, qs, {"norm.weight": np.ones(2, np.float32)}, {"dtype": "bfloat16"}), tmp_path, rounds)
