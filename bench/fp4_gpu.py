"""Times the 4- and 8-bit quantizers on an NVIDIA GPU.

    PYTHONPATH=src python -m bench.fp4_gpu [--elements 24903680] [--rounds 30] [--save DIRECTORY]

They are compared with qwantize's kernels, torchao's casts and a copy of the memory. Quantizes 24.9 million bfloat16 numbers
(the size of qwantize's own benchmark) unless its options say otherwise. The bound is bytes: what is read and written, over the copy
bandwidth measured in the same run. Nothing about speed is printed unless every quantizer gives the bytes that the reference in
JAX gives. Needs torch with CUDA and Triton; qwantize and torchao take part where they are installed.
"""

import argparse
import datetime
import importlib.metadata
import json
import pathlib
import platform
import statistics
import sys
from collections.abc import Callable
from typing import Any

import jax
import torch

from fewbit import torch as fbt

OURS = (
    ("mxfp4", "naive"), ("mxfp4", "optimal"), ("mxfp6", "optimal"), ("mxfp8", "naive"), ("mxfp8", "optimal"), ("nvfp4", "naive"),
    ("nvfp4", "optimal"), ("nf4", "naive"), ("int4_g32", "naive"), ("int8_g128", "naive"),
)  # fmt: skip
COLUMNS = 9728


