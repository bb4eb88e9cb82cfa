"""GPTQ weights: the numbers of AutoGPTQ's formula both ways, zero points minus 1, 3-bit words, act-order."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

import fewbit as fb
from fewbit import io
from fewbit.errors import QuantError, UnsupportedError
from fewbit.io.containers.container import Weight, notes_on_floats
from fewbit.io.containers.encodings.integer_words import codes_of_words
from fewbit.io.containers.gptq import GPTQ
from fewbit.io.containers.writer import ContainerWriter
from tests.io.containers.stored import MODULE, NAME, quantized, read_back, tensors, values

K, N = 64, 32
SCHEMES = [f"{sign}int{bits}" for bits in (2, 3, 4, 8) for sign in ("", "u")]


def half(name, group=16, dtype="float16"):
    """A scheme with 16-bit scales in groups."""
    return fb.scheme(fb.scheme(name).to_json() | {"scale": dtype, "tile": {"*": 1, "-1": group}})


def codes(words, bits):
    """The codes of a column of words, read as one long number."""
    number = sum(int(word) << 32 * i for i, word in enumerate(np.asarray(words).view(np.uint32)))
    return [number >> place & 2**bits - 1 for place in range(0, 32 * len(words) // bits * bits, bits)]


def reference(arrays, bits, *, is_v1):
    """AutoGPTQ's formula, code by code: `scales[g_idx] * (q - zero)` in float16."""
    qweight, qzeros, scales, g_idx = (arrays[f"{MODULE}.{part}"] for part in ("qweight", "qzeros", "scales", "g_idx"))
    zeros = np.array([codes(row, bits) for row in qzeros])  # [groups, out]
    if is_v1:
        zeros = (zeros + 1) % 2**bits
    weights = np.array([codes(np.ascontiguousarray(column), bits) for column in qweight.T]).T  # [in, out]
    product = scales[g_idx].astype(np.float32) * (weights - zeros[g_idx]).astype(np.float32)
    return product.astype(np.float16).T


def config(**settings):
    return {"quantization_config": {"quant_method": "gptq", "group_size": 16, **settings}}


