"""Perplexity of a model, alone or against another."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from ..errors import QuantError
from .metrics import Divergence, Estimate, divergence, estimate, token_divergences, token_losses, tokens_agree

LogitsFn = Callable[[Int[Array, "B T"]], Float[Array, "B T V"]]
"""A compiled function from tokens to the logits after each token."""


@dataclasses.dataclass(frozen=True)
class Perplexity:
    """`exp(mean(-log p(token)))` over the tokens of a text.

    Attributes:
        value: the perplexity.
        error: its standard error, `value` times the standard error of the mean loss.
        tokens: the number of predicted tokens.
    """

    value: float
    error: float
    tokens: int

    def __str__(self) -> str:
        return f"{self.value:.4f} ± {self.error:.4f}"


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A candidate model compared with a reference on the same tokens.

    Attributes:
        reference: the perplexity of the reference.
        candidate: the perplexity of the candidate.
        log_ratio: the mean of `log p_reference - log p_candidate`, the logarithm of the perplexity ratio. The spread of the
            text cancels, so its error is much smaller than those of the two perplexities.
        kl: `KL(reference || candidate)` of the tokens.
        top1: the fraction of positions with the same argmax.
    """

    reference: Perplexity
    candidate: Perplexity
    log_ratio: Estimate
    kl: Divergence
    top1: Estimate


def token_windows(tokens: Sequence[int] | np.ndarray, *, length: int = 512, limit: int | None = None) -> np.ndarray:
    """Cuts tokens into windows `[N, length + 1]` of inputs and next tokens.

    The last token of a window is the first of the next, so every token but the very first is predicted once. Tokens that
    fill no window are left out.

    Args:
        tokens: the ids of a text.
        length: the number of input tokens of a window.
        limit: the number of input tokens at most, a multiple of `length`; None takes the full text.

    Returns:
        The windows, int32.

    Raises:
        QuantError: when the text is too short for a window or for `limit`, or `limit` is no multiple of `length`.

    >>> token_windows(range(7), length=3).tolist()
    [[0, 1, 2, 3], [3, 4, 5, 6]]
    """
    if length < 1:
        raise QuantError(f"length is {length}, must be at least 1")
    if limit is not None and (limit < length or limit % length):
        raise QuantError(f"limit is {limit} tokens, must be a multiple of the window length, {length}")
    ids = np.asarray(tokens, np.int32)
    count = (len(ids) - 1) // length if limit is None else limit // length
    if count < 1 or len(ids) < count * length + 1:
        needed = max(count, 1) * length + 1
        raise QuantError(f"the text has {len(ids)} tokens, {needed} are needed; take a longer text or lower length or limit")
    starts = np.arange(count)[:, None] * length
    return ids[starts + np.arange(length + 1)[None, :]]


def perplexity(
    logits_fn: LogitsFn,
    windows: Int[np.ndarray, "N W"],
    *,
    batch_size: int = 1,
    progress: Callable[[int, int], None] | None = None,
) -> Perplexity:
    """The perplexity over windows, with one batch of logits in memory at a time.

    Args:
        logits_fn: the model, compiled: `jax.jit(forward, static_argnames="config")` with its parameters bound by a
            lambda, say.
        windows: the result of `token_windows`: all but the last token are inputs, all but the first are predicted.
        batch_size: the windows of a batch.
        progress: called with the number of windows done and of all windows, after each batch.

    Returns:
        The perplexity with its standard error; NaN when the model gives NaN.

    Raises:
        QuantError: when there is no window, or `batch_size` is not positive.

    Example:
        >>> fair_coin = lambda tokens: jnp.zeros((*tokens.shape, 2))
        >>> print(perplexity(fair_coin, token_windows([0, 1, 1, 0, 1], length=2)))
        2.0000 ± 0.0000
    """
    losses = []
    for tokens, targets, kept in _batches(windows, batch_size, progress):
        losses.append(np.asarray(token_losses(logits_fn(tokens), targets))[:kept])
    return _perplexity(np.concatenate(losses))


def compare_models(
    reference_fn: LogitsFn,
    candidate_fn: LogitsFn,
    windows: Int[np.ndarray, "N W"],
    *,
    batch_size: int = 1,
    progress: Callable[[int, int], None] | None = None,
) -> Comparison:
    """Both perplexities, their ratio, the KL divergence and the top-1 agreement in one pass.

    One batch of logits of each model is in memory at a time; four numbers per token are kept.

    Args:
        reference_fn: the reference, compiled.
        candidate_fn: the candidate, compiled.
        windows: the result of `token_windows`.
        batch_size: the windows of a batch.
        progress: called with the number of windows done and of all windows, after each batch.

    Returns:
        The comparison.

    Raises:
        QuantError: when there is no window, or `batch_size` is not positive.
    """
    kept_numbers = []
    for tokens, targets, kept in _batches(windows, batch_size, progress):
        numbers = _token_numbers(reference_fn(tokens), candidate_fn(tokens), targets)
        kept_numbers.append([np.asarray(n, np.float64)[:kept] for n in numbers])
    p_loss, q_loss, kl, agrees = (np.concatenate(n) for n in zip(*kept_numbers, strict=True))
    return Comparison(_perplexity(p_loss), _perplexity(q_loss), estimate(q_loss - p_loss), divergence(kl), estimate(agrees))


@jax.jit
def _token_numbers(p: Float[Array, "*b V"], q: Float[Array, "*b V"], targets: Int[Array, "*b"]) -> tuple[Array, ...]:
    """The losses of both models, their divergence and whether their likeliest tokens are one, in fewer passes over the logits."""
    return token_losses(p, targets), token_losses(q, targets), token_divergences(p, q), tokens_agree(p, q)


def _perplexity(losses: np.ndarray) -> Perplexity:
    """The perplexity of per-token losses."""
    mean, value = estimate(losses), math.inf
    if not mean.value > 700:  # exp overflows
        value = math.exp(mean.value)
    return Perplexity(value, value * mean.error, losses.size)


def _batches(
    windows: np.ndarray, batch_size: int, progress: Callable[[int, int], None] | None
) -> Iterator[tuple[Array, Array, int]]:
    """Tokens, targets and the number of valid windows of each batch. The last batch is padded to the same shape."""
    count = len(windows)
    if windows.ndim != 2 or count < 1 or windows.shape[1] < 2:
        raise QuantError(f"windows has shape {windows.shape}, must be [N, length + 1] as token_windows makes it")
    if batch_size < 1:
        raise QuantError(f"batch_size is {batch_size}, must be at least 1")
    size = min(batch_size, count)
    for first in range(0, count, size):
        rows = np.minimum(np.arange(first, first + size), count - 1)
        batch = jnp.asarray(windows[rows], jnp.int32)
        kept = min(size, count - first)
        yield batch[:, :-1], batch[:, 1:], kept
        if progress is not None:
            progress(first + kept, count)
