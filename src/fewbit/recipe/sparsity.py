"""N:M sparsity of weights, with masks renewed on a schedule."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, Self

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int

from .._json import checked, form_of
from ..array.masks import check_counts, nm_mask
from ..array.scheme import Scheme
from ..array.straight_through import passed_through
from ..errors import QuantError
from ..formats.format import AbstractFormat


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SparsityState:
    """The current mask and the number of the next step; a pytree.

    Attributes:
        mask: True where a weight is kept.
        step: how many updates there were, int32.
    """

    # Any: JAX puts specs, shardings and the like in the place of a pytree's leaves.
    mask: Any
    step: Any


@dataclasses.dataclass(frozen=True, init=False)
class Sparsity:
    """N:M sparsity: the `n` largest weights of every `m` are kept.

    Attributes:
        n: how many weights of each group are kept.
        m: how many weights make a group.
        axis: the axis or axes that groups run along; None takes, in a rule, the contracted axes of the parameter (of a
            convolution its input channels), as sparse hardware needs: -2 for a kernel `[in, out]`. Where its uses disagree
            or no code can be traced, None takes the rule's `axis`.
        start_step: the step of the first mask; before it everything is kept.
        update_step: the number of steps between masks.
        gradient: "identity": straight-through, so that pruned weights learn and may come back; "masked": the gradient of the
            masked weight, zero where it is pruned.

    Reference: Zhou et al., Learning N:M Fine-grained Structured Sparse Neural Networks From Scratch, arXiv 2102.04010.

    >>> sparsity = Sparsity(1, 2, axis=-1)
    >>> w = jnp.array([[1.0, -2.0, 0.5, 0.25]])
    >>> state = sparsity.update(sparsity.init(w), w)
    >>> sparsity.apply(w, state).tolist()
    [[0.0, -2.0, 0.5, 0.0]]
    """

    n: int
    m: int
    axis: tuple[int, ...] | None
    start_step: int
    update_step: int
    gradient: Literal["identity", "masked"]

    def __init__(
        self,
        n: int,
        m: int,
        axis: int | Sequence[int] | None = None,
        start_step: int = 0,
        update_step: int = 1,
        gradient: Literal["identity", "masked"] = "identity",
    ):
        counts = {"n": n, "m": m, "start_step": start_step, "update_step": update_step}
        if wrong := [name for name, count in counts.items() if not _is_integer(count)]:
            raise QuantError(f"{wrong[0]} is {counts[wrong[0]]!r}, must be an integer")
        check_counts(n, m)
        if start_step < 0 or update_step < 1:
            raise QuantError(f"start_step is {start_step} and update_step {update_step}; must be at least 0 and at least 1")
        if gradient not in ("identity", "masked"):
            raise QuantError(f"gradient is {gradient!r}, must be identity or masked")
        fields = {"n": n, "m": m, "axis": as_axes(axis), "start_step": start_step, "update_step": update_step}
        vars(self).update(fields, gradient=gradient)

    def __str__(self) -> str:
        return f"{self.n}:{self.m} sparse"

    @property
    def _axes(self) -> tuple[int, ...]:
        if self.axis is None:
            raise QuantError(f"{self} has no axis, and outside a recipe no product determines it; pass axis=")
        return self.axis

    def init(self, w: ArrayLike) -> SparsityState:
        """The state before the first step: everything is kept.

        Args:
            w: the weights; their shape counts.
        """
        return SparsityState(jnp.ones_like(w, jnp.bool_), jnp.zeros((), jnp.int32))

    def update(self, state: SparsityState, w: Float[Array, "*s"], step: Int[ArrayLike, ""] | None = None) -> SparsityState:
        """The state after one step, with a new mask where the schedule has one.

        The mask is renewed at `start_step` and every `update_step` steps from there.

        Args:
            state: the state before.
            w: the weights. They are not differentiated.
            step: the number of this step; None counts the updates from 0.

        Raises:
            QuantError: without an axis, and for a length along it that `m` does not divide.
        """
        axes = self._axes
        now = state.step if step is None else jnp.asarray(step, jnp.int32)
        since = now - self.start_step
        is_due = (since >= 0) & (since % self.update_step == 0)
        w = jax.lax.stop_gradient(w)
        mask = jax.lax.cond(is_due, lambda: nm_mask(w, self.n, self.m, axis=axes), lambda: state.mask)
        return SparsityState(mask, now + 1)

    def apply(self, w: Float[Array, "*s"], state: SparsityState) -> Float[Array, "*s"]:
        """The weights, exact zeros where the mask prunes. Its gradient is as `gradient` says.

        Args:
            w: the weights.
            state: the state with the mask.

        Returns:
            An array of the shape and dtype of `w`.
        """
        kept = jnp.where(state.mask, w, jnp.zeros_like(w))
        if self.gradient == "masked":
            return kept
        return passed_through(w, kept, jnp.ones_like(state.mask))

    def pruned(self, w: Float[Array, "*s"]) -> Float[Array, "*s"]:
        """The weights pruned by their own magnitudes, whatever the schedule.

        Args:
            w: the weights. The result of `apply` comes back unchanged.

        Returns:
            An array of the shape and dtype of `w`.

        Raises:
            QuantError: without an axis, and for a length along it that `m` does not divide.
        """
        return jnp.where(nm_mask(w, self.n, self.m, axis=self._axes), w, jnp.zeros_like(w))

    def penalty(self, w: Float[Array, "*s"], state: SparsityState) -> Float[Array, ""]:
        """Half the sum of the squares of the pruned weights, float32.

        Added to the loss with a factor `f`, it adds `f * w` to the gradient of each pruned weight: the decay of SR-STE (2e-4
        in the paper).

        Args:
            w: the weights.
            state: the state with the mask.
        """
        pruned = jnp.where(state.mask, jnp.zeros_like(w), w).astype(jnp.float32)
        return jnp.sum(jnp.square(pruned)) / 2

    def check(self, scheme: Scheme) -> None:
        """Refuses a scheme that cannot represent exact zeros, the pruned weights.

        Args:
            scheme: the scheme of the sparse parameter.

        Raises:
            QuantError: for a format without a zero, and for offsets that are no integers.
        """
        is_offset = scheme.zero_point is not None and not isinstance(scheme.zero_point, AbstractFormat)
        if is_offset or 0.0 not in scheme.format.values():
            raise QuantError(f"{self}, but {scheme.name} has no exact zero for pruned weights; use a symmetric scheme")

    def to_json(self) -> dict[str, Any]:
        """The JSON form: `n`, `m`, and the fields that differ from their defaults."""
        plain = Sparsity(self.n, self.m)
        form: dict[str, Any] = {"n": self.n, "m": self.m}
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        form |= {name: value for name, value in fields.items() if value != getattr(plain, name)}
        if self.axis is not None:
            form["axis"] = list(self.axis)
        return form

    @classmethod
    def from_json(cls, form: object) -> Self:
        """The sparsity of a JSON form; an unknown or missing key raises QuantError."""
        return cls(**checked(form, SPARSITY, "sparsity"))


def as_axes(axis: int | Sequence[int] | None) -> tuple[int, ...] | None:
    """One axis or several as a tuple; None stays None.

    Raises:
        QuantError: for what is no axis.
    """
    if axis is None:
        return None
    axes = (axis,) if isinstance(axis, int) else axis
    if isinstance(axes, str) or not isinstance(axes, Sequence) or not all(_is_integer(one) for one in axes):
        raise QuantError(f"axis is {axis!r}, must be an integer or integers")
    return tuple(axes)


def _is_integer(x: object) -> bool:
    return isinstance(x, int) and not isinstance(x, bool)


AXES = int | list[int] | None
"""The JSON schema of an axis, or of several."""

SPARSITY = form_of(Sparsity, axis=AXES)
"""The JSON schema of a sparsity."""
