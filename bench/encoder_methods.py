"""Quality loss of a sentence encoder, by method and scheme.

    python -m bench.encoder_methods [--pieces 32] [--schemes int4_g64,nf4] [--methods rtn,gptq] [--save [--keep]]

Each method runs with and without bias correction. MiniLM (6 layers of width 384, float32 as it was released) over pieces of
128 tokens of one text: the methods learn from the first pieces, and the embeddings of as many others are compared with those
of the float model: the relative error `|Q - F| / |F|` of all, and the mean of their cosines. Only the weights of the layers
are quantized.
"""

import argparse
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

import fewbit as fb

from .encoder_activations import PACKAGES, cosines, minilm
from .facts import add_keep, headline, kept_rows, save
from .memory import peak_bytes, reset_peak

SCHEMES = ("int4_g64", "nf4", "mxfp4", "nvfp4", "int3_g64", "int2_g32")
METHODS = ("rtn", "hqq", "imatrix", "awq", "rounding", "gptq", "gptq_mse", "qep", "qep+gptq_mse")
"""`qep` and `qep+gptq_mse` go through the model in order (`fb.methods.quantize_sequentially`), the others see the float model."""


def main() -> None:
    """Prints the table, and writes it."""
    parser = argparse.ArgumentParser(prog="python -m bench.encoder_methods", description="an encoder by method and scheme")
    parser.add_argument("--pieces", type=int, default=32, help="to learn from, and as many to compare")
    add_schemes_and_methods(parser)
    options = parser.parse_args()
    params, encode, pieces, text = minilm(2 * options.pieces)
    learned, compared = pieces[: options.pieces], pieces[options.pieces :]
    print(f"{headline(PACKAGES)}; {text}, {options.pieces} pieces", flush=True)
    reference, rows = np.asarray(encode(params, compared)), kept_rows("encoder_methods", options, "scheme", "method")
    for row, trees in by_scheme_and_method(encode, params, [learned], r"encoder\..*\.weight", options):
        for kind, tree in trees.items():
            ours = np.asarray(fb.transparent(encode)(tree, compared))
            row[f"{kind}_error"] = round(float(np.linalg.norm(ours - reference) / np.linalg.norm(reference)), 6)
            row[f"{kind}_cosine"] = cosines(ours, reference)["mean"]
        rows[row["scheme"], row["method"]] = row
        print(row, flush=True)
        if options.save:  # after each row: some take minutes
            save("encoder_methods", PACKAGES, text=text, pieces=options.pieces, rows=list(rows.values()))


def add_schemes_and_methods(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `by_scheme_and_method`, and `--save`."""
    parser.add_argument("--schemes", default=",".join(SCHEMES))
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--save", action="store_true", help="write the file in bench/results")
    add_keep(parser)


def by_scheme_and_method(
    fn: Callable[..., Any], params: Any, batches: Sequence[Any], path: str, options: argparse.Namespace
) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Parameters quantized by each of the chosen methods to each of the schemes.

    Args:
        fn: the model, `fn(params, *inputs)`.
        params: its float parameters.
        batches: what the methods learn from, see `fb.observe`.
        path: a pattern of the matrices that are quantized.
        options: of `add_schemes_and_methods`.

    Yields:
        The facts of each row; and the parameters, "plain" as the method gives them and "biases" with corrected biases.
    """
    inputs = batches[0] if isinstance(batches[0], tuple) else (batches[0],)
    for scheme in options.schemes.split(","):
        recipe = fb.Recipe((fb.Rule(path, scheme, roles=("matmul",)),))
        plan = fb.plan(fn, params, *inputs, recipe=recipe)
        for name in options.methods.split(","):
            reset_peak()
            method, start = fb.methods.method(name), time.perf_counter()
            if isinstance(method, fb.methods.QEP):
                run = functools.partial(fb.methods.quantize_sequentially, fn, params, batches, plan, method=method)
                found, corrected = run(), functools.partial(run, correct_biases=True)
            else:
                stats = fb.observe(fn, params, batches, recipe, collect=("sum", *method.collect))
                found = fb.quantize_params(params, plan, method=method, stats=stats if method.collect else None)
                corrected = functools.partial(fb.methods.correct_biases, params, found, plan, stats)
            found = jax.block_until_ready(found)
            row: dict[str, Any] = {"scheme": scheme, "method": name, "seconds": time.perf_counter() - start}
            row["peak_bytes"] = peak_bytes()
            yield row, {"plain": found, "biases": corrected()}
        jax.clear_caches()  # the programs of six schemes have more memory maps than Linux gives a process (65,530)


if __name__ == "__main__":
    main()
