"""QEP: corrects weights for the quantization errors in their inputs.

With inputs `X` in the float model and `Y` in the quantized one, tokens in rows, the weight `V` of least `|X W^T - Y V^T|**2` is
`V = W + W (X^T Y - Y^T Y) (Y^T Y)^-1`. A part of that step is taken, then another method rounds the result for the inputs `Y`.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ..array.qarray import QArray
from ..array.scheme import Scheme
from ..errors import QuantError
from ..kernels.quantize.dispatch import quantize
from ..recipe.method import AbstractMethod
from .gptq import GPTQ
from .weight_matrices import WeightMatrices


@dataclasses.dataclass(frozen=True)
class QEP(AbstractMethod):
    """Corrects a weight for the errors of its quantized inputs, then quantizes it by another method.

    The experts of a ragged product are not corrected: the routers of both models send them different tokens. Nor is a tied
    embedding, whose rows are also the input embeddings.

    Attributes:
        method: what quantizes the corrected weight: one that needs nothing or the Hessian, such as `GPTQ`, `GPTQMSE` or `RTN`.
        strength: the part of the correction that is made, 0 to 1; all of it follows the calibration data too closely.
        damping: what is added to the diagonal of the second moments, as a part of its mean.

    Reference: Arai and Ichikawa, Quantization Error Propagation, arXiv 2504.09629.
    """

    name = "qep"
    collect = ("hessian", "cross")

    method: AbstractMethod = GPTQ()
    strength: float = 0.5
    damping: float = 0.01

    def __post_init__(self) -> None:
        if not set(self.method.collect) <= {"hessian"}:
            raise QuantError(
                f"qep takes methods of the Hessian or of no data, such as gptq; {self.method.name} needs other statistics"
            )
        if not (0 <= self.strength <= 1 and 0 < self.damping < math.inf):
            raise QuantError(f"strength is {self.strength} and damping {self.damping}; they must be 0 to 1, and above 0")

    def quantized(self, x: jax.Array, scheme: Scheme, axis: tuple[int, ...], observation: Any) -> QArray:
        if observation is None or observation.hessian is None:
            raise QuantError("qep needs the second moments of quantized inputs, and their products with the float ones")
        if x.size == 0:  # nothing to correct
            return quantize(x, scheme, axis=axis)
        corrected = x.astype(jnp.float32)
        if observation.cross is not None:
            view = WeightMatrices.of(quantize(x, scheme, axis=axis), axis, observation.hessian.shape, observation.batch)
            moments = map(view.moments, (observation.hessian, observation.cross))
            columns = jax.vmap(self._corrected)(view.columns_first(corrected), *moments)
            corrected = view.restored(columns)
        return self.method.quantized(corrected, scheme, axis, observation).astype(x.dtype)

    def _corrected(
        self, w: Float[Array, "K N"], hessian: Float[Array, "K K"], cross: Float[Array, "K K"]
    ) -> Float[Array, "K N"]:
        """`W^T` with its correction; unchanged where all inputs were zero."""
        mean, identity = jnp.trace(hessian) / len(hessian), jnp.eye(len(hessian), dtype=jnp.float32)
        unit = jnp.where(mean > 0, mean, 1.0)
        normal = jnp.where(mean > 0, hessian / unit, identity) + self.damping * identity
        wanted = jnp.matmul((cross - hessian).T / unit, w, precision="highest")
        step = self.strength * jax.scipy.linalg.solve(normal, wanted, assume_a="pos")
        return w + jnp.where(jnp.isfinite(step).all(), step, 0.0)
