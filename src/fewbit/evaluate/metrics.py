"""KL divergence, top-1 agreement and SQNR."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int

from ..array.qarray import QArray
from ..errors import QuantError
from ..kernels.quantize.dispatch import dequantize


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A mean over tokens, with its standard error.

    Attributes:
        value: the mean.
        error: its standard error, `s / sqrt(n)` with the sample deviation `s`; NaN for a single token or an infinite mean.
    """

    value: float
    error: float

    def __str__(self) -> str:
        return f"{self.value:.4g} ± {self.error:.2g}"


@dataclasses.dataclass(frozen=True)
class Divergence:
    """The distribution over tokens of `KL(p || q)`, in nats.

    Attributes:
        mean: its mean with the standard error.
        median: the median.
        p90: the 90th percentile.
        p99: the 99th percentile.
        largest: the largest value.
    """

    mean: Estimate
    median: float
    p90: float
    p99: float
    largest: float


def estimate(samples: ArrayLike) -> Estimate:
    """The mean of samples with its standard error, in float64.

    Args:
        samples: one number per token, of any shape.

    Returns:
        The mean and its standard error.

    Raises:
        QuantError: when there are none.

    >>> estimate(np.array([1.0, 2.0, 3.0, 4.0]))
    Estimate(value=2.5, error=0.6454972243679028)
    """
    flat = np.asarray(samples, np.float64).ravel()
    if not flat.size:
        raise QuantError("estimate got no samples, needs at least one; check that the text is long enough")
    error = math.nan
    with np.errstate(invalid="ignore"):  # an infinite mean has the error NaN, without a warning
        if flat.size > 1:
            error = float(flat.std(ddof=1)) / math.sqrt(flat.size)
        return Estimate(float(flat.mean()), error)


def kl_divergence(p_logits: Float[Array, "*b V"], q_logits: Float[Array, "*b V"]) -> Divergence:
    """The distribution over tokens of the KL divergence, in nats.

    `KL(p || q) = sum_v p_v (log p_v - log q_v)`. Exactly zero for equal logits; else float32 rounding can make it as low as
    about -1e-7.

    Args:
        p_logits: the reference's logits.
        q_logits: the candidate's logits.

    Returns:
        The mean with its standard error, percentiles and maximum.

    Raises:
        QuantError: when there is no token.

    Example:
        >>> logits = jnp.log(jnp.array([[0.5, 0.5]]))
        >>> round(kl_divergence(logits, jnp.log(jnp.array([[0.75, 0.25]]))).mean.value, 6)
        0.143841
    """
    return divergence(token_divergences(p_logits, q_logits))


def divergence(samples: ArrayLike) -> Divergence:
    """Mean, percentiles and maximum of per-token divergences.

    Args:
        samples: `KL(p || q)` of each token, of any shape.

    Raises:
        QuantError: when there are none.
    """
    flat = np.asarray(samples, np.float64).ravel()
    mean = estimate(flat)
    ordered = np.sort(flat)  # picked, not interpolated: infinities have no middle
    median, p90, p99, largest = (float(ordered[math.ceil(q * flat.size) - 1]) for q in (0.5, 0.9, 0.99, 1.0))
    return Divergence(mean, median, p90, p99, largest)


def top1_agreement(p_logits: Float[Array, "*b V"], q_logits: Float[Array, "*b V"]) -> Estimate:
    """The fraction of positions with the same argmax; NaN logits never agree.

    Args:
        p_logits: the reference's logits.
        q_logits: the candidate's logits.

    Returns:
        The fraction and its standard error.

    >>> top1_agreement(jnp.array([[1.0, 2.0], [2.0, 1.0]]), jnp.array([[0.0, 3.0], [1.0, 1.5]])).value
    0.5
    """
    return estimate(tokens_agree(p_logits, q_logits))


