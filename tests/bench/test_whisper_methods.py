"""Whisper's bench: its net runs on small random weights, and a model has no distance from itself."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench import whisper
from bench.whisper_methods import edit_distance, outputs, quality
from bench.whisper_methods import whisper as run

WIDTH, VOCABULARY = 24, 48


@pytest.fixture
def params(monkeypatch) -> whisper.Weights:
    """The parameters of a narrow Whisper whose first tokens are in its small vocabulary."""
    monkeypatch.setattr(whisper, "START", (45, 46))
    monkeypatch.setattr(whisper, "END", 47)
    random = np.random.default_rng(0)

    def normal(*shape: int) -> jax.Array:
        return jax.device_put(np.float32(random.standard_normal(shape) / 8))

    found = {"decoder/embeddings/weight": normal(VOCABULARY, WIDTH)}
    for side, places in (("encoder", 1500), ("decoder", 448)):
        found[f"{side}/position_encodings/encodings"] = normal(places, WIDTH)
        norms, linears = [side], []
        for i in range(whisper.LAYERS):
            at = f"{side}/layer_{i}"
            norms += [f"{at}/{part}" for part in ("self_attention", "attention", "ffn")]
            linears += [(f"{at}/self_attention/linear_0", 3, 1), (f"{at}/self_attention/linear_1", 1, 1)]
            linears += [(f"{at}/attention/linear_{j}", outputs, 1) for j, outputs in enumerate((1, 2, 1))]
            linears += [(f"{at}/ffn/linear_0", 4, 1), (f"{at}/ffn/linear_1", 1, 4)]
        for name in norms:
            found |= {f"{name}/layer_norm/gamma": jnp.ones(WIDTH), f"{name}/layer_norm/beta": normal(WIDTH)}
        for name, rows, columns in linears:
            found |= {f"{name}/weight": normal(rows * WIDTH, columns * WIDTH), f"{name}/bias": normal(rows * WIDTH)}
    for name, channels in (("conv1", whisper.MELS), ("conv2", WIDTH)):
        found |= {f"encoder/{name}/weight": normal(WIDTH, channels, 3), f"encoder/{name}/bias": normal(WIDTH)}
    return found


@pytest.mark.slow
def test_a_model_has_no_distance_from_itself(params, monkeypatch):
    monkeypatch.setattr("bench.whisper_methods.MOST_TOKENS", 8)
    mel = jnp.asarray(np.random.default_rng(1).standard_normal((whisper.MELS, 3000)), jnp.float32)
    tokens = jnp.array(whisper.transcribed(params, whisper.remembered(params, whisper.encoded(params, mel, {})), 8))
    found = quality(params, [(mel, tokens)], [outputs(params, mel, tokens)])
    assert found == {"encoder_error": 0, "kl": 0, "kl_error": 0, "top1": 1, "token_errors": 0}
    logits = run(params, mel, tokens)[1]
    np.testing.assert_array_equal(jnp.argmax(logits, -1)[1:-1], tokens[2:])  # the transcript is the greedy one
    np.testing.assert_allclose(run(params, mel, tokens[:-2])[1], logits[:-2], atol=1e-5)  # later tokens are not seen


def test_edit_distance():
    assert [edit_distance([1, 2, 3], found) for found in ([1, 2, 3], [], [1, 3], [2, 1, 3], [9, 1, 2, 3, 4])] == [
        0,
        3,
        1,
        2,
        2,
    ]


def test_windows_are_filled_with_silence():
    found = whisper.windows(np.ones(whisper.RATE * 31))
    assert found.shape == (2, whisper.RATE * 30) and found[1].sum() == whisper.RATE
