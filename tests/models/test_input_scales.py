"""Scales of inputs: exact for every family of decoder, in the float64 formulas of the network."""

import dataclasses

import ml_dtypes
import numpy as np
import pytest

from fewbit.models import Experts, params_from_paths, paths_of_params, shapes
from fewbit.models.input_scales import FoldedScales, scalable_inputs, why_not_scaled
from tests.nets.random_decoder import (
    BY_HEAD,
    BY_KEY_HEAD,
    CHUNKS,
    CORRECTED,
    FEATURES,
    LATENT,
    LEARNED_POSITIONS,
    LINEAR,
    MAMBA,
    OTHERS,
    PARALLEL,
    SHARED_KEYS,
    SHORT_CONV,
    SINGLE_BLOCKS,
    SMALL,
    SUB_NORMS,
    TWO_WIDTHS,
    UNTIED,
    logits_float64,
    random_params,
    random_tokens,
)

INTERLEAVED = dataclasses.replace(OTHERS, activation="silu", norms="sandwich", norm_offset=0.5)
CONFIGS = {
    "small": SMALL,
    "untied": UNTIED,
    "features": FEATURES,
    "others": OTHERS,
    "interleaved": INTERLEAVED,
    "latent": LATENT,
    "linear": LINEAR,
    "linear by key head": BY_KEY_HEAD,
    "mamba": MAMBA,
    "short conv": SHORT_CONV,
    "sub norms": SUB_NORMS,
    "two widths": TWO_WIDTHS,
    "shared keys": SHARED_KEYS,
    "learned positions": LEARNED_POSITIONS,
    "by head": BY_HEAD,
    "parallel": PARALLEL,
    "single blocks": SINGLE_BLOCKS,
    "corrected": CORRECTED,
    "chunks": CHUNKS,
}
SPLIT = dataclasses.replace(LATENT, latent=dataclasses.replace(LATENT.latent, split=True))
"""As in GGUF files."""
EXACT = 1e-11  # float64: 2**-53 for each of about a thousand operations, with conditions of about 100


def arrays_of(config, dtype=np.float64) -> dict[str, np.ndarray]:
    return {path: np.asarray(x).astype(dtype) for path, x in paths_of_params(random_params(config), config).items()}


def scales_of(config) -> dict[str, np.ndarray]:
    """Scales between 1/4 and 4 for every input."""
    rng = np.random.default_rng(3)
    every = scalable_inputs(config)
    return {one.name: 4 ** rng.uniform(-1, 1, (*([one.groups] if one.groups else []), one.size)) for one in every}


def folded(config, arrays, scales) -> dict[str, np.ndarray]:
    changes = FoldedScales.of(scalable_inputs(config), scales, config, arrays.__getitem__)
    return {path: changes.applied(path, x) for path, x in arrays.items()}


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_do_not_change(name):
    config = CONFIGS[name]
    arrays, tokens = arrays_of(config), random_tokens(config, 1, 9)
    new = folded(config, arrays, scales_of(config))
    exact = logits_float64(params_from_paths(arrays, config), tokens, config)
    np.testing.assert_allclose(
        logits_float64(params_from_paths(new, config), tokens, config), exact, rtol=0, atol=EXACT * np.abs(exact).max()
    )
    readers = {part.path for one in scalable_inputs(config) for part in one.readers}
    assert all(not np.allclose(new[path], arrays[path]) for path in readers), "each input has a scale"


