"""The product on CPUs by compiled kernels: one quantized operand, in any scheme, beside one of float32, bfloat16 or float16,
or two of integers.

The arithmetic is float32's: codes are decoded exactly, products summed in float32 (in an order of our own, the same for any
number of threads), and the result rounded once to its dtype. Nothing is quantized that was not. Two operands of integers are
multiplied as such: sums are exact int32, and take the scales afterwards.
"""

import dataclasses
from typing import Any, ClassVar

import jax

from ...array import QArray, Scheme
from ...array.packing import codes_per_unit
from ..extension import device_refusal, extension
from .integers import native_integers
from .native import native_product
from .paired import pair_refusal
from .problem import Operand, Problem, refused_precision
from .ragged import RAGGED, AbstractRaggedKernel, RaggedProblem
from .reference import BACKENDS
from .stack import Stack
from .stacked import AbstractStackKernel

FLOATS = ("float32", "bfloat16", "float16")


@dataclasses.dataclass(frozen=True)
class Cpu(AbstractStackKernel):
    """C++ kernels for AVX-512, AVX2, NEON, and any processor.

    Attributes:
        isa: the instruction set to take, where the machine has it: avx512, avx2, portable (on arm64: NEON); None: the best.
    """

    name: ClassVar[str] = "cpu"
    platform: ClassVar[str] = "cpu"
    isa: str | None = None

    def unsupported(self, problem: Problem) -> str | None:
        return extension("fewbit.kernels.qmatmul._cpu").missing or super().unsupported(problem)

    def refused_pair(self, problem: Problem) -> str | None:
        return extension("fewbit.kernels.qmatmul._integers").missing or pair_refusal(problem)

    def refused(self, problem: Problem, x: Operand, stack: Stack) -> str | None:
        wrong = _refused_dtypes(x.dtype, problem.result_dtype.name) or refused_precision(problem.precision)
        return wrong or _refused_scheme(stack)

    def passed_over(self, problem: Problem) -> str | None:
        return device_refusal()

    def about(self) -> str:
        isa = self.isa or extension("fewbit.kernels.qmatmul._cpu").isa
        return f"compiled for {isa}; programs for other platforms take their own kernels, or the reference"

    def stacked(self, x: jax.Array, q: QArray, *, contracts_cols: bool, dtype: Any, precision: Any) -> jax.Array:
        del (
            precision
        )  # `refused_precision` leaves those that float32 serves; it is the fastest: cpu.cc has what bfloat16 costs
        return native_product(x, q, None, contracts_cols=contracts_cols, dtype=dtype, isa=self.isa)

    def picked(
        self, x: jax.Array, q: QArray, index: jax.Array, *, contracts_cols: bool, dtype: Any, precision: Any
    ) -> jax.Array:
        del precision
        return native_product(x, q, index, contracts_cols=contracts_cols, dtype=dtype, isa=self.isa)

    def paired(self, x: QArray, q: QArray, *, contracts_cols: bool, dtype: Any) -> jax.Array:
        return native_integers(x, q, contracts_cols=contracts_cols, dtype=dtype, isa=self.isa)


@dataclasses.dataclass(frozen=True)
class CpuRagged(AbstractRaggedKernel):
    """The same for rows in groups, each with a matrix of its own; the matrix of a group without rows is not read.

    Attributes:
        isa: as of `Cpu`.
    """

    name: ClassVar[str] = "cpu"
    platform: ClassVar[str] = "cpu"
    isa: str | None = None

    def unsupported(self, problem: RaggedProblem) -> str | None:
        return extension("fewbit.kernels.qmatmul._cpu").missing or super().unsupported(problem)

    def refused(self, problem: RaggedProblem, stack: Stack) -> str | None:
        wrong = _refused_dtypes(problem.lhs.dtype, problem.result_dtype.name) or refused_precision(problem.precision)
        return wrong or _refused_scheme(stack)

    def passed_over(self, problem: RaggedProblem) -> str | None:
        return device_refusal()

    def grouped(
        self, x: jax.Array, q: QArray, sizes: jax.Array, *, contracts_cols: bool, dtype: Any, precision: Any
    ) -> jax.Array:
        del precision  # as in `Cpu`
        return native_product(x[None], q, None, contracts_cols=contracts_cols, dtype=dtype, isa=self.isa, sizes=sizes)[0]


def _refused_dtypes(x: str, result: str) -> str | None:
    """Why the kernels cannot multiply these dtypes, or None."""
    if x in FLOATS and result in FLOATS:
        return None
    return f"it multiplies {x} into {result}; both must be one of {', '.join(FLOATS)}"


def _refused_scheme(stack: Stack) -> str | None:
    """Why the kernels cannot read a scheme, or None."""
    scheme = stack.scheme
    axis = stack.merged[scheme.pack_axis + 2]
    group = codes_per_unit(scheme.format.bits, scheme.packing) if scheme.packing != type(scheme.packing)() else 1
    if axis.tile is not None and axis.tile % group:
        return f"codes are permuted in groups of {group}, across tiles of {axis.tile}"
    if isinstance(scheme.scale, Scheme) and scheme.scale.format.bits != 8:
        return f"its scales are {scheme.scale.name}; quantized scales must have 8 bits"
    return None


def reads_packed_weights() -> bool:
    """Whether compiled kernels compute the products of this process, so that weights are better left packed than decoded.

    Returns:
        True on one CPU device with the extension built.
    """
    built = extension("fewbit.kernels.qmatmul._cpu").missing is None
    return built and jax.default_backend() == "cpu" and device_refusal() is None


BACKENDS.add("cpu", Cpu())
RAGGED.add("cpu", CpuRagged())
