"""TPU matmul backends: Pallas kernels, experimental."""

import dataclasses
from typing import ClassVar

import jax
from jax.typing import DTypeLike

from ....array.packing import Packing
from ....array.qarray import QArray
from ...lowering import split_refusal
from ...pallas.decode import NATIVE
from ..integer_codes import is_whole
from ..kernel import AbstractKernel
from ..matrix_view import MatrixView
from ..paired import pair_refusal
from ..problem import Problem
from .blocks import PAIRS, PLAIN, Config
from .problem import refusal

LEAST_TILE = 32
"""The smallest block size along the contraction; shorter blocks leave more than 3/4 of the matrix unit idle."""

OLD = ("TPU v2", "TPU v3", "TPU v4")
"""TPUs on which Mosaic has no int8 or FP8 matmul and a slow int4 to float conversion."""


@dataclasses.dataclass(frozen=True)
class PallasTPU(AbstractKernel):
    """Decodes packed codes in VMEM. In a ragged_dot the matrices of empty groups are not decoded.

    Attributes:
        config: block sizes. Other settings are another backend: `backend=PallasTPU(Config(nf4_polynomial=True))`.
        pairs: block sizes for two quantized operands.
        groups: block sizes for ragged_dot; None: the defaults.
        interpret: whether JAX evaluates the kernel step by step instead of compiling it; for tests, on any platform.
    """

    name: ClassVar[str] = "pallas_tpu"
    platform: ClassVar[str] = "tpu"
    experimental: ClassVar[bool] = True
    groups_pairs: ClassVar[bool] = True
    config: Config = PLAIN
    pairs: Config = PAIRS
    groups: Config | None = None
    interpret: bool = False

    def refused_pair(self, problem: Problem) -> str | None:
        return pair_refusal(problem, floats=True) or _refused_codes(problem)

    def refused(self, problem: Problem, weight: MatrixView) -> str | None:
        tile = weight.merged[weight.scheme.pack_axis + 2].tile
        at = problem.weight[0]
        dtypes = problem.activation.dtype, (problem.lhs, problem.rhs)[at].dtype, problem.result_dtype
        return refusal(weight.scheme, tile, *dtypes, precision=problem.precision)

    def not_chosen(self, problem: Problem) -> str | None:
        return split_refusal()

    def about(self) -> str:
        return "Pallas; experimental: tested in an interpreter and cross-compiled, not yet run on a TPU"

    def stacked(self, x: jax.Array, q: QArray, *, contracts_cols: bool, dtype: DTypeLike, precision: object) -> jax.Array:
        from .gemm import stacked_product  # importing Pallas takes half a second

        return stacked_product(
            *(x, q),
            contracts_last=contracts_cols,
            result=dtype,
            precision=precision,
            config=_of_chip(self.config),
            interpret=self.interpret,
        )

    def paired(self, x: QArray, q: QArray, *, contracts_cols: bool, dtype: DTypeLike) -> jax.Array:
        from .int8_gemm import paired_stacks

        return paired_stacks(x, q, contracts_last=contracts_cols, result=dtype, config=self.pairs, interpret=self.interpret)

    def grouped(
        self, x: jax.Array, q: QArray, sizes: jax.Array, *, contracts_cols: bool, dtype: DTypeLike, precision: object
    ) -> jax.Array:
        from . import ragged

        return ragged.grouped_product(
            *(x, q, sizes),
            contracts_last=contracts_cols,
            result=dtype,
            precision=precision,
            config=_of_chip(self.groups or ragged.PLAIN),
            interpret=self.interpret,
        )

    def grouped_pair(self, x: QArray, q: QArray, sizes: jax.Array, *, contracts_cols: bool, dtype: DTypeLike) -> jax.Array:
        from . import ragged

        config = self.groups or ragged.PLAIN
        return ragged.grouped_pair(
            x, q, sizes, contracts_last=contracts_cols, result=dtype, config=config, interpret=self.interpret
        )


def _refused_codes(problem: Problem) -> str | None:
    """Why the matrix unit does not support two operands' codes, or None."""
    if (chip := _old_chip()) is not None:
        return f"the device is a {chip}, on which Mosaic has no int8 or FP8 matmul"
    weight = problem.weight[1]
    scheme = weight.scheme
    if not is_whole(scheme) and scheme.format.name not in NATIVE:
        return f"the codes are {scheme.format.name}; integers, {' and '.join(NATIVE)} are supported"
    if scheme.format.bits not in (4, 8) or scheme.packing != Packing():
        return f"the codes are {scheme.format.name}; codes of 4 and 8 bits in order, low bits first, are supported"
    packed = weight.merged[scheme.pack_axis + 2]
    if packed.tile is not None and packed.tile * scheme.format.bits % 8:
        return f"tiles of {packed.tile} along the packed axis split bytes of {8 // scheme.format.bits} codes"
    if (tile := weight.contraction.tile) is not None and tile < LEAST_TILE:
        return f"the block size along the contraction is {tile}; it must be at least {LEAST_TILE}"
    return None


def _of_chip(config: Config) -> Config:
    """The configuration for the current TPU."""
    if _old_chip() is None:
        return config
    return dataclasses.replace(config, halves=False)


def _old_chip() -> str | None:
    """The current TPU if it is one of `OLD`, else None."""
    if jax.default_backend() != "tpu":
        return None
    kind = jax.devices()[0].device_kind
    return next((chip for chip in OLD if kind == chip or kind.startswith(chip + " ")), None)