def sqnr_db(reference: ArrayLike, approx: ArrayLike | QArray) -> float:
    """The signal-to-quantization-noise ratio in decibels.

    `10 log10(sum reference ** 2 / sum (reference - approx) ** 2)`; infinite for equal arrays, zeros included; minus infinity
    if only the reference is zero; NaN if either has a NaN. Rows are summed in float32, their sums in float64; NumPy's float64
    in float64.

    Args:
        reference: a floating array, or a number.
        approx: an array or a QArray of the same shape.

    Returns:
        Decibels.

    Raises:
        QuantError: when the shapes differ.

    >>> round(sqnr_db(jnp.array([3.0, 4.0]), jnp.array([3.0, 3.5])), 6)
    20.0
    """
    if isinstance(approx, QArray):
        approx = dequantize(approx)
    if np.shape(reference) != np.shape(approx):
        raise QuantError(f"reference has shape {np.shape(reference)} and approx {np.shape(approx)}; they must be the same")
    if any(isinstance(x, np.ndarray | np.float64) and x.dtype == np.float64 for x in (reference, approx)):
        parts = _energies(np.asarray(reference, np.float64), np.asarray(approx, np.float64))
    else:
        parts = _row_energies(reference, approx)
    (signal, unit), (noise, noise_unit) = (
        (float(np.sum(np.asarray(rows, np.float64))), float(unit)) for rows, unit in parts
    )
    if math.isnan(signal) or math.isnan(noise) or signal == noise == math.inf:
        return math.nan
    if noise == 0:
        return math.inf
    if signal == 0 or noise == math.inf:
        return -math.inf
    return 10 * math.log10(signal / noise) + 20 * (math.log10(unit) - math.log10(noise_unit))


def _log_softmax(logits: Float[Array, "*b V"]) -> Float[Array, "*b V"]:
    """The log-probabilities. Logits of 16 bits are computed in float32: theirs have 3 or 4 digits."""
    if logits.dtype != jnp.float64:
        logits = logits.astype(jnp.float32)
    return jax.nn.log_softmax(logits, axis=-1)


@jax.jit
def token_losses(logits: Float[Array, "*b V"], targets: Int[Array, "*b"]) -> Float[Array, "*b"]:
    """`-log p(target)` of each token, float32; float64 for float64 logits."""
    picked = jnp.take_along_axis(_log_softmax(logits), targets[..., None], axis=-1)
    return -jnp.squeeze(picked, axis=-1)


@jax.jit
def token_divergences(p_logits: Float[Array, "*b V"], q_logits: Float[Array, "*b V"]) -> Float[Array, "*b"]:
    """`KL(p || q)` of each token, float32; float64 for float64 logits."""
    log_p, log_q = _log_softmax(p_logits), _log_softmax(q_logits)
    terms = jnp.where(jnp.isneginf(log_p), jnp.zeros_like(log_p), jnp.exp(log_p) * (log_p - log_q))
    return jnp.sum(terms, axis=-1)


@jax.jit
def tokens_agree(p_logits: Float[Array, "*b V"], q_logits: Float[Array, "*b V"]) -> Bool[Array, "*b"]:
    """Whether the argmax is the same."""
    has_nan = jnp.any(jnp.isnan(p_logits) | jnp.isnan(q_logits), axis=-1)
    return (jnp.argmax(p_logits, axis=-1) == jnp.argmax(q_logits, axis=-1)) & ~has_nan


@jax.jit
def _row_energies(reference: ArrayLike, approx: ArrayLike) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    """The energies in float32."""
    reference, approx = (jnp.atleast_1d(jnp.asarray(x, jnp.float32)) for x in (reference, approx))
    return _energies(reference, approx)


def _energies(reference: Any, approx: Any) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """Sums of squares over the last axis: of half the reference, and of half the difference.

    Each is in units of the square of its second number, a power of two, so that no square overflows or is lost. Half, so that no
    difference overflows.
    """
    xp = np if isinstance(reference, np.ndarray) else jnp
    half = reference * 0.5
    found = []
    for x in (half, half - approx * 0.5):
        amax = xp.max(xp.abs(x), initial=0)
        amax = xp.where((amax > 0) & (amax < xp.inf), amax, xp.ones_like(amax))
        unit = amax / (2 * xp.frexp(amax)[0])
        found.append((xp.sum((x / unit) ** 2, axis=-1), unit))
    return found[0], found[1]
