"""Sparsity: masks that keep the largest weights, and the schedule that renews them."""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int

from ..errors import QuantError
from .fake_quant import passed_through


def nm_mask(w: Float[Array, "*s"], n: int, m: int, *, axis: int) -> Bool[Array, "*s"]:
    """Which weights are among the `n` of largest magnitude in their group of `m` neighbours along an axis.

    Of equal magnitudes the first counts; a NaN counts as infinite, so it is kept and stays visible.

    Args:
        w: the weights.
        n: how many of each group are kept; 2 of 4 is what sparse tensor cores multiply.
        m: how many weights make a group.
        axis: the axis that groups run along: the one that the product contracts, where hardware wants them.

    Returns:
        True where a weight is kept.

    Raises:
        QuantError: for counts or an axis that make no sense, or a length that `m` does not divide.

    >>> nm_mask(jnp.array([0.1, -3.0, 2.0, 0.5]), 2, 4, axis=-1).tolist()
    [False, True, True, False]
    """
    _check_counts(n, m)
    if not -w.ndim <= axis < w.ndim:
        raise QuantError(f"axis is {axis}, but the array has {w.ndim} axes")
    length = w.shape[axis]
    if length % m:
        fits = ", ".join(str(k) for k in range(2, min(length, 64) + 1) if length % k == 0) or "none up to 64"
        raise QuantError(
            f"axis {axis} has {length} elements, which groups of m={m} do not divide; pad it to {-(-length // m) * m}, or take "
            f"one of the groups that fit: {fits}"
        )
    moved = jnp.moveaxis(w, axis, -1)
    groups = moved.reshape(*moved.shape[:-1], length // m, m)
    return jnp.moveaxis((_rank(groups) < n).reshape(moved.shape), -1, axis)


def magnitude_mask(w: Float[Array, "*s"], density: float) -> Bool[Array, "*s"]:
    """Which weights are among the largest magnitudes of the whole array.

    Args:
        w: the weights.
        density: the fraction that is kept, from 0 to 1: `round(density * w.size)` weights, the first of equal ones.

    Returns:
        True where a weight is kept; a NaN is.

    Raises:
        QuantError: for a density outside 0 .. 1.

    >>> magnitude_mask(jnp.array([[0.1, -3.0], [2.0, 0.5]]), 0.25).tolist()
    [[False, True], [False, False]]
    """
    if not 0 <= density <= 1:
        raise QuantError(f"density is {density}, must lie between 0 and 1")
    return (_rank(w.reshape(-1)) < round(density * w.size)).reshape(w.shape)


def _rank(w: Float[Array, "*s m"]) -> Int[Array, "*s m"]:
    """The place of each element along the last axis when magnitudes are sorted, the largest and the first at 0."""
    magnitude = jnp.where(jnp.isnan(w), jnp.inf, jnp.abs(w))
    order = jnp.argsort(-magnitude, axis=-1, stable=True)
    return jnp.argsort(order, axis=-1)


def _check_counts(n: int, m: int) -> None:
    if not 1 <= n <= m:
        raise QuantError(f"n:m is {n}:{m}; at least one and at most m weights of each group are kept")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SparsityState:
    """The mask in force and the number of the next step: a pytree to carry from step to step.

    Attributes:
        mask: True where a weight is kept.
        step: how many updates there were, int32.
    """

    # Any: JAX puts specs, shardings and the like in the place of a pytree's leaves.
    mask: Any
    step: Any


@dataclasses.dataclass(frozen=True)
class Sparsity:
    """N:M sparsity on a schedule: a mask of the largest weights, renewed now and then, that products see.

    Attributes:
        n: how many weights of each group are kept.
        m: how many weights make a group.
        axis: the axis that groups run along; -2 is the contracted axis of a kernel `[in, out]`.
        start_step: the step that makes the first mask; before it everything is kept.
        update_step: how many steps later each next mask is made.
        gradient: "identity": pruned weights learn as if they were not, and may come back (straight-through); "masked": the
            gradient of the masked weight, zero where it is pruned.

    Reference: Zhou et al., Learning N:M Fine-grained Structured Sparse Neural Networks From Scratch, arXiv 2102.04010.

    >>> sparsity = Sparsity(1, 2, axis=-1)
    >>> w = jnp.array([[1.0, -2.0, 0.5, 0.25]])
    >>> state = sparsity.update(sparsity.init(w), w)
    >>> sparsity.apply(w, state).tolist()
    [[0.0, -2.0, 0.5, 0.0]]
    """

    n: int
    m: int
    axis: int = -2
    start_step: int = 0
    update_step: int = 1
    gradient: Literal["identity", "masked"] = "identity"

    def __post_init__(self) -> None:
        _check_counts(self.n, self.m)
        if self.start_step < 0 or self.update_step < 1:
            raise QuantError(
                f"start_step is {self.start_step} and update_step {self.update_step}; must be at least 0 and at least 1"
            )
        if self.gradient not in ("identity", "masked"):
            raise QuantError(f"gradient is {self.gradient!r}, must be identity or masked")

    def init(self, w: ArrayLike) -> SparsityState:
        """The state before the first step: everything is kept.

        Args:
            w: the weights; their shape counts.

        Returns:
            The state of step 0.
        """
        return SparsityState(jnp.ones(jnp.shape(w), jnp.bool_), jnp.zeros((), jnp.int32))

    def update(self, state: SparsityState, w: Float[Array, "*s"], step: Int[ArrayLike, ""] | None = None) -> SparsityState:
        """The state after one step; the mask is made anew at `start_step` and every `update_step` steps from there.

        Args:
            state: the state before.
            w: the weights. They are not differentiated.
            step: the number of this step; None counts the updates from 0.

        Returns:
            The state with the mask for this step.
        """
        now = state.step if step is None else jnp.asarray(step, jnp.int32)
        since = now - self.start_step
        is_due = (since >= 0) & (since % self.update_step == 0)
        w = jax.lax.stop_gradient(w)
        mask = jax.lax.cond(is_due, lambda: nm_mask(w, self.n, self.m, axis=self.axis), lambda: state.mask)
        return SparsityState(mask, now + 1)

    def apply(self, w: Float[Array, "*s"], state: SparsityState) -> Float[Array, "*s"]:
        """The weights with exact zeros where the mask prunes them; the gradient is as the field `gradient` says.

        Args:
            w: the weights.
            state: the state that holds the mask.

        Returns:
            An array of the shape and dtype of `w`.
        """
        kept = jnp.where(state.mask, w, jnp.zeros_like(w))
        return kept if self.gradient == "masked" else passed_through(w, kept, jnp.ones_like(state.mask))

    def penalty(self, w: Float[Array, "*s"], state: SparsityState) -> Float[Array, ""]:
        """Half the sum of the squares of the pruned weights, float32.

        Added to the loss with a factor `f`, it adds `f * w` to the gradient of each pruned weight, which is the decay of SR-STE
        (2e-4 in the paper); without it pruned weights are not decayed.

        Args:
            w: the weights.
            state: the state that holds the mask.

        Returns:
            A float32 number.
        """
        pruned = jnp.where(state.mask, jnp.zeros_like(w), w).astype(jnp.float32)
        return jnp.sum(jnp.square(pruned)) / 2
