"""Float arrays that carry a policy: what a parameter is while it is trained."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, TypeGuard

import jax
import numpy as np

from .policy import Policy
from .standin import StandIn

PARAMETER_RULES: dict[str, Any] = {}
"""For primitives by name, how an equation with a Latent is computed; `fewbit.ops.rules.parameters` fills it at import."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Latent(StandIn):
    """A floating array whose products follow a policy: quantized on the way in, with the policy's gradients.

    Everywhere else it is the array. `fb.train` makes one of each parameter that a rule matches.

    Attributes:
        value: the array.
        key: a JAX random key for arms that draw random numbers; None where there is none.
        policy: how its products are computed.
    """

    rules: ClassVar[Mapping[str, Any]] = PARAMETER_RULES

    value: Any
    key: Any
    policy: Policy = dataclasses.field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        return self.value.shape

    @property
    def dtype(self) -> np.dtype:
        return self.value.dtype

    @property
    def ndim(self) -> int:
        """How many axes the array has."""
        return self.value.ndim

    def __repr__(self) -> str:
        return f"{self.dtype.name}{list(self.shape)} trained as {self.policy}"

    def array(self) -> jax.Array:
        return self.value

    def stacked(self) -> "Latent":
        return self if self.key is None else dataclasses.replace(self, key=jax.random.split(self.key, self.shape[0]))

    def moved(self, value: Any) -> "Latent":
        """The same parameter after its array was moved about: transposed, cast, sliced."""
        return dataclasses.replace(self, value=value)


def is_latent(x: Any) -> TypeGuard[Latent]:
    """Whether a value is a Latent."""
    return isinstance(x, Latent)


def plain(x: Any) -> Any:
    """The array of a Latent; anything else as it is."""
    return x.value if is_latent(x) else x
