"""AWQ weights: the numbers of AutoAWQ's formula both ways, and its order of columns."""

import jax.numpy as jnp
import numpy as np
import pytest

import fewbit as fb
from fewbit.errors import QuantError, UnsupportedError
from fewbit.io.containers.awq import AWQ
from fewbit.io.containers.container import Weight
from tests.io.containers.stored import MODULE, NAME, quantized, read_back, tensors, values

K, N = 64, 16
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The column of each code of a word, from the lowest bits."""
CONFIG = {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "GEMM", "zero_point": True}}


def columns(words):
    """The codes of words, column by column."""
    words = words.view(np.uint32)
    codes = np.empty((len(words), words.shape[1] * 8), np.int32)
    for place, column in enumerate(ORDER):
        codes[:, column::8] = words >> np.uint32(4 * place) & np.uint32(15)
    return codes


def reference(arrays):
    """AutoAWQ's `dequantize_gemm`: `(q - zero) * scale` in float16, transposed."""
    qweight, qzeros, scales = (arrays[f"{MODULE}.{part}"] for part in ("qweight", "qzeros", "scales"))
    group = len(qweight) // len(scales)
    difference = columns(qweight) - np.repeat(columns(qzeros), group, axis=0)
    product = difference.astype(np.float32) * np.repeat(scales, group, axis=0).astype(np.float32)
    return product.astype(np.float16).T


def random_arrays():
    rng = np.random.default_rng(0)
    words = [rng.integers(-(2**31), 2**31, (rows, N // 8), np.int32) for rows in (K, 2)]
    scales = rng.choice(np.array([0, 6e-8, 0.02, -0.5, 3.25], np.float16), (2, N))
    return dict(zip((f"{MODULE}.{part}" for part in ("qweight", "qzeros", "scales")), (*words, scales), strict=True))


def test_random_words_decode_as_the_formula():
    arrays = random_arrays()
    found = AWQ().decoded(CONFIG, tensors(arrays | {f"{MODULE}.bias": np.ones(N, np.float16)}), "here")
    assert found.info[NAME].scheme.name == "uint4_f16_g32" and f"{MODULE}.bias" in found
    np.testing.assert_array_equal(values(found[NAME], np.float16), reference(arrays))


@pytest.mark.parametrize("scheme", ["uint4_f16_g32", "int4_f16_g16", "q4_0", "uint4_f16", "uint4_f16_g64"])
def test_what_is_written_has_the_values_of_the_formula_and_reads_back(scheme):
    weight, q = quantized(scheme, (N, K), "float16")
    arrays, back = read_back(AWQ(), weight, q)
    assert [array.shape for array in arrays.values()] == [(K, 2), (q.scale.shape[1], 2), (q.scale.shape[1], N)]
    np.testing.assert_array_equal(reference(arrays), values(q, np.float16))
    np.testing.assert_array_equal(values(back), values(q))
    assert back.scheme.tile == q.scheme.tile and back.scheme.name.startswith("uint4_f16")


def test_codes_are_in_the_order_of_the_columns():
    """Column 2 takes bits 4 to 7, column 1 bits 16 to 19."""
    weight, q = quantized("uint4_f16_g32", (N, K))
    codes = np.zeros((N, K // 2), np.uint8)
    codes[2, 0], codes[1, 0] = 0xA, 0xB
    arrays = AWQ().encoded(weight, fb.QArray(jnp.asarray(codes), q.scale, q.zero_point, None, q.scheme, q.dtype))
    assert arrays[f"{MODULE}.qweight"].view(np.uint32)[0, 0] == 0x000B00A0
    assert not arrays[f"{MODULE}.qweight"][1:].any()


def test_what_stays_in_float_is_named():
    weight, _ = quantized("uint4_f16_g32", (N, K))
    settings = (
        AWQ()
        .files([weight], ["model.layers.0.mlp.gate.weight", "model.layers.0.post_norm.weight", "b.bias"], {})
        .config["quantization_config"]
    )
    assert settings["modules_to_not_convert"] == ["model.layers.0.mlp.gate", "lm_head"] and settings["group_size"] == 32
    with pytest.raises(UnsupportedError, match=r"one group size; the weights have \[-1, 32\]"):
        AWQ().files([weight, quantized("uint4_f16", (N, K))[0]], [], {})


@pytest.mark.parametrize(
    ("scheme", "shape", "reason"),
    [
        ("uint8", (N, K), "not integers of 4 bits"),
        ("int4_f16_g32", (N + 4, K), r"\(20, 64\) is not a multiple of 8 outputs and of groups of 32 inputs"),
        ("int4_f16_g32", (N, K + 8), "groups of 32 inputs"),
        ("uint4", (N, K), r"float32, not float16.*Schemes that fit: uint4_f16_g64, uint4_f16_g32"),
    ],
)
def test_what_does_not_fit_is_refused(scheme, shape, reason):
    with pytest.raises(UnsupportedError, match=reason):
        AWQ().check([Weight(NAME, shape, "float32", fb.scheme(scheme))])


@pytest.mark.parametrize(
    ("settings", "change", "error", "message"),
    [
        ({"version": "gemv"}, {}, UnsupportedError, "layout 'gemv'; 4 bits in the layout gemm"),
        ({"bits": 3}, {}, UnsupportedError, "3 bits"),
        ({}, {"qzeros": np.zeros((2, 3), np.int32)}, QuantError, "do not fit together"),
        ({}, {"scales": np.zeros((2, N), np.uint8)}, QuantError, r"uint8\(2, 16\), not those of an AWQ layer"),
        ({}, {"scales": None}, QuantError, "scales' is missing"),
    ],
)
def test_damaged_layers_are_refused(settings, change, error, message):
    arrays = random_arrays() | {f"{MODULE}.{part}": array for part, array in change.items()}
    arrays = {name: array for name, array in arrays.items() if array is not None}
    config = {"quantization_config": CONFIG["quantization_config"] | settings}
    with pytest.raises(error, match=message):
        AWQ().decoded(config, tensors(arrays), "here")
