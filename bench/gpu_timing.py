"""Times functions on a CUDA device in interleaved rounds of graphs.

Each call takes another copy of its weight.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

import fewbit as fb
from fewbit import torch as fbt
from fewbit.kernels.qmatmul.gpu.config import Gpu
from fewbit.torch.matmul import gpu_of


def weight(name: str, n: int, k: int, dim: int = -1) -> fbt.QTensor:
    """A matrix `[K, N]`, stored as `[N, K]` (dim -1) or `[K, N]` (dim 0)."""
    w = torch.randn(*((n, k) if dim == -1 else (k, n)), device="cuda") * 0.02
    if fb.scheme(name).zero_point is None:
        q = fbt.quantize(w.bfloat16(), name, dim, "naive")
    else:
        q = fbt.quantize(w.cpu(), name, dim).cuda()
    return q.T if dim == -1 else q


def timed(runs: dict[str, Callable[[int], Any]], rounds: int) -> dict[str, list[float]]:
    """The seconds of each call, interleaved, from graphs of eight calls with different weights, so that no launch is timed."""
    graphs = {who: graph_of(run) for who, run in runs.items()}
    seconds: dict[str, list[float]] = {who: [] for who in runs}
    for _ in range(rounds):
        for who, graph in graphs.items():
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            seconds[who].append(start.elapsed_time(end) / 1e3 / 8)
    return seconds


def graph_of(run: Callable[[int], Any]) -> torch.cuda.CUDAGraph:
    """Eight calls as a graph, warmed up."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for i in range(3):
            run(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(8):
            run(i)
    graph.replay()
    torch.cuda.synchronize()
    return graph


def count_of(nbytes: int) -> int:
    """How many copies of a weight exceed the L2 cache three times; at most 64."""
    cache = torch.cuda.get_device_properties(0).L2_cache_size
    return min(64, max(2, -(-3 * cache // nbytes)))


def copies(w: torch.Tensor, nbytes: int) -> list[torch.Tensor]:
    """A tensor and copies of it."""
    return [w, *(w.clone() for _ in range(count_of(nbytes) - 1))]


def copied(q: fbt.QTensor) -> fbt.QTensor:
    """The same matrix at other addresses, as it is strided."""
    return dataclasses.replace(q, codes=q.codes.clone(), scale=q.scale.clone())


def gpu() -> Gpu:
    """The current device."""
    return gpu_of(torch.device("cuda", 0))