@pytest.mark.parametrize("layout", ["stacked", "joined"])
def test_stacks_of_experts_have_scales_each(layout):
    config = dataclasses.replace(SMALL, experts=Experts(3, 2, 12, layout=layout, bias=True))
    arrays = arrays_of(config)
    scales = {name: s for name, s in scales_of(config).items() if "experts" in name}
    assert {s.shape for s in scales.values()} == {(3, 12)} and len(scales) == config.layers
    new = folded(config, arrays, scales)
    at = "layers/0/mlp/experts/"

    def gate_and_up(arrays, ending=""):
        if layout == "joined":
            return np.split(arrays[f"{at}gate+up{ending}"], 2, axis=1)
        return arrays[f"{at}gate{ending}"], arrays[f"{at}up{ending}"]

    (gate, up), (new_gate, new_up) = gate_and_up(arrays), gate_and_up(new)
    np.testing.assert_array_equal(new_gate, gate)
    np.testing.assert_allclose(new[f"{at}down"] @ new_up, arrays[f"{at}down"] @ up, rtol=1e-11)
    (gate, up), (new_gate, new_up) = gate_and_up(arrays, "_bias"), gate_and_up(new, "_bias")
    np.testing.assert_array_equal(new_gate, gate)
    np.testing.assert_allclose(
        np.einsum("edf,ef->ed", new[f"{at}down"], new_up), np.einsum("edf,ef->ed", arrays[f"{at}down"], up), rtol=1e-11
    )


def test_the_rounding_of_a_gain_costs_nothing():
    """The weights get the ratio of the old gain and the rounded one."""
    config = dataclasses.replace(FEATURES, norm_offset=1.0)
    arrays = {p: x.astype(ml_dtypes.bfloat16) if p.endswith("norm") else x for p, x in arrays_of(config).items()}
    new, tokens = folded(config, arrays, scales_of(config)), random_tokens(config, 1, 9)
    assert new["layers/0/attn/norm"].dtype == ml_dtypes.bfloat16
    exact = logits_float64(params_from_paths(arrays, config), tokens, config)
    np.testing.assert_allclose(
        logits_float64(params_from_paths(new, config), tokens, config), exact, rtol=0, atol=EXACT * np.abs(exact).max()
    )


def test_a_gain_that_would_vanish_stays():
    arrays = arrays_of(SMALL, np.float16)
    arrays["norm"] = np.float16([6e-8, 0, 1, 2] * 6)
    config = dataclasses.replace(SMALL, tied=False)
    arrays["head"] = arrays["embed"]
    changes = FoldedScales.of(scalable_inputs(config), {"norm": np.full(24, 4.0)}, config, arrays.__getitem__)
    assert changes.gains["norm"][:4].tolist() == [np.float16(6e-8), 0, 0.25, 0.5]
    (((axis, factor),),) = [changes.factors["head"]]
    assert axis == -1 and factor[:4].tolist() == [1, 1, 4, 4]
    assert changes.applied("layers/0/attn/q", arrays["layers/0/attn/q"]) is arrays["layers/0/attn/q"]


def test_every_weight_reads_one_input_or_has_a_reason():
    for config in (*CONFIGS.values(), SPLIT):
        readers = [part.path for one in scalable_inputs(config) for part in one.readers]
        assert len(readers) == len(set(readers))
        matrices = {
            path for path, shape in shapes(config).items() if len(shape) > 1 and not path.endswith(("bias", "conv1d"))
        }
        assert set(readers) <= matrices
        reasons = {why_not_scaled(path, config) for path in matrices - set(readers)}
        expected = {"its rows are read as embeddings, too"}
        if config is OTHERS:
            expected |= {"no norm comes before it", "the activation clamped_swiglu is not linear in up"}
        if config is SPLIT:
            expected |= {"the projection of the latent is stored in two parts, as in GGUF files"}
        if config.positions:
            expected |= {"no product reads it"}
        if config is BY_HEAD:
            expected |= {"the activation gelu is not linear in up"}
        if config is SINGLE_BLOCKS:
            expected |= {"no norm comes before it", "the activation relu2 is not linear in up"}
        if config.value_norm:
            expected |= {"values are normed after their projection"}
        if config.per_layer is not None:
            expected |= {"no norm comes before it"}
        assert reasons == expected


def test_heads_that_share_a_value_share_its_scales():
    (one,) = [one for one in scalable_inputs(SMALL) if one.name == "layers/1/attn/v"]
    assert one.size == SMALL.kv_heads * SMALL.head_dim == len(one.sources[0].places)
    assert one.channels[:8] == one.channels[8:16] == one.channels[16:24] == tuple(range(8))
    assert one.channels[24:32] == tuple(range(8, 16)) and len(one.channels) == SMALL.heads * SMALL.head_dim
