"""Matmul with quantized operands: selects the kernels."""

import dataclasses

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from ...array.qarray import QArray
from ..backend import AbstractBackend, select
from .call import multiplied
from .cpu.backend import Cpu
from .gpu.backend import TritonGPU
from .kernel import AbstractKernel
from .problem import DimensionNumbers, Operand, Problem
from .reference import Reference, decodes_both
from .tpu.backend import PallasTPU

BACKENDS = (PallasTPU(), TritonGPU(), Cpu(), Reference())
"""The backends of matmuls, in the order in which they are asked."""


def with_decoded_lhs(problem: Problem) -> Problem | None:
    """The product with the left operand dequantized to float32. Kernels then read the codes of the right one in place.

    None unless both operands are quantized, no kernel multiplies their codes, and the reference would dequantize both.
    """
    if not problem.is_paired or not decodes_both(problem) or select(BACKENDS, problem).kernels:
        return None
    lhs = Operand(problem.lhs.shape, "float32", None)
    return dataclasses.replace(problem, lhs=lhs, preferred_element_type=problem.result_dtype)


def product(
    problem: Problem,
    lhs: QArray | jax.Array,
    rhs: QArray | jax.Array,
    sizes: jax.Array | None = None,
    *,
    backend: str | AbstractBackend[Problem] | None = None,
) -> jax.Array:
    """Computes a product with the kernels selected for the problem.

    Args:
        problem: the product.
        lhs: the left operand.
        rhs: the right operand.
        sizes: for ragged_dot the rows of each group, else None.
        backend: a backend or its name, which is never replaced by another; None chooses one for each platform.

    Returns:
        The product.

    Raises:
        UnsupportedError: if the named backend does not support the problem, or the platform that the program is compiled for.
    """
    choice = select(BACKENDS, problem, backend)
    operands: tuple[QArray | jax.Array, ...] = (lhs, rhs)
    if sizes is not None:
        operands = (lhs, rhs, sizes)
    if 0 in (*problem.lhs.shape, *problem.rhs.shape):  # nothing to sum, or no elements: no kernel is needed
        return _empty(problem, *operands)
    if backend is None and not _has_known_sizes(*operands):
        return Reference().run(problem, *operands)
    kernels = [kernel for kernel in choice.kernels if isinstance(kernel, AbstractKernel)]
    if kernels and isinstance(choice.backend, AbstractKernel | Reference):
        return multiplied(problem, operands, kernels, is_named=backend is not None)
    return choice.backend.run(problem, *operands)


def picked_product(
    x: jax.Array | QArray,
    q: QArray,
    index: jax.Array,
    numbers: DimensionNumbers,
    precision: object,
    preferred: DTypeLike | None,
) -> jax.Array | None:
    """Multiplies with one element of a stack in place; None if unsupported.

    Args:
        x: the left operand; a QArray's tiles are those of its last axes.
        q: arrays stacked along the first axis of every leaf.
        index: the element that is the right operand.
        numbers: the dimension numbers of the product with one element; without batch axes.
        precision: as in `lax.dot_general`.
        preferred: as in `lax.dot_general`.
    """
    (left, right), batch = numbers
    if any(batch) or not _has_known_sizes(x):
        return None
    one = Operand(tuple(q.shape[1:]), jnp.dtype(q.dtype).name, q.scheme)
    problem = Problem(Operand.of(x), one, numbers, precision, preferred)
    many = ((tuple(a + 1 for a in left), tuple(a + 1 for a in right)), ((0,), (0,)))
    x = jax.tree.map(lambda leaf: leaf[None], x)
    stack = Problem(Operand.of(x), Operand.of(q), many, precision, problem.result_dtype)
    kernels = [kernel for kernel in select(BACKENDS, problem).kernels if isinstance(kernel, AbstractKernel)]
    if not kernels or any(kernel.unsupported(stack) for kernel in kernels):
        return None
    return multiplied(stack, (x, q), kernels, is_named=False, index=index)[0]


def _has_known_sizes(*operands: QArray | jax.Array) -> bool:
    """Whether all sizes are numbers, which kernels need. `jax.export` can leave some open."""
    return all(isinstance(n, int) for operand in operands for n in operand.shape)


def _empty(problem: Problem, *operands: QArray | jax.Array) -> jax.Array:
    """The product where an operand has no elements."""
    if problem.is_ragged:  # `lax.ragged_dot` needs at least one group
        columns = problem.rhs.shape[3 - problem.dimension_numbers[0][1][0]]
        return jnp.zeros((problem.lhs.shape[0], columns), problem.result_dtype)
    return Reference().run(problem, *operands)
