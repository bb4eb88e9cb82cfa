"""Quantizes a Hugging Face directory by llm-compressor or gptqmodel; the half of `bench.peer_gptq` that runs in the peers' environment.

    PEER_PYTHON bench/peer_gptq_torch.py SOURCE OUT JOB

SOURCE has the float32 model, the calibration tokens `windows.npy`, and `check.npz` with tokens and the logits that fewbit has for
them. JOB is a JSON object: package, scheme, method and observer, as `bench.peer_gptq` makes it. OUT gets the quantized model,
the logits of the weights before they are packed (`logits.npy`), and `result.json`. It imports nothing of fewbit.
"""

import importlib.metadata
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")  # its own choice on two cores is 1, which it then refuses

import numpy as np
import torch
import transformers

VERSIONS = ("llmcompressor", "compressed-tensors", "gptqmodel", "transformers", "torch")
BATCH = 16
INTEGERS = {"int4_g64": (4, 64), "int3_g64": (3, 64)}
FLOATS = {"nvfp4": "NVFP4A16", "mxfp4": "MXFP4A16"}


def main() -> None:
    """Runs one job."""
    source, out, job = Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3])
    check, windows = np.load(source / "check.npz"), np.load(source / "windows.npy")
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    error = np.abs(logits(model, check["tokens"]) - check["logits"]).max() / np.abs(check["logits"]).max()
    result = PACKAGES[job["package"]](source, out, windows, check["tokens"], job)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (out / name).write_bytes((source / name).read_bytes())
    result |= {"float_logits_error": float(error), "versions": versions()}
    (out / "result.json").write_text(json.dumps(result, default=str))


def versions() -> dict[str, str]:
    """The versions of those packages that are installed."""
    found = {}
    for name in VERSIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def logits(model: Any, tokens: np.ndarray) -> np.ndarray:
    """The logits of a model of transformers."""
    with torch.no_grad():
        return model(torch.from_numpy(tokens).long()).logits.float().numpy()


def by_llm_compressor(
    source: Path, out: Path, windows: np.ndarray, tokens: np.ndarray, job: dict[str, Any]
) -> dict[str, Any]:
    """GPTQ, AWQ or rounding by llm-compressor; writes compressed-tensors."""
    from compressed_tensors.quantization import preset_name_to_scheme
    from datasets import Dataset  # pyright: ignore[reportMissingImports]
    from llmcompressor import oneshot  # pyright: ignore[reportMissingImports]
    from llmcompressor.modifiers.quantization import GPTQModifier, QuantizationModifier  # pyright: ignore[reportMissingImports]
    from llmcompressor.modifiers.transform.awq import AWQModifier  # pyright: ignore[reportMissingImports]
    from llmcompressor.pipelines.cache import IntermediatesCache  # pyright: ignore[reportMissingImports]

    scheme = job["scheme"]
    group = preset_name_to_scheme(FLOATS.get(scheme, "W4A16"), ["Linear"])
    assert group.weights is not None
    if scheme in INTEGERS:
        group.weights.num_bits, group.weights.group_size = INTEGERS[scheme]
    if job["observer"] is not None:
        group.weights.observer = job["observer"]
    kind = GPTQModifier if job["method"] == "gptq" else QuantizationModifier
    recipe = [kind(config_groups={"group_0": group}, ignore=["lm_head"], **job.get("settings", {}))]
    scaling = {}
    if job["method"] == "awq":
        IntermediatesCache.pin_memory = lambda *_: None  # torch refuses to pin memory on a machine without an accelerator
        recipe.insert(0, AWQModifier())
        scaling = {name: getattr(recipe[0], name) for name in ("duo_scaling", "n_grid")}
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    data: dict[str, Any] = {}
    if job["method"] != "rtn":
        ids = windows.tolist()
        data = {"dataset": Dataset.from_dict({"input_ids": ids, "attention_mask": np.ones_like(windows).tolist()})}
        data |= {
            "num_calibration_samples": len(ids),
            "max_seq_length": windows.shape[1],
            "shuffle_calibration_samples": False,
        }
        data |= {"batch_size": BATCH}
    taken = timed(lambda: oneshot(model=model, tokenizer=str(source), recipe=recipe, **data))
    args = model.model.layers[0].mlp.down_proj.quantization_scheme.weights
    found = logits(model, tokens)
    model.save_pretrained(out, save_compressed=True)
    np.save(out / "logits.npy", found)
    return {**taken, "settings": json.loads(args.model_dump_json()) | scaling}


def by_gptqmodel(source: Path, out: Path, windows: np.ndarray, tokens: np.ndarray, job: dict[str, Any]) -> dict[str, Any]:
    """GPTQ by gptqmodel, with its defaults; writes its own layout."""
    from gptqmodel import BACKEND, GPTQModel, QuantizeConfig  # pyright: ignore[reportMissingImports]

    bits, group_size = INTEGERS[job["scheme"]]
    config = QuantizeConfig(bits=bits, group_size=group_size, device="cpu", **job.get("settings", {}))
    model = GPTQModel.load(str(source), config, dtype=torch.float32)
    rows = [{"input_ids": row.tolist(), "attention_mask": [1] * len(row)} for row in windows]
    taken = timed(lambda: model.quantize(rows, batch_size=BATCH))
    model.save(str(out))
    read = GPTQModel.load(str(out), device="cpu", backend=BACKEND.TORCH, dtype=torch.float16)  # float32 it refuses
    np.save(out / "logits.npy", logits(read.model, tokens))
    return {**taken, "settings": config.to_dict()}


def timed(work: Callable[[], Any]) -> dict[str, float]:
    """The seconds of some work, and those of the processor."""
    start, processor = time.perf_counter(), time.process_time()
    work()
    return {"seconds": time.perf_counter() - start, "cpu_seconds": time.process_time() - processor}


PACKAGES = {"llm-compressor": by_llm_compressor, "gptqmodel": by_gptqmodel}


if __name__ == "__main__":
    main()
