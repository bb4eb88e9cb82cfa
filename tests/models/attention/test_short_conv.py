"""Short convolutions: what a cache keeps of them, and what is refused. What they share with linear attention is in test_linear."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from fewbit.errors import QuantError
from fewbit.models import DecoderConfig, HybridCache, ShortConvolution, empty_cache
from fewbit.models.attention.short_conv import short_convolution
from tests.nets.random_decoder import MAMBA, SHORT_CONV


def test_a_cache_has_keys_of_the_one_layer_and_inputs_of_the_others():
    cache = empty_cache(SHORT_CONV, batch=2, max_length=14, dtype=jnp.bfloat16)
    assert isinstance(cache, HybridCache)
    assert cache.kv.keys.shape == (1, 2, 2, 14, 8)
    assert [state.inputs.shape for state in cache.states] == [(2, 2, 24)] * 3
    assert all(state.inputs.dtype == jnp.bfloat16 and state.memory.size == 0 for state in cache.states)


def test_a_token_sees_itself_and_those_before_it_in_the_kernel():
    part = ShortConvolution((0,), channels=4, kernel=3)
    attn = {"in": jnp.tile(jnp.eye(4), (3, 1)), "conv1d": jnp.ones((4, 1, 3))}
    y = jnp.zeros((1, 6, 4)).at[0, 2].set(2.0).at[0, 4].set(3.0)
    out, state = short_convolution(y, attn, part)
    # c is y, so that only tokens 2 and 4 are not 0: 2 (2 2) and 3 (2 2 + 3 3).
    np.testing.assert_array_equal(out[0, :, 0], [0, 0, 8, 0, 39, 0])
    np.testing.assert_array_equal(state.inputs[0, :, 0], [9, 0])


def test_it_continues_in_bfloat16():
    """Small integers, whose products and sums are exact, in three runs as in one."""
    part = SHORT_CONV.short_conv
    draw = np.random.default_rng(0)
    attn = {"in": draw.integers(-1, 2, (72, 24)), "in_bias": draw.integers(-1, 2, 72)}
    attn |= {"conv1d": draw.integers(-2, 3, (24, 1, 3)), "conv1d_bias": draw.integers(-2, 3, 24)}
    attn = {name: jnp.asarray(numbers, jnp.bfloat16) for name, numbers in attn.items()}
    y = jnp.asarray(draw.integers(-1, 2, (2, 9, 24)) * (draw.random((2, 9, 24)) < 0.2), jnp.bfloat16)
    whole, last = short_convolution(y, attn, part)
    outs, state = [], None
    for tokens in (y[:, :5], y[:, 5:6], y[:, 6:]):
        out, state = short_convolution(tokens, attn, part, state)
        outs.append(out)
    assert whole.dtype == last.inputs.dtype == jnp.bfloat16 and np.any(np.asarray(whole))
    np.testing.assert_array_equal(jnp.concatenate(outs, axis=1), whole)
    np.testing.assert_array_equal(state.inputs, last.inputs)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"kernel": 0}, r"short_conv\.kernel is 0, must be a positive integer"),
        ({"bias": 1}, r"short_conv\.bias is 1, must be true or false"),
        ({"layers": ()}, r"short_conv\.layers is \(\), must be layers in ascending order"),
        ({"layers": (0, 1, 2, 3)}, r"short_conv\.layers has 4 of 4 layers; one without is expected"),
        ({"layers": (0, 4)}, r"short_conv\.layers is \(0, 4\), must be layers from 0 to 3"),
        ({"channels": 12}, r"short_conv\.channels is 12, must be width, 24"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_refuses(changed, message):
    with pytest.raises(QuantError, match=message):
        dataclasses.replace(SHORT_CONV, short_conv=dataclasses.replace(SHORT_CONV.short_conv, **changed))


def test_one_kind_of_state_is_expected():
    with pytest.raises(QuantError, match="mamba and short_conv are given; expected one of them"):
        dataclasses.replace(SHORT_CONV, mamba=MAMBA.mamba)


def test_its_json_comes_back():
    assert DecoderConfig.from_json(SHORT_CONV.to_json()) == SHORT_CONV
