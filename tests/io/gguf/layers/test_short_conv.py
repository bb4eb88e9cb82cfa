"""LFM2 as llama.cpp reads it: short convolutions, and the width of the feed-forward block."""

import numpy as np
import pytest

from fewbit import QuantError, UnsupportedError
from fewbit.io.gguf.metadata import architecture_fields, architecture_of
from tests.io.gguf.test_conversion import LAYER, converted, normal, quantized
from tests.io.gguf.test_metadata import config_of


def fields_of(**changed) -> dict:
    config = config_of("lfm2", **changed)
    found = architecture_fields(architecture_of(config), config)
    return {key.removeprefix("lfm2."): value for key, value in found.items()}


def test_the_fields_of_lfm2():
    assert fields_of() == {
        "general.architecture": "lfm2",
        "vocab_size": 300,
        "block_count": 3,
        "context_length": 256,
        "embedding_length": 64,
        "feed_forward_length": 96,  # 1.3 times 64, rounded up
        "attention.head_count": 4,
        "attention.head_count_kv": [0, 2, 0],
        "attention.layer_norm_rms_epsilon": 1e-3,
        "shortconv.l_cache": 3,
        "rope.dimension_count": 16,
        "rope.freq_base": 1e6,
    }
    before = fields_of(layer_types=None, full_attn_idxs=[0, 2], block_ff_dim=150, block_ffn_dim_multiplier=None)
    assert (before["feed_forward_length"], before["attention.head_count_kv"]) == (100, [2, 0, 2])
    assert fields_of(block_auto_adjust_ff_dim=False)["feed_forward_length"] == 96
    assert fields_of(layer_types=None)["attention.head_count_kv"] == [2, 2, 2]


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"layer_types": ["conv", "mamba", "conv"]}, UnsupportedError, "layer_types = 'mamba'; supported is 'conv' or"),
        ({"layer_types": ["conv", "full_attention"]}, QuantError, "2 layer_types and num_hidden_layers 3"),
        ({"conv_bias": True}, UnsupportedError, "only with conv_bias False"),
        ({"conv_L_cache": 0}, QuantError, "conv_L_cache is 0"),
        ({"block_ff_dim": "96"}, QuantError, "block_ff_dim is '96'"),
    ],
)
def test_what_llama_cpp_cannot_run_is_refused(changed, error, message):
    with pytest.raises(error, match=message):
        fields_of(**changed)


def test_the_convolution_has_two_axes_in_float32():
    taps = normal(64, 1, 3)
    found = converted("lfm2", {f"{LAYER}conv.conv.weight": taps.astype(np.float16)})
    (name, tensor), *others = found.items()
    assert (name, tensor.type_name, others) == ("blk.1.shortconv.conv.weight", "F32", [])
    np.testing.assert_array_equal(tensor.values(), taps.astype(np.float16).astype(np.float32)[:, 0])


def test_a_quantized_convolution_is_refused():
    with pytest.raises(
        QuantError, match=r"needs blk\.1\.shortconv\.conv\.weight in float32, but it is Q4_0; leave it float"
    ):
        converted("lfm2", {f"{LAYER}conv.conv.weight": quantized("Q4_0", 64, 1, 32)})


@pytest.mark.parametrize(("changed", "dropped"), [({}, True), ({"tie_embedding": False}, False)], ids=["tied", "untied"])
def test_a_tied_head_is_dropped(changed: dict, dropped: bool):
    found = converted("lfm2", {"lm_head.weight": normal(300, 64)}, **changed)
    assert ("output.weight" not in found) == dropped
