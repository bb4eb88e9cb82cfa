"""The tables whose texts are committed: plans, inspections and comparisons of a Llama under both kinds of names.

`PYTHONPATH=src python -m tests.cli.tables` writes the files in `tests/cli/tables/` anew.
"""

import functools
import itertools
import math
from pathlib import Path

import numpy as np

from fewbit.cli.render import comparison_table, inspection_table, plan_table
from fewbit.evaluate import Comparison, Divergence, Estimate, Perplexity
from fewbit.io import TensorInfo
from fewbit.models import HUGGING_FACE, DecoderConfig, shapes
from fewbit.ops import Policy
from fewbit.recipe import Plan, PlanRow
from fewbit.workflows import Candidate, Inspection, Model, TensorResult
from fewbit.workflows.evaluate import Baseline, DecoderEngine
from fewbit.workflows.inspect import TensorEntry

FOLDER = Path(__file__).parent / "tables"
WIDTHS = (60, 80, 100, 160)
LLAMA = DecoderConfig(vocab=128_256, layers=8, width=4096, heads=32, kv_heads=8, head_dim=128, hidden=14_336, tied=False)
POLICIES = {"embed": Policy("q8_0"), "head": Policy("q8_0"), "down": Policy("mxfp4", "mxfp8", dlhs="mxfp8", drhs="mxfp8")}


@functools.cache
def plan_of(names: str) -> Plan:
    """A plan of a Llama 3 of 8 layers, under our paths or under Hugging Face's names, and of a stack of experts."""
    rows = []
    for path, shape in {**shapes(LLAMA), "experts/down": (2, 4, 256, 128)}.items():
        name = path if names == "paths" or path.startswith("experts") else HUGGING_FACE.name(path)
        policy = None if len(shape) == 1 else POLICIES.get(path.rpartition("/")[2], Policy("nf4"))
        size = math.prod(shape)
        after = 2 * size if policy is None else size * 9 // 16
        reason = "a vector: no product contracts it" if policy is None else ""
        if path.startswith("experts"):
            reason = "axis assumed: no code was traced; takes more bytes than before: few elements share a scale"
        axis = () if policy is None else (-1,)
        rows.append(PlanRow(name, shape, "bfloat16", policy, axis, (), (), 2 * size, after, reason))
    return Plan(tuple(rows), "nf4")


def inspection_of(names: str) -> Inspection:
    """The same parameters as a file holds them."""
    rows = plan_of(names).rows
    entries = tuple(
        TensorEntry(r.path, r.shape, r.dtype, r.kind, r.policy is not None, r.bytes_after, 8 * r.bytes_after / r.size)
        for r in rows
    )
    size, nbytes = sum(r.size for r in rows), sum(r.bytes_after for r in rows)
    shown = entries[:11] + entries[-3:]
    return Inspection(Path("m"), "fewbit", "llama", "", None, {}, {}, shown, size, nbytes, nbytes, ())


def comparison_of(names: str, width: int) -> str:
    """Five recipes with figures of our own invention."""
    perplexity = Perplexity(12.3456, 0.1234, 2048)
    info = {"w": TensorInfo((4096, 4096), "float32", "F32", 1 << 26)}
    model = Model(Path("m"), "gguf", None, "", info, lambda path: np.zeros(1))
    engine = DecoderEngine("fewbit", LLAMA.vocab, LLAMA.context, LLAMA)
    base = Baseline(model, engine, np.zeros((1, 2), np.int32), perplexity, lambda tokens: tokens, {})
    candidates = []
    for i, recipe in enumerate(("int8", "nf4", "maxtext/intmp/dense_llm_weight_only_scale")):
        worst = "layers/7/mlp/down" if names == "paths" else "model.language_model.layers.7.mlp.down_proj.weight"
        results = (TensorResult(worst, (8, 8), "nf4", True, 20.25 - i, 256, 144, 0.0),)
        found = Perplexity(12.5 + i, 0.1251, 2048)
        kl = Divergence(Estimate(0.0123 * (i + 1), 0.0004), 0.01, 0.02, 0.03, 0.4)
        quality = Comparison(
            perplexity, found, Estimate(math.log(found.value / perplexity.value), 0.001), kl, Estimate(0.9712, 0.0034)
        )
        candidates.append(
            Candidate(recipe, plan_of("paths"), None, results, 4_837_283_840 >> i, 8.5 / (i + 1), quality, 1.0, 2.0)
        )
    return comparison_table(base, candidates, width=width)


TABLES = {
    "plan": lambda names, width: plan_table(plan_of(names), full=False, width=width),
    "inspect": lambda names, width: inspection_table(inspection_of(names), width=width),
    "compare": comparison_of,
}
NAMES = tuple(f"{kind}-{names}" for names in ("paths", "hugging-face") for kind in TABLES)


@functools.cache
def text_of(name: str, width: int) -> str:
    """The text of the table of a name, at a width."""
    kind, _, names = name.partition("-")
    return TABLES[kind](names, width)


def path_of(name: str, width: int) -> Path:
    """The file of one table."""
    return FOLDER / f"{name}-{width}.txt"


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, width in itertools.product(NAMES, WIDTHS):
        path_of(name, width).write_text(text_of(name, width) + "\n", encoding="utf-8")
