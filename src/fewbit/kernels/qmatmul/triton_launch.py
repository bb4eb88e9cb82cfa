"""How the GPU's kernels are started for a product: the grid, the numbers and the constants of each family."""

import dataclasses
from typing import Any

from ...formats import Codebook, Minifloat
from . import gpu_pairs
from .gpu_configs import DotConfig, GemvConfig, Gpu, GpuConfig, PairsConfig, blocks_for, splits_for, stages_for
from .gpu_matrix import NO_ZERO, Matrix
from .triton_codes import codes_kernel
from .triton_dot import dot_kernel
from .triton_gemv import gemv_kernel
from .triton_pairs import pairs_kernel

GROUP = 8
"""How many blocks of one axis follow each other, so that they share what the second cache holds."""

CHUNK = 32


@dataclasses.dataclass(frozen=True)
class Launch:
    """One call of a kernel; it takes the arrays, these numbers, and the result. Without groups, any array stands for their sizes.

    Attributes:
        kernel: the Triton function.
        grid: how many programs there are.
        numbers: lengths and strides.
        constants: what it is compiled for.
        warps: of a program.
        stages: steps that are loaded ahead.
        splits: how many sums the result has; 1: it is the result.
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
        """Whether the sizes of groups are the last of the arrays."""
        return "GP" in self.constants

    def run(self, arrays: tuple[Any, ...], y: Any) -> None:
        """Runs it on torch tensors."""
        self.kernel[self.grid](*arrays, *self.numbers, y, **self.constants, **self.settings)

    @property
    def settings(self) -> dict[str, Any]:
        """What the compiler is told."""
        return {"num_warps": self.warps, "num_stages": self.stages, "enable_fp_fusion": True}


@dataclasses.dataclass(frozen=True)
class Groups:
    """A matrix for each group of rows, as kernels are told of them.

    Attributes:
        count: how many; 0: one matrix for all rows, and no groups.
        codes: the stride from the codes of one matrix to those of the next.
        scale: likewise of scales and zero points; 0 where all share them.
        unit: likewise of tensor scales.
    """

    count: int = 0
    codes: int = 0
    scale: int = 0
    unit: int = 0

    @property
    def numbers(self) -> tuple[int, ...]:
        """What kernels take of it."""
        return self.count, self.codes, self.scale, self.unit

    @property
    def padded(self) -> int:
        """A power of two that is more than there are groups; 0 where there are none."""
        return 1 << self.count.bit_length() if self.count else 0

    def blocks(self, m: int, block: int) -> int:
        """How many blocks of rows there can be: every group, and the rows beyond all, may end with a short one."""
        return (m + min(self.count + 1, m) * (block - 1)) // block if self.count else -(-m // block)


ONE = Groups()


def gemv_launch(
    matrix: Matrix, m: int, x_stride: int, word_stride: int, scale_strides: tuple[int, int], config: GemvConfig
) -> Launch:
    """The product of a few rows, for a matrix stored `[N, K]` in words along K."""
    rows_of_x = 1 << (m - 1).bit_length()
    rows = max(1, config.rows // rows_of_x)
    codes_in_word = 32 // matrix.bits
    words = min(config.words, 1 << (-(-matrix.k // codes_in_word) - 1).bit_length())
    words = max(words, CHUNK // codes_in_word)
    blocks = {"MP": rows_of_x, "BN": rows, "BW": words, "CHUNK": min(matrix.tile_k or CHUNK, CHUNK)}
    numbers = (m, matrix.n, matrix.k, x_stride, word_stride, *scale_strides)
    return Launch(gemv_kernel, (-(-matrix.n // rows),), numbers, blocks | matrix.constants(), config.warps)


def gemv_refuses(matrix: Matrix, codes_strides: tuple[int, int], address: int) -> str | None:
    """Why the kernel of a few rows does not read the codes; None when it does."""
    if not matrix.packs_k or codes_strides[0] != 1:
        return "its bytes do not follow each other along the contraction"
    if codes_strides[1] % 4 or address % 4 or -(-matrix.k * matrix.bits // 8) % 4:
        return "its rows of bytes are no words of 32 bits"
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
    """The product of a few rows of bfloat16 on tensor cores, for a matrix stored `[N, K]` in bytes along K."""
    rows_of_x, chunk = 8 if typical_rows(m, groups) <= 8 else 16, max(32, min(64, matrix.tile_k or 64))
    step = max(chunk, min(config.step, 1 << (matrix.k - 1).bit_length()))
    blocks = {"BM": rows_of_x, "BN": config.rows, "KS": step // chunk, "CHUNK": chunk, "EVEN_K": matrix.k % step == 0}
    blocks["GP"] = groups.padded
    blocks["FOLDED"] = ptx and 0 < matrix.tile_k < chunk and matrix.scheme.format.name == "e2m1"
    blocks["PTX"] = gpu_pairs.ptx(matrix.scheme.format, gpu.sm, is_raw=blocks["FOLDED"]) if ptx else ""
    numbers = (m, matrix.n, matrix.k, x_stride, codes_stride, *scale_strides, *groups.numbers)
    grid = (-(-matrix.n // config.rows), groups.blocks(m, rows_of_x))
    stages = stages_for(config, step * (2 * rows_of_x + config.rows * matrix.bits // 8), gpu)
    return Launch(pairs_kernel, grid, numbers, blocks | matrix.constants(), config.warps, stages)


def pairs_refuses(matrix: Matrix, codes_strides: tuple[int, int]) -> str | None:
    """Why the kernel of a few rows on tensor cores does not read the codes; None when it does."""
    scheme = matrix.scheme
    if (reason := gpu_pairs.unsupported(scheme.format)) is not None:
        return f"{reason} are not made in bfloat16"
    if not matrix.packs_k or codes_strides[0] != 1:
        return "its bytes do not follow each other along the contraction"
    if 0 < matrix.tile_k < 32:
        held = scheme.scale
        is_exact = isinstance(held, Minifloat) and held.mantissa == 3 and not isinstance(scheme.format, Codebook)
        if matrix.tile_k < 16 or matrix.bits == 8 or not is_exact or matrix.constants()["ZERO"] != NO_ZERO:
            return f"tiles of {matrix.tile_k} are shorter than a chunk, and bfloat16 does not hold what they stand for"
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
    """The product on tensor cores."""
    splits = 1 if groups.count else splits_for(config, m, matrix.n, matrix.k, gpu.multiprocessors)
    n, k = config.n, config.k if precision == "bf16" else max(16, config.k // 2)
    blocks = {"BM": config.m, "BN": n, "BK": k, "SPLITS": splits, "GROUP": GROUP, "EVEN_K": matrix.k % k == 0}
    blocks |= {"GP": groups.padded, "PACKS_K": matrix.packs_k, "PRECISION": precision}
    blocks |= {"CN": _tiles_in(n, matrix.tile_n), "CK": _tiles_in(k, matrix.tile_k)}
    grid = (groups.blocks(m, config.m) * -(-matrix.n // n), splits)
    numbers = (m, matrix.n, matrix.k, x_stride, *codes_strides, *scale_strides, *groups.numbers)
    step_bytes = k * (config.m * (2 if precision == "bf16" else 4) + n * matrix.bits // 8)
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
    """The product of rows in groups; how long groups are is not known here, so blocks are those of the average."""
    rows = typical_rows(m, groups)
    is_few = precision == "bf16" and rows <= config.pairs_rows
    if is_few and pairs_refuses(matrix, codes_strides) is None:
        blocks = config.pairs[matrix.bits]
        how: Any = {"ptx": config.ptx, "gpu": gpu, "groups": groups}
        return pairs_launch(matrix, m, x_stride, codes_strides[1], scale_strides, blocks, **how)
    how = {"precision": precision, "gpu": gpu, "groups": groups}
    return dot_launch(matrix, m, x_stride, codes_strides, scale_strides, blocks_for(config.dot, rows), **how)


def typical_rows(m: int, groups: Groups) -> int:
    """How many rows a group has on the average, rounded up."""
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
    """The product of codes with codes; `strides` are those of x along M and K, and of w along K and N."""
    blocks = {"BM": config.m, "BN": config.n, "BK": config.k, "GROUP": GROUP, "EVEN_K": k % config.k == 0, "WHOLE": is_whole}
    grid = (-(-m // config.m) * -(-n // config.n),)
    stages = stages_for(config, config.k * (config.m + config.n), gpu)
    return Launch(codes_kernel, grid, (m, n, k, *strides, *scale_strides), blocks, config.warps, stages)


def _tiles_in(block: int, tile: int) -> int:
    """How many tiles a block of an axis meets; tiles and blocks are powers of two."""
    return 1 if tile == 0 else max(1, block // tile)
