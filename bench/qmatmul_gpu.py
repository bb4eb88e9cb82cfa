"""Times products with packed weights on an NVIDIA GPU.

    PYTHONPATH=src python3 -m bench.qmatmul_gpu [--tune] [--save] [--rounds 30]

They are compared with cuBLAS in bfloat16, in the shapes of Llama-3-8B. First correctness: no speed is printed unless every
product errs by no more than its roundings allow. Then medians of interleaved rounds, every call with another copy of the
weight, so that none is found in the L2 cache. `--tune` tries blocks first, and with `--save` writes them to the file of this
device in `fewbit/kernels/qmatmul/gpu/configs`. Needs torch with CUDA, and Triton.
"""

import argparse
import datetime
import itertools
import json
import pathlib
import platform
import statistics
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import torch
import triton

from fewbit import torch as fbt
from fewbit.kernels.qmatmul.gpu.config import FOLDER, GpuConfig, file_name, gpu_config
from fewbit.torch.matmul import by_triton, codes_by_triton
from fewbit.torch.ragged import ragged_by_triton

from .gpu_timing import copied, copies, count_of, gpu, timed, weight
from .gpu_tuning import tuned

SHAPES = ((4096, 4096), (14336, 4096), (4096, 14336), (1024, 4096))
"""`[N, K]` of the weights: attention's output, the MLP's two ways, keys and values."""
ROWS = (1, 16, 256, 4096)
SCHEMES = ("int4_g64", "nf4", "mxfp4", "nvfp4", "int8", "fp8", "mxfp8")
CODES = ("int8", "fp8")
EXPERTS, EXPERT_ROWS = 16, (16, 256, 4096)
"""A mixture of experts: how many matrices of 4096 x 4096, and how many rows all of them have."""
RESULTS = pathlib.Path(__file__).parent / "results"


def main() -> int:
    """Runs the comparison; the exit status is 1 when a value is wrong or there is no GPU."""
    parser = argparse.ArgumentParser(prog="python -m bench.qmatmul_gpu")
    parser.add_argument("--tune", action="store_true", help="try blocks before the comparison, and take the fastest")
    parser.add_argument("--save", action="store_true", help="write bench/results, and the tuned blocks")
    parser.add_argument("--rounds", type=int, default=30)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device is here", file=sys.stderr)
        return 1
    jax.config.update("jax_platforms", "cpu")  # where JAX sees the GPU, it would take most of its memory
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    config = gpu_config(torch.cuda.get_device_name())
    if wrong := list(wrongs(config)):
        print(f"a value is wrong, so no times are printed: {'; '.join(wrong)}", file=sys.stderr)
        return 1
    config = tuned(config, options.rounds) if options.tune else config
    rows = [row for n, k in SHAPES for m in ROWS for row in measured(n, k, m, config, options.rounds)]
    rows += [row for m in EXPERT_ROWS for row in measured_experts(m, config, options.rounds)]
    if options.save:
        save(rows, config, is_tuned=options.tune)
    return 0


def wrongs(config: GpuConfig) -> Iterator[str]:
    """The products that err by more than roundings do, by the kernels of every family."""
    for name, m, dim in itertools.product((*SCHEMES, "uint4_g64"), (1, 3, 16, 100, 300), (-1, 0)):
        q = weight(name, 1000, 1088, dim)
        for dtype, step in ((torch.bfloat16, 2.0**-8), (torch.float32, 2.0**-16), (torch.float16, 2.0**-9)):
            x = torch.randn(m, 1088, device="cuda").to(dtype)
            if not is_right(by_triton(x, q, config, gpu()), x, q, step):
                yield f"{name} dim {dim}, {m} rows of {dtype}"
        g = torch.randn(m, 1000, device="cuda").bfloat16()
        if not is_right(by_triton(g, q.T, config, gpu()), g, q.T, 2.0**-8):
            yield f"{name} dim {dim}, gradient of {m} rows"
    for name, dim, dtype in itertools.product(SCHEMES, (-1, -2), (torch.bfloat16, torch.float32)):
        q, x = experts(name, 1000, 1088, dim), torch.randn(300, 1088, device="cuda").to(dtype)
        sizes = torch.tensor([70, 0, 200, 1, *[0] * (EXPERTS - 4)], device="cuda")
        y, w = ragged_by_triton(x, q, sizes, config, gpu()), fbt.dequantize(q, torch.float32)
        parts = zip(x.double().split([*sizes.tolist(), len(x) - int(sizes.sum())]), [*w.double(), None], strict=True)
        exact = torch.cat([rows.new_zeros(len(rows), w.shape[2]) if m is None else rows @ m for rows, m in parts])
        size = x.float().norm(dim=1)[:, None] * w.norm(dim=1).amax()
        if not bool(((y.double() - exact).abs() <= 2.0**-8 * size).all()):
            yield f"{name} in groups, dim {dim}, rows of {dtype}"
    for name in CODES:
        q, x = weight(name, 1000, 1088), fbt.quantize(torch.randn(100, 1088, device="cuda"), name)
        if not is_right(codes_by_triton(x, q, config, gpu()), fbt.dequantize(x), q, 2.0**-9):  # 14 bits of a sum
            yield f"codes of {name}"


