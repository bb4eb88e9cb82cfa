"""Explains which backend computes a product."""

import dataclasses
import math

import jax
import numpy as np
from jax.typing import ArrayLike

from ..array.qarray import QArray, is_qarray
from ..array.scheme import laid_along
from ..errors import QuantError
from ..kernels.backend import select
from ..kernels.qmatmul.dispatch import BACKENDS, with_decoded_lhs
from ..kernels.qmatmul.problem import Operand, Problem
from .dot import matmul_numbers, untransposed
from .resolve_policy import ProductConfig, resolved


def explain(lhs: ArrayLike | QArray, rhs: ArrayLike | QArray, *, backend: str | None = None) -> str:
    """Says which backend computes `lhs @ rhs` here, and why earlier backends refuse.

    Nothing is computed. The bytes are those that the product reads from memory: codes, scales and zero points of a QArray, the
    elements of an array. `fewbit bench` measures times.

    Args:
        lhs: the left operand, `[..., M, K]` or `[K]`.
        rhs: the right operand, `[..., K, N]` or `[K]`; at least one of the two is a QArray.
        backend: the name of the backend that must compute it, as in `fb.dot_general`. One of another platform is explained for
            programs that are compiled for that platform, and a line says that it does not run here.

    Returns:
        A line with the product and its backend, one with the bytes it reads, and one for each backend that does not run. A
        backend that never ran on its hardware is marked `experimental`.

    Raises:
        QuantError: where neither operand is quantized, or their shapes do not match.
        UnsupportedError: where the named backend cannot compute it.

    >>> q = fb.quantize(jnp.ones((64, 8)), "nf4", axis=-2)
    >>> print(explain(jnp.ones((2, 64)), q))  # doctest: +ELLIPSIS
    float32[2,64] @ nf4[64,8]: reference (plain JAX, which writes the decoded weight to memory before it multiplies)
      reads: float32[2,64] of 512 bytes, nf4[64,8] of 288 bytes (2,048 in float32)
      pallas_tpu (experimental): it runs on tpu, the device is cpu
      triton (experimental): it runs on cuda through jax-triton, which is not installed
      cpu: ...
    """
    if not (is_qarray(lhs) or is_qarray(rhs)):
        raise QuantError("neither operand is a QArray; jax.numpy computes their product")
    left, right, config, _ = resolved(lhs, rhs, None, None)
    numbers = matmul_numbers(left.shape, right.shape)
    shown = f"{Operand.of(left)} @ {Operand.of(right)}"
    reads = f"  reads: {_bytes_of(left)}, {_bytes_of(right)}"
    left, right, numbers = untransposed(left, right, numbers)
    entering = (_entering(Operand.of(x), config, i == 0, numbers[0][i]) for i, x in enumerate((left, right)))
    problem = Problem(*entering, dimension_numbers=numbers)
    decoded = None
    if backend is None:
        decoded = with_decoded_lhs(problem)
    choice = select(BACKENDS, decoded or problem, backend)
    lines = [f"{shown}: {choice.backend.name} ({choice.backend.about()})", reads]
    if decoded is not None:
        lines.append("  the left operand is dequantized first: no kernel multiplies these codes")
    marks = {backend.name: " (experimental)" for backend in BACKENDS if backend.experimental}
    lines += [f"  {name}{marks.get(name, '')}: {reason}" for name, reason in choice.reasons.items()]
    return "\n".join(lines)


def _bytes_of(x: jax.Array | QArray) -> str:
    """An operand and its bytes in memory."""
    operand = Operand.of(x)
    dense = math.prod(operand.shape) * np.dtype(operand.dtype).itemsize
    if isinstance(x, QArray):
        return f"{operand} of {x.nbytes:,} bytes ({dense:,} in {operand.dtype})"
    return f"{operand} of {dense:,} bytes"


def _entering(side: Operand, config: ProductConfig | None, is_left: bool, contracted: tuple[int, ...]) -> Operand:
    """An operand with the scheme that its policy quantizes it in."""
    if config is None or side.scheme is not None:
        return side
    scheme = config.scheme(is_left)
    if scheme is None:
        return side
    return dataclasses.replace(side, scheme=laid_along(scheme, contracted, side.shape))
