"""Experts to which the calibration data routes few tokens, or none."""

import dataclasses
import re
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from ..._registry import near_names
from ...errors import QuantError

EXPERT = re.compile(r"experts/(\d+)/")
"""The part of a path that names one expert."""

UNSEEN = ("nearest", "share", "error")
"""What can happen to an expert without tokens: it is rounded to nearest; it takes the statistics of all tokens of the layer's
other experts; or it is an error."""


@dataclasses.dataclass(frozen=True)
class ExpertTokens:
    """How many tokens of the calibration data were routed to the experts of a layer.

    Attributes:
        path: the path of the experts, `layers/3/mlp/experts`.
        counts: the tokens of each.
    """

    path: str
    counts: tuple[int, ...]

    @property
    def unseen(self) -> tuple[int, ...]:
        """The numbers of the experts without tokens."""
        return tuple(number for number, count in enumerate(self.counts) if count == 0)

    def of(self, path: str) -> tuple[int, ...]:
        """The tokens of the experts whose weight has this path.

        It is the number of one expert, those of all experts where they are stacked, none for other weights.

        >>> tokens = ExpertTokens("layers/3/mlp/experts", (5, 0))
        >>> tokens.of("layers/3/mlp/experts/1/up"), tokens.of("layers/3/mlp/experts/up"), tokens.of("layers/3/attn/q")
        ((0,), (5, 0), ())
        """
        if not path.startswith(f"{self.path}/"):
            return ()
        number = path.removeprefix(f"{self.path}/").split("/")[0]
        if number.isdecimal():
            return (self.counts[int(number)],)
        return self.counts

    def __str__(self) -> str:
        low, high = min(self.counts), max(self.counts)
        return f"{self.path}: {low:,} to {high:,} tokens an expert, {len(self.unseen)} of {len(self.counts)} without any"


def check_unseen(policy: str) -> None:
    """Refuses an unknown policy for experts without tokens."""
    if policy not in UNSEEN:
        raise QuantError(f"unknown policy {policy!r} for experts without tokens; {near_names(policy, UNSEEN)}")


def with_unseen_experts(
    stats: Mapping[str, PyTree], summed: Callable[[PyTree], PyTree], policy: str, layer: str
) -> tuple[dict[str, PyTree], np.ndarray | None]:
    """The statistics of a layer with the policy for experts without tokens applied.

    Args:
        stats: the `Observation`s by path; those of experts have a leading axis, and a count for each.
        summed: joins the statistics of all experts.
        policy: one of `UNSEEN`.
        layer: the path of the layer, for messages.

    Returns:
        The statistics, and the tokens of each expert; None for a layer without experts.

    Raises:
        QuantError: when an expert has no token, with the policy "error".
    """
    grouped = {path: one for path, one in stats.items() if one.count is not None and one.count.ndim == 1}
    if not grouped:
        return dict(stats), None
    path, one = next(iter(grouped.items()))
    counts = np.asarray(one.count).astype(np.int32)
    tokens = ExpertTokens(f"{layer}/{path.rsplit('/', 1)[0]}", tuple(counts.tolist()))
    if not tokens.unseen or policy == "nearest":
        return dict(stats), counts
    if policy == "error":
        raise QuantError(
            f"no token of the calibration data is routed to {tokens.path} {', '.join(map(str, tokens.unseen))}; take more or "
            "other text (--calibration-windows, --calibration-text), or --unseen-experts nearest or share"
        )
    return {**stats, **{path: _shared(one, summed(one)) for path, one in grouped.items()}}, counts


def _shared(one: PyTree, whole: PyTree) -> PyTree:
    """The statistics of experts, where those without tokens have those of all others together."""

    def chosen(each: jax.Array, total: jax.Array) -> jax.Array:
        is_seen = jnp.expand_dims(one.count > 0, tuple(range(1, each.ndim)))
        return jnp.where(is_seen, each, total[None])

    return jax.tree.map(chosen, one, whole)
