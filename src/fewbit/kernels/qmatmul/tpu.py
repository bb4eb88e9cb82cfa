"""The products on TPUs by Pallas kernels. The kernels, and why they are as they are, stand in `pallas_*.py`."""

import dataclasses
from typing import Any, ClassVar

import jax
from jax.sharding import AxisType

from ...array import QArray
from .pallas_blocks import PLAIN, Config
from .pallas_form import refusal
from .problem import Operand, Problem
from .ragged import RAGGED, AbstractRaggedKernel, RaggedProblem
from .reference import BACKENDS
from .stack import Stack
from .stacked import AbstractStackKernel


@dataclasses.dataclass(frozen=True)
class PallasTPU(AbstractStackKernel):
    """Packed bytes decoded in VMEM, beside the matrix unit.

    Attributes:
        config: the sizes of blocks. Another one is another backend:
            `BACKENDS.add("nf4_polynomial", PallasTPU(Config(nf4_polynomial=True)))`.
        interpret: whether JAX evaluates the kernel step by step instead of compiling it; for tests, on any platform.
    """

    name: ClassVar[str] = "pallas_tpu"
    platform: ClassVar[str] = "tpu"
    config: Config = PLAIN
    interpret: bool = False

    def refused(self, problem: Problem, x: Operand, stack: Stack) -> str | None:
        tile = stack.merged[stack.scheme.pack_axis + 2].tile
        dtypes = x.dtype, stack_dtype(problem), problem.result_dtype
        return refusal(stack.scheme, tile, *dtypes, precision=problem.precision)

    def passed_over(self, problem: Problem) -> str | None:
        return _split_refusal()

    def about(self) -> str:
        return "Pallas; programs for other platforms take their own kernels, or the reference"

    def stacked(self, x: jax.Array, q: QArray, *, contracts_cols: bool, dtype: Any, precision: Any) -> jax.Array:
        from .pallas_tpu import stacked_product  # importing Pallas takes half a second

        return stacked_product(
            *(x, q),
            contracts_last=contracts_cols,
            result=dtype,
            precision=precision,
            config=self.config,
            interpret=self.interpret,
        )


@dataclasses.dataclass(frozen=True)
class PallasTPURagged(AbstractRaggedKernel):
    """The same for rows in groups, each with a matrix of its own; what it decodes are the matrices of groups that have rows.

    Attributes:
        config: the sizes of blocks, as of `PallasTPU`; None: those made for groups.
        interpret: whether JAX evaluates the kernel step by step instead of compiling it; for tests, on any platform.
    """

    name: ClassVar[str] = "pallas_tpu"
    platform: ClassVar[str] = "tpu"
    config: Config | None = None
    interpret: bool = False

    def refused(self, problem: RaggedProblem, stack: Stack) -> str | None:
        tile = stack.merged[stack.scheme.pack_axis + 2].tile
        dtypes = problem.lhs.dtype, problem.rhs.dtype, problem.result_dtype
        return refusal(stack.scheme, tile, *dtypes, precision=problem.precision)

    def passed_over(self, problem: RaggedProblem) -> str | None:
        return _split_refusal()

    def grouped(
        self, x: jax.Array, q: QArray, sizes: jax.Array, *, contracts_cols: bool, dtype: Any, precision: Any
    ) -> jax.Array:
        from .pallas_ragged import PLAIN, grouped_product

        return grouped_product(
            *(x, q, sizes),
            contracts_last=contracts_cols,
            result=dtype,
            precision=precision,
            config=self.config or PLAIN,
            interpret=self.interpret,
        )


BACKENDS.add(PallasTPU.name, PallasTPU())
RAGGED.add(PallasTPURagged.name, PallasTPURagged())


def _split_refusal() -> str | None:
    """Why a kernel is left aside on several devices; None where there is one, or each computes for itself."""
    if jax.device_count() == 1 or (jax.default_backend() == "tpu" and _is_manual()):
        return None
    return "there are several devices, and XLA splits no kernel over them; call it within jax.shard_map, or name it"


def stack_dtype(problem: Problem) -> str:
    """The logical dtype of the quantized operand."""
    return problem.lhs.dtype if problem.lhs.scheme is not None else problem.rhs.dtype


def _is_manual() -> bool:
    """Whether each device computes for itself here, as within `jax.shard_map` over the whole mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    return not mesh.empty and all(kind == AxisType.Manual for kind in mesh.axis_types)
