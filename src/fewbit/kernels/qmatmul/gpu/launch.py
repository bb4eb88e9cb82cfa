"""Launch parameters of the GPU kernels."""

import dataclasses
from typing import Any

from ....formats.codebook import Codebook
from ....formats.minifloat import Minifloat
from . import ptx as gpu_pairs
from .config import DotConfig, GemvConfig, Gpu, GpuConfig, PairsConfig, blocks_for, splits_for, stages_for
from .gemm import dot_kernel
from .gemv import gemv_kernel
from .gemv_bf16 import pairs_kernel
from .int8_gemm import codes_kernel
from .weight import Matrix

GROUP = 8
"""Consecutive blocks of one axis per group, for reuse in the L2 cache."""

CHUNK = 32


@dataclasses.dataclass(frozen=True)
class Launch:
    """One kernel launch: its arguments are the arrays, `numbers` and the result.

    Attributes:
        kernel: the Triton function.
        grid: the number of programs.
        numbers: lengths and strides.
        constants: compile-time constants.
        warps: per program.
        stages: pipeline stages.
        splits: partial sums in the output; 1: it is the result.
    """

    kernel: Any
    grid: tuple[int, ...]
    numbers: tuple[int, ...]
    constants: dict[str, Any]
    warps: int
    stages: int = 3
    splits: int = 1

    @property
    def takes_sizes(self) -> bool:
        """Whether the last array is group sizes (any array without groups)."""
        return "GP" in self.constants

    def run(self, arrays: tuple[Any, ...], y: Any) -> None:
        """Launches the kernel on torch tensors."""
        self.kernel[self.grid](*arrays, *self.numbers, y, **self.constants, **self.settings)

    @property
    def settings(self) -> dict[str, Any]:
        """Compiler options."""
        return {"num_warps": self.warps, "num_stages": self.stages, "enable_fp_fusion": True}


