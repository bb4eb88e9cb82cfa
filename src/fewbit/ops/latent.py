"""Float arrays that carry a policy: what a parameter is while it is trained."""

import dataclasses
from typing import Any, TypeGuard

import jax
import numpy as np

from ..array import is_qarray
from .policy import Policy


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Latent:
    """A floating array whose products follow a policy: quantized on the way in, with the policy's gradients.

    Everywhere else it is the array. `fb.train` makes one of each parameter that a rule matches.

    Attributes:
        value: the array.
        key: a JAX random key for arms that draw random numbers; None where the policy draws none.
        policy: how its products are computed.
    """

    value: Any
    key: Any
    policy: Policy = dataclasses.field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array."""
        return self.value.shape

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the array."""
        return self.value.dtype

    @property
    def ndim(self) -> int:
        """How many axes the array has."""
        return self.value.ndim

    def moved(self, value: Any) -> "Latent":
        """The same parameter after its array was moved about: transposed, cast, sliced."""
        return dataclasses.replace(self, value=value)


def is_latent(x: Any) -> TypeGuard[Latent]:
    """Whether a value is a Latent; as the `is_leaf` of `jax.tree` functions it keeps them whole."""
    return isinstance(x, Latent)


def plain(x: Any) -> Any:
    """The array of a Latent; anything else as it is."""
    return x.value if is_latent(x) else x


def stands_for_an_array(x: Any) -> bool:
    """Whether a value is a pytree that unchanged code sees as one array; as the `is_leaf` of `jax.tree` it keeps them whole."""
    return is_qarray(x) or is_latent(x)
