"""The product on CPUs by compiled kernels: one quantized operand, in any scheme, beside one of float32, bfloat16 or float16.

The arithmetic is float32's: codes are decoded exactly, products summed in float32 (in an order of our own, the same for any
number of threads), and the result rounded once to its dtype. Nothing is quantized that was not.
"""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from ...array import QArray, Scheme
from ...array.packing import codes_per_unit
from ...errors import QuantError
from ..extension import device_refusal, extension
from ..select import AbstractBackend
from .native import stacked_product
from .problem import Operand, Problem
from .reference import BACKENDS
from .stack import Stack, stack_of

FLOATS = ("float32", "bfloat16", "float16")


@dataclasses.dataclass(frozen=True)
class Cpu(AbstractBackend[Problem]):
    """C++ kernels for AVX-512, AVX2, and any processor.

    Attributes:
        isa: the instruction set to take, where the machine has it: avx512, avx2, portable; None: the best.
    """

    name: ClassVar[str] = "cpu"
    isa: str | None = None

    def unsupported(self, problem: Problem) -> str | None:
        if (missing := extension("fewbit.kernels.qmatmul._cpu").missing) is not None:
            return missing
        if problem.lhs.scheme is not None and problem.rhs.scheme is not None:
            return "both operands are quantized; it takes one"
        x, q = _sides(problem)
        if x.dtype not in FLOATS or problem.result_dtype.name not in FLOATS:
            return f"it multiplies {x.dtype} into {problem.result_dtype.name}; both must be one of {', '.join(FLOATS)}"
        try:
            stack = _stack(problem)
        except QuantError as refusal:
            return f"{q} is no stack of matrices: {refusal}"
        return _refused_scheme(stack)

    def passed_over(self, problem: Problem) -> str | None:
        return device_refusal()

    def about(self) -> str:
        isa = self.isa or extension("fewbit.kernels.qmatmul._cpu").isa
        return f"compiled for {isa}; on devices other than CPUs the reference takes its place"

    def run(self, problem: Problem, *operands: Any) -> jax.Array:
        q_side = 0 if isinstance(operands[0], QArray) else 1
        x, q = operands[1 - q_side], operands[q_side]
        stack, own = _stack(problem), problem.dimension_numbers[0][q_side]
        met = problem.dimension_numbers[0][1 - q_side]
        contracted = tuple(met[own.index(axis)] for axis in stack.contracted)
        batch = problem.dimension_numbers[1][1 - q_side]
        free = tuple(a for a in range(x.ndim) if a not in contracted and a not in batch)
        lengths = [[x.shape[a] for a in group] for group in (batch, free, contracted)]
        x3 = x.transpose(*batch, *free, *contracted).reshape([int(np.prod(group)) for group in lengths])
        y = stacked_product(x3, stack.of(q), contracts_cols=stack.contracts_cols, dtype=problem.result_dtype, isa=self.isa)
        own_free = [q.shape[a] for a in (stack.rows if stack.contracts_cols else stack.cols)]
        if q_side == 0:
            return jnp.swapaxes(y, 1, 2).reshape(*lengths[0], *own_free, *lengths[1])
        return y.reshape(*lengths[0], *lengths[1], *own_free)


def _sides(problem: Problem) -> tuple[Operand, Operand]:
    """The float operand, and the quantized one."""
    return (problem.lhs, problem.rhs) if problem.lhs.scheme is None else (problem.rhs, problem.lhs)


def _stack(problem: Problem) -> Stack:
    """The quantized operand as a stack."""
    side = 0 if problem.lhs.scheme is not None else 1
    q = (problem.lhs, problem.rhs)[side]
    return stack_of(q, problem.dimension_numbers[0][side], problem.dimension_numbers[1][side])


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