@dataclasses.dataclass(frozen=True)
class Groups:
    """The strides of matrices, one per group of rows.

    Attributes:
        count: their number; 0: no groups, one matrix for all rows.
        codes: the stride between the codes of matrices.
        scale: likewise of scales and zero points; 0 if shared.
        unit: likewise of tensor scales.
    """

    count: int = 0
    codes: int = 0
    scale: int = 0
    unit: int = 0

    @property
    def numbers(self) -> tuple[int, ...]:
        """The kernel arguments."""
        return self.count, self.codes, self.scale, self.unit

    @property
    def padded(self) -> int:
        """The smallest power of two above `count`; 0 without groups."""
        return 1 << self.count.bit_length() if self.count else 0

    def blocks(self, m: int, block: int) -> int:
        """The most blocks of rows: every group may end with a short one."""
        if not self.count:
            return -(-m // block)
        return (m + min(self.count + 1, m) * (block - 1)) // block


ONE = Groups()


def gemv_launch(
    matrix: Matrix, m: int, x_stride: int, word_stride: int, scale_strides: tuple[int, int], config: GemvConfig
) -> Launch:
    """The float32 GEMV, for a matrix stored `[N, K]` in words along K."""
    rows_of_x = 1 << (m - 1).bit_length()
    rows = max(1, config.rows // rows_of_x)
    codes_in_word = 32 // matrix.bits
    words = min(config.words, 1 << (-(-matrix.k // codes_in_word) - 1).bit_length())
    words = max(words, CHUNK // codes_in_word)
    blocks = {"MP": rows_of_x, "BN": rows, "BW": words, "CHUNK": min(matrix.tile_k or CHUNK, CHUNK)}
    numbers = (m, matrix.n, matrix.k, x_stride, word_stride, *scale_strides)
    return Launch(gemv_kernel, (-(-matrix.n // rows),), numbers, blocks | matrix.constants(), config.warps)


def gemv_refuses(matrix: Matrix, codes_strides: tuple[int, int], address: int) -> str | None:
    """Why the float32 GEMV kernel does not support the codes. None when it does."""
    if not matrix.packs_k or codes_strides[0] != 1:
        return "its bytes are not contiguous along the contraction"
    if codes_strides[1] % 4 or address % 4 or -(-matrix.k * matrix.bits // 8) % 4:
        return "its rows are not aligned to 32 bits"
    if matrix.tile_k and matrix.tile_k < 32 // matrix.bits:
        return f"tiles of {matrix.tile_k} are shorter than a word"
    return None


def pairs_launch(
    matrix: Matrix,
    m: int,
    x_stride: int,
    codes_stride: int,
    scale_strides: tuple[int, int],
    config: PairsConfig,
    *,
    ptx: bool,
    gpu: Gpu,
    groups: Groups = ONE,
) -> Launch:
    """The bfloat16 GEMV on tensor cores, for a matrix stored `[N, K]` in bytes along K."""
    rows_of_x = 8 if typical_rows(m, groups) <= 8 else 16
    chunk = max(32, min(64, matrix.tile_k or 64))
    step = max(chunk, min(config.step, 1 << (matrix.k - 1).bit_length()))
    blocks = {"BM": rows_of_x, "BN": config.rows, "KS": step // chunk, "CHUNK": chunk, "EVEN_K": matrix.k % step == 0}
    blocks["GP"] = groups.padded
    blocks["FOLDED"] = ptx and 0 < matrix.tile_k < chunk and matrix.scheme.format.name == "e2m1"
    blocks["PTX"] = ""
    if ptx:
        blocks["PTX"] = gpu_pairs.ptx(matrix.scheme.format, gpu.sm, is_raw=blocks["FOLDED"])
    numbers = (m, matrix.n, matrix.k, x_stride, codes_stride, *scale_strides, *groups.numbers)
    grid = (-(-matrix.n // config.rows), groups.blocks(m, rows_of_x))
    stages = stages_for(config, step * (2 * rows_of_x + config.rows * matrix.bits // 8), gpu)
    return Launch(pairs_kernel, grid, numbers, blocks | matrix.constants(), config.warps, stages)


def pairs_refuses(matrix: Matrix, codes_strides: tuple[int, int]) -> str | None:
    """Why the bfloat16 GEMV kernel does not support the codes. None when it does."""
    scheme = matrix.scheme
    if (reason := gpu_pairs.unsupported(scheme.format)) is not None:
        return f"{reason} are not decoded to bfloat16"
    if not matrix.packs_k or codes_strides[0] != 1:
        return "its bytes are not contiguous along the contraction"
    if 0 < matrix.tile_k < 32:
        scale = scheme.scale
        is_exact = isinstance(scale, Minifloat) and scale.mantissa == 3 and not isinstance(scheme.format, Codebook)
        if matrix.tile_k < 16 or matrix.bits == 8 or not is_exact or scheme.zero_point is not None:
            return f"tiles of {matrix.tile_k} are shorter than a chunk, and scaled codes are not exact in bfloat16"
    return None


def dot_launch(
    matrix: Matrix,
    m: int,
    x_stride: int,
    codes_strides: tuple[int, int],
    scale_strides: tuple[int, int],
    config: DotConfig,
    *,
    precision: str,
    gpu: Gpu,
    groups: Groups = ONE,
) -> Launch:
    """The GEMM on tensor cores."""
    splits, n, k, bytes_of_x = 1, config.n, config.k, 2
    if not groups.count:
        splits = splits_for(config, m, matrix.n, matrix.k, gpu.multiprocessors)
    if precision != "bf16":
        k, bytes_of_x = max(16, k // 2), 4
    blocks = {"BM": config.m, "BN": n, "BK": k, "SPLITS": splits, "GROUP": GROUP, "EVEN_K": matrix.k % k == 0}
    blocks |= {"GP": groups.padded, "PACKS_K": matrix.packs_k, "PRECISION": precision}
    blocks |= {"CN": _tiles_in(n, matrix.tile_n), "CK": _tiles_in(k, matrix.tile_k)}
    grid = (groups.blocks(m, config.m) * -(-matrix.n // n), splits)
    numbers = (m, matrix.n, matrix.k, x_stride, *codes_strides, *scale_strides, *groups.numbers)
    step_bytes = k * (config.m * bytes_of_x + n * matrix.bits // 8)
    stages = stages_for(config, step_bytes, gpu)
    return Launch(dot_kernel, grid, numbers, blocks | matrix.constants(), config.warps, stages, splits)


def grouped_launch(
    matrix: Matrix,
    m: int,
    x_stride: int,
    codes_strides: tuple[int, int],
    scale_strides: tuple[int, int],
    config: GpuConfig,
    groups: Groups,
    *,
    precision: str,
    gpu: Gpu,
) -> Launch:
    """The grouped product, with blocks for the average group size."""
    rows = typical_rows(m, groups)
    if precision == "bf16" and rows <= config.pairs_rows and pairs_refuses(matrix, codes_strides) is None:
        few = config.pairs[matrix.bits]
        settings: Any = {"ptx": config.ptx, "gpu": gpu, "groups": groups}
        return pairs_launch(matrix, m, x_stride, codes_strides[1], scale_strides, few, **settings)
    settings = {"precision": precision, "gpu": gpu, "groups": groups}
    return dot_launch(matrix, m, x_stride, codes_strides, scale_strides, blocks_for(config.dot, rows), **settings)


def typical_rows(m: int, groups: Groups) -> int:
    """The average rows per group, rounded up."""
    return -(-m // max(1, groups.count))


def codes_launch(
    m: int,
    n: int,
    k: int,
    strides: tuple[int, ...],
    scale_strides: tuple[int, int],
    config: DotConfig,
    *,
    is_whole: bool,
    gpu: Gpu,
) -> Launch:
    """The GEMM of 8-bit codes; `strides`: x along M, K, w along K, N."""
    blocks = {"BM": config.m, "BN": config.n, "BK": config.k, "GROUP": GROUP, "EVEN_K": k % config.k == 0, "WHOLE": is_whole}
    grid = (-(-m // config.m) * -(-n // config.n),)
    stages = stages_for(config, config.k * (config.m + config.n), gpu)
    return Launch(codes_kernel, grid, (m, n, k, *strides, *scale_strides), blocks, config.warps, stages)


def _tiles_in(block: int, tile: int) -> int:
    """The tiles that a block overlaps; both are powers of two."""
    return max(1, block // (tile or block))
