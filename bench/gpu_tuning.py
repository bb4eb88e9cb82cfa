"""Finds the fastest block sizes on a GPU: `bench.qmatmul_gpu --tune`."""

import dataclasses
import datetime
import itertools
import statistics
from collections.abc import Callable
from typing import Any

import torch
import triton

from fewbit import torch as fbt
from fewbit.kernels.qmatmul.gpu.config import DotConfig, GemvConfig, GpuConfig, PairsConfig
from fewbit.torch.matmul import by_triton, codes_by_triton

from .gpu_timing import gpu, timed, weight


def tuned(config: GpuConfig, rounds: int) -> GpuConfig:
    """The fastest blocks on this device, tried with weights of 4096 x 4096 and 14336 x 4096."""
    config = dataclasses.replace(config, pairs_rows=0)
    schemes = ((4, "int4_g64"), (8, "int8"))
    gemv = {bits: fastest_gemv(config, bits, name, rounds) for bits, name in schemes}
    pairs = {bits: fastest_pairs(config, bits, name, rounds) for bits, name in schemes}
    config = dataclasses.replace(config, gemv=gemv, pairs=pairs)
    family = tuple(fastest_dot(config, blocks, rounds) for blocks in config.dot)
    config = dataclasses.replace(config, dot=family, codes=tuple(fastest_codes(config, b, rounds) for b in config.codes))
    few = next((m for m in (1, 2, 4, 8) if not gemv_wins(config, m, rounds)), 16)
    paired = next((m for m in (64, 32, 16, 8, 4, 2, 1) if pairs_win(config, m, rounds)), 0)
    many = next((m for m in (256, 512, 1024, 2048, 4096, 8192) if torch_wins(config, m, rounds)), 1 << 30)
    today = datetime.date.today().isoformat()
    return dataclasses.replace(
        config,
        device=torch.cuda.get_device_name(),
        measured=today,
        gemv_rows=few // 2,
        pairs_rows=paired,
        torch_from=many,
    )


def fastest_gemv(config: GpuConfig, bits: int, name: str, rounds: int) -> GemvConfig:
    """The fastest blocks of one row."""
    tried = [GemvConfig(*sizes) for sizes in itertools.product((1, 2, 4, 8), (128, 256, 512, 1024), (2, 4, 8))]
    return fastest(tried, lambda blocks: dataclasses.replace(config, gemv={**config.gemv, bits: blocks}), name, 1, rounds)


def fastest_pairs(config: GpuConfig, bits: int, name: str, rounds: int) -> PairsConfig:
    """The fastest blocks of one row on tensor cores."""
    tried = [PairsConfig(*sizes) for sizes in itertools.product((16, 32, 64), (256, 512, 1024), (2, 4, 8), (2, 3, 4))]
    paired = dataclasses.replace(config, pairs_rows=1)
    return fastest(tried, lambda blocks: dataclasses.replace(paired, pairs={**config.pairs, bits: blocks}), name, 1, rounds)


def fastest_dot(config: GpuConfig, blocks: DotConfig, rounds: int) -> DotConfig:
    """The fastest blocks for as many rows as these are for."""
    m = blocks.up_to or 512
    sizes = itertools.product(sorted({min(m, 64), min(m, 128), blocks.m}), (64, 128), (64, 128), (4, 8), (2, 3, 4))
    tried = [DotConfig(blocks.up_to, *s) for s in sizes]
    of = lambda found: dataclasses.replace(config, gemv_rows=0, dot=(dataclasses.replace(found, up_to=None),))  # noqa: E731
    return fastest(tried, of, "int4_g64", m, rounds)


def fastest_codes(config: GpuConfig, blocks: DotConfig, rounds: int) -> DotConfig:
    """The same for codes with codes."""
    m = blocks.up_to or 2048
    sizes = itertools.product(sorted({min(m, 64), min(m, 128), blocks.m}), (64, 128, 256), (128, 256), (4, 8), (3, 4))
    tried = [DotConfig(blocks.up_to, *s) for s in sizes]
    x, held = fbt.quantize(torch.randn(m, 4096, device="cuda").bfloat16(), "fp8"), weight("fp8", 4096, 4096)
    configs = [dataclasses.replace(config, codes=(dataclasses.replace(found, up_to=None),)) for found in tried]
    runs = {str(i): lambda _, c=c: codes_by_triton(x, held, c, gpu()) for i, c in enumerate(configs)}
    return tried[least(runs, rounds)]


def fastest(tried: list[Any], config_of: Callable[[Any], GpuConfig], name: str, m: int, rounds: int) -> Any:
    """The one of these blocks with the least time for both shapes."""
    x = torch.randn(m, 4096, device="cuda").bfloat16()
    held = [weight(name, n, 4096) for n in (4096, 14336)]
    count = gpu()
    configs = map(config_of, tried)
    runs = {str(i): lambda _, c=c: [by_triton(x, q, c, count) for q in held] for i, c in enumerate(configs)}
    return tried[least(runs, rounds)]


def least(runs: dict[str, Callable[[int], Any]], rounds: int) -> int:
    """The place of the fastest; those that the device refuses (too much shared memory) take no part."""
    able = {}
    for who, run in runs.items():
        try:
            run(0)
        except triton.runtime.errors.OutOfResources:
            continue
        able[who] = run
    seconds = timed(able, max(5, rounds // 3))
    return int(min(seconds, key=lambda who: statistics.median(seconds[who])))


def gemv_wins(config: GpuConfig, m: int, rounds: int) -> bool:
    """Whether the kernel of a few rows is faster than tensor cores for this many."""
    x, held = torch.randn(m, 4096, device="cuda").bfloat16(), weight("int4_g64", 4096, 4096)
    pair = [dataclasses.replace(config, gemv_rows=limit) for limit in (m, 0)]
    return least({str(i): lambda _, c=c: by_triton(x, held, c, gpu()) for i, c in enumerate(pair)}, rounds) == 0


def pairs_win(config: GpuConfig, m: int, rounds: int) -> bool:
    """Whether decoding in pairs is faster than what else serves this many rows of bfloat16."""
    x, held = torch.randn(m, 4096, device="cuda").bfloat16(), weight("int4_g64", 4096, 4096)
    pair = [dataclasses.replace(config, pairs_rows=limit) for limit in (m, 0)]
    return least({str(i): lambda _, c=c: by_triton(x, held, c, gpu()) for i, c in enumerate(pair)}, rounds) == 0


def torch_wins(config: GpuConfig, m: int, rounds: int) -> bool:
    """Whether decoding once and cuBLAS take less time for this many rows."""
    x, held = torch.randn(m, 4096, device="cuda").bfloat16(), weight("int4_g64", 4096, 4096)
    runs = {
        "0": lambda _: by_triton(x, held, config, gpu()),
        "1": lambda _: fbt.matmul(x, held, backend="torch"),
    }
    return least(runs, rounds) == 1
