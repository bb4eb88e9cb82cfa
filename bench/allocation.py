"""Bit allocation on SmolLM2, compared with uniform schemes.

    python -m bench.allocation [--bits 4.25,4.5,5.2] [--candidates mxfp4,nvfp4,int3_g64,int8] [--save]

The model is that of `bench.methods`. A plan by the estimated losses is compared with one by the losses that `fewbit plan --measure`
measures on the calibration text. The rank correlation (Spearman) of a scheme compares the estimated loss of each group of weights
with the KL divergence of the model with that group alone quantized: on that text, and of some of the groups on another one.
"""

import argparse
import dataclasses
import sys
import time
from typing import Any

import jax

from fewbit import methods
from fewbit.recipe.plan import Plan
from fewbit.recipe.quantize_row import quantize_finite
from fewbit.workflows import calibrated_weights, calibration_data, load, plan_model, quantized_tensors, rotated
from fewbit.workflows.evaluate import Baseline
from fewbit.workflows.methods.allocation import WINDOW, WINDOWS, Sensitivity, allocated, rank_correlations, sensitivities

from .facts import headline, save
from .methods import PACKAGES, evaluated, language_quality

CANDIDATES = ("mxfp4", "nvfp4", "int3_g64", "int8")


def main() -> int:
    """Runs the comparison."""
    parser = argparse.ArgumentParser(prog="python -m bench.allocation", description="bit allocation against uniform schemes")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--bits", default="4.25,4.5,5.2")
    parser.add_argument("--candidates", default=",".join(CANDIDATES))
    parser.add_argument("--every", type=int, default=4, help="which groups are measured on the text that is evaluated, too")
    parser.add_argument("--tokens", type=int, default=8192, help="of the text that is evaluated")
    parser.add_argument("--save", action="store_true", help="write bench/results/allocation.json")
    options = parser.parse_args()
    print(headline(PACKAGES))
    model = rotated(load(options.model))
    first, start = plan_model(model, recipe="nvfp4"), time.perf_counter()
    windows = calibration_data(model, windows=WINDOWS, window=WINDOW).windows
    candidates = options.candidates.split(",")
    measured = sensitivities(model, first, candidates, windows, measure=True)
    seconds, on_calibration = time.perf_counter() - start, rank_correlations(measured)
    print(f"sensitivities of {len(measured)} groups and {len(candidates)} schemes in {seconds:.0f} s", flush=True)
    print(f"rank correlations of estimated and measured losses: {on_calibration}", flush=True)
    estimated = [dataclasses.replace(one, measured={}) for one in measured]
    short, plans = evaluated(model, 512), {scheme: plan_model(model, recipe=scheme) for scheme in candidates}
    sample = [
        dataclasses.replace(one, measured={scheme: measured_loss(short, made, one) for scheme, made in plans.items()})
        for one in estimated[:: options.every]
    ]
    correlations = rank_correlations(sample)
    print(f"rank correlations of {len(sample)} groups with losses on another text: {correlations}", flush=True)
    base = evaluated(model, options.tokens)
    rows = [
        {"losses": losses, **quality(base, allocated(first, found, float(bits)), name)}
        for bits in options.bits.split(",")
        for losses, found in (("estimated", estimated), ("measured", measured))
        for name in ("rtn", "gptq")
    ]
    if options.save:
        facts = {
            "model": options.model,
            "tokens": options.tokens,
            "candidates": candidates,
            "groups": len(estimated),
            "measured": len(sample),
            "seconds": seconds,
            "rank_correlation": correlations,
            "rank_correlation_on_calibration": on_calibration,
        }
        save("allocation", PACKAGES, **facts, rows=rows)
    return 0


def measured_loss(base: Baseline, plan: Plan, group: Sensitivity) -> float:
    """The KL divergence of the model with one group of weights in the plan's scheme."""
    model = base.model
    values = {path: quantize_finite(jax.numpy.asarray(model.load(path)), plan[path]) for path in group.paths}
    changed = dataclasses.replace(model, load=lambda path: values[path] if path in values else model.load(path))
    return language_quality(changed, base)["kl"]


def quality(base: Baseline, plan: Plan, name: str) -> dict[str, Any]:
    """The quality of a plan by one method, against the float model."""
    model, method, found = base.model, methods.method(name), {}
    if method.collect:
        found = calibrated_weights(model, plan, method, calibration_data(model))
    values = {result.path: jax.block_until_ready(value) for value, result in quantized_tensors(model, plan, {}, found)}
    counts: dict[str, int] = {}
    for row in plan:
        if row.policy is not None:
            counts[row.policy.weight.name] = counts.get(row.policy.weight.name, 0) + 1
    row = {
        "method": name,
        "bits": plan.bits_per_weight,
        "weights": counts,
        "expected": next(note for note in plan.notes if "nats a token" in note),
        **language_quality(dataclasses.replace(model, load=values.__getitem__), base),
    }
    print(
        f"{row['bits']:.3f} bits  {name:5} perplexity {row['perplexity']:.3f}  KL {row['kl']:.4f} ± {row['kl_error']:.4f}  {counts}"
    )
    return row


if __name__ == "__main__":
    sys.exit(main())