def main() -> int:
    """Runs the comparison; the exit status is 1 when a value is wrong or there is no GPU."""
    parser = argparse.ArgumentParser(prog="python -m bench.fp4_gpu")
    parser.add_argument("--elements", type=int, default=2560 * COLUMNS)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--save", type=pathlib.Path, help="a directory; the file in it is named after the device")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device is here", file=sys.stderr)
        return 1
    jax.config.update("jax_platforms", "cpu")  # where JAX sees the GPU, it would take most of its memory
    torch.manual_seed(0)
    W = torch.randn(options.elements // COLUMNS, COLUMNS, device="cuda").mul_(0.02).bfloat16()
    wrong = [f"{name} {method}" for name, method in OURS if not is_right(W, name, method)]
    if wrong:
        print(f"a value is wrong, so no times are printed: {', '.join(wrong)}", file=sys.stderr)
        return 1
    rows = measured(W, options.rounds)
    for row in rows:
        print("{who:34} {us:9.1f} us ({low:.1f} to {high:.1f})  {of_copy:7.1%} of the copy bandwidth".format(**row))
    if options.save is not None:
        save(options.save, rows, W)
    return 0


def is_right(W: torch.Tensor, name: str, method: str) -> bool:
    """Whether the kernels give the bytes of JAX on the CPU, on numbers that are hard: zeros, tiny and huge rows, NaN."""
    hard = W[:64].clone()
    hard[0, :64], hard[1, 5], hard[2, 7] = 0, float("nan"), float("inf")
    hard[3] *= 1e-30
    hard[4] *= 1e30
    ours, plain = fbt.quantize(hard, name, method=method, backend="triton"), fbt.quantize(hard.cpu(), name, method=method)
    back = [fbt.dequantize(ours, torch.float32, backend="triton").cpu(), ours.cpu().dequantize(torch.float32)]
    same = [(ours.codes.cpu(), plain.codes), (ours.scale.cpu().view(torch.uint8), plain.scale.view(torch.uint8))]
    return all(torch.equal(a, b) for a, b in [*same, tuple(b.view(torch.int32) for b in back)])


def measured(W: torch.Tensor, rounds: int) -> list[dict[str, Any]]:
    """The figures of every contender, each round all of them once."""
    target = torch.empty_like(W)
    contenders: dict[str, tuple[Callable[[], Any], float]] = {"copy": (lambda: target.copy_(W), 2.0 * W.numel() * 2)}
    for name, method in OURS:
        q = fbt.quantize(W, name, method=method)
        quantize, dequantize = quantizer(W, name, method), decoder(q)
        reads = 2 if q.tensor_scale is not None else 1  # the tensor scale needs the largest magnitude first
        contenders[f"fewbit {name} {method}"] = quantize, 2.0 * W.numel() * reads + q.nbytes
        contenders[f"fewbit {name} {method}, decode"] = dequantize, 2.0 * W.numel() + q.nbytes
    contenders |= peers(W)
    seconds = timed({who: run for who, (run, _) in contenders.items()}, rounds)
    bandwidth = contenders["copy"][1] / statistics.median(seconds["copy"])
    rows = []
    for who, (_, nbytes) in contenders.items():
        times = sorted(seconds[who])
        middle = statistics.median(times)
        facts = {"us": 1e6 * middle, "low": 1e6 * times[0], "high": 1e6 * times[-1], "bytes": nbytes}
        rows.append({"who": who, **facts, "of_copy": nbytes / middle / bandwidth})
    return rows


def quantizer(W: torch.Tensor, name: str, method: str) -> Callable[[], Any]:
    """One of ours."""
    return lambda: fbt.quantize(W, name, method=method, backend="triton")  # type: ignore[arg-type]


def decoder(q: fbt.QTensor) -> Callable[[], Any]:
    """The way back to bfloat16."""
    return lambda: fbt.dequantize(q, backend="triton")


def peers(W: torch.Tensor) -> dict[str, tuple[Callable[[], Any], float]]:
    """What else is installed, with the bytes that a packed result would need: the work is the same, so the bound is."""
    found: dict[str, tuple[Callable[[], Any], float]] = {}
    try:
        import qwantize

        blocks = {"mxfp4": W.reshape(len(W), -1, 32), "nvfp4": W.reshape(len(W), -1, 16)}
        for name in ("mxfp4_naive", "mxfp4_optimal", "nvfp4_naive", "nvfp4_optimal"):
            run, cut = getattr(qwantize, f"{name}_triton"), blocks[name.split("_")[0]]
            found[f"qwantize {name}"] = (lambda run=run, cut=cut: run(cut)), 2.53 * W.numel()
    except ImportError:
        print("qwantize is not installed")
    try:
        from torchao.prototype.mx_formats.mx_tensor import MXTensor

        for dtype, size in ((torch.float4_e2m1fn_x2, 2.53), (torch.float8_e4m3fn, 3.03)):
            run = lambda dtype=dtype: MXTensor.to_mx(W, dtype, block_size=32)  # noqa: E731
            run()
            found[f"torchao to_mx {dtype}"] = run, size * W.numel()
    except (ImportError, AttributeError, NotImplementedError, AssertionError, RuntimeError) as error:
        print(f"torchao takes no part: {error}")
    return found


def timed(contenders: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """The seconds of every contender, interleaved, by events on the device, with the L2 cache overwritten in between."""
    cache = torch.empty(256 * 2**20, dtype=torch.uint8, device="cuda")
    for run in contenders.values():
        for _ in range(3):
            run()
    seconds: dict[str, list[float]] = {who: [] for who in contenders}
    for _ in range(rounds):
        for who, run in contenders.items():
            cache.zero_()
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            run()
            end.record()
            torch.cuda.synchronize()
            seconds[who].append(start.elapsed_time(end) / 1e3)
    return seconds


def save(directory: pathlib.Path, rows: list[dict[str, Any]], W: torch.Tensor) -> None:
    """Writes the rows, and what they were measured on, to a file named after the device."""
    device = torch.cuda.get_device_name()
    versions = {}
    for package in ("torch", "triton", "qwantize", "torchao"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    facts = {
        "date": datetime.date.today().isoformat(), "device": device, "python": platform.python_version(), "versions": versions,
        "elements": W.numel(), "dtype": "bfloat16", "rows": rows,
    }  # fmt: skip
    name = device.lower().replace("nvidia ", "").replace(" ", "_")
    (directory / f"{name}.json").write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
