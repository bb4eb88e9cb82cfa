"""How the GPU's kernels are started for a product: the grid, the numbers and the constants of each family."""

import dataclasses
from typing import Any

from .gpu_configs import DotConfig, GemvConfig, Gpu, splits_for, stages_for
from .gpu_matrix import Matrix
from .triton_codes import codes_kernel
from .triton_dot import dot_kernel
from .triton_gemv import gemv_kernel

GROUP = 8
"""How many blocks of one axis follow each other, so that they share what the second cache holds."""

CHUNK = 32


@dataclasses.dataclass(frozen=True)
class Launch:
    """One call of a kernel; it takes the arrays, these numbers, and the result.

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

    def run(self, arrays: tuple[Any, ...], y: Any) -> None:
        """Runs it on torch tensors."""
        self.kernel[self.grid](*arrays, *self.numbers, y, **self.constants, **self.settings)

    @property
    def settings(self) -> dict[str, Any]:
        """What the compiler is told."""
        return {"num_warps": self.warps, "num_stages": self.stages, "enable_fp_fusion": True}


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
) -> Launch:
    """The product on tensor cores."""
    splits = splits_for(config, m, matrix.n, matrix.k, gpu.multiprocessors)
    n, k = config.n, config.k if precision == "bf16" else max(16, config.k // 2)
    blocks = {"BM": config.m, "BN": n, "BK": k, "SPLITS": splits, "GROUP": GROUP, "EVEN_K": matrix.k % k == 0}
    blocks |= {"PACKS_K": matrix.packs_k, "PRECISION": precision}
    blocks |= {"CN": _tiles_in(n, matrix.tile_n), "CK": _tiles_in(k, matrix.tile_k)}
    grid = (-(-m // config.m) * -(-matrix.n // n), splits)
    numbers = (m, matrix.n, matrix.k, x_stride, *codes_strides, *scale_strides)
    step_bytes = k * (config.m * (2 if precision == "bf16" else 4) + n * matrix.bits // 8)
    stages = stages_for(config, step_bytes, gpu)
    return Launch(dot_kernel, grid, numbers, blocks | matrix.constants(), config.warps, stages, splits)


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