def random_arrays(bits, groups=4):
    rng = np.random.default_rng(bits)
    words = [rng.integers(-(2**31), 2**31, shape, np.int32) for shape in ((K * bits // 32, N), (groups, N * bits // 32))]
    scales = rng.choice(np.array([0, 6e-8, 1e-3, 0.02, -0.5, 3.25], np.float16), (groups, N))
    order = (np.arange(K) // (K // groups)).astype(np.int32)
    return dict(
        zip((f"{MODULE}.{p}" for p in ("qweight", "qzeros", "scales", "g_idx")), (*words, scales, order), strict=True)
    )


@pytest.mark.parametrize("name", SCHEMES)
def test_what_is_written_has_the_values_of_the_formula_and_reads_back(name):
    weight, q = quantized(half(name), (N, K), "float16")
    arrays, back = read_back(GPTQ(), weight, q)
    bits = weight.scheme.format.bits
    assert arrays[f"{MODULE}.qweight"].shape == (K * bits // 32, N) and arrays[f"{MODULE}.scales"].dtype == np.float16
    np.testing.assert_array_equal(reference(arrays, bits, is_v1=not name.startswith("u")), values(q, np.float16))
    assert back.scheme == q.scheme and back.dtype == q.dtype
    for leaf in ("codes", "scale", "zero_point"):
        np.testing.assert_array_equal(getattr(back, leaf), getattr(q, leaf))


@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_random_words_decode_as_the_formula(bits, version):
    """Every zero point occurs, also the one that version 1 stores as -1."""
    arrays = random_arrays(bits)
    q = GPTQ().decoded(config(checkpoint_format=version), tensors(arrays), "here")[NAME]
    np.testing.assert_array_equal(values(q, np.float16), reference(arrays, bits, is_v1=version == "gptq"))


def test_symmetric_files_have_zero_points_minus_one_and_the_words_of_autogptq():
    weight, q = quantized("int4_f16_g16", (N, K))
    arrays, back = read_back(GPTQ(), weight, q)
    assert (arrays[f"{MODULE}.qzeros"].view(np.uint32) == 0x77777777).all()
    assert back.scheme.name == "int4_f16_g16" and back.zero_point is None
    files = GPTQ().files([weight], [], {})
    assert files.config["quantization_config"] == json.loads(files.small["quantize_config.json"])
    settings = files.config["quantization_config"]
    assert (settings["checkpoint_format"], settings["sym"], settings["bits"], settings["group_size"]) == (
        "gptq",
        True,
        4,
        16,
    )
    weight, q = quantized("uint4_f16_g16", (N, K))
    arrays, _ = read_back(GPTQ(), weight, q)
    assert codes(arrays[f"{MODULE}.qzeros"][0], 4) == q.zero_point[:, 0].tolist()
    assert GPTQ().files([weight], [], {}).config["quantization_config"]["checkpoint_format"] == "gptq_v2"


def test_codes_of_three_bits_cross_words():
    """Codes 10 and 21 of 32 straddle the three words."""
    arrays = random_arrays(3)
    words = arrays[f"{MODULE}.qweight"]
    words[:] = 0
    words[0, 0], words[1, 0] = np.uint32(1 << 30).view(np.int32), 1  # code 10 is 0b101
    words[1, 1], words[2, 1] = np.uint32(1 << 31).view(np.int32), 3  # code 21 is 0b111
    q = GPTQ().decoded(config(checkpoint_format="gptq_v2"), tensors(arrays), "here")[NAME]
    found = codes_of_words(np.asarray(q.codes), 3)
    assert found[0].nonzero()[0].tolist() == [10] and found[0, 10] == 5
    assert found[1].nonzero()[0].tolist() == [21] and found[1, 21] == 7


def test_gptqmodel_borrows_from_the_next_zero_point():
    """Its version 1 subtracts 1 from all codes of a word at once, so a zero point of 0 takes 1 from the next."""
    zeros = np.array([[0, 8, 0, 0, 15, 3, 0, 7]], np.uint32)
    arrays = random_arrays(4, groups=1)
    word = int((zeros[0] << np.arange(0, 32, 4, dtype=np.uint32)).sum())
    stored = (word - 0x11111111) % 2**32
    arrays[f"{MODULE}.qzeros"][:] = np.uint32(stored).view(np.int32)
    settings = config(meta={"quantizer": ["gptqmodel:2.0.0"]}, group_size=-1)
    q = GPTQ().decoded(settings, tensors(arrays), "here")[NAME]
    assert q.scheme.tile == {...: 1, -1: None}
    np.testing.assert_array_equal(np.asarray(q.zero_point)[:8, 0], zeros[0])


def test_act_order_is_decoded_to_the_values_of_the_formula():
    arrays = random_arrays(4)
    arrays[f"{MODULE}.g_idx"] = np.random.default_rng(1).permutation(arrays[f"{MODULE}.g_idx"])
    stored = tensors(arrays)
    found = GPTQ().decoded(config(desc_act=True), stored, "here")
    assert found[NAME].dtype == np.float16 and found.info[NAME].scheme is None
    np.testing.assert_array_equal(found[NAME], reference(arrays, 4, is_v1=True))
    assert notes_on_floats(stored, found) == (f"1 weights are decoded to float, GPTQ with act-order: {NAME}",)
    # static groups have an order too, that of the inputs
    arrays[f"{MODULE}.g_idx"].sort()
    assert GPTQ().decoded(config(desc_act=True), tensors(arrays), "here")[NAME].scheme.tile[-1] == 16


@pytest.mark.parametrize("group", [None, 16, 48, 64, 128])
def test_group_sizes(group):
    """Also rows that are one group, a group longer than a row, and a short last group."""
    weight, q = quantized(half("int4", group), (N, K))
    _, back = read_back(GPTQ(), weight, q)
    assert back.scheme == q.scheme
    np.testing.assert_array_equal(back.scale, q.scale)


def test_a_group_size_of_its_own_with_a_short_last_group():
    """Three groups of 48 for 112 inputs; equal groups would have 38."""
    weight, q = quantized(half("int4", 48), (N, 112))
    arrays = GPTQ().encoded(weight, q)
    found = GPTQ().decoded(config(group_size=16, sym=True), tensors(arrays), "here")[weight.name]
    assert found.scheme == q.scheme
    np.testing.assert_array_equal(found.scale, q.scale)
    del arrays[f"{MODULE}.g_idx"]
    with pytest.raises(QuantError, match="has 3 groups for 112 inputs, and no g_idx that assigns them"):
        GPTQ().decoded(config(group_size=16, sym=True), tensors(arrays), "here")


def test_other_modules_and_forms_are_patterns():
    """Routers and heads that stay in float are excluded, norms are no linear layers; 8 bits among 4."""
    forms = [("a.q_proj", "int4_f16_g16"), ("a.k_proj", "int4_f16_g16"), ("a.v_proj", "int8_f16")]
    weights = [quantized(scheme, (N, K), name=f"{name}.weight")[0] for name, scheme in forms]
    kept = ["a.mlp.gate.weight", "a.input_layernorm.weight", "embed_tokens.weight", "a.q_proj.bias"]
    dynamic = GPTQ().files(weights, kept, {}).config["quantization_config"]["dynamic"]
    assert dynamic == {r"-:^a\.mlp\.gate$": {}, "-:^lm_head$": {}, r"+:^a\.v_proj$": {"bits": 8, "group_size": -1}}
    settings = config(group_size=16, sym=True, dynamic=dynamic)
    arrays = {}
    for name, scheme in forms:
        weight, q = quantized(scheme, (N, K), name=f"{name}.weight")
        arrays |= GPTQ().encoded(weight, q)
    found = GPTQ().decoded(settings, tensors(arrays | {"norm.weight": np.ones(4, np.float16)}), "here")
    assert [info.scheme and info.scheme.name for info in found.info.values()] == [
        "int4_f16_g16",
        "int4_f16_g16",
        "int8_f16",
        None,
    ]
    with pytest.raises(UnsupportedError, match="symmetric or asymmetric as a whole"):
        GPTQ().files([weights[0], quantized("uint4_f16_g16", (N, K))[0]], [], {})


@pytest.mark.parametrize(
    ("scheme", "shape", "reason"),
    [
        ("int4_g16", (N, K), r"its scales are float32, not float16 or bfloat16"),
        ("nf4", (N, K), "its codes are nf4, not integers of 2 or 3 or 4 or 8 bits"),
        ("q4_1", (N, K), "its zero points are not integers"),
        ("int4_f16_g16", (N + 1, K), r"not in multiples of 8"),
        ("int4_f16_g16", (2, N, K), "it stores matrices, and the weight has 3 axes"),
    ],
)
def test_what_does_not_fit_is_refused(scheme, shape, reason):
    with pytest.raises(UnsupportedError, match=reason):
        GPTQ().check([Weight(NAME, shape, "float32", fb.scheme(scheme).along(-1, len(shape)))])


def test_transposed_groups_and_activations_are_refused():
    assert "along axis -2 here" in GPTQ().why_not(Weight(NAME, (N, K), "float32", fb.scheme("int4_f16_g16").along(0, 2)))
    assert "activations" in GPTQ().why_not(Weight(NAME, (N, K), "float32", fb.scheme("int4_f16"), fb.scheme("int8")))


@pytest.mark.parametrize(
    ("settings", "change", "error", "message"),
    [
        ({"checkpoint_format": "marlin"}, {}, UnsupportedError, "in the format 'marlin'"),
        ({"sym": True}, {}, QuantError, "sym, but .*qzeros has zero points other than 8; set sym to false"),
        ({}, {"scales": np.ones((3, N), np.float16)}, QuantError, "do not fit together"),
        ({}, {"scales": np.ones((4, N), np.int32)}, QuantError, r"is int32\(4, 32\)"),
        ({}, {"qweight": np.ones((K * 4 // 32, N), np.float32)}, QuantError, r"qweight' is float32\(8, 32\), not that of"),
        ({}, {"qzeros": np.ones((4, N * 4 // 32), np.float16)}, QuantError, r"qzeros' is float16\(4, 4\), not that of"),
        ({}, {"qweight": np.ones((1, K * 4 // 32, N), np.int32)}, QuantError, r"qweight' is int32\(1, 8, 32\), not that of"),
        ({}, {"g_idx": np.full(K, 4, np.int32)}, QuantError, "group outside 0 .. 3"),
        ({}, {"g_idx": np.zeros(K - 1, np.int32)}, QuantError, "expected 64 integers"),
        ({}, {"qzeros": None}, QuantError, r"qzeros' is missing"),
        ({"group_size": "x"}, {}, QuantError, "group_size"),
    ],
)
def test_damaged_layers_are_refused(settings, change, error, message):
    arrays = random_arrays(4) | {f"{MODULE}.{part}": array for part, array in change.items()}
    arrays = {name: array for name, array in arrays.items() if array is not None}
    with pytest.raises(error, match=message):
        GPTQ().decoded(config(**settings), tensors(arrays), "here")[NAME]


def test_a_directory_goes_out_and_comes_back(tmp_path):
    weight, q = quantized("int4_f16_g16", (N, K), "float16")
    options = {
        "weights": [weight],
        "kept": ["model.norm.weight"],
        "config": {"model_type": "llama", "torch_dtype": "float16"},
    }
    with ContainerWriter(tmp_path / "m", GPTQ(), **options) as writer:
        writer.add(weight.name, q)
        writer.add("model.norm.weight", np.ones(K, np.float16))
    found = io.read(tmp_path / "m")
    assert found.notes == ("gptq: 1 weights in int4_f16_g16",)
    np.testing.assert_array_equal(values(found.tensors[NAME]), values(q))
    assert found.tensors["model.norm.weight"].dtype == jnp.float16
    with pytest.raises(QuantError, match="lacks 'quantization_config'"):
        GPTQ().decoded({}, tensors(random_arrays(4)), "here")