def is_right(y: torch.Tensor, x: torch.Tensor, q: fbt.QTensor, step: float) -> bool:
    """Whether each sum errs by less than a rounding step of the sum of its products' magnitudes."""
    w = fbt.dequantize(q.cpu(), torch.float32).to(q.device).double()
    exact, magnitude = x.double() @ w, x.double().abs() @ w.abs()
    return bool(((y.double() - exact).abs() <= step * magnitude).all())


def measured(n: int, k: int, m: int, config: GpuConfig, rounds: int) -> list[dict[str, Any]]:
    """The figures of one shape: cuBLAS and every scheme."""
    x = torch.randn(m, k, device="cuda").bfloat16()
    dense = copies(torch.randn(n, k, device="cuda").bfloat16(), n * k * 2)
    runs: dict[str, Callable[[int], Any]] = {"cuBLAS bfloat16": lambda i: x @ dense[i % len(dense)].T}
    for name in SCHEMES:
        q = weight(name, n, k)
        held = [q, *(copied(q) for _ in range(count_of(q.nbytes) - 1))]
        runs[name] = lambda i, held=held: by_triton(x, held[i % len(held)], config, gpu())
        if m >= config.torch_from:
            runs[f"{name}, decoded once"] = lambda i, held=held: fbt.matmul(x, held[i % len(held)], backend="torch")
        if name in CODES and m >= 16:
            held_x = fbt.quantize(x, name)
            runs[f"{name} x {name}"] = lambda i, held=held, held_x=held_x: codes_by_triton(
                held_x, held[i % len(held)], config, gpu()
            )
    return reported(timed(runs, rounds), {"n": n, "k": k, "m": m})


def reported(seconds: dict[str, list[float]], shape: dict[str, int]) -> list[dict[str, Any]]:
    """A row for each of those that were timed, compared with the first."""
    base = statistics.median(next(iter(seconds.values())))
    rows = []
    for who, times in seconds.items():
        middle, ends = statistics.median(times), (min(times), max(times))
        facts = {"us": 1e6 * middle, "low": 1e6 * ends[0], "high": 1e6 * ends[1], "speedup": base / middle}
        rows.append({**shape, "who": who, **facts})
        print("{n:6} x {k:6} m {m:5}  {who:32} {us:9.1f} us ({low:.1f} to {high:.1f})  {speedup:5.2f}x".format(**rows[-1]))
    return rows


def experts(name: str, n: int, k: int, dim: int = -1) -> fbt.QTensor:
    """Matrices `[EXPERTS, K, N]`, stored as `[N, K]` each (dim -1) or as `[K, N]` (dim -2)."""
    w = torch.randn(EXPERTS, *((n, k) if dim == -1 else (k, n)), device="cuda") * 0.02
    q = fbt.quantize(w.bfloat16(), name, dim, "naive")
    return q.mT if dim == -1 else q


def measured_experts(m: int, config: GpuConfig, rounds: int) -> list[dict[str, Any]]:
    """The figures of rows in groups of different lengths: one bfloat16 product a group, whose sizes the host knows, and every scheme."""
    x, share = torch.randn(m, 4096, device="cuda").bfloat16(), torch.rand(EXPERTS).softmax(0)
    ends = [0, *(share.cumsum(0) * m).round().int().tolist()]
    sizes = torch.tensor([b - a for a, b in itertools.pairwise(ends)], dtype=torch.int32, device="cuda")
    dense = copies(torch.randn(EXPERTS, 4096, 4096, device="cuda").bfloat16(), EXPERTS * 4096 * 4096 * 2)

    def one_by_one(i: int) -> list[torch.Tensor]:
        return [x[a:b] @ dense[i % len(dense)][g].T for g, (a, b) in enumerate(itertools.pairwise(ends)) if b > a]

    runs: dict[str, Callable[[int], Any]] = {"cuBLAS bfloat16, a call a group": one_by_one}
    for name in SCHEMES:
        q = experts(name, 4096, 4096)
        held = [q, *(copied(q) for _ in range(count_of(q.nbytes) - 1))]
        runs[name] = lambda i, held=held: ragged_by_triton(x, held[i % len(held)], sizes, config, gpu())
    return reported(timed(runs, rounds), {"n": 4096, "k": 4096, "m": m, "groups": EXPERTS})


def save(rows: list[dict[str, Any]], config: GpuConfig, *, is_tuned: bool) -> None:
    """Writes the rows, and the blocks where they were tuned, to files named after the device."""
    device = torch.cuda.get_device_name()
    versions = {"torch": torch.__version__, "triton": triton.__version__, "cuda": torch.version.cuda}
    facts = {
        "date": datetime.date.today().isoformat(),
        "device": device,
        "python": platform.python_version(),
        "versions": versions,
    }
    facts |= {"blocks_measured": config.measured or "no", "dtype": "bfloat16", "rows": rows}
    (RESULTS / f"qmatmul_{file_name(device)}.json").write_text(json.dumps(facts, indent=1) + "\n")
    if is_tuned:
        (FOLDER / f"{file_name(device)}.json").write_text(json.dumps(config.to_json(), indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
