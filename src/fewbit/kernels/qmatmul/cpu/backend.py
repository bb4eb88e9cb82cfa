"""CPU matmul backend: compiled kernels for quantized weights.

One operand is quantized, in any scheme, and the other is float32, bfloat16 or float16; or both have integer codes.
Codes are decoded exactly, products summed in float32 (in a fixed order, independent of the number of threads), and the result
is rounded once to its dtype. Scales of integers multiply sums of codes times `x`, which overflow where an `x` exceeds
3e38 / (K * the largest code): 6e32 for int8 and K = 4096. Two integer operands are summed exactly in int32 and scaled afterwards.
"""

import dataclasses
from typing import ClassVar

import jax
from jax.typing import DTypeLike

from ....array.packing import codes_per_unit
from ....array.qarray import QArray
from ....array.scheme import Scheme
from ...extension import ARM64_ISAS, device_refusal, extension
from ..blocks import block_refusal, refused_weight
from ..integer_codes import is_whole
from ..kernel import AbstractKernel
from ..matrix_view import MatrixView, contracted_axis
from ..paired import pair_refusal
from ..problem import Problem, refused_precision
from .block_ffi import native_blocks
from .ffi import native_product
from .int8_ffi import native_integers

FLOATS = ("float32", "bfloat16", "float16")

BLOCK_ROWS = 4
"""The most rows of integer activations for which weights with blocks are read in place; for more they are packed in panels."""


@dataclasses.dataclass(frozen=True)
class Cpu(AbstractKernel):
    """C++ kernels for AVX-512, AVX2, NEON, and any processor. In a ragged_dot the matrix of an empty group is not read.

    Attributes:
        isa: the instruction set to use, if the machine has it: avx512, avx2, portable (on arm64: NEON); None: the best.
    """

    name: ClassVar[str] = "cpu"
    platform: ClassVar[str] = "cpu"
    groups_pairs: ClassVar[bool] = True
    isa: str | None = None

    def unsupported(self, problem: Problem) -> str | None:
        return extension("fewbit.kernels.qmatmul.cpu._dequant_gemm").missing or super().unsupported(problem)

    def refused_pair(self, problem: Problem) -> str | None:
        if missing := extension("fewbit.kernels.qmatmul.cpu._int8_gemm").missing:
            return missing
        if problem.result_dtype.name not in FLOATS:
            return f"the result is {problem.result_dtype.name}, must be one of {', '.join(FLOATS)}"
        if block_refusal(problem) is None:
            return None
        return pair_refusal(problem)

    def refused(self, problem: Problem, weight: MatrixView) -> str | None:
        wrong = _refused_dtypes(problem.activation.dtype, problem.result_dtype.name) or refused_precision(problem.precision)
        return wrong or _refused_scheme(weight)

    def not_chosen(self, problem: Problem) -> str | None:
        return device_refusal()

    def about(self) -> str:
        modules = ("fewbit.kernels.qmatmul.cpu._dequant_gemm", "fewbit.kernels.qmatmul.cpu._int8_gemm")
        best = {extension(module).isa for module in modules} - {""}  # integers may have an instruction of their own
        tested = ""
        if not best.isdisjoint(ARM64_ISAS):
            tested = "; experimental: tested in an emulator only"
        isas = self.isa or " and ".join(sorted(best))
        return f"compiled for {isas}{tested}; programs for other platforms use their own kernels, or the reference"

    def stacked(self, x: jax.Array, q: QArray, *, contracts_cols: bool, dtype: DTypeLike, precision: object) -> jax.Array:
        del (
            precision
        )  # `refused_precision` accepts what float32 satisfies; a lower precision would not be faster (dequant_gemm.cc)
        return native_product(x, q, None, contracts_cols=contracts_cols, dtype=dtype, isa=self.isa)

    def picked(
        self, x: jax.Array, q: QArray, index: jax.Array, *, contracts_cols: bool, dtype: DTypeLike, precision: object
    ) -> jax.Array:
        del precision
        return native_product(x, q, index, contracts_cols=contracts_cols, dtype=dtype, isa=self.isa)

    def grouped(
        self, x: jax.Array, q: QArray, sizes: jax.Array, *, contracts_cols: bool, dtype: DTypeLike, precision: object
    ) -> jax.Array:
        del precision
        return native_product(x[None], q, None, contracts_cols=contracts_cols, dtype=dtype, isa=self.isa, sizes=sizes)[0]

    def paired(self, x: QArray, q: QArray, *, contracts_cols: bool, dtype: DTypeLike) -> jax.Array:
        if _reads_blocks(x, q, contracts_cols):
            return native_blocks(x, q, contracts_cols=contracts_cols, dtype=dtype, isa=self.isa)
        return native_integers(x, q, contracts_cols=contracts_cols, dtype=dtype, isa=self.isa)

    def grouped_pair(self, x: QArray, q: QArray, sizes: jax.Array, *, contracts_cols: bool, dtype: DTypeLike) -> jax.Array:
        native = native_blocks if _has_blocks(x, q, contracts_cols) else native_integers
        return native(x, q, contracts_cols=contracts_cols, dtype=dtype, isa=self.isa, sizes=sizes)

    def picked_pair(self, x: QArray, q: QArray, index: jax.Array, *, contracts_cols: bool, dtype: DTypeLike) -> jax.Array:
        if _reads_blocks(x, q, contracts_cols):
            return native_blocks(x, q, index, contracts_cols=contracts_cols, dtype=dtype, isa=self.isa)
        return super().picked_pair(x, q, index, contracts_cols=contracts_cols, dtype=dtype)


def _reads_blocks(x: QArray, q: QArray, contracts_cols: bool) -> bool:
    """Whether a weight is read in place, block by block, and not packed in panels, whose blocks are those of `x`, too."""
    at = contracted_axis(contracts_cols)
    is_equal = 1 in (x.scale.shape[2], q.scale.shape[at]) or x.tiles[2] == q.tiles[at]
    return _has_blocks(x, q, contracts_cols) and (not is_whole(q.scheme) or x.shape[1] <= BLOCK_ROWS or not is_equal)


def _has_blocks(x: QArray, q: QArray, contracts_cols: bool) -> bool:
    """Whether two operands can be multiplied by blocks."""
    at = contracted_axis(contracts_cols)
    refusal = refused_weight(q.scheme, q.shape[at], q.tiles[at], x.tiles[2], contracts_cols=contracts_cols)
    return refusal is None and x.zero_point is None


def _refused_dtypes(x: str, result: str) -> str | None:
    """Why the kernels do not support these dtypes, or None."""
    if x in FLOATS and result in FLOATS:
        return None
    return f"it multiplies {x} into {result}; both must be one of {', '.join(FLOATS)}"


def _refused_scheme(weight: MatrixView) -> str | None:
    """Why the kernels do not support a scheme, or None."""
    scheme = weight.scheme
    axis = weight.merged[scheme.pack_axis + 2]
    group = 1
    if scheme.packing != type(scheme.packing)():
        group = codes_per_unit(scheme.format.bits, scheme.packing)
    if axis.tile is not None and axis.tile % group:
        return f"codes are permuted in groups of {group}, across tiles of {axis.tile}"
    if isinstance(scheme.scale, Scheme) and scheme.scale.format.bits != 8:
        return f"its scales are {scheme.scale.name}; quantized scales must have 8 bits"
    return None


def reads_packed_weights() -> bool:
    """True where packed weights are faster: one CPU device with the extension built."""
    built = extension("fewbit.kernels.qmatmul.cpu._dequant_gemm").missing is None
    return built and jax.default_backend() == "cpu" and device_refusal() is None
